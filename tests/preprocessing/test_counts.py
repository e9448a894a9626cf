"""Counts come back exactly from normalised and standardised values, and nothing else does."""

import numpy as np
import pytest
from scipy.sparse import csr_array

from alphastomics.preprocessing.counts import counts_of
from alphastomics.preprocessing.normalize import (
    log_normalized,
    moments_of_dense,
    standard_deviation,
)


def standardised_and_back(counts: np.ndarray) -> np.ndarray:
    """Normalise, standardise as float32 and undo the latter, as files of a processed folder do."""
    values = log_normalized(csr_array(counts.astype(np.float32))).toarray()
    moments = moments_of_dense(values)
    std = standard_deviation(moments)
    return ((values - moments.mean) / std).astype(np.float32) * std + moments.mean


def made_up_counts(seed: int, mean: float) -> np.ndarray:
    random = np.random.default_rng(seed)
    rate = random.gamma(0.5, mean / 0.5, (300, 80))
    return random.poisson(rate)


@pytest.mark.parametrize("mean", [0.2, 2.0, 30.0, 300.0])
def test_counts_come_back(mean):
    counts = made_up_counts(1, mean)
    recovered = counts_of(standardised_and_back(counts))
    assert recovered.exact.all()
    np.testing.assert_array_equal(recovered.values, counts)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ([0, 0, 0], [0, 0, 0]),
        ([2, 3, 0], [2, 3, 0]),
        ([7, 11, 13], [7, 11, 13]),
        ([4, 4, 0], [1, 1, 0]),  # what they were divided by is nowhere to be seen
    ],
)
def test_cells_without_a_count_of_one(cell, expected):
    values = np.log1p(np.array([cell]) * 123.4)
    np.testing.assert_array_equal(counts_of(values).values, [expected])


def test_what_is_no_multiple_of_one_number_is_no_count():
    values = np.random.default_rng(0).gamma(2.0, 1.0, (200, 40))
    assert counts_of(np.log1p(values)).exact.mean() < 0.05


@pytest.mark.parametrize("value", [800.0, 60.0, -1.0])
def test_values_that_no_logarithm_of_a_count_has_are_none(value):
    values = np.log1p(made_up_counts(0, 2.0)).astype(np.float64)
    values[::2, 0] = value
    recovered = counts_of(values)
    assert not recovered.exact[::2].any()
    assert recovered.exact[1::2].all()
