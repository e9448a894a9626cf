"""Calibration: right of draws from the posterior, and told when they are too sure."""

import numpy as np
import pytest

from alphastomics.errors import InputError
from alphastomics.evaluation.calibration import calibration, envelope


def drawn(spread_of_draws: float, num_samples: int = 5, cells: int = 20_000):
    """A posterior with another spread for each cell; draws are as wide, times a factor."""
    rng = np.random.default_rng(0)
    mean = rng.normal(size=(cells, 2))
    width = rng.uniform(0.5, 3, size=(cells, 1))
    true = mean + width * rng.normal(size=mean.shape)
    noise = rng.normal(size=(num_samples, cells, 2))
    return mean, true, mean + spread_of_draws * width * noise


@pytest.mark.parametrize("num_samples", [2, 5, 20])
def test_draws_from_the_posterior_are_calibrated(num_samples: int):
    mean, true, draws = drawn(1.0, num_samples)
    found = calibration(mean, true, envelope(draws))
    assert found.expected == (num_samples - 1) / (num_samples + 1)
    assert found.coverage == pytest.approx(found.expected, abs=0.01)
    assert found.error_over_std == pytest.approx(1, abs=0.03)
    assert found.spearman > 0.2


def test_draws_that_are_too_alike_are_too_sure():
    found = calibration(*parts(drawn(0.5)))
    assert found.coverage < found.expected - 0.2
    assert found.error_over_std == pytest.approx(2, abs=0.05)


def parts(drawn_cells):
    mean, true, draws = drawn_cells
    return mean, true, envelope(draws)


def test_draws_without_spread_say_nothing_and_one_draw_is_refused():
    mean, true, draws = drawn(1.0, 3, 50)
    draws[:] = 0
    found = calibration(mean, true, envelope(draws))
    assert (found.coverage, found.error_over_std, found.spearman) == (0, np.inf, 0)
    with pytest.raises(InputError, match="1 sample"):
        calibration(mean, true, envelope(draws[:1]))


def test_the_deviation_is_unbiased():
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(3, 50_000, 1))
    assert (envelope(draws).deviation ** 2).mean() == pytest.approx(1, abs=0.02)
