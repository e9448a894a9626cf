"""Normalisation: the numbers of scanpy, and sound where a sum of squares is not."""

import anndata
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array

from alphastomics.preprocessing.normalize import (
    Moments,
    absent,
    densified,
    log_normalized,
    merged,
    moments_of_dense,
    moments_of_sparse,
    standard_deviation,
    standardized_entries,
)
from tests.preprocessing.tissue import in_scanpy


def moments_in_chunks(values: np.ndarray, cuts: list[int]) -> Moments:
    joined = Moments(0, np.zeros(values.shape[1]), np.zeros(values.shape[1]))
    for chunk in np.split(values, sorted(cuts)):
        joined = merged(joined, moments_of_sparse(csr_array(chunk)))
    return joined


@given(
    st.integers(1, 60),
    st.integers(1, 6),
    st.lists(st.integers(0, 60), max_size=5),
    st.floats(-1e4, 1e4),
    st.integers(0, 2**32 - 1),
)
def test_joined_moments_equal_numpy_whatever_the_chunks_and_the_offset(
    cells, genes, cuts, offset, seed
):
    rng = np.random.default_rng(seed)
    values = (rng.normal(offset, 1, (cells, genes)) * (rng.random((cells, genes)) < 0.7)).astype(
        np.float32
    )
    moments = moments_in_chunks(values, [cut for cut in cuts if cut <= cells])
    wide = values.astype(np.float64)
    np.testing.assert_allclose(moments.mean, wide.mean(axis=0), rtol=1e-9, atol=1e-9)
    expected = ((wide - wide.mean(axis=0)) ** 2).sum(axis=0)
    np.testing.assert_allclose(moments.squares, expected, rtol=1e-7, atol=1e-7)
    dense = moments_of_dense(values)
    np.testing.assert_allclose(dense.squares, expected, rtol=1e-7, atol=1e-7)


def test_log_normalized_equals_scanpy():
    rng = np.random.default_rng(0)
    counts = rng.poisson(0.7, (50, 20)).astype(np.float32)
    counts[3] = 0
    data = anndata.AnnData(counts.copy())
    in_scanpy(data, log=True, scale=False)
    np.testing.assert_allclose(log_normalized(csr_array(counts)).toarray(), data.X, rtol=1e-6)


@pytest.mark.parametrize("offset", [0, 100, 10_000])
def test_standardising_stays_exact_when_the_mean_is_large_beside_the_std(offset):
    rng = np.random.default_rng(1)
    values = (offset + rng.normal(0, 1, (5000, 3))).astype(np.float32)
    moments = moments_in_chunks(values, list(range(0, 5000, 700)))
    deviation = standard_deviation(moments)
    result = standardized_entries(csr_array(values), moments.mean, deviation).toarray()
    wide = values.astype(np.float64)
    expected = (wide - wide.mean(axis=0)) / wide.std(axis=0, ddof=1)
    np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize("constant", [0.0, 1.0, 0.1, 3.3e5])
def test_a_constant_gene_becomes_zero(constant):
    values = csr_array(np.full((10_001, 1), constant, dtype=np.float32))
    moments = moments_of_sparse(values)
    deviation = standard_deviation(moments)
    assert deviation.tolist() == [1.0]
    assert np.abs(standardized_entries(values, moments.mean, deviation).toarray()).max() < 1e-6


def test_one_cell_alone_becomes_zero():
    values = csr_array(np.array([[2.0, 0.0]], dtype=np.float32))
    moments = moments_of_sparse(values)
    assert (
        standardized_entries(values, moments.mean, standard_deviation(moments)).toarray().max() == 0
    )


def test_entries_that_are_not_stored_take_their_slices_value_of_zero():
    values = csr_array(np.array([[0, 5.0], [7.0, 0]], dtype=np.float32))
    zero = absent(np.array([[1.0, 2.0], [3.0, 8.0]]), np.array([[1.0, 4.0], [2.0, 2.0]]))
    dense = densified(values, np.array([1, 0], dtype=np.int32), zero)
    assert dense.tolist() == [[-1.5, 5.0], [7.0, -0.5]]
