"""Radii of slices without anchors: errors on slices that training held out enter, radii leave.

How far a position is off is not the same for all cells: those whose nearest cells by expression are
predicted far from one another are predicted worse. That dispersion scales the radius of each cell;
the slices that the first training held out say by how much, and how far off cells then are.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float64
from pydantic import BaseModel, ConfigDict, ValidationError
from scipy.optimize import nnls
from scipy.spatial import cKDTree

from alphastomics.diffusion_model.run_folder import read_record
from alphastomics.errors import InputError
from alphastomics.evaluation.position import aligned
from alphastomics.generation.anchor_regression import expression_features
from alphastomics.generation.cells import InputCells
from alphastomics.generation.generate import Generated
from alphastomics.generation.radii import Radii, conformal_factor

logger = logging.getLogger(__name__)

NEIGHBOURS, COMPARED_CELLS = 15, 2_000
# Sorted errors that are kept: enough for the level 0.99.
KEPT_ERRORS = 500
SMALLEST = 1e-12


class LeftOutErrors(BaseModel):
    """What held-out slices say of how far positions are off.

    Parameters
    ----------
    held_out
        Those slices, in words.
    constant, slope
        The squared scale of a cell is constant + slope x dispersion^2, in the users' units.
    errors
        Sorted errors over scales.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    held_out: str
    constant: float
    slope: float
    errors: list[float]

    def scale(self, dispersion: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
        """Return how far off cells are expected to be."""
        return np.sqrt(self.constant + self.slope * dispersion**2)

    def factor(self, level: float) -> float:
        """Return the scales that hold a share of the cells."""
        return conformal_factor(np.array(self.errors), level)


def dispersion_of(
    cells: InputCells, rows: np.ndarray, estimate: Float[np.ndarray, "N 3"]
) -> Float64[np.ndarray, " N"]:
    """Root mean square distance of the estimates of each cell's nearest cells by expression."""
    at = estimate.astype(np.float64)[:, : cells.dims]
    _, expression = expression_features(cells, rows)
    # As many to choose from as where it was calibrated: of more cells the nearest are nearer.
    some = np.random.default_rng(0).permutation(len(rows))[:COMPARED_CELLS]
    count = min(NEIGHBOURS, len(some))
    near = cKDTree(expression[some]).query(expression, k=range(1, count + 1))[1]
    return np.sqrt(at[some][near].var(1).sum(1))


def errors_of(cells: InputCells, generated: Generated, held_out: str) -> LeftOutErrors | None:
    """Compare the estimate of held-out slices with the truth, each slice rotated onto itself."""
    assert cells.position is not None
    errors, dispersion = [], []
    for number in range(len(cells.slice_names)):
        rows = cells.rows_of(number)
        true = cells.position[rows, : cells.dims]
        estimate = generated.position[rows]
        moved = aligned(estimate[:, : cells.dims], true, scale=False, reflection=True).numpy()
        errors.append(np.linalg.norm(moved - true, axis=1))
        dispersion.append(dispersion_of(cells, rows, estimate))
    error, apart = np.concatenate(errors), np.concatenate(dispersion)
    columns = np.stack([np.ones_like(apart), apart**2], axis=1)
    weights = nnls(columns, error**2)[0]
    if not weights.any():
        return None
    over = np.sort(error / np.sqrt(np.maximum(columns @ weights, SMALLEST)))
    kept = np.linspace(0, len(over) - 1, min(len(over), KEPT_ERRORS)).round().astype(int)
    return LeftOutErrors(
        held_out=held_out,
        constant=float(weights[0]),
        slope=float(weights[1]),
        errors=over[kept].tolist(),
    )


def read_errors(checkpoint: Path) -> LeftOutErrors | None:
    """Read what the run of a checkpoint, or an exported model, found; None where there is nothing.

    A checkpoint that was moved away from its run has no radii.
    """
    for path in (checkpoint, checkpoint.resolve().parent.parent):
        if (path / "verdict.json").is_file():
            return errors_in(read_record(path / "verdict.json"), str(path / "verdict.json"))
        if (path / "record.json").is_file():
            record = read_record(path / "record.json")
            return errors_in(record.get("verdict", {}), str(path / "record.json"))
    return None


def errors_in(verdict: Mapping[str, Any], where: str) -> LeftOutErrors | None:
    """Take the errors out of a verdict."""
    errors = verdict.get("position_errors")
    if errors is None:
        return None
    try:
        return LeftOutErrors.model_validate(errors)
    except ValidationError as error:
        raise InputError(f"{where}: damaged: position_errors are not as written") from error


def scales_of(
    cells: InputCells, generated: Generated, errors: LeftOutErrors
) -> Float64[np.ndarray, " N"]:
    """Return how far off the cells of all slices are expected to be."""
    scale = np.zeros(len(cells.names))
    for number in range(len(cells.slice_names)):
        rows = cells.rows_of(number)
        scale[rows] = errors.scale(dispersion_of(cells, rows, generated.position[rows]))
    return scale


def with_radii(
    cells: InputCells, generated: Generated, errors: LeftOutErrors | None, level: float
) -> Generated:
    """Give estimated positions of slices their radii, where held-out slices calibrate them."""
    if errors is None:
        return generated
    if np.isnan(errors.factor(level)):
        logger.warning(
            "training held out too few cells for radii that hold %g %% of them: none are written",
            100 * level,
        )
        return generated
    radius = errors.factor(level) * scales_of(cells, generated, errors)
    logger.info(
        "radii that hold %g %% of the cells are calibrated by what training held out (%s); other "
        "animals or techniques may be further off",
        *(100 * level, errors.held_out),
    )
    return replace(generated, radii=Radii(radius, level, f"held out: {errors.held_out}"))
