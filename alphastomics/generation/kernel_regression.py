"""Kernel regression: features and values of known cells enter, a predictor leaves.

The mean of a Gaussian process with a squared-exponential kernel, its width and noise chosen by
leave-one-out error, which has a closed form. Of many known cells some are centres (Nystroem's
approximation), so that time grows with the number of cells.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int64
from scipy.spatial.distance import cdist

# Centres of the kernel, and cells that its width is chosen by: all known cells up to this number.
CENTRES, WIDTH_CELLS = 1_500, 500
# Widths are shares of the median squared distance; noise is in units of the kernel's height.
WIDTHS, NOISES = (0.1, 0.3, 1.0, 3.0), (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
SMALLEST = 1e-10
BLOCK = 5_000


class KernelFit(NamedTuple):
    """A fit: mean squared leave-one-out error, width, weights of centres, residuals."""

    error: float
    width: float
    weights: Float64[np.ndarray, "C D"]
    residual: Float64[np.ndarray, "M D"]


class KernelRegression:
    """Predicts values from features.

    Parameters
    ----------
    features, values
        Those of known cells.
    seed
        Seed of the choice of centres.

    Attributes
    ----------
    residual
        True minus predicted value of each known cell, when it is left out.
    """

    def __init__(
        self, features: Float[np.ndarray, "M F"], values: Float[np.ndarray, "M D"], *, seed: int
    ) -> None:
        x, y = (np.asarray(part, dtype=np.float64) for part in (features, values))
        self.usual = y.mean(0)
        some, centres = (_some(len(x), most, seed) for most in (WIDTH_CELLS, CENTRES))
        between = cdist(x[some], x[some], "sqeuclidean")
        middle = float(np.median(between[between > 0])) if (between > 0).any() else 1.0
        tried = [fitted(between, between, y[some] - self.usual, w * middle) for w in WIDTHS]
        best = min(tried, key=lambda fit: fit.error)
        if len(x) > WIDTH_CELLS:
            distance = cdist(x, x[centres], "sqeuclidean")
            best = fitted(distance, distance[centres], y - self.usual, best.width)
        self.centres = x[centres]
        self.width, self.weights, self.residual = best.width, best.weights, best.residual

    def predict(self, features: Float[np.ndarray, "N F"]) -> Float64[np.ndarray, "N D"]:
        """Return expected values."""
        x = np.asarray(features, dtype=np.float64)
        parts = [
            np.exp(-cdist(rows, self.centres, "sqeuclidean") / (2 * self.width)) @ self.weights
            for rows in np.array_split(x, -(-len(x) // BLOCK) or 1)
        ]
        return np.concatenate(parts) + self.usual


def fitted(
    distance: Float64[np.ndarray, "M C"],
    between: Float64[np.ndarray, "C C"],
    y: Float64[np.ndarray, "M D"],
    width: float,
) -> KernelFit:
    """Fit weights for one width, with the noise of the least leave-one-out error.

    `distance` is that of known cells and centres, `between` that of centres, both squared. With
    K_cc = A A^T and Phi = K_mc A^-T, the process is ridge regression on Phi. Left out, a cell has
    the residual r / (1 - h), where h is its leverage in the whole fit.
    """
    values, vectors = np.linalg.eigh(np.exp(-between / (2 * width)))
    kept = values > SMALLEST * values[-1]
    root = vectors[:, kept] / np.sqrt(values[kept])
    u, s, vt = np.linalg.svd(np.exp(-distance / (2 * width)) @ root, full_matrices=False)
    along = u.T @ y
    best: KernelFit | None = None
    for noise in NOISES:
        shrunk = s**2 / (s**2 + noise)
        leverage = np.minimum((u**2) @ shrunk, 1 - SMALLEST)
        residual = (y - u @ (shrunk[:, None] * along)) / (1 - leverage)[:, None]
        error = float((residual**2).mean())
        if best is None or error < best.error:
            weights = root @ (vt.T @ ((s / (s**2 + noise))[:, None] * along))
            best = KernelFit(error, width, weights, residual)
    assert best is not None
    return best


def _some(number: int, most: int, seed: int) -> Int64[np.ndarray, " M"]:
    """Choose some of very many cells, in order."""
    return np.sort(np.random.default_rng(seed).permutation(number)[:most])
