"""Intervals of expression on real slices: how many hidden values lie within, by level.

    python benchmarks/intervals.py DATA [--slices ssctx ...] [--seeds 0 1 2]

A random fifth of each slice is hidden and predicted from the other cells, by position alone; no
model is trained. For each level: the share of hidden values within, the least and the largest
share of a gene (5th and 95th percentile), and the mean width over that of intervals of one width
for each gene.
"""

import argparse
from pathlib import Path

import anndata
import numpy as np
import pyarrow as pa
import scanpy as sc
from scipy.sparse import issparse

from alphastomics.generation.cells import InputCells, some_cells
from alphastomics.generation.intervals import conformal_ends
from alphastomics.generation.spatial_context import SpatialContext

LEVELS = (0.5, 0.8, 0.9, 0.95)


def read_cells(path: Path) -> InputCells:
    """Read a slice, normalised and standardised as in training."""
    data = anndata.read_h5ad(path)
    data.X = data.X.toarray() if issparse(data.X) else data.X
    sc.pp.normalize_total(data, target_sum=1e4)
    sc.pp.log1p(data)
    sc.pp.scale(data)
    position = np.asarray(data.obsm["spatial"], dtype=np.float64)
    return InputCells(
        expression=np.ascontiguousarray(data.X, dtype=np.float32),
        position=np.pad(position, ((0, 0), (0, 3 - position.shape[1]))),
        cell_type=None,
        slice_id=np.zeros(data.n_obs, dtype=np.int64),
        obs_name=pa.array(list(data.obs_names)),
        measured=np.ones((1, data.n_vars), dtype=bool),
        dims=position.shape[1],
        slice_names=[path.stem],
    )


def coverage(cells: InputCells, level: float, seed: int) -> tuple[np.ndarray, float]:
    """Return the share of hidden values within, by gene, and the relative width."""
    order = np.random.default_rng(seed).permutation(len(cells.names))
    hidden, known = (
        some_cells(cells, np.sort(rows)) for rows in np.split(order, [len(order) // 5])
    )
    context = SpatialContext(known, across_slices=False, seed=seed, level=level)
    assert hidden.position is not None
    low, high = context.intervals.about(context.predict(hidden.position))
    inside = (low <= hidden.expression) & (hidden.expression <= high)
    errors = np.sort(known.expression - context.predict(known.position), axis=0)
    usual = np.diff([conformal_ends(column, level) for column in errors.T], axis=1)
    return inside.mean(0), float((high - low).mean() / usual.mean())


def main() -> None:
    """Print the coverage of every slice."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--slices", nargs="+", default=["ssctx"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    asked = parser.parse_args()
    for name in asked.slices:
        cells = read_cells(next(asked.data.rglob(f"{name}.h5ad")))
        for level in LEVELS:
            found = [coverage(cells, level, seed) for seed in asked.seeds]
            genes = np.concatenate([part[0] for part in found])
            low, high = np.quantile(genes, (0.05, 0.95))
            print(
                f"{name}: level {level:.2f}, covered {genes.mean():.3f} "
                f"(by gene {low:.3f} to {high:.3f}), "
                f"width {np.mean([part[1] for part in found]):.2f} of one for each gene",
                flush=True,
            )


if __name__ == "__main__":
    main()
