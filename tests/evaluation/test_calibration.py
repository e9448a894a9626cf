"""Calibration: right of draws from the posterior, and told when they are too sure."""

import numpy as np
import pytest

from alphastomics.errors import InputError
from alphastomics.evaluation.calibration import calibration, envelope


def posterior(std_of_samples: float, num_samples: int = 5, cells: int = 20_000):
    """A posterior with another std for each cell; samples are as wide, times a factor."""
    rng = np.random.default_rng(0)
    mean = rng.normal(size=(cells, 2))
    width = rng.uniform(0.5, 3, size=(cells, 1))
    true = mean + width * rng.normal(size=mean.shape)
    noise = rng.normal(size=(num_samples, cells, 2))
    return mean, true, mean + std_of_samples * width * noise


@pytest.mark.parametrize("num_samples", [2, 5, 20])
def test_samples_from_the_posterior_are_calibrated(num_samples: int):
    mean, true, samples = posterior(1.0, num_samples)
    result = calibration(mean, true, envelope(samples))
    assert result.expected == (num_samples - 1) / (num_samples + 1)
    assert result.coverage == pytest.approx(result.expected, abs=0.01)
    assert result.error_over_std == pytest.approx(1, abs=0.03)
    assert result.spearman > 0.2


def test_samples_that_vary_too_little_are_too_sure():
    result = calibration(*parts(posterior(0.5)))
    assert result.coverage < result.expected - 0.2
    assert result.error_over_std == pytest.approx(2, abs=0.05)


def parts(drawn_cells):
    mean, true, samples = drawn_cells
    return mean, true, envelope(samples)


def test_samples_without_std_say_nothing_and_one_sample_is_refused():
    mean, true, samples = posterior(1.0, 3, 50)
    samples[:] = 0
    result = calibration(mean, true, envelope(samples))
    assert (result.coverage, result.error_over_std, result.spearman) == (0, np.inf, 0)
    with pytest.raises(InputError, match="1 sample"):
        calibration(mean, true, envelope(samples[:1]))


def test_the_deviation_is_unbiased():
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(3, 50_000, 1))
    assert (envelope(samples).deviation ** 2).mean() == pytest.approx(1, abs=0.02)
