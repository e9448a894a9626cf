"""Expression at a position from the training cells around it: cells enter, expected values leave.

The mean of the nearest cells is a strong predictor whose best number of neighbours differs by gene
and tissue. Here several such means, and within a slice a ridge regression on their principal
components, which lets genes inform one another, are combined with weights fitted to training cells
that were left out of their own neighbourhood (stacking, Wolpert 1992). The means are among the
columns, so that the combination cannot do worse than the best of them but by its weights' noise.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Float64
from scipy.spatial import cKDTree

from alphastomics.generation.cells import InputCells, some_cells
from alphastomics.generation.intervals import IntervalFit

NEIGHBOURS = (3, 6, 12, 25, 50, 100, 200)
# Scales whose principal components the ridge regression sees: near, middle and far.
RIDGE_SCALES = (6, 25, 100)
COMPONENTS = 20
PENALTIES = (1e2, 1e3, 1e4)
FOLDS = 5
# Weights of single genes vary about the shared ones by this much, before the data are seen.
WEIGHT_STD = 0.05
# Cells that the weights are fitted to: more change them no further.
FIT_CELLS = 20_000
# Cells that can be neighbours: beyond it a random part of them is as near as makes no difference.
MOST_CELLS = 200_000
SMALLEST = 1e-12


class SpatialContext:
    """Predicts expression from the known cells around a position.

    Parameters
    ----------
    cells
        Known cells, all in one frame.
    across_slices
        Whether positions to come lie in slices of their own: the weights are then fitted to cells
        whose own slice is left out, else to cells that are left out themselves.
    seed
        Seed of the choice of cells where there are very many.
    level
        Share of the cells that intervals hold.

    Attributes
    ----------
    std
        What the prediction leaves of each gene, (G): the error of left-out cells.
    intervals
        How far above and below a prediction true values lie.
    """

    def __init__(self, cells: InputCells, *, across_slices: bool, seed: int, level: float) -> None:
        rng = np.random.default_rng(seed)
        if len(cells) > MOST_CELLS:
            cells = some_cells(cells, np.sort(rng.permutation(len(cells))[:MOST_CELLS]))
        assert cells.position is not None
        self.cells, self.position = cells, cells.position
        self.across = across_slices and len(np.unique(cells.slice_id)) > 1
        most = max((len(cells) - 1) // 2, 1)
        self.scales = tuple(k for k in NEIGHBOURS if k <= most) or (1,)
        chosen = np.sort(rng.permutation(len(cells))[:FIT_CELLS])
        columns = self._left_out_means(chosen)
        target = cells.expression[chosen].astype(np.float64)
        counted = cells.measured[cells.slice_id[chosen]]
        self.usual = _column_mean(target, counted)
        # Not for slices of their own: what holds between genes here may not hold beyond.
        self.ridge = None
        if not self.across:
            features = self._features(columns, self.position[chosen])
            self.ridge = _Ridge(features, target, counted, rng)
            columns = [*columns, self.ridge.cross_fitted]
        self.weights = stacking_weights(columns, target - self.usual, counted, self.usual)
        combined = self._combined(columns)
        left = target - combined
        self.std = np.sqrt(_column_mean(left**2, counted))
        self.intervals = IntervalFit(combined, left, counted, level, seed)

    def predict(self, position: Float[np.ndarray, "N D"]) -> Float64[np.ndarray, "N G"]:
        """Return the expected expression at each position."""
        parts = []
        for rows in np.array_split(np.arange(len(position)), -(-len(position) // FIT_CELLS) or 1):
            at = np.asarray(position[rows], dtype=np.float64)
            columns = self._means(at, self.cells)
            if self.ridge is not None:
                columns.append(self.ridge.predict(self._features(columns, at)))
            parts.append(self._combined(columns))
        return np.concatenate(parts)

    def _combined(self, columns: Sequence[np.ndarray]) -> Float64[np.ndarray, "N G"]:
        """Add up the columns, about each gene's mean, with the gene's weights."""
        combined = np.zeros_like(columns[0])
        for column, weight in zip(columns, self.weights, strict=True):
            combined += weight * (column - self.usual)
        return combined + self.usual

    def _features(
        self, means: Sequence[np.ndarray], position: np.ndarray
    ) -> list[Float64[np.ndarray, "N F"]]:
        """Return what the ridge regression sees: means at some scales, and the position."""
        seen = [
            mean for k, mean in zip(self.scales, means, strict=True) if k in RIDGE_SCALES
        ] or list(means[-1:])
        low, high = self.position.min(0), self.position.max(0)
        # A trend is not followed beyond the known cells.
        return [*seen, np.clip(position, low, high)]

    def _means(self, position: np.ndarray, source: InputCells) -> list[Float64[np.ndarray, "N G"]]:
        """Mean of the k nearest source cells, gene by gene over those measured, for all scales.

        A cell at the very position is taken for the one asked about, and never speaks for itself.
        """
        most = min(max(self.scales), len(source) - 1)
        distance, near = cKDTree(source.position).query(position, k=list(range(1, most + 2)))
        near = np.where(distance[:, :1] == 0, near[:, 1:], near[:, :-1])
        complete = bool(source.measured.all())
        total = np.zeros((len(position), source.expression.shape[1]))
        count = np.zeros_like(total)
        counted = source.measured[source.slice_id]
        usual = _column_mean(source.expression.astype(np.float64), counted)
        means = []
        for k, cells in enumerate(near.T, start=1):
            measured = 1.0 if complete else counted[cells]
            total += source.expression[cells] * measured
            count += measured
            if k in self.scales or k == most:
                mean = np.where(count > 0, total / np.maximum(count, 1), usual)
                means += [mean] * (1 if k in self.scales else 0)
        # A source with fewer cells than the widest scale: all of it.
        return means + [mean] * (len(self.scales) - len(means))

    def _left_out_means(self, chosen: np.ndarray) -> list[Float64[np.ndarray, "N G"]]:
        """Means for known cells, each without itself, or without its whole slice."""
        cells = self.cells
        if not self.across:
            return self._means(self.position[chosen], cells)
        parts = [np.zeros((len(chosen), cells.expression.shape[1])) for _ in self.scales]
        for number in np.unique(cells.slice_id[chosen]):
            rows = np.flatnonzero(cells.slice_id[chosen] == number)
            others = some_cells(cells, np.flatnonzero(cells.slice_id != number))
            means = self._means(self.position[chosen[rows]], others)
            for part, mean in zip(parts, means, strict=True):
                part[rows] = mean
        return parts


class _Ridge:
    """Ridge regression of all genes on principal components, with predictions for unseen folds."""

    def __init__(
        self,
        features: list[np.ndarray],
        target: Float64[np.ndarray, "N G"],
        counted: Bool[np.ndarray, "N G"],
        rng: np.random.Generator,
    ) -> None:
        from sklearn.decomposition import PCA

        width = min(COMPONENTS, *features[0].shape)
        self.projections = [PCA(width, random_state=0).fit(part) for part in features[:-1]]
        values = self._raw(features)
        self.center, self.scale = values.mean(0), np.maximum(values.std(0), SMALLEST)
        x = self._standardized(values)
        self.usual = _column_mean(target, counted)
        y = np.where(counted, target - self.usual, 0.0)
        fold = rng.permutation(len(x)) % min(FOLDS, len(x))
        fitted = {penalty: self._cross_fit(x, y, fold, penalty) for penalty in PENALTIES}
        errors = {
            penalty: float((((left_out - y) * counted) ** 2).sum())
            for penalty, left_out in fitted.items()
        }
        best = min(errors, key=errors.__getitem__)
        self.cross_fitted = fitted[best] + self.usual
        self.weights = _ridge(x, y, best)

    def predict(self, features: list[np.ndarray]) -> Float64[np.ndarray, "N G"]:
        """Predict expression from means and positions."""
        return self._standardized(self._raw(features)) @ self.weights + self.usual

    def _raw(self, features: list[np.ndarray]) -> np.ndarray:
        means = zip(self.projections, features[:-1], strict=True)
        return np.hstack([pca.transform(part) for pca, part in means] + [features[-1]])

    def _standardized(self, values: np.ndarray) -> np.ndarray:
        return (values - self.center) / self.scale

    @staticmethod
    def _cross_fit(x: np.ndarray, y: np.ndarray, fold: np.ndarray, penalty: float) -> np.ndarray:
        predicted = np.zeros_like(y)
        for number in np.unique(fold):
            out = fold == number
            predicted[out] = x[out] @ _ridge(x[~out], y[~out], penalty)
        return predicted


def _ridge(x: np.ndarray, y: np.ndarray, penalty: float) -> Float64[np.ndarray, "F G"]:
    """Minimise |y - x w|^2 + penalty |w|^2."""
    return np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ y)


def _column_mean(
    values: Float64[np.ndarray, "N G"], counted: Bool[np.ndarray, "N G"]
) -> Float64[np.ndarray, " G"]:
    return (values * counted).sum(0) / np.maximum(counted.sum(0), 1)


def stacking_weights(
    columns: Sequence[Float64[np.ndarray, "N G"]],
    target: Float64[np.ndarray, "N G"],
    counted: Bool[np.ndarray, "N G"],
    usual: Float64[np.ndarray, " G"],
) -> Float64[np.ndarray, "K G"]:
    """Return the weights of each gene, drawn towards those that serve all genes together.

    Shared: least squares over all genes. Gene g: minimises |y_g - S_g w|^2 + r |w - shared|^2 with
    r = s_g^2 / WEIGHT_STD^2, where s_g^2 is the variance that the shared weights leave: the
    posterior mean under a normal prior about the shared weights.
    """
    stack = np.stack([np.where(counted, column - usual, 0.0) for column in columns])
    y = np.where(counted, target, 0.0)
    gram = np.einsum("kng,lng->gkl", stack, stack, optimize=True)
    moment = np.einsum("kng,ng->gk", stack, y, optimize=True)
    number = len(columns)
    whole = gram.sum(0)
    small = 1e-3 * np.trace(whole) / number + SMALLEST
    shared = np.linalg.solve(whole + small * np.eye(number), moment.sum(0))
    left = y - np.einsum("kng,k->ng", stack, shared)
    variance = (left**2).sum(0) / np.maximum(counted.sum(0), 1)
    pull = (variance / WEIGHT_STD**2 + SMALLEST)[:, None, None] * np.eye(number)
    right = moment + (pull @ shared)
    return np.linalg.solve(gram + pull, right[..., None])[..., 0].T
