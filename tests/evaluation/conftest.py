"""Random tissues of the metrics' tests."""

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(params=[2, 3], ids=["2D", "3D"])
def pair(request, rng) -> tuple[np.ndarray, np.ndarray]:
    """Return a prediction that is partly right, and the truth."""
    true = rng.normal(size=(61, request.param)) * np.array([3.0, 1.0, 2.0])[: request.param]
    return true + rng.normal(size=true.shape), true
