"""Genes that a panel lacks: a fifth of the genes hidden in the test cells, and predicted.

    python -m benchmarks.peers.imputation DATA --json rows.json [--methods NAME ...]

Methods are given training cells with all genes, and at most QUERY_CELLS test cells without the
hidden ones. Truth and prediction are compared gene by gene (Pearson's r over cells), on values
normalised by the total of the genes that are seen.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anndata
import numpy as np
from scipy.sparse import issparse
from sklearn.decomposition import PCA
from sklearn.neighbors import KNeighborsRegressor

from alphastomics import AlphaSTomics
from alphastomics.utils.metrics import gene_correlations
from benchmarks.defaults import SETS as ALL_SETS
from benchmarks.defaults import slices_of
from benchmarks.peers.positions import moscot_plan, novosparc_plan
from benchmarks.peers.processes import Method, Task, main
from benchmarks.peers.slices import smoothed

SETS = ["BY3, a fifth hidden", "embryo2 -> embryo1", "osmFISH, a fifth hidden"]
SHOWN = ("pearson_gene_mean", "pearson_gene_median")
HIDDEN_SHARE = 0.2
QUERY_CELLS, KNOWN_CELLS, TANGRAM_CELLS = 1000, 4000, 1500
CANDIDATES = (5, 10, 20, 50, 100)
KNN_COMPONENTS = 50
TARGET_SUM = 1e4
GIMVI_EPOCHS, TANGRAM_EPOCHS = 200, 500


class Panels(NamedTuple):
    """Training cells with all genes, test cells, and which genes these lack."""

    train: list[anndata.AnnData]
    test: anndata.AnnData
    hidden: np.ndarray

    def values(self, data: anndata.AnnData) -> np.ndarray:
        """Return log-normalised values of all genes, by the total of those that are seen."""
        counts = dense(data)
        total = counts[:, ~self.hidden].sum(1, keepdims=True).clip(min=1)
        return np.log1p(counts / total * TARGET_SUM).astype(np.float32)

    def known(self, size: int, seed: int) -> anndata.AnnData:
        """Return some training cells, of all slices."""
        joined = anndata.concat(self.train, index_unique="-")
        return joined[np.random.default_rng(seed).permutation(joined.n_obs)[:size]].copy()


def dense(data: anndata.AnnData) -> np.ndarray:
    """Return the counts as an array."""
    return data.X.toarray() if issparse(data.X) else np.asarray(data.X)


def read_panels(folder: Path, name: str, seed: int) -> Panels:
    """Read a set, its first test slice, and choose the hidden genes."""
    train, test = slices_of(folder, ALL_SETS[name], seed, hidden=False)
    return panels_of(train, test[0], seed)


def panels_of(train: list[anndata.AnnData], test: anndata.AnnData, seed: int) -> Panels:
    """Hide genes of the test cells, of which at most QUERY_CELLS are taken."""
    random = np.random.default_rng(seed)
    hidden = np.zeros(test.n_vars, dtype=bool)
    hidden[random.permutation(test.n_vars)[: round(HIDDEN_SHARE * test.n_vars)]] = True
    return Panels(train, test[random.permutation(test.n_obs)[:QUERY_CELLS]].copy(), hidden)


def knn(panels: Panels, seed: int, *, is_smoothed: bool = False) -> np.ndarray:
    """Mean of the k nearest training cells in the genes that are seen.

    The k of 5 to 100 that is best for a tenth of the training cells.
    """
    known = panels.known(10**9, seed)
    values, asked = panels.values(known), panels.values(panels.test)
    seen = values[:, ~panels.hidden], asked[:, ~panels.hidden]
    if is_smoothed:
        groups = known.obs["slice_id"].to_numpy().astype(str)
        seen = smoothed(seen[0], groups), smoothed(seen[1], np.zeros(len(asked)))
    pca = PCA(min(KNN_COMPONENTS, *seen[0].shape), random_state=seed).fit(seen[0])
    features, query = pca.transform(seen[0]), pca.transform(seen[1])
    target = values[:, panels.hidden]
    tenth = len(features) // 10
    errors = {}
    for k in CANDIDATES:
        model = KNeighborsRegressor(k).fit(features[tenth:], target[tenth:])
        errors[k] = ((model.predict(features[:tenth]) - target[:tenth]) ** 2).mean()
    best = min(errors, key=errors.__getitem__)
    return KNeighborsRegressor(best).fit(features, target).predict(query)


def tangram(panels: Panels, seed: int) -> np.ndarray:
    """Map training cells onto test cells, as `positions` does, and project the hidden genes."""
    import tangram as tg

    known = panels.known(TANGRAM_CELLS, seed)
    genes = np.array([f"g{number}" for number in range(known.n_vars)])
    single = anndata.AnnData(panels.values(known))
    spatial = anndata.AnnData(panels.values(panels.test)[:, ~panels.hidden])
    single.var_names, spatial.var_names = genes, genes[~panels.hidden]
    tg.pp_adatas(single, spatial, genes=None)
    plan = tg.map_cells_to_space(
        single,
        spatial,
        mode="cells",
        density_prior="uniform",
        num_epochs=TANGRAM_EPOCHS,
        random_state=seed,
        verbose=False,
    )
    found = tg.project_genes(plan, single).to_df()
    return found.reindex(columns=genes[panels.hidden], fill_value=0).to_numpy()


def mapped(panels: Panels, seed: int, solve: Any, *, is_smoothed: bool = False) -> np.ndarray:
    """Map training cells onto test cells as `positions` does; a gene is the mean of those mapped.

    That is how novoSpaRc predicts a gene in space, and moscot imputes one.
    """
    known = panels.known(TANGRAM_CELLS, seed)
    values, asked = panels.values(known), panels.values(panels.test)
    seen = values[:, ~panels.hidden], asked[:, ~panels.hidden]
    if is_smoothed:
        groups = known.obs["slice_id"].to_numpy().astype(str)
        seen = smoothed(seen[0], groups), smoothed(seen[1], np.zeros(len(asked)))
    at = np.asarray(panels.test.obsm["spatial"], np.float64)
    plan = np.asarray(solve(*seen, at - at.mean(0), seed)).T
    return plan / plan.sum(1, keepdims=True).clip(min=1e-30) @ values[:, panels.hidden]


def gimvi(panels: Panels, seed: int, decode_mode: int | None = None) -> np.ndarray:
    """Train for 200 epochs, gimVI's default; return normalised values of its decoder.

    `decode_mode` 0 decodes test cells as training cells, which have all genes.
    """
    import scvi

    scvi.settings.seed = seed
    single = anndata.AnnData(dense(panels.known(KNOWN_CELLS, seed)))
    spatial = anndata.AnnData(dense(panels.test)[:, ~panels.hidden])
    genes = np.array([f"g{number}" for number in range(single.n_vars)])
    # The genes that are seen come first: gimVI takes the leading ones for the spatial panel.
    order = np.concatenate([np.flatnonzero(~panels.hidden), np.flatnonzero(panels.hidden)])
    single, single_genes = anndata.AnnData(single.X[:, order]), genes[order]
    single.var_names, spatial.var_names = single_genes, genes[~panels.hidden]
    # It refuses cells without counts.
    single = single[single.X.sum(1) > 0].copy()
    empty = spatial.X.sum(1) == 0
    spatial.X[empty, 0] = 1
    scvi.external.GIMVI.setup_anndata(single)
    scvi.external.GIMVI.setup_anndata(spatial)
    model = scvi.external.GIMVI(single, spatial)
    model.train(GIMVI_EPOCHS, accelerator="cpu")
    _, found = model.get_imputed_values(normalized=True, decode_mode=decode_mode)
    count = int((~panels.hidden).sum())
    return np.log1p(found[:, count:][:, np.argsort(order[count:])] * TARGET_SUM)


def ours(panels: Panels, seed: int) -> np.ndarray:
    """AlphaSTomics' `impute`, whose estimate is made of the training cells.

    It does not depend on the network, which is trained for one update: seconds are a user's, less
    those of a training.
    """
    if not hasattr(AlphaSTomics, "impute"):
        raise SystemExit("this version of AlphaSTomics has no `impute`")
    genes = list(panels.test.var_names[panels.hidden])
    model = AlphaSTomics(panels.train, seed=seed, max_epochs=1, position_head_updates=1).train()
    query = panels.test[:, ~panels.hidden].copy()
    return model.impute(query, genes=genes)[:, genes].to_df().to_numpy()


def score(panels: Panels, values: np.ndarray, _seed: int) -> dict[str, dict[str, float]]:
    """Score the hidden genes; a gene that does not vary in truth has no score."""
    truth = panels.values(panels.test)[:, panels.hidden]
    values = np.asarray(values, dtype=np.float32)
    measured = np.ones((1, truth.shape[1]), dtype=bool)
    found = gene_correlations(values, truth, measured).numpy()[truth.std(0) > 0]
    # A prediction that does not vary says nothing about a gene.
    found = np.nan_to_num(found)
    scores = {
        "pearson_gene_mean": float(found.mean()),
        "pearson_gene_median": float(np.median(found)),
    }
    return {str(panels.test.obs["slice_id"].iloc[0]): scores}


METHODS = {
    "k-NN": Method(knn),
    "k-NN, smoothed": Method(lambda panels, seed: knn(panels, seed, is_smoothed=True)),
    "Tangram": Method(tangram, "tangram-sc", "tangram"),
    "novoSpaRc": Method(partial(mapped, solve=novosparc_plan), "novosparc", "novosparc"),
    "novoSpaRc, tuned": Method(
        partial(mapped, solve=partial(novosparc_plan, alpha_linear=0.5), is_smoothed=True),
        "novosparc",
        "novosparc",
    ),
    "moscot": Method(partial(mapped, solve=moscot_plan), "moscot", "moscot"),
    "moscot, tuned": Method(
        partial(mapped, solve=partial(moscot_plan, alpha=0.1), is_smoothed=True),
        "moscot",
        "moscot",
    ),
    "gimVI": Method(gimvi, "scvi-tools", "scvi"),
    "gimVI, tuned": Method(
        lambda panels, seed: gimvi(panels, seed, decode_mode=0),
        "scvi-tools",
        "scvi",
    ),
    "AlphaSTomics": Method(ours),
}
TASK = Task("imputation", METHODS, SETS, read_panels, score, SHOWN)

if __name__ == "__main__":
    main(TASK, __doc__)
