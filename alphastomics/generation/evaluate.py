"""Scores of a checkpoint: cells with known truth enter; every metric, beside the baselines, leaves.

Each slice is scored by itself, and slices are averaged by their number of cells. Baselines that
need other slices are there when training cells are given.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from alphastomics.config import SamplingConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.errors import InputError
from alphastomics.evaluation.baselines import (
    class_centroids,
    closest_slice,
    regressed_positions,
    shuffled,
    spatial_knn_mean,
)
from alphastomics.evaluation.scores import NEIGHBOURS, expression_scores, position_scores
from alphastomics.generation.cells import InputCells
from alphastomics.generation.generate import generate, modes_of

SPATIAL_NEIGHBOURS = 20
OURS = "alphastomics"
Predictor = Callable[[np.ndarray], Any]


def evaluate(
    module: AlphaSTomicsModule,
    cells: InputCells,
    known: InputCells | None,
    settings: SamplingConfig,
    seed: int,
) -> dict[str, dict[str, dict[str, float]]]:
    """Return {mode: {method: {metric: value}}} for the modes that can be scored against truth."""
    if cells.position is None:
        raise InputError("test: the input has no coordinates to compare with")
    smallest = min(len(cells.rows_of(number)) for number in range(len(cells.slice_names)))
    if smallest <= NEIGHBOURS:
        raise InputError(
            f"test: a slice has {smallest} cells; the scores need more than {NEIGHBOURS}"
        )
    scores: dict[str, dict[str, dict[str, float]]] = {}
    able = modes_of(module)
    if "expr_to_pos" in able:
        made = generate(module, cells, "expr_to_pos", settings, seed).position
        methods = {OURS: made.__getitem__, **place_baselines(cells, known, seed)}
        scores["expr_to_pos"] = scored(cells, methods, place_scores)
    if "pos_to_expr" in able:
        made = generate(module, cells, "pos_to_expr", settings, seed).expression
        methods = {OURS: made.__getitem__, **value_baselines(cells, known, seed)}
        scores["pos_to_expr"] = scored(cells, methods, value_scores)
    return scores


def scored(
    cells: InputCells,
    methods: dict[str, Predictor],
    score: Callable[[InputCells, np.ndarray, Any], dict[str, float]],
) -> dict[str, dict[str, float]]:
    """Score every method on every slice."""
    return {
        name: over_slices(cells, lambda rows: score(cells, rows, method(rows)))  # noqa: B023 - used at once
        for name, method in methods.items()
    }


def over_slices(
    cells: InputCells, score: Callable[[np.ndarray], dict[str, float]]
) -> dict[str, float]:
    """Average the scores of slices by their number of cells."""
    totals: dict[str, float] = {}
    for number in range(len(cells.slice_names)):
        rows = cells.rows_of(number)
        for name, value in score(rows).items():
            totals[name] = totals.get(name, 0.0) + value * len(rows) / len(cells.names)
    return totals


def place_scores(cells: InputCells, rows: np.ndarray, predicted: Any) -> dict[str, float]:
    """Score predicted places of one slice, in the dimensions that it has."""
    assert cells.position is not None
    labels = None if cells.cell_type is None else cells.cell_type[rows]
    found = np.asarray(predicted, dtype=np.float32)[:, : cells.dims]
    return position_scores(found, cells.position[rows, : cells.dims], labels)


def value_scores(cells: InputCells, rows: np.ndarray, predicted: Any) -> dict[str, float]:
    """Score predicted expression of one slice."""
    assert cells.position is not None
    measured = cells.measured[cells.slice_id[rows[0]]]
    return expression_scores(
        torch.as_tensor(np.asarray(predicted, dtype=np.float32)),
        torch.as_tensor(cells.expression[rows]),
        torch.as_tensor(measured),
        torch.as_tensor(cells.position[rows, : cells.dims]),
    )


def place_baselines(cells: InputCells, known: InputCells | None, seed: int) -> dict[str, Predictor]:
    """Baselines of expr_to_pos: chance, the oracle of cell types, and a regressor."""
    position = cells.position
    assert position is not None

    def by_chance(rows: np.ndarray) -> Any:
        return shuffled(position[rows], torch.Generator().manual_seed(seed))

    found: dict[str, Predictor] = {"shuffled": by_chance}
    labels = cells.cell_type
    if labels is not None:
        found["class centroid oracle"] = lambda rows: class_centroids(position[rows], labels[rows])
    if known is not None and known.position is not None:
        place = known.position
        found["MLP regressor"] = lambda rows: regressed_positions(
            cells.expression[rows], known.expression, place, regressor="mlp", seed=seed
        )
    return found


def value_baselines(cells: InputCells, known: InputCells | None, seed: int) -> dict[str, Predictor]:
    """Baselines of pos_to_expr: chance, the mean of near training cells, and the closest slice."""
    position = cells.position
    assert position is not None

    def by_chance(rows: np.ndarray) -> Any:
        return shuffled(cells.expression[rows], torch.Generator().manual_seed(seed))

    found: dict[str, Predictor] = {"shuffled": by_chance}
    if known is not None and known.position is not None:
        place = known.position
        measured = known.measured[known.slice_id]
        found["spatial k-NN mean"] = lambda rows: spatial_knn_mean(
            position[rows], place, known.expression, measured, k=SPATIAL_NEIGHBOURS
        )
        found["closest slice"] = lambda rows: closest_slice(
            position[rows], place, known.expression, known.slice_id
        )
    return found
