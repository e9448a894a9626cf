"""Regression on anchors: features, estimates and known positions enter; positions leave.

What the model's estimate lacks is predicted from expression by a kernel regression and by trees,
weighted by what each says of anchors that are left out. That mean may then be moved to the region
where a cell lies more likely (`robust_shift.py`). How much of both is taken, left-out anchors say.
The result is smoothed over neighbours in expression space that lie nearby, as the position head
does.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from scipy.spatial import cKDTree
from sklearn.decomposition import PCA
from sklearn.ensemble import ExtraTreesRegressor

from alphastomics.attn_model.neighbourhood import (
    bilateral_mean,
    few_enough,
    nearest_cells,
    smoothed_set,
)
from alphastomics.evaluation.distances import contact_scores
from alphastomics.evaluation.ranks import distance_spearman
from alphastomics.generation.cells import InputCells
from alphastomics.generation.kernel_regression import KernelRegression
from alphastomics.generation.robust_shift import RobustShift, robust_loss

COMPONENTS = 30
SMOOTHING: dict[str, int] = {"rounds": 1, "neighbours": 15, "components": 30}
TREES, LEAF_CELLS = 200, 5
# The estimate is two or three of some hundred features: repeated, trees try it as often as genes.
ESTIMATE_SHARE = 0.05
# Anchors of trees at most: more change little, and take minutes.
TREE_ANCHORS = 20_000
# How much of the correction is taken, and of the shift from the mean to the likelier region; widths
# of the smoothing as shares of the std of positions.
CORRECTIONS, WIDTHS = ((0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (1.0, 1.0)), (0.05, 0.15)
# More must raise the score of left-out anchors by this over their number: few vary by chance.
CORRECTION_COST = 2.0
# The score: Spearman of distances, precision of contacts, and so much of the robust loss.
CONTACT_SHARE, ERROR_WEIGHT = 0.1, 0.5
# Anchors are left out fold by fold, until so many were; fewer than the least say nothing, and fits
# need as many but one.
FOLDS, JUDGED, LEAST_JUDGED = 10, 1_000, 5
LEAST_FITTED = LEAST_JUDGED - 1
# Cells beside the anchors that are there when anchors are left out: more are not needed.
OTHER_CELLS = 10_000
# Left-out anchors whose errors say how far off a cell near them is, drawn towards the mean of all.
NEAREST, PRIOR = 30, 10
# Std of the weights of both predictors about a half each.
WEIGHT_STD = 0.1
# Of the smoothing.
ROUNDS, NEIGHBOURS = 2, 30
SMALLEST = 1e-12


class AnchoredSlice(NamedTuple):
    """Positions of a slice's cells in the anchors' frame.

    `scale` is how far off each is expected to be, `std` that of each axis; both are 0 for anchors.
    """

    position: Float64[np.ndarray, "N D"]
    std: Float64[np.ndarray, "N D"]
    scale: Float64[np.ndarray, " N"]
    errors: Float64[np.ndarray, " M"]


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
    """Features of the kernel (few, the estimate last), and of the trees (all genes)."""

    kernel: Float64[np.ndarray, "N F"]
    trees: Float[np.ndarray, "N H"]

    def part(self, rows: Int64[np.ndarray, " M"]) -> "Features":
        """Return those of some cells."""
        return Features(self.kernel[rows], self.trees[rows])


class CellFits:
    """What anchors among some cells say of the others.

    Parameters
    ----------
    features, dims
        Those of the cells; how many of the last are the estimate.
    seed
        Seed of the trees.
    """

    def __init__(self, features: Features, dims: int, seed: int) -> None:
        self.features, self.seed = features, seed
        expression = torch.from_numpy(features.kernel[:, :-dims])
        self.near = nearest_cells(expression, few_enough(NEIGHBOURS, len(expression)))

    def corrections(
        self,
        prior: Float64[np.ndarray, "N D"],
        rows: Int64[np.ndarray, " M"],
        position: Float64[np.ndarray, "M D"],
        *,
        shifts: bool,
    ) -> tuple[Float64[np.ndarray, "N D"], Float64[np.ndarray, "N D"]]:
        """Return what the prior lacks on average, and how much farther a likelier region is."""
        x, left = self.features, position - prior[rows]
        if len(rows) < LEAST_FITTED:
            return np.zeros_like(prior), np.zeros_like(prior)
        kernel = KernelRegression(x.kernel[rows], left, seed=self.seed)
        some = np.random.default_rng(self.seed).permutation(len(left))[:TREE_ANCHORS]
        trees = ExtraTreesRegressor(
            TREES,
            min_samples_leaf=min(LEAF_CELLS, len(left)),
            max_features="sqrt",
            bootstrap=True,
            oob_score=True,
            n_jobs=-1,
            random_state=self.seed,
        ).fit(x.trees[rows][some], left[some])
        # Threads add up the trees in any order, which changes the last digits.
        trees.set_params(n_jobs=1)
        tree_values = trees.predict(x.trees).reshape(prior.shape)
        left_out = tree_values[rows]
        left_out[some] = trees.oob_prediction_.reshape(len(some), -1)
        both = np.stack([left - kernel.residual, left_out])
        weight = weights_of(both, left)
        mean = np.tensordot(weight, np.stack([kernel.predict(x.kernel), tree_values]), 1)
        if not shifts:
            return mean, np.zeros_like(mean)
        errors = (left - np.tensordot(weight, both, 1))[some]
        shift = RobustShift(trees, x.trees[rows][some], errors, total_std(position))
        return mean, shift.of_cells(x.trees)

    def smoothed(
        self,
        position: Float64[np.ndarray, "N D"],
        width: float,
        rows: Int64[np.ndarray, " M"] | None = None,
    ) -> Float64[np.ndarray, "M D"]:
        """Average each cell, or some, with neighbours in expression space that lie nearby."""
        wide = torch.tensor(width * total_std(position))
        asked = [torch.arange(len(position)) if rows is None else torch.from_numpy(rows)]
        for _ in range(ROUNDS - 1):  # what is averaged last needs its neighbours, averaged before
            asked.insert(0, torch.unique(torch.cat([asked[0], self.near[asked[0]].flatten()])))
        at = torch.from_numpy(position)
        for some in asked:
            mean = bilateral_mean(at, self.near[some], wide, some)
            at = at.index_copy(0, some, mean)
        return at[asked[-1]].numpy()


class Correction(NamedTuple):
    """How much is taken of the mean correction and of the shift, and the width of the smoothing."""

    mean: float
    shift: float
    width: float

    @property
    def extent(self) -> float:
        """How far it goes from the prior, smoothed narrowly."""
        return self.mean + self.shift + float(self.width > WIDTHS[0])


class AnchorRegression:
    """Predicts what the estimate lacks, and how far off the result is.

    Parameters
    ----------
    features, prior
        Those of all cells of a slice, and where the model expects them, in the anchors' frame.
    known, position
        Which of them are anchors, and where these are.
    moved
        By how much the prior of each anchor changes where it is left out of the frame.
    seed
        Seed of the trees and of the folds.
    judged
        Anchors that are left out in turn, of as many as there are.
    """

    def __init__(
        self,
        features: Features,
        prior: Float64[np.ndarray, "N D"],
        known: Bool[np.ndarray, " N"],
        position: Float64[np.ndarray, "M D"],
        moved: Float64[np.ndarray, "M D"],
        seed: int,
        *,
        judged: int = JUDGED,
    ) -> None:
        self.features, self.seed, self.position = features, seed, position
        self.rows = np.flatnonzero(known)
        self.folds = folds_of(len(position), seed, judged)
        self.judged = np.concatenate(self.folds)
        left_out = self.left_out(prior, moved)
        best = best_of(left_out, position[self.judged])
        self.left_out_position = left_out[best]
        fits = CellFits(features, position.shape[1], seed)
        mean, shift = fits.corrections(prior, self.rows, position, shifts=best.shift > 0)
        corrected = prior + best.mean * mean + best.shift * shift
        corrected[self.rows] = position
        self.predicted = fits.smoothed(corrected, best.width)

    def left_out(
        self, prior: Float64[np.ndarray, "N D"], moved: Float64[np.ndarray, "M D"]
    ) -> dict[Correction, Float64[np.ndarray, "J D"]]:
        """Predict anchors by fits without them, with each correction and each width."""
        others = np.setdiff1d(np.arange(len(prior)), self.rows)
        some = np.random.default_rng(self.seed).permutation(others)[:OTHER_CELLS]
        part = np.sort(np.concatenate([self.rows, some]))
        anchors = np.searchsorted(part, self.rows)
        fits = CellFits(self.features.part(part), prior.shape[1], self.seed)
        parts: dict[Correction, list[np.ndarray]] = {}
        for fold in self.folds:
            kept = np.setdiff1d(np.arange(len(self.position)), fold)
            rows, at = anchors[kept], self.position[kept]
            expected = prior[part]
            expected[anchors[fold]] -= moved[fold]
            mean, shift = fits.corrections(expected, rows, at, shifts=True)
            for a, b in CORRECTIONS:
                corrected = expected + a * mean + b * shift
                corrected[rows] = at
                for width in WIDTHS:
                    smooth = fits.smoothed(corrected, width, anchors[fold])
                    parts.setdefault(Correction(a, b, width), []).append(smooth)
        return {each: np.concatenate(folds) for each, folds in parts.items()}

    def result(self) -> AnchoredSlice:
        """Return positions and how far off they are; anchors stay where they are."""
        x = self.features.kernel
        judged = x[self.rows[self.judged]]
        tree = cKDTree(judged)
        squares = (self.position[self.judged] - self.left_out_position) ** 2
        nearest = min(NEAREST, len(squares) - 1)
        of_anchors = tree.query(judged, k=range(2, nearest + 2))[1]
        # An anchor's own error is not among those that its scale is made of.
        others = (squares.sum(0) - squares) / (len(squares) - 1)
        own = _drawn_to_mean(squares, of_anchors, others)
        near = tree.query(x, k=range(1, nearest + 1))[1]
        variance = _drawn_to_mean(squares, near, squares.mean(0))
        position = self.predicted.copy()
        position[self.rows], variance[self.rows] = self.position, 0
        errors = np.sqrt(squares.sum(1)) / np.maximum(np.sqrt(own.sum(1)), SMALLEST)
        return AnchoredSlice(position, np.sqrt(variance), np.sqrt(variance.sum(1)), np.sort(errors))


def folds_of(anchors: int, seed: int, judged: int = JUDGED) -> list[Int64[np.ndarray, " F"]]:
    """Divide anchors into folds that are left out in turn; of many anchors, few folds are."""
    folds = np.array_split(np.random.default_rng(seed).permutation(anchors), FOLDS)
    needed = -(-judged * FOLDS // anchors)
    return [np.sort(fold) for fold in folds[:needed] if len(fold)]


def best_of(
    left_out: dict[Correction, Float64[np.ndarray, "J D"]], true: Float64[np.ndarray, "J D"]
) -> Correction:
    """Choose the correction by left-out anchors: their distances, contacts and errors, less a cost.

    Squared errors alone would not do: positions drawn to the middle have small ones.
    """
    if len(true) < LEAST_JUDGED:
        return next(iter(left_out))
    center = true.mean(0)
    at = (true - center).astype(np.float32)
    scores = {}
    for each, position in left_out.items():
        pair = (position - center).astype(np.float32), at
        spearman = float(distance_spearman(*pair).nanmean())
        contacts = contact_scores(*pair, share=CONTACT_SHARE).precision
        error = float(robust_loss((position - true) / max(total_std(true), SMALLEST)).mean())
        cost = CORRECTION_COST / len(true) * each.extent
        scores[each] = spearman + contacts - ERROR_WEIGHT * error - cost
    return max(scores, key=lambda each: scores[each])


def total_std(position: Float64[np.ndarray, "N D"]) -> float:
    """Return the std of positions over all axes."""
    return float(np.sqrt(position.var(0).sum()))


def weights_of(
    predicted: Float64[np.ndarray, "K M D"], true: Float64[np.ndarray, "M D"]
) -> Float64[np.ndarray, " K"]:
    """Weigh predictions of left-out anchors: ridge regression (stacking, Wolpert 1992).

    Drawn to equal weights, the more the less the anchors say: w ~ N(1/K, tau^2), and the noise has
    the variance that equal weights leave.
    """
    x = predicted.reshape(len(predicted), -1)
    left = (true - predicted.mean(0)).ravel()
    noise = max(float((left**2).mean()), SMALLEST)
    precision = x @ x.T / noise + np.eye(len(x)) / WEIGHT_STD**2
    return np.clip(1 / len(x) + np.linalg.solve(precision, x @ left / noise), 0, 1)


def _drawn_to_mean(
    squares: Float64[np.ndarray, "M D"], near: np.ndarray, usual: Float64[np.ndarray, "..."]
) -> Float64[np.ndarray, "N D"]:
    """Average squared errors over the nearest anchors, and a little over all."""
    total = squares[near].sum(1) + PRIOR * usual
    return total / (near.shape[1] + PRIOR)
