"""Scores with anchors: cells with known truth and some that are given enter, scores leave.

Cells that are no anchors are scored: by the anchors, assigned, and by the model alone. The
outline and the spacing of cells are compared, too, since an assignment is made for them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from alphastomics.config import SamplingConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.errors import InputError
from alphastomics.evaluation.calibration import error_and_std
from alphastomics.evaluation.metric import NEIGHBOURS
from alphastomics.evaluation.outline import outline_overlap, spacing_distance
from alphastomics.evaluation.position import aligned
from alphastomics.generation.anchors import with_anchors
from alphastomics.generation.cells import InputCells, some_cells
from alphastomics.generation.frame import Reference
from alphastomics.generation.generate import Generated
from alphastomics.generation.predict import put_onto
from alphastomics.generation.section import predict_beside_section


class Anchored(NamedTuple):
    """Positions by the anchors, the same assigned, and those to show."""

    mean: Generated
    assigned: Generated
    shown: Generated


def anchored_positions(
    module: AlphaSTomicsModule,
    cells: InputCells,
    section: Reference | None,
    estimate: Generated,
    settings: SamplingConfig,
    seed: int,
) -> Anchored:
    """Bring an estimate to the anchors of the cells, or to those of a section."""

    def by(estimator: str) -> Generated:
        chosen = settings.model_copy(update={"estimator": estimator})
        if section is not None:
            return predict_beside_section(module, cells, section, chosen, seed)[1]
        reflection = module.config.loss.reflection
        return with_anchors(cells, estimate, chosen, seed, reflection=reflection)

    mean = by("mean")
    assigned = put_onto(cells, mean, section, seed)
    others: dict[str, Callable[[], Generated]] = {
        "assigned": lambda: assigned,
        "sample": lambda: by("sample"),
    }
    return Anchored(mean, assigned, others.get(settings.estimator, lambda: mean)())


def free_rows(cells: InputCells, number: int) -> np.ndarray:
    """Return the rows of a slice's cells that are no anchors."""
    rows = cells.rows_of(number)
    return rows if cells.anchors is None else rows[np.isnan(cells.anchors[rows]).any(1)]


def require_free_cells(cells: InputCells) -> None:
    """Refuse anchors that leave nothing to be scored."""
    for number, name in enumerate(cells.slice_names):
        free = len(free_rows(cells, number))
        if free <= NEIGHBOURS:
            raise InputError(
                f"--anchors: slice {name} has {free} cell(s) that are no anchors; a score needs "
                f"more than {NEIGHBOURS}: mark fewer"
            )


def known_by_anchors(cells: InputCells, section: Reference | None) -> InputCells | None:
    """Return the known cells: those of the section, or the anchors; None without any."""
    if section is not None:
        return section.cells
    if cells.anchors is None:
        return None
    return some_cells(cells, np.flatnonzero(np.isfinite(cells.anchors).all(1)))


def shape_scores(predicted: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Compare the outline and the spacing of predicted cells with those of the true ones."""
    scores = {
        "outline_overlap": outline_overlap(predicted, true),
        "spacing_distance": spacing_distance(predicted, true),
    }
    return {name: value for name, value in scores.items() if value is not None}


def radius_scores(
    cells: InputCells, rows: np.ndarray, generated: Generated, *, other_frame: bool
) -> dict[str, float]:
    """Say how many true positions lie within the radii, and how the std compares with errors."""
    assert cells.position is not None
    radii = generated.radii
    if radii is None or not np.isfinite(radii.radius[rows]).all():
        return {}
    true = cells.position[rows, : cells.dims].astype(np.float64)
    predicted: Any = generated.position[rows, : cells.dims]
    if other_frame:
        predicted = aligned(predicted, true, scale=False, reflection=True).numpy()
    error = np.linalg.norm(predicted - true, axis=1)
    std = np.linalg.norm(generated.position_std[rows, : cells.dims], axis=1)
    ratio, correlation = error_and_std(error, std)
    return {
        "interval_coverage": float((error <= radii.radius[rows]).mean()),
        "interval_coverage_expected": radii.level,
        "std_error_ratio": ratio,
        "std_error_spearman": correlation,
    }


def interval_scores(cells: InputCells, rows: np.ndarray, generated: Generated) -> dict[str, float]:
    """Say how many true values of measured genes lie within the intervals of expression."""
    intervals = generated.intervals
    if intervals is None:
        return {}
    part = np.ix_(rows, np.flatnonzero(cells.measured[cells.slice_id[rows[0]]]))
    low, high, true = intervals.low[part], intervals.high[part], cells.expression[part]
    there = np.isfinite(low)
    if not there.any():
        return {}
    inside = (low <= true) & (true <= high)
    return {
        "interval_coverage": float(inside[there].mean()),
        "interval_coverage_expected": intervals.level,
    }
