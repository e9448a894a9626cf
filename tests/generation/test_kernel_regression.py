"""Kernel regression beside scikit-learn's Gaussian process, and left-out cells beside refits."""

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF

from alphastomics.generation import kernel_regression
from alphastomics.generation.kernel_regression import KernelRegression, fitted

NOISE, WIDTH = 0.1, 2.0


@pytest.fixture
def known(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x = rng.normal(size=(60, 3))
    return x, np.stack([np.sin(x[:, 0]), x[:, 1] * x[:, 2]], 1) + 0.1 * rng.normal(size=(60, 2))


def process(x: np.ndarray, y: np.ndarray) -> GaussianProcessRegressor:
    return GaussianProcessRegressor(RBF(np.sqrt(WIDTH)), alpha=NOISE, optimizer=None).fit(x, y)


def test_predictions_are_the_mean_of_a_gaussian_process(known, rng, monkeypatch):
    monkeypatch.setattr(kernel_regression, "NOISES", (NOISE,))
    x, y = known
    middle = np.median(cdist(x, x, "sqeuclidean")[~np.eye(60, dtype=bool)])
    monkeypatch.setattr(kernel_regression, "WIDTHS", (WIDTH / middle,))
    asked = rng.normal(size=(20, 3))
    expected = process(x, y - y.mean(0)).predict(asked) + y.mean(0)
    np.testing.assert_allclose(KernelRegression(x, y, seed=0).predict(asked), expected, atol=1e-6)


def test_residuals_are_those_of_a_fit_without_the_cell(known, monkeypatch):
    monkeypatch.setattr(kernel_regression, "NOISES", (NOISE,))
    x, y = known
    distance = cdist(x, x, "sqeuclidean")
    result = fitted(distance, distance, y, WIDTH)
    for row in (0, 7, 59):
        others = np.arange(60) != row
        left = y[row] - process(x[others], y[others]).predict(x[[row]])[0]
        np.testing.assert_allclose(result.residual[row], left, atol=1e-6)
    assert result.error == pytest.approx(float((result.residual**2).mean()))


def test_the_width_and_noise_of_the_least_error_are_taken(rng):
    x = rng.normal(size=(300, 2))
    smooth, noise = np.sin(2 * x[:, :1]), rng.normal(size=(300, 1))
    asked = rng.normal(size=(200, 2))
    found = KernelRegression(x, smooth, seed=0).predict(asked)
    assert np.abs(found - np.sin(2 * asked[:, :1])).mean() < 0.02
    # Nothing is there to be found: nothing is followed.
    assert np.abs(KernelRegression(x, noise, seed=0).predict(asked) - noise.mean()).max() < 0.5


def test_of_many_cells_some_are_centres(rng, monkeypatch):
    x = rng.normal(size=(800, 2))
    y = np.sin(2 * x)
    whole = KernelRegression(x, y, seed=0)
    monkeypatch.setattr(kernel_regression, "CENTRES", 120)
    monkeypatch.setattr(kernel_regression, "WIDTH_CELLS", 100)
    part = KernelRegression(x, y, seed=0)
    assert (len(whole.centres), len(part.centres), part.residual.shape) == (800, 120, (800, 2))
    asked = rng.normal(size=(100, 2))
    assert np.abs(part.predict(asked) - whole.predict(asked)).mean() < 0.05
