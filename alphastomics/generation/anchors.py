"""Anchors: predicted positions and some that are known enter; all positions, with radii, leave.

The model's estimate is moved onto the anchors (rotation, mirror image, shift, size). What is left
between both is predicted for all other cells from their expression, by the mean of a kernel
regression and of trees that are fitted to the anchors. With few anchors nothing but the frame
changes; with many, the anchors say more than the model. Anchors that are left out of the fit say
how far it is off (`radii.py`).
"""

import logging
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from scipy.spatial import cKDTree
from sklearn.decomposition import PCA
from sklearn.ensemble import ExtraTreesRegressor

from alphastomics.attn_model.neighbourhood import smoothed_set
from alphastomics.config import SamplingConfig
from alphastomics.generation.cells import InputCells
from alphastomics.generation.frame import (
    LEAST_EXTENT,
    KnownPositions,
    Transform,
    fitted,
    require_a_frame,
)
from alphastomics.generation.generate import Generated
from alphastomics.generation.kernel_regression import KernelRegression
from alphastomics.generation.radii import CURVE_LEVELS, Radii, conformal_factor, least_cells
from alphastomics.preprocessing.query_fit import UNIT_RATIO

logger = logging.getLogger(__name__)

COMPONENTS = 30
SMOOTHING: dict[str, int] = {"rounds": 1, "neighbours": 15, "components": 30}
TREES, LEAF_CELLS = 200, 5
# The estimate is two or three of some hundred features: repeated, trees try it as often as genes.
ESTIMATE_SHARE = 0.05
# Anchors of trees at most: more change little, and take minutes.
TREE_ANCHORS = 20_000
# Anchors whose errors say how far off a cell near them is, drawn towards the mean of all.
NEAREST, PRIOR = 30, 10
# More anchors than this fix a frame that one of them does not change.
FRAME_ANCHORS = 500
# Fewer of them fit the frame so closely that their errors are too small.
LEAST_ANCHORS = 20
SMALLEST = 1e-12


class AnchoredSlice(NamedTuple):
    """Positions of a slice's cells in the anchors' frame.

    `scale` is how far off each is expected to be, `std` that of each axis; both are 0 for anchors.
    """

    position: Float64[np.ndarray, "N D"]
    std: Float64[np.ndarray, "N D"]
    scale: Float64[np.ndarray, " N"]
    errors: Float64[np.ndarray, " M"]


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
            logger.warning(
                "slice %s: has no anchors: its positions are the model's mean, centred, in a frame "
                "of their own, without a radius",
                name,
            )
            continue
        corrected = number not in frame_alone
        result = anchored_slice(
            *(cells, rows, position[rows], name, seed), reflection=reflection, corrected=corrected
        )
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
            say_calibration(name, len(result.errors), settings.radius_level)
    radii = Radii(radius[0], settings.radius_level, "anchors", known, radius[1:])
    return replace(generated, position=position, position_std=std, radii=radii)


def without_std(settings: SamplingConfig) -> SamplingConfig:
    """Return settings of an estimate whose std anchors give: samples in many steps are not."""
    return settings.model_copy(update={"estimator": "mean", "num_steps": 1})


def all_anchored(cells: InputCells) -> bool:
    """Say whether every slice has anchors."""
    if cells.anchors is None:
        return False
    known = np.isfinite(cells.anchors).all(1)
    return len(np.unique(cells.slice_id[known])) == len(cells.slice_names)


def say_calibration(name: str, anchors: int, level: float) -> None:
    """Say what positions were found by, or that too few anchors are there to calibrate them."""
    share = 100 * level
    least = max(least_cells(level), LEAST_ANCHORS)
    if anchors < least:
        logger.warning(
            "slice %s: %d anchors are too few for a radius that holds %g %% of the cells: at least "
            "%d are needed, and the radius is left empty",
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
    *,
    reflection: bool,
    corrected: bool = True,
) -> AnchoredSlice:
    """Predict the positions of one slice by those that are known; or move them into the frame."""
    assert cells.anchors is not None
    known = np.isfinite(cells.anchors[rows]).all(1)
    at = cells.anchors[rows[known]]
    where = f"anchors: slice {name}"
    # A section may be stored with its z: it is planar all the same.
    is_planar = np.ptp(at[:, 2]) <= LEAST_EXTENT * np.ptp(at, axis=0).max()
    dims = 2 if is_planar else cells.dims
    require_a_frame(at, where, dims, dims, reflection=reflection)
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
    if not 1 / UNIT_RATIO <= abs(fit.scale) <= UNIT_RATIO:
        logger.warning(
            "%s: the anchors' unit is %.3g of the training slices': predicted positions are in the "
            "anchors' unit",
            *(where, fit.scale),
        )
    prior = fit.apply(estimate)[:, :dims]
    if not corrected:
        unknown = np.full((len(rows), cells.dims), np.nan)
        flat = np.hstack([prior, np.full((len(rows), cells.dims - dims), at[0, 2])])
        return AnchoredSlice(flat, unknown, unknown[:, 0], np.zeros(0))
    left_out = left_out_prior(estimate[known], at, fit, dims, reflection=reflection)
    features = features_of(cells, rows, estimate[:, :dims])
    regression = AnchorRegression(features, prior, known, at[:, :dims], seed)
    # Where an anchor would be expected in a frame that it does not fix itself.
    result = regression.result(prior[known] - left_out[:, :dims])
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
    """Bring each anchor's estimate into the frame of the others; one of many changes nothing."""
    moved = fit.apply(estimate)
    if not dims < len(at) <= FRAME_ANCHORS:
        return moved
    for row in range(len(at)):
        others = np.flatnonzero(np.arange(len(at)) != row)
        moved[row] = fitted(
            estimate[others],
            KnownPositions(others, at[others]),
            dims=dims,
            scale=True,
            reflection=reflection,
            where="anchors",
        ).apply(estimate[row][None])[0]
    return moved


def features_of(
    cells: InputCells, rows: np.ndarray, estimate: Float64[np.ndarray, "N D"]
) -> "Features":
    """Return what the fits see of each cell: expression, smoothed expression, the estimate."""
    both, pca = expression_features(cells, rows)
    size = max(float(estimate.std()), SMALLEST)
    scaled = (estimate - estimate.mean(0)) / size
    repeated = np.repeat(scaled, max(int(ESTIMATE_SHARE * both.shape[1]), 1), axis=1)
    return Features(
        np.hstack([pca, scaled]),
        np.hstack([both, repeated.astype(np.float32)]),
    )


def expression_features(
    cells: InputCells, rows: np.ndarray
) -> tuple[Float[np.ndarray, "N H"], Float[np.ndarray, "N C"]]:
    """Return own and smoothed expression of a slice, and its leading components, the first of 1."""
    measured = cells.measured[cells.slice_id[rows[0]]]
    own = np.ascontiguousarray(cells.expression[rows][:, measured])
    smoothed = smoothed_set(torch.from_numpy(own), **SMOOTHING).numpy()
    both = np.hstack([own, smoothed])
    pca = PCA(min(COMPONENTS, *both.shape), random_state=0).fit_transform(both)
    return both, pca / max(float(pca[:, 0].std()), SMALLEST)


class Features(NamedTuple):
    """Features of the kernel (few), and of the trees (all genes)."""

    kernel: Float64[np.ndarray, "N F"]
    trees: Float[np.ndarray, "N H"]


class AnchorRegression:
    """Predicts what the estimate lacks, and how far off the result is.

    Parameters
    ----------
    features, prior
        Those of all cells of a slice, and where the model expects them, in the anchors' frame.
    known, position
        Which of them are anchors, and where these are.
    seed
        Seed of the trees.
    """

    def __init__(
        self,
        features: Features,
        prior: Float64[np.ndarray, "N D"],
        known: Bool[np.ndarray, " N"],
        position: Float64[np.ndarray, "M D"],
        seed: int,
    ) -> None:
        self.features, self.prior, self.known, self.position = features, prior, known, position
        left = position - prior[known]
        kernel = KernelRegression(features.kernel[known], left, seed=seed)
        some = np.random.default_rng(seed).permutation(len(left))[:TREE_ANCHORS]
        trees = ExtraTreesRegressor(
            TREES,
            min_samples_leaf=min(LEAF_CELLS, len(left)),
            max_features="sqrt",
            bootstrap=True,
            oob_score=True,
            n_jobs=-1,
            random_state=seed,
        ).fit(features.trees[known][some], left[some])
        # Threads add up the trees in any order, which changes the last digits.
        trees.set_params(n_jobs=1)
        tree_values = trees.predict(features.trees).reshape(prior.shape)
        left_out = tree_values[known]
        left_out[some] = trees.oob_prediction_.reshape(len(some), -1)
        self.predicted = prior + (kernel.predict(features.kernel) + tree_values) / 2
        self.residual = (kernel.residual + left - left_out) / 2

    def result(self, moved: Float64[np.ndarray, "M D"]) -> AnchoredSlice:
        """Return positions and how far off they are; anchors stay where they are.

        `moved` is by how much the prior of each anchor changes where it is left out of the frame.
        """
        x = self.features.kernel
        tree = cKDTree(x[self.known])
        squares = (self.residual + moved) ** 2
        nearest = min(NEAREST, len(squares) - 1)
        of_anchors = tree.query(x[self.known], k=range(2, nearest + 2))[1]
        # An anchor's own error is not among those that its scale is made of.
        others = (squares.sum(0) - squares) / (len(squares) - 1)
        own = _drawn_to_mean(squares, of_anchors, others)
        near = tree.query(x, k=range(1, nearest + 1))[1]
        variance = _drawn_to_mean(squares, near, squares.mean(0))
        position = self.predicted.copy()
        position[self.known], variance[self.known] = self.position, 0
        errors = np.sqrt(squares.sum(1)) / np.maximum(np.sqrt(own.sum(1)), SMALLEST)
        return AnchoredSlice(position, np.sqrt(variance), np.sqrt(variance.sum(1)), np.sort(errors))


def _drawn_to_mean(
    squares: Float64[np.ndarray, "M D"], near: np.ndarray, usual: Float64[np.ndarray, "..."]
) -> Float64[np.ndarray, "N D"]:
    """Average squared errors over the nearest anchors, and a little over all."""
    total = squares[near].sum(1) + PRIOR * usual
    return total / (near.shape[1] + PRIOR)


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
