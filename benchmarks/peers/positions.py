"""Positions from expression: simple regressors, other programs and this one.

    python -m benchmarks.peers.positions DATA --json rows.json [--methods NAME ...] [--seeds 0 1 2]

Every method is given the training slices, each centred on itself, and returns a position for each
test cell. Tangram, moscot and novoSpaRc hold matrices of cells x cells: they map PART_CELLS cells
of a test slice onto PART_KNOWN training cells. All others are scored on these cells, too ("part"),
since the neighbours kept depend on how dense cells are. What differs from a peer's documented
defaults stands beside its call. "tuned" was chosen on embryo2_z2 -> embryo2_z5, the smoothing of
the k-NN on embryo1 -> embryo2.
"""

import tempfile
from functools import partial
from typing import Any

import anndata
import numpy as np
from scipy.sparse import csr_matrix, eye
from scipy.sparse.linalg import spsolve
from sklearn.decomposition import PCA
from sklearn.neighbors import KNeighborsRegressor, kneighbors_graph

from alphastomics import AlphaSTomics
from alphastomics.evaluation.baselines import Regressor, regressed_positions
from alphastomics.evaluation.registry import position_scores
from alphastomics.generation.baselines import (
    TREE_CELLS,
    centred_positions,
    smoothed_within_slices,
)
from benchmarks.peers.processes import Method, Task, main
from benchmarks.peers.slices import Split, log_values, part_of, read_split, smoothed

SETS = [
    "embryo2 -> embryo1",
    "Moffitt -0.09 -> -0.29",
    "slab0 + slab1 -> slab2",
    "serial 0.04 + 0.14 -> 0.09",
    "osmFISH, a fifth hidden",
]
SHOWN = ("spearman_mean", "contact_precision_10pct", "knn_preservation", "procrustes")
PART_CELLS, PART_KNOWN = 1000, 1500
KNN_NEIGHBOURS, KNN_COMPONENTS = 20, 50
LAPLACIAN_WEIGHT = 1.0
CELERY_BATCH, TANGRAM_EPOCHS = 128, 500


def trees(split: Split, seed: int, kind: Regressor) -> np.ndarray:
    """ExtraTrees of at most TREE_CELLS training cells, as the package's own baselines are.

    They try all genes at a split, or the square root of their number; smoothed ones are given the
    means over neighbours in expression space, too.
    """
    cells, known = split.cells, split.known
    order = np.random.default_rng(seed).permutation(len(known.slice_id))
    rows = np.sort(order[:TREE_CELLS])
    asked, features = cells.expression, known.expression[rows]
    if kind == "smoothed trees":
        everyone = np.arange(len(cells.slice_id))
        asked = np.hstack([asked, smoothed_within_slices(cells, everyone)])
        features = np.hstack([features, smoothed_within_slices(known, rows)])
    target = centred_positions(known)[rows]
    return regressed_positions(asked, features, target, regressor=kind, seed=seed).numpy()


def smoothed_features(split: Split, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return principal components of twice smoothed expression, of test and training cells."""
    asked, known = (
        smoothed(smoothed(cells.expression, cells.slice_id), cells.slice_id)
        for cells in (split.cells, split.known)
    )
    pca = PCA(min(KNN_COMPONENTS, *known.shape), random_state=seed).fit(known)
    return pca.transform(asked), pca.transform(known)


def smoothed_knn(split: Split, seed: int) -> np.ndarray:
    """Mean position of the nearest training cells in smoothed expression."""
    asked, features = smoothed_features(split, seed)
    model = KNeighborsRegressor(KNN_NEIGHBOURS)
    return model.fit(features, centred_positions(split.known)).predict(asked)


def laplacian_knn(split: Split, seed: int) -> np.ndarray:
    """Smooth those positions over the graph of the test cells' own expression neighbours.

    (1 + w L) y = x, with the symmetric graph's Laplacian L over its mean degree.
    """
    start = smoothed_knn(split, seed)
    asked, _ = smoothed_features(split, seed)
    result = np.empty_like(start)
    for number in range(len(split.cells.slice_names)):
        rows = split.cells.rows_of(number)
        graph = kneighbors_graph(asked[rows], KNN_NEIGHBOURS)
        graph = csr_matrix(graph.maximum(graph.T))
        degree = np.asarray(graph.sum(1)).ravel()
        laplacian = (csr_matrix(np.diag(degree)) - graph) / degree.mean()
        matrix = eye(len(rows)) + LAPLACIAN_WEIGHT * laplacian
        result[rows] = spsolve(matrix.tocsc(), start[rows])
    return result


def mapped_parts(split: Split, seed: int, solve: Any, *, is_smoothed: bool) -> np.ndarray:
    """Map a part of each test slice onto training cells; NaN for the other cells.

    `solve` takes log-normalised values of test and of training cells and positions of the latter,
    and returns a matrix of test x training cells: a cell's position is its row's mean.
    """
    cells, known = split.cells, split.known
    asked, values = log_values(cells), log_values(known)
    if is_smoothed:
        asked, values = smoothed(asked, cells.slice_id), smoothed(values, known.slice_id)
    rows = np.sort(np.random.default_rng(seed).permutation(len(values))[:PART_KNOWN])
    target = centred_positions(known)[rows]
    result = np.full((len(asked), 3), np.nan)
    for number in range(len(cells.slice_names)):
        chosen = np.intersect1d(part_of(cells, PART_CELLS, seed), cells.rows_of(number))
        plan = np.asarray(solve(asked[chosen], values[rows], target[:, : cells.dims], seed))
        plan = plan / plan.sum(1, keepdims=True).clip(min=1e-30)
        result[chosen] = plan @ target
    return result


def tangram_plan(asked: np.ndarray, values: np.ndarray, _at: np.ndarray, seed: int) -> Any:
    """Map in mode "cells", the default, with a uniform density, for 500 epochs instead of 1,000."""
    import tangram as tg

    single, spatial = anndata.AnnData(asked.copy()), anndata.AnnData(values.copy())
    tg.pp_adatas(single, spatial, genes=None)
    found = tg.map_cells_to_space(
        single,
        spatial,
        mode="cells",
        density_prior="uniform",
        num_epochs=TANGRAM_EPOCHS,
        random_state=seed,
        device="cpu",
        verbose=False,
    )
    return found.X


def moscot_plan(asked: np.ndarray, values: np.ndarray, at: np.ndarray, seed: int, **solve: Any):
    """Map by a MappingProblem: expression in 30 PCs, genes jointly; alpha 0.5, epsilon 0.01."""
    from moscot.problems.space import MappingProblem

    single, spatial = anndata.AnnData(asked.copy()), anndata.AnnData(values.copy())
    single.obsm["X_pca"] = PCA(min(30, *asked.shape), random_state=seed).fit_transform(asked)
    spatial.obsm["spatial"] = at
    problem = MappingProblem(adata_sc=single, adata_sp=spatial).prepare(
        sc_attr={"attr": "obsm", "key": "X_pca"}, joint_attr={"attr": "X"}
    )
    problem = problem.solve(**({"alpha": 0.5, "epsilon": 0.01} | solve))
    plan = np.asarray(next(iter(problem.solutions.values())).transport_matrix)
    return plan if plan.shape[0] == len(asked) else plan.T


def novosparc_plan(asked: np.ndarray, values: np.ndarray, at: np.ndarray, _seed: int, **solve: Any):
    """Map by a Tissue with the training cells as atlas: all genes are markers, 5 neighbours."""
    import novosparc

    tissue = novosparc.cm.Tissue(dataset=anndata.AnnData(asked.copy()), locations=at)
    markers = np.arange(asked.shape[1])
    tissue.setup_reconstruction(markers_to_use=markers, atlas_matrix=values, verbose=False)
    tissue.reconstruct(**({"alpha_linear": 0.8, "epsilon": 5e-3} | solve), verbose=False)
    return tissue.gw


def celery(
    split: Split, seed: int, *, is_smoothed: bool = False, epochs: int = 500, rate: float = 1e-4
) -> np.ndarray:
    """Fit CeLEry's network, of three layers of 30, 25, 15; batches of 128 cells instead of 4."""
    import CeLEry
    import pandas as pd

    if split.cells.dims == 3 and np.ptp(split.cells.position[:, 2]) > 0:
        raise SystemExit("CeLEry predicts two coordinates: no 3D")
    values, asked = split.known.expression, split.cells.expression
    if is_smoothed:
        values = smoothed(values, split.known.slice_id)
        asked = smoothed(asked, split.cells.slice_id)
    target = centred_positions(split.known)[:, :2]
    # It divides each axis by its range plus 2: coordinates are made large beside that.
    target *= 1e4 / np.abs(target).max()
    train = anndata.AnnData(values)
    coordinates = pd.DataFrame(target, columns=["x", "y"])
    with tempfile.TemporaryDirectory() as folder:
        settings = {"path": folder, "filename": "model"}
        CeLEry.Fit_cord(
            train,
            coordinates,
            num_epochs_max=epochs,
            batch_size=CELERY_BATCH,
            num_workers=0,
            initial_learning_rate=rate,
            seednum=seed,
            **settings,
        )
        found = CeLEry.Predict_cord(anndata.AnnData(asked), **settings)
    low, high = target.min(0) - 1, target.max(0) + 1
    return np.pad(found * (high - low) + low, ((0, 0), (0, 1)))


def ours(split: Split, seed: int) -> np.ndarray:
    """AlphaSTomics with nothing set, its training included."""
    model = AlphaSTomics(split.train, seed=seed, **split.settings).train()
    found = np.concatenate([model.predict_positions(test, seed=seed) for test in split.test])
    return np.pad(found, ((0, 0), (0, 3 - found.shape[1])))


def score(split: Split, position: np.ndarray, seed: int) -> dict[str, dict[str, float]]:
    """Score every test slice, and the part of it that is mapped."""
    cells, scores = split.cells, {}
    assert cells.position is not None
    chosen = part_of(cells, PART_CELLS, seed)
    for number, name in enumerate(cells.slice_names):
        rows = cells.rows_of(number)
        part = np.intersect1d(chosen, rows)
        groups = {name: rows} | ({f"{name}, part": part} if len(part) < len(rows) else {})
        for group, some in groups.items():
            at = position[some, : cells.dims].astype(np.float32)
            if not np.isnan(at).any():
                found = position_scores(at, cells.position[some, : cells.dims].astype(np.float32))
                scores[group] = {key: found[key] for key in SHOWN}
    return scores


def mapping(package: str, module: str, solve: Any, *, is_smoothed: bool = False) -> Method:
    """Return a method that maps a part of the cells."""

    def run(split: Split, seed: int) -> np.ndarray:
        return mapped_parts(split, seed, solve, is_smoothed=is_smoothed)

    return Method(run, package, module)


METHODS = {
    "ExtraTrees, sqrt": Method(partial(trees, kind="sqrt trees")),
    "ExtraTrees, smoothed": Method(partial(trees, kind="smoothed trees")),
    "ExtraTrees": Method(partial(trees, kind="trees")),
    "k-NN, smoothed": Method(smoothed_knn),
    "k-NN, Laplacian": Method(laplacian_knn),
    "novoSpaRc": mapping("novosparc", "novosparc", novosparc_plan),
    "novoSpaRc, tuned": mapping(
        "novosparc",
        "novosparc",
        partial(novosparc_plan, alpha_linear=0.5),
        is_smoothed=True,
    ),
    "moscot": mapping("moscot", "moscot", moscot_plan),
    "moscot, tuned": mapping("moscot", "moscot", partial(moscot_plan, alpha=0.1), is_smoothed=True),
    "CeLEry": Method(celery, "CeLEryPy", "CeLEry"),
    "CeLEry, tuned": Method(
        partial(celery, is_smoothed=True, epochs=100, rate=1e-3), "CeLEryPy", "CeLEry"
    ),
    "Tangram": mapping("tangram-sc", "tangram", tangram_plan),
    "Tangram, tuned": mapping("tangram-sc", "tangram", tangram_plan, is_smoothed=True),
    "AlphaSTomics": Method(ours),
}
TASK = Task("positions", METHODS, SETS, read_split, score, SHOWN)

if __name__ == "__main__":
    main(TASK, __doc__)
