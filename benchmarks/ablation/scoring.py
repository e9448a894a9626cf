"""Scores of a trained module: held-out cells enter, errors of expression and places leave.

The point estimates of `test`, without its baselines and draws: the same for every configuration.
"""

from pathlib import Path

import numpy as np
import torch

from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.errors import InputError
from alphastomics.evaluation.distances import distance_mse
from alphastomics.evaluation.expression import summary
from alphastomics.evaluation.metric import NEIGHBOURS
from alphastomics.evaluation.neighbours import knn_preservation
from alphastomics.evaluation.position import procrustes
from alphastomics.evaluation.ranks import distance_spearman
from alphastomics.evaluation.registry import expression_scores, type_scores
from alphastomics.generation.cells import InputCells, read_processed
from alphastomics.generation.evaluate import over_slices
from alphastomics.generation.generate import generate

SUBSET_SEED = 0  # the same cells for all runs, whatever their seed


def held_out(processed: Path, genes: list[str], split: str, most_cells: int) -> InputCells:
    """Read a split; of each slice at most `most_cells` cells, drawn at random."""
    cells = read_processed(processed, genes, split)
    rng = np.random.default_rng(SUBSET_SEED)
    kept = []
    for number, name in enumerate(cells.slice_names):
        rows = cells.rows_of(number)
        if len(rows) <= NEIGHBOURS:
            raise InputError(
                f"{processed}: slice {name} has {len(rows)} cells in split {split}; the scores "
                f"need more than {NEIGHBOURS}"
            )
        few = min(len(rows), most_cells)
        kept.append(np.sort(rng.choice(rows, few, replace=False)))
    rows = np.concatenate(kept)
    return cells.take(rows)


def scores(module: AlphaSTomicsModule, cells: InputCells, seed: int) -> dict[str, float]:
    """Generate places and expression, and compare them with the truth."""
    # The estimate needs one call a start; more steps would only draw what is not looked at.
    settings = module.config.sampling.model_copy(update={"product": "estimate", "num_steps": 1})
    places = generate(module, cells, "expr_to_pos", settings, seed).position
    values = generate(module, cells, "pos_to_expr", settings, seed).expression
    return over_slices(cells, lambda rows: place_figures(cells, rows, places)) | over_slices(
        cells, lambda rows: value_figures(cells, rows, values, seed)
    )


def place_figures(cells: InputCells, rows: np.ndarray, places: np.ndarray) -> dict[str, float]:
    """Score the places of one slice."""
    assert cells.position is not None
    found, true = places[rows, : cells.dims], cells.position[rows, : cells.dims]
    return {
        "distance_mse": distance_mse(found, true),
        "procrustes": procrustes(found, true, scale=True, reflection=True),
        "spearman_mean": summary(distance_spearman(found, true), "Spearman of distances").mean,
        "knn_preservation": float(knn_preservation(found, true, k=NEIGHBOURS).mean()),
    }


def value_figures(
    cells: InputCells, rows: np.ndarray, values: np.ndarray, seed: int
) -> dict[str, float]:
    """Score the expression of one slice, and its clusters where cell types are known."""
    assert cells.position is not None
    measured = cells.measured[cells.slice_id[rows[0]]]
    found = expression_scores(
        torch.as_tensor(values[rows]),
        torch.as_tensor(cells.expression[rows]),
        torch.as_tensor(measured),
        torch.as_tensor(cells.position[rows, : cells.dims]),
    )
    if cells.cell_type is None:
        return found
    labels = cells.cell_type[rows].astype(str)
    return found | type_scores(values[np.ix_(rows, measured)], labels, None, seed=seed)
