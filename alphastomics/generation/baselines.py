"""What a user could do without a network, for cells to be scored: methods by name leave.

Positions from expression: chance, regressors fitted to training slices, each centred on itself, and
what no user has: the centroids of cell types, half of the slice. Expression from positions: chance
and the training cells around, where there are any in the frame of the slice: else those baselines
do not apply, and are left out.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32

from alphastomics.attn_model.neighbourhood import smoothed_set
from alphastomics.evaluation.baselines import (
    Regressor,
    class_centroids,
    closest_slice,
    from_other_half,
    regressed_positions,
    shuffled,
    spatial_knn_mean,
    tuned_num_neighbours,
)
from alphastomics.evaluation.methods import CENTROIDS, KNOWN_HALF, SHUFFLED, TRUE_EXPRESSION
from alphastomics.generation.cells import InputCells
from alphastomics.generation.training_cells import LEAST_KNOWN, known_around

logger = logging.getLogger(__name__)

Predictor = Callable[[np.ndarray], Any]

REGRESSORS: dict[str, Regressor] = {
    "ridge": "ridge",
    "expression kNN": "knn",
    "ExtraTrees": "trees",
    "ExtraTrees, sqrt": "sqrt trees",
}
SMOOTHED_TREES = "ExtraTrees, smoothed"
SPATIAL_KNN = "spatial k-NN mean"
CANDIDATES = (5, 10, 20, 50, 100)
# Of more training cells a regressor takes a random part: the rest would change little.
REGRESSION_CELLS = 20_000
# Trees that try many genes at a split take fewer cells: 10,000 x 250 genes take minutes on a CPU.
TREE_CELLS = 10_000
TUNING_CELLS = 5_000
SMOOTHING: dict[str, int] = {"rounds": 3, "neighbours": 15, "components": 30}


def position_baselines(
    cells: InputCells, known: InputCells | None, seed: int, tree_cells: int = TREE_CELLS
) -> dict[str, Predictor]:
    """Baselines of `expr_to_pos`, fitted at most once for all slices; trees to some cells."""
    position = cells.position
    assert position is not None

    def by_chance(rows: np.ndarray) -> Any:
        return shuffled(position[rows], torch.Generator().manual_seed(seed))

    def by_half(rows: np.ndarray) -> Any:
        features = _with_smoothed(cells, rows)
        return from_other_half(features, position[rows], seed=seed, most=tree_cells)

    methods: dict[str, Predictor] = {SHUFFLED: by_chance, KNOWN_HALF: by_half}
    labels = cells.cell_type
    if labels is not None:
        methods[CENTROIDS] = lambda rows: class_centroids(position[rows], labels[rows])
    if known is None or known.position is None:
        return methods
    return methods | _regressions(cells, known, seed, tree_cells)


def _regressions(
    cells: InputCells, known: InputCells, seed: int, tree_cells: int
) -> dict[str, Predictor]:
    """Fit every regressor to training cells, each slice centred on itself."""
    number = len(known.slice_id)
    few, some = (_some(number, most, seed) for most in (tree_cells, REGRESSION_CELLS))
    say_which_cells(number, tree_cells)
    target = centred_positions(known)
    predicted = {}
    for name, regressor in REGRESSORS.items():
        rows = few if regressor == "trees" else some
        predicted[name] = regressed_positions(
            cells.expression, known.expression[rows], target[rows], regressor=regressor, seed=seed
        )
    predicted[SMOOTHED_TREES] = regressed_positions(
        _with_smoothed(cells, np.arange(len(cells.slice_id))),
        _with_smoothed(known, few),
        target[few],
        regressor="smoothed trees",
        seed=seed,
    )
    return {name: position.__getitem__ for name, position in predicted.items()}


def say_which_cells(number: int, tree_cells: int) -> None:
    """Say what the regressors are fitted to."""
    if number <= tree_cells:
        logger.info("baselines: ridge, expression kNN and ExtraTrees on %d training cells", number)
        return
    logger.info(
        "baselines: of %d training cells ExtraTrees takes %d at random (with sqrt features, ridge "
        "and expression kNN: %d)",
        number,
        tree_cells,
        min(number, REGRESSION_CELLS),
    )


def _with_smoothed(cells: InputCells, rows: np.ndarray) -> Float32[np.ndarray, "M F"]:
    """Return the expression of some cells beside its smoothed version."""
    return np.hstack([cells.expression[rows], smoothed_within_slices(cells, rows)])


def centred_positions(cells: InputCells) -> Float32[np.ndarray, "N 3"]:
    """Return positions about the centre of each slice: all that slices without a frame share."""
    assert cells.position is not None
    position = cells.position.astype(np.float64)
    for number in range(len(cells.slice_names)):
        rows = cells.rows_of(number)
        position[rows] -= position[rows].mean(0)
    return position.astype(np.float32)


def smoothed_within_slices(cells: InputCells, chosen: np.ndarray) -> Float32[np.ndarray, "M F"]:
    """Average expression over its nearest neighbours within each slice, as the network does.

    All cells of a slice are averaged over; only those of the `chosen` rows, in order, are returned.
    """
    width = cells.expression.shape[1] * SMOOTHING["rounds"]
    smoothed = np.zeros((len(chosen), width), np.float32)
    for number in range(len(cells.slice_names)):
        rows = cells.rows_of(number)
        wanted = np.isin(rows, chosen)
        if wanted.any():
            values = smoothed_set(torch.from_numpy(cells.expression[rows]), **SMOOTHING)
            smoothed[np.isin(chosen, rows)] = values.numpy()[wanted]
    return smoothed


def expression_baselines(
    cells: InputCells, known: InputCells | None, seed: int
) -> dict[str, Predictor]:
    """Baselines of `pos_to_expr` that apply to every slice."""
    position = cells.position
    assert position is not None

    def by_chance(rows: np.ndarray) -> Any:
        return shuffled(cells.expression[rows], torch.Generator().manual_seed(seed))

    methods: dict[str, Predictor] = {
        SHUFFLED: by_chance,
        TRUE_EXPRESSION: cells.expression.__getitem__,
    }
    if known is None or not all(in_frame(name, known) for name in cells.slice_names):
        return methods
    known_position = known.position
    assert known_position is not None
    measured = known.measured[known.slice_id]
    k = tuned_num_neighbours(*_tuning_cells(known, seed), CANDIDATES)

    def around(rows: np.ndarray) -> Any:
        chosen, _ = known_around(cells.slice_names[cells.slice_id[rows[0]]], known)
        near = known_position[chosen], known.expression[chosen], measured[chosen]
        return spatial_knn_mean(position[rows], *near, k=k)

    methods[SPATIAL_KNN] = around
    if known.common_frame and len(known.slice_names) > 1:
        methods["closest slice"] = lambda rows: closest_slice(
            position[rows], known_position, known.expression, known.slice_id
        )
    return methods


def _tuning_cells(known: InputCells, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return positions, expression and slices to tune on: without a frame those of one slice."""
    assert known.position is not None
    rows = np.arange(len(known.slice_id))
    if not known.common_frame:
        largest = max(range(len(known.slice_names)), key=lambda n: len(known.rows_of(n)))
        rows = known.rows_of(largest)
    some = rows[_some(len(rows), TUNING_CELLS, seed)]
    return known.position[some], known.expression[some], known.slice_id[some]


def in_frame(name: str, known: InputCells) -> bool:
    """Say whether training cells lie in the frame of a slice."""
    return bool(known_around(name, known)[0].sum() >= LEAST_KNOWN)


def _some(number: int, most: int, seed: int) -> np.ndarray:
    """Choose some of very many cells."""
    order = np.random.default_rng(seed).permutation(number)
    return np.sort(order[:most])
