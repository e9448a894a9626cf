"""Dissociated training cells on simulated tissue: what they add to imputation and the count model.

    python benchmarks/dissociated.py impute --cells 150 400 800 1200 --seeds 1 2 3
    python benchmarks/dissociated.py counts --cells 1500 4000 --seeds 1 2

Dissociated cells are of the same tissue, but of other cells, and every gene is caught with an
efficiency of its own: `--effects` are the std of its logarithm. `impute` compares genes that a
query lacks and slices measured, learned from slices alone and from both, genes that dissociated
cells alone measured, and cell types. `counts` fits the count model with and without dissociated
cells and scores cells of the slice that it was not fitted to: mean negative log likelihood of a
cell's counts, but for a constant, and correlation over cells, over genes that the slice measured
and genes that it did not.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import torch
from scipy.sparse import csr_matrix

from alphastomics.attn_model.count_model import negative_binomial_loss
from alphastomics.config import PreprocessingConfig, SimulationConfig
from alphastomics.config.auto import with_settings
from alphastomics.config.file import parse_document
from alphastomics.diffusion_model import count_fit
from alphastomics.diffusion_model.train import make_module
from alphastomics.generation.gene_features import GeneCells, joined
from alphastomics.generation.impute import Imputed, impute
from alphastomics.generation.labels import predict_labels
from alphastomics.preprocessing.batch_loader import create_dataloaders
from alphastomics.preprocessing.commands import preprocess
from alphastomics.simulate import simulate

GENES, DISSOCIATED = 150, 3_000
UPDATES = 1_500


def tissue(seed: int, cells: int, slices: int) -> list[anndata.AnnData]:
    """Simulate slices that measured every gene."""
    settings = SimulationConfig(cells=cells, slices=slices, genes=GENES, panel_share=1.0)
    return list(simulate(settings, seed))


def counts_of(data: anndata.AnnData) -> np.ndarray:
    """Return counts as a dense matrix."""
    return np.asarray(data.X.todense()).astype(np.float64)


def dissociated_cells(seed: int, effect: float) -> anndata.AnnData:
    """Return other cells of the tissue, whose genes are caught with efficiencies of their own."""
    data = tissue(seed, DISSOCIATED, 2)[1]
    rng = np.random.default_rng(seed)
    caught = np.exp(rng.normal(0, effect, GENES))
    share = np.minimum(0.6 * caught / caught.max() * (3 if effect else 1), 1)
    values = rng.binomial(counts_of(data).astype(int), share).astype(np.float32)
    return anndata.AnnData(csr_matrix(values), obs=data.obs[["cell_type"]], var=data.var[[]])


def log_shares(counts: np.ndarray) -> np.ndarray:
    """Return log-normalised counts."""
    return np.log1p(counts / np.maximum(counts.sum(1, keepdims=True), 1) * 1e4)


def gene_cells(data: anndata.AnnData, name: str, hidden: np.ndarray) -> GeneCells:
    """Return cells without some genes, in the unit that `impute` takes."""
    measured = ~np.isin(np.arange(GENES), hidden)[None]
    position = np.full((data.n_obs, 3), np.nan)
    if "spatial" in data.obsm:
        position = np.pad(np.asarray(data.obsm["spatial"], float), ((0, 0), (0, 1)))
    return GeneCells(
        log_shares(counts_of(data) * measured).astype(np.float32),
        measured,
        np.zeros(data.n_obs, np.int64),
        [name],
        position,
        data.obs["cell_type"].astype(str).to_numpy().astype(object),
    )


def mean_correlation(values: np.ndarray, truth: np.ndarray) -> float:
    """Return Pearson's r, averaged over genes."""
    pairs = zip(values.T, truth.T, strict=True)
    return float(np.nanmean([np.corrcoef(mine, real)[0, 1] for mine, real in pairs]))


def score_imputation(seed: int, cells: int, effect: float) -> dict[str, float]:
    """Impute genes of a slice from another one, with dissociated cells and without."""
    first, last = tissue(seed, cells, 2)
    others = gene_cells(dissociated_cells(seed, effect), "reference: r", np.array([], int))
    hidden = np.sort(np.random.default_rng(seed).permutation(GENES)[: GENES // 2])
    of_slices, of_others = hidden[1::2], hidden[::2]
    slices, query = gene_cells(first, "first", of_others), gene_cells(last, "last", hidden)
    both, truth = joined([slices, others]), log_shares(counts_of(last))

    def coverage(made: Imputed, genes: np.ndarray) -> float:
        within = np.abs(made.values - truth[:, genes]) <= made.interval * made.std
        return float(within.mean())

    alone, more, new = (
        impute(known, query, genes, 0, is_log=True)
        for known, genes in ((slices, of_slices), (both, of_slices), (both, of_others))
    )
    scores = {
        "r, slices alone": mean_correlation(alone.values, truth[:, of_slices]),
        "r, both": mean_correlation(more.values, truth[:, of_slices]),
        "in interval, slices alone": coverage(alone, of_slices),
        "in interval, both": coverage(more, of_slices),
        "r, genes of dissociated cells": mean_correlation(new.values, truth[:, of_others]),
    }
    for name, known in (("slices alone", slices), ("both", both)):
        labels = predict_labels(known, query, 0, is_log=True)
        right = np.array(labels.names)[labels.probability.argmax(1)] == query.cell_type
        scores[f"types, {name}"] = float(right.mean())
    return scores


def processed(folder: Path, name: str, **data: anndata.AnnData) -> Path:
    """Preprocess slices and dissociated cells with the list of all genes."""
    source, target = folder / name, folder / f"{name}-done"
    source.mkdir()
    for key, cells in data.items():
        cells.write_h5ad(source / f"{key}.h5ad")
    preprocess(
        PreprocessingConfig(cell_type_key="cell_type", train_ratio=0.7, val_ratio=0.0),
        input_dir=source,
        output_dir=target,
        gene_list_file=folder / "genes.txt",
        seed=1,
        overwrite=False,
        scheduler=None,
    )
    return target


def score_count_model(folder: Path, counts: np.ndarray, hidden: np.ndarray) -> dict[str, float]:
    """Fit the count model to a folder, and score the test cells of its slice."""
    settings = {"model": {"d_model": 16, "n_heads": 2, "n_layers": 1}, "training": {}}
    settings["training"] = {"max_epochs": 1, "batch_size": 64, "position_head_updates": 5}
    config = parse_document(settings, "settings")
    config = with_settings(config, {"expression.space": "latent", "expression.updates": UPDATES})
    loader, _, test = create_dataloaders(folder, batch_size=64)
    torch.manual_seed(0)
    module = make_module(config, loader)
    count_fit.fit_count_model(module, loader, config, torch.device("cpu"))
    model, table = module.average.count_model, test.source.table()  # type: ignore[attr-defined]
    assert model is not None
    expression = torch.tensor(test.reader.dense(table))
    real = torch.tensor(counts[table.cell_id])
    panel = ~np.isin(np.arange(GENES), hidden)
    with torch.no_grad():
        mean, _ = model.encode(expression, torch.tensor(panel).expand(expression.shape))
        logits = model.decode(mean).genes + model.offset[0]
        shares = logits - logits[:, panel].logsumexp(-1, keepdim=True)
        total = real[:, panel].sum(1, keepdim=True)
        loss = negative_binomial_loss(real, shares.exp() * total, model.log_dispersion).numpy()
    truth = np.log1p(real.numpy() / np.maximum(total.numpy(), 1) * 1e4)
    return {
        "loss, measured": float(loss[:, panel].sum(1).mean()),
        "loss, hidden": float(loss[:, ~panel].sum(1).mean()),
        "r, measured": mean_correlation(shares.numpy()[:, panel], truth[:, panel]),
        "r, hidden": mean_correlation(shares.numpy()[:, ~panel], truth[:, ~panel]),
    }


def score_counts(seed: int, cells: int, effect: float) -> dict[str, float]:
    """Compare count models that were fitted with dissociated cells and without."""
    [data] = tissue(seed, cells, 1)
    hidden = np.sort(np.random.default_rng(seed).permutation(GENES)[:40])
    shown = data[:, np.setdiff1d(np.arange(GENES), hidden)].copy()
    scores = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "genes.txt").write_text("\n".join(data.var_names))
        inputs: dict[str, Any] = {
            "alone": {"slice": shown},
            "both": {"slice": shown, "others": dissociated_cells(seed, effect)},
        }
        for name, parts in inputs.items():
            done = processed(folder, name, **parts)
            for key, value in score_count_model(done, counts_of(data), hidden).items():
                scores[f"{key}, {name}"] = value
    return scores


def main() -> None:
    """Print a line for each number of cells and each effect: the mean over seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["impute", "counts"])
    parser.add_argument("--cells", type=int, nargs="+", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--effects", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    asked = parser.parse_args()
    score = score_imputation if asked.part == "impute" else score_counts
    for cells in asked.cells:
        for effect in asked.effects:
            results = [score(seed, cells, effect) for seed in asked.seeds]
            means = {key: np.mean([each[key] for each in results]) for key in results[0]}
            shown = "; ".join(f"{key} {value:.3f}" for key, value in means.items())
            print(f"{cells} cells, effect {effect:g}: {shown}", flush=True)


if __name__ == "__main__":
    main()
