"""Baselines: what a user could do without a network. Arrays enter, a prediction leaves.

For positions from expression: regression from training slices, and two oracles, class centroids and
half of the slice known. For expression from positions: the mean of the nearest training cells, and
the closest slice. Most published predictors of expression do not beat the last two.
For everything: the truth with its cells shuffled, which is chance with the right shape.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from numpy import ndarray
from scipy.spatial import cKDTree
from sklearn.compose import TransformedTargetRegressor
from sklearn.decomposition import PCA
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.linear_model import RidgeCV
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from alphastomics.errors import InputError
from alphastomics.evaluation.arrays import (
    Array,
    as_tensor,
    checked,
    spans,
)
from alphastomics.evaluation.clusters import COMPONENTS, Labels

Regressor = Literal["ridge", "knn", "trees", "sqrt trees", "smoothed trees"]

RIDGE_PENALTIES = np.logspace(-1, 5, 13)  # RidgeCV takes the best by leave-one-out
REGRESSION_NEIGHBOURS = 10
TREES, LEAF_CELLS = 200, 5
# Exponent and share of the features tried at a split: all is scikit-learn's default for
# regression; of noisy genes and of smoothed ones, which repeat one another, fewer do better.
SPLIT_FEATURES: dict[Regressor, tuple[float, float]] = {
    "trees": (1.0, 1.0),
    "sqrt trees": (0.5, 1.0),
    "smoothed trees": (1.0, 0.3),
}
MOST_AT_A_SPLIT = 500  # time grows with the features tried: 20,000 genes would take hours


def shuffled(values: Float[Array, "N K"], generator: torch.Generator) -> Float[Tensor, "N K"]:
    """Give each cell the values of another, at random: chance, with the right distribution."""
    tensor = as_tensor(values)
    return tensor[torch.randperm(len(tensor), generator=generator).to(tensor.device)]


def class_centroids(position: Float[Array, "N D"], labels: Labels) -> Float[Tensor, "N D"]:
    """Put each cell at the true centroid of its class in this slice: an oracle for cell types."""
    points = checked(position, "positions").double()
    names, number = np.unique(np.asarray(labels), return_inverse=True)
    if len(number) != len(points):
        raise InputError(f"labels: {len(number)} for {len(points)} cells. Give one label a cell.")
    of_class = torch.from_numpy(number).to(points.device)
    total = points.new_zeros(len(names), points.shape[1]).index_add_(0, of_class, points)
    return (total / torch.bincount(of_class)[:, None])[of_class]


def regressed_positions(
    expression: Float[Array, "N G"],
    training_expression: Float[Array, "M G"],
    training_position: Float[Array, "M D"],
    *,
    regressor: Regressor,
    seed: int,
) -> Float[Tensor, "N D"]:
    """Predict positions from expression by a regressor fitted to the cells of training slices.

    The slices must share a frame, if only by being centred. Genes are standardised; `ridge` chooses
    its penalty by leave-one-out, `knn` averages the 10 nearest of 50 principal components, `trees`
    are 200 extremely randomised trees (Geurts et al. 2006) with at least 5 cells in a leaf. They
    try every feature at a split, `sqrt trees` the square root of their number, `smoothed trees`
    30 % of them, and none more than 500.
    """
    # Trees compute in float32, and a copy in float64 of 20,000 smoothed genes would fill a laptop.
    dtype = torch.float32 if regressor in SPLIT_FEATURES else torch.float64
    x, known_x = (
        checked(values, "expression").to(dtype).cpu().numpy()
        for values in (expression, training_expression)
    )
    y = _numbers(training_position, "training positions")
    model = TransformedTargetRegressor(
        _regressor(regressor, known_x.shape, seed), transformer=StandardScaler()
    )
    model.fit(known_x, y)
    if regressor in SPLIT_FEATURES:
        # Threads add up the trees in any order, which changes the last digits.
        model.regressor_[-1].set_params(n_jobs=1)
    return torch.from_numpy(np.asarray(model.predict(x), dtype=np.float64))


def from_other_half(
    features: Float[Array, "N F"], position: Float[Array, "N D"], *, seed: int, most: int
) -> Float[Tensor, "N D"]:
    """Predict the positions of each half of a slice by trees fitted to the other: an oracle.

    What expression says about position in this very tissue, whatever slices a model was trained on.
    `sqrt trees` are fitted to at most `most` cells of a half.
    """
    x, y = np.asarray(features), np.asarray(position)
    order = np.random.default_rng(seed).permutation(len(x))
    halves = order[: len(x) // 2], order[len(x) // 2 :]
    predicted = torch.zeros(y.shape, dtype=torch.float64)
    for asked, known in (halves, halves[::-1]):
        known = known[:most]
        predicted[torch.from_numpy(asked)] = regressed_positions(
            x[asked], x[known], y[known], regressor="sqrt trees", seed=seed
        )
    return predicted


def _regressor(name: Regressor, shape: tuple[int, ...], seed: int) -> Pipeline:
    match name:
        case "ridge":
            return make_pipeline(StandardScaler(), RidgeCV(RIDGE_PENALTIES))
        case "knn":
            pca = PCA(min(COMPONENTS, *shape), random_state=seed)
            neighbours = KNeighborsRegressor(min(REGRESSION_NEIGHBOURS, shape[0]))
            return make_pipeline(StandardScaler(), pca, neighbours)
        case "trees" | "sqrt trees" | "smoothed trees":
            return make_pipeline(
                ExtraTreesRegressor(
                    TREES,
                    min_samples_leaf=min(LEAF_CELLS, shape[0]),
                    max_features=features_at_a_split(name, shape[1]),
                    n_jobs=-1,
                    random_state=seed,
                )
            )


def features_at_a_split(regressor: Regressor, num_features: int) -> int:
    """Return how many features trees try at a split: their share, at most 500."""
    exponent, share = SPLIT_FEATURES[regressor]
    return max(1, min(int(share * num_features**exponent), MOST_AT_A_SPLIT))


def spatial_knn_mean(
    position: Float[Array, "N D"],
    training_position: Float[Array, "M D"],
    training_expression: Float[Array, "M G"],
    training_measured: Bool[Array, "#M G"],
    *,
    k: int,
) -> Float[Tensor, "N G"]:
    """Mean expression of the k training cells nearest in space, gene by gene over those measured.

    A gene that none of them measured gets its mean over all training cells.
    """
    points = _numbers(position, "positions")
    known = as_tensor(training_expression).cpu()
    measured = torch.as_tensor(training_measured).cpu().expand(known.shape)
    k = min(k, len(known))
    tree = cKDTree(_numbers(training_position, "training positions"))
    _, near = tree.query(points, k=list(range(1, k + 1)))
    usual = _mean_of_genes(known, measured)
    parts = []
    for rows in spans(len(points), k * known.shape[1], known.device):
        cells = torch.from_numpy(near[rows])
        count = measured[cells].sum(1)
        total = torch.where(measured[cells], known[cells].double(), 0).sum(1)
        parts.append(torch.where(count > 0, total / count.clamp(min=1), usual).to(known.dtype))
    return torch.cat(parts)


def _mean_of_genes(
    known: Float[Tensor, "M G"], measured: Bool[Tensor, "M G"]
) -> Float[Tensor, " G"]:
    total = torch.zeros(known.shape[1], dtype=torch.float64)
    for rows in spans(len(known), known.shape[1], known.device):
        total += torch.where(measured[rows], known[rows].double(), 0).sum(0)
    return total / measured.sum(0).clamp(min=1)


def tuned_num_neighbours(
    training_position: Float[Array, "M D"],
    training_expression: Float[Array, "M G"],
    training_slice: Int64[Array, " M"],
    candidates: Sequence[int],
) -> int:
    """Choose k for `spatial_knn_mean`: that of the least squared error.

    Each slice is predicted from the others; a single slice, each cell from its other cells. A
    candidate is left out where there are fewer cells than that.
    """
    at = _numbers(training_position, "training positions")
    known = as_tensor(training_expression).float().cpu().numpy()
    of_slice = np.asarray(torch.as_tensor(training_slice).cpu())
    names, sizes = np.unique(of_slice, return_counts=True)
    alone = len(names) == 1
    most = len(at) - (1 if alone else int(sizes.max()))
    errors = {k: 0.0 for k in candidates if k <= most}
    if not errors:
        raise InputError(f"neighbours to choose from: {candidates}, but there are {most} cells.")
    for name in names:
        asked = of_slice == name
        source = asked if alone else ~asked
        values = known[source]
        # In its own slice the nearest cell is the cell itself.
        columns = list(range(1 + alone, 1 + alone + max(errors)))
        _, near = cKDTree(at[source]).query(at[asked], k=columns)
        total = np.zeros((int(asked.sum()), known.shape[1]), dtype=np.float32)
        for k, column in enumerate(near.T, start=1):
            total += values[column]
            if k in errors:
                errors[k] += float(((total / k - known[asked]) ** 2).sum())
    return min(errors, key=errors.__getitem__)


def closest_slice(
    position: Float[Array, "N D"],
    training_position: Float[Array, "M D"],
    training_expression: Float[Array, "M G"],
    training_slice: Int64[Array, " M"],
) -> Float[Tensor, "N G"]:
    """Copy the expression of the nearest cell of the closest training slice.

    The closest slice is the one whose nearest cells lie nearest on average: for a stack of sections
    that is the next one along z.
    """
    points = _numbers(position, "positions")
    at = _numbers(training_position, "training positions")
    of_slice = np.asarray(torch.as_tensor(training_slice).cpu())
    best, gap = np.zeros(len(points), dtype=np.int64), np.inf
    for name in np.unique(of_slice):
        cells = np.flatnonzero(of_slice == name)
        distance, near = cKDTree(at[cells]).query(points)
        if distance.mean() < gap:
            best, gap = cells[near], distance.mean()
    return as_tensor(training_expression).cpu()[torch.from_numpy(best)]


def _numbers(values: Float[Array, "N K"], what: str) -> Float64[ndarray, "N K"]:
    return checked(values, what).double().cpu().numpy()
