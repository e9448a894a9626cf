"""Anchors: predicted positions and some that are known enter; all positions, with radii, leave.

The model's estimate is moved onto the anchors (rotation, mirror image, shift, size). What is left
between both is predicted for all other cells from their expression (`anchor_regression.py`). With
few anchors nothing but the frame changes; with many, the anchors say more than the model. Anchors
that are left out of the fit say how far it is off (`radii.py`).
"""

import logging
from collections.abc import Collection
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float64

from alphastomics.config import SamplingConfig
from alphastomics.generation.anchor_regression import (
    JUDGED,
    SMALLEST,
    AnchoredSlice,
    AnchorRegression,
    features_of,
)
from alphastomics.generation.cells import InputCells
from alphastomics.generation.frame import (
    LEAST_EXTENT,
    KnownPositions,
    Transform,
    fitted,
    require_a_frame,
    spans,
)
from alphastomics.generation.generate import Generated
from alphastomics.generation.radii import CURVE_LEVELS, Radii, conformal_factor, least_cells
from alphastomics.preprocessing.query_fit import UNIT_RATIO, size_of

logger = logging.getLogger(__name__)

# More anchors than this fix a frame that one of them does not change.
FRAME_ANCHORS = 500
NO_ANCHORS = (
    "slice %s: has no anchors: its positions are the model's mean, centred, in a frame of their "
    "own, without a radius"
)
# Fewer of them fit the frame so closely that their errors are too small.
LEAST_ANCHORS = 20


def with_anchors(
    cells: InputCells,
    generated: Generated,
    settings: SamplingConfig,
    seed: int,
    *,
    reflection: bool,
    frame_alone: Collection[int] = (),
) -> Generated:
    """Bring estimated positions into the frame of the anchors, and correct them by the anchors.

    Parameters
    ----------
    cells
        The query, some of whose positions are known.
    generated
        The model's estimate of all of them.
    settings, seed
        The estimator, the level of the radius, and the seed of a sample.
    reflection
        Allow the mirror image of the estimate: expression does not tell the two apart.
    frame_alone
        Numbers of slices whose anchors give the frame and nothing else: no radii, no std.
    """
    anchors = cells.anchors
    assert anchors is not None
    known = np.isfinite(anchors).all(1)
    position, std = generated.position.astype(np.float64), generated.position_std.copy()
    # The level that is asked for, then those of the curve.
    levels = (settings.radius_level, *CURVE_LEVELS)
    radius = np.full((len(levels), len(known)), np.nan)
    for number, name in enumerate(cells.slice_names):
        rows = cells.rows_of(number)
        if not known[rows].any():
            logger.warning(NO_ANCHORS, name)
            continue
        corrected = number not in frame_alone
        given = cells, rows, position[rows], name, seed
        least = least_cells(settings.radius_level)
        result = anchored_slice(*given, least, reflection=reflection, corrected=corrected)
        at = result.position
        if settings.estimator == "sample" and corrected:
            at = sampled(result, known[rows], seed + number)
        position[rows, : cells.dims] = at
        position[rows[known[rows]]] = anchors[rows[known[rows]]]
        std[rows, : cells.dims] = result.std
        factors = np.array([conformal_factor(result.errors, level) for level in levels])
        # What holds about the estimate holds about a sample within so much more.
        away = np.linalg.norm(position[rows, : cells.dims] - result.position, axis=1)
        radius[:, rows] = np.where(known[rows], 0, result.scale * factors[:, None] + away)
        if len(result.errors) < LEAST_ANCHORS:
            radius[:, rows[~known[rows]]] = np.nan
        if corrected:
            say_calibration(name, int(known[rows].sum()), settings.radius_level)
    radii = Radii(radius[0], levels[0], "anchors", known, radius[1:], too_few("anchors", levels[0]))
    return replace(generated, position=position, position_std=std, radii=radii)


def check_anchors(cells: InputCells, scale: float, *, reflection: bool) -> None:
    """Refuse anchors that leave a slice free to rotate, and warn of another unit.

    Parameters
    ----------
    cells
        Cells some of whose positions are known; slices may have none.
    scale
        The size of the training slices, as `size_of` measures it.
    reflection
        Allow the mirror image of an estimate.
    """
    assert cells.anchors is not None
    for number, name in enumerate(cells.slice_names):
        at = cells.anchors[cells.rows_of(number)]
        at = at[np.isfinite(at).all(1)]
        if not len(at):
            continue
        where = f"anchors: slice {name}"
        anchor_dims(at, where, cells.dims, reflection=reflection)
        # Not the scale of a fit, which shrinks where the estimate is poor.
        ratio = size_of(at) / scale
        if not 1 / UNIT_RATIO <= ratio <= UNIT_RATIO:
            logger.warning(
                "%s: the anchors extend %.3g times as far as a training slice: they are in another "
                "unit, or in a part of the slice; predicted positions are in the anchors' unit",
                *(where, ratio),
            )


def anchor_dims(at: Float64[np.ndarray, "M 3"], where: str, dims: int, *, reflection: bool) -> int:
    """Return the dimensions that anchors fix a frame in; refuse those that fix none."""
    # A section may be stored with its z: it is planar all the same.
    is_planar = np.ptp(at[:, 2]) <= LEAST_EXTENT * np.ptp(at, axis=0).max()
    dims = 2 if is_planar else dims
    require_a_frame(at, where, dims, dims, reflection=reflection)
    return dims


def without_std(settings: SamplingConfig) -> SamplingConfig:
    """Return settings of an estimate whose std anchors give: samples in many steps are not."""
    return settings.model_copy(update={"estimator": "mean", "num_steps": 1})


def all_anchored(cells: InputCells) -> bool:
    """Say whether every slice has anchors."""
    if cells.anchors is None:
        return False
    known = np.isfinite(cells.anchors).all(1)
    return len(np.unique(cells.slice_id[known])) == len(cells.slice_names)


def least_anchors(level: float) -> int:
    """Return how many anchors of a slice calibrate radii of a level."""
    return max(least_cells(level), LEAST_ANCHORS)


def too_few(what: str, level: float) -> str:
    """Say why cells have no radius."""
    share = f"{100 * level:g} % of the cells"
    return f"too few {what} for a radius that holds {share}: at least {least_anchors(level)}"


def say_calibration(name: str, anchors: int, level: float) -> None:
    """Say what positions were found by, or that too few anchors are there to calibrate them."""
    share = 100 * level
    least = least_anchors(level)
    if anchors < least:
        logger.warning(
            "slice %s: %d anchors are too few for a radius that holds %g %% of the cells: at least "
            "%d are needed, and there is none",
            *(name, anchors, share, least),
        )
        return
    logger.info(
        "slice %s: positions by %d anchors; radii that hold %g %% of the cells are calibrated by "
        "anchors that were left out",
        *(name, anchors, share),
    )


def anchored_slice(
    cells: InputCells,
    rows: np.ndarray,
    estimate: Float64[np.ndarray, "N 3"],
    name: str,
    seed: int,
    least_judged: int,
    *,
    reflection: bool,
    corrected: bool = True,
) -> AnchoredSlice:
    """Predict the positions of one slice by those that are known; or move them into the frame.

    At least so many anchors are left out in turn, of as many as there are.
    """
    assert cells.anchors is not None
    known = np.isfinite(cells.anchors[rows]).all(1)
    at = cells.anchors[rows[known]]
    where = f"anchors: slice {name}"
    dims = anchor_dims(at, where, cells.dims, reflection=reflection)
    estimate = estimate.copy()
    estimate[:, dims:] = 0
    fit = fitted(
        estimate[known],
        KnownPositions(np.flatnonzero(known), at),
        dims=dims,
        scale=True,
        reflection=reflection,
        where=where,
    )
    prior = fit.apply(estimate)[:, :dims]
    if not corrected:
        unknown = np.full((len(rows), cells.dims), np.nan)
        flat = np.hstack([prior, np.full((len(rows), cells.dims - dims), at[0, 2])])
        return AnchoredSlice(flat, unknown, unknown[:, 0], np.zeros(0))
    left_out = left_out_prior(estimate[known], at, fit, dims, reflection=reflection)
    features = features_of(cells, rows, estimate[:, :dims])
    # By how much an anchor would be expected elsewhere in a frame that it does not fix itself.
    moved = prior[known] - left_out[:, :dims]
    regression = AnchorRegression(
        *(features, prior, known, at[:, :dims], moved, seed), judged=max(JUDGED, least_judged)
    )
    result = regression.result()
    z = np.full((len(rows), cells.dims - dims), at[0, 2])
    return result._replace(
        position=np.hstack([result.position, z]), std=np.hstack([result.std, 0 * z])
    )


def left_out_prior(
    estimate: Float64[np.ndarray, "M 3"],
    at: Float64[np.ndarray, "M 3"],
    fit: Transform,
    dims: int,
    *,
    reflection: bool,
) -> Float64[np.ndarray, "M 3"]:
    """Bring each anchor's estimate into the frame of the others; one of many changes nothing.

    Others that fix no frame by themselves, or are expected on one point, leave the whole one.
    """
    moved = fit.apply(estimate)
    if not dims < len(at) <= FRAME_ANCHORS:
        return moved
    for row in range(len(at)):
        others = np.flatnonzero(np.arange(len(at)) != row)
        extent = np.ptp(estimate[others], axis=0).max()
        if extent <= LEAST_EXTENT * np.ptp(estimate, axis=0).max() or not spans(
            at[others], 3 if dims == 3 and reflection else 2
        ):
            continue
        moved[row] = fitted(
            estimate[others],
            KnownPositions(others, at[others]),
            dims=dims,
            scale=True,
            reflection=reflection,
            where="anchors",
        ).apply(estimate[row][None])[0]
    return moved


def sampled(
    result: AnchoredSlice, known: Bool[np.ndarray, " N"], seed: int
) -> Float64[np.ndarray, "N D"]:
    """Draw positions about the estimate: an error of the anchors, in a random direction.

    Its length is that of an anchor's error, in units of the scale; its direction is normal noise
    with the std of each axis.
    """
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal(result.position.shape) * result.std
    length = np.maximum(np.linalg.norm(noise, axis=1), SMALLEST)
    drawn = rng.choice(result.errors, len(noise)) * result.scale
    return np.where(
        known[:, None], result.position, result.position + noise * (drawn / length)[:, None]
    )
