"""Counts of cells: standardised expression of cells enters, how many counts each has leaves."""

import numpy as np
import torch
from jaxtyping import Int64

from alphastomics.diffusion_model.count_cells import unscaled
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.generation.cells import InputCells
from alphastomics.preprocessing.counts import counts_of
from alphastomics.preprocessing.query_fit import check_depth

# So many random cells of a slice tell how many counts a cell has: files are sorted in many ways.
DEPTH_CELLS = 1_000


def cell_totals(cells: InputCells, rows: Int64[np.ndarray, " M"]) -> Int64[np.ndarray, " K"] | None:
    """Return the counts of some of these cells, over the genes that their slices measured.

    None where most of them hold values that are no counts, or nobody knows their unit.
    """
    if cells.scaling is None or not len(rows):
        return None
    rows = np.random.default_rng(0).permutation(rows)[:DEPTH_CELLS]
    slices = cells.slice_id[rows]
    logs = unscaled(cells.expression[rows], cells.measured[slices], slices, cells.scaling)
    counts = counts_of(np.maximum(logs, 0))
    totals = counts.values.sum(1)[counts.exact]
    return totals if 2 * len(totals) > len(rows) else None


def check_depth_of_slice(cells: InputCells, number: int, module: AlphaSTomicsModule) -> None:
    """Warn of a slice whose cells have far more or fewer counts than the training cells had."""
    model = module.average.count_model
    if model is None or not bool(model.is_fitted & model.is_counts):
        return
    totals = cell_totals(cells, cells.rows_of(number))
    if totals is None or not totals.any():
        return
    usual = model.usual_depths(torch.from_numpy(cells.measured[number]))
    check_depth(float(np.median(totals)), usual, cells.slice_names[number])
