"""Regression on anchors: features, estimates and known positions enter; positions leave.

What the model's estimate lacks is predicted from expression by a kernel regression and by trees,
weighted by what each says of anchors that are left out. The result is smoothed over neighbours in
expression space that lie nearby, as the position head does.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from scipy.spatial import cKDTree
from sklearn.decomposition import PCA
from sklearn.ensemble import ExtraTreesRegressor

from alphastomics.attn_model.neighbourhood import (
    bilateral_mean,
    few_enough,
    nearest_cells,
    smoothed_set,
)
from alphastomics.generation.cells import InputCells
from alphastomics.generation.kernel_regression import KernelRegression

COMPONENTS = 30
SMOOTHING: dict[str, int] = {"rounds": 1, "neighbours": 15, "components": 30}
TREES, LEAF_CELLS = 200, 5
# The estimate is two or three of some hundred features: repeated, trees try it as often as genes.
ESTIMATE_SHARE = 0.05
# Anchors of trees at most: more change little, and take minutes.
TREE_ANCHORS = 20_000
# Anchors whose errors say how far off a cell near them is, drawn towards the mean of all.
NEAREST, PRIOR = 30, 10
# Std of the weights of both predictors about a half each.
WEIGHT_STD = 0.1
# Of the smoothing: rounds, neighbours, and the width as a share of the std of positions.
ROUNDS, NEIGHBOURS, WIDTH = 2, 30, 0.05
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
        self.features, self.known, self.position = features, known, position
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
        both = np.stack([left - kernel.residual, left_out])
        weight = weights_of(both, left)
        values = np.stack([kernel.predict(features.kernel), tree_values])
        self.predicted = prior + np.tensordot(weight, values, 1)
        self.residual = left - np.tensordot(weight, both, 1)

    def result(self, moved: Float64[np.ndarray, "M D"]) -> AnchoredSlice:
        """Return positions and how far off they are; anchors stay where they are.

        `moved` is by how much the prior of each anchor changes where it is left out of the frame.
        """
        x = self.features.kernel
        tree = cKDTree(x[self.known])
        position = self.predicted.copy()
        position[self.known] = self.position - self.residual - moved
        position = self.smoothed(position)
        squares = (self.position - position[self.known]) ** 2
        nearest = min(NEAREST, len(squares) - 1)
        of_anchors = tree.query(x[self.known], k=range(2, nearest + 2))[1]
        # An anchor's own error is not among those that its scale is made of.
        others = (squares.sum(0) - squares) / (len(squares) - 1)
        own = _drawn_to_mean(squares, of_anchors, others)
        near = tree.query(x, k=range(1, nearest + 1))[1]
        variance = _drawn_to_mean(squares, near, squares.mean(0))
        position[self.known], variance[self.known] = self.position, 0
        errors = np.sqrt(squares.sum(1)) / np.maximum(np.sqrt(own.sum(1)), SMALLEST)
        return AnchoredSlice(position, np.sqrt(variance), np.sqrt(variance.sum(1)), np.sort(errors))

    def smoothed(self, position: Float64[np.ndarray, "N D"]) -> Float64[np.ndarray, "N D"]:
        """Average each cell with its neighbours in expression space that lie nearby.

        Anchors are where they would be expected if they were left out, so that their errors are
        those of other cells.
        """
        expression = torch.from_numpy(self.features.kernel[:, : -position.shape[1]])
        cells = nearest_cells(expression, few_enough(NEIGHBOURS, len(position)))
        width = torch.tensor(WIDTH * float(np.sqrt(position.var(0).sum())))
        at = torch.from_numpy(position)
        for _ in range(ROUNDS):
            at = bilateral_mean(at, cells, width)
        return at.numpy()


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
