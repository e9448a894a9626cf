"""A query that does not fit the model is said in words, and never normalised twice."""

from contextlib import nullcontext
from pathlib import Path

import anndata
import numpy as np
import pytest
from scipy.sparse import csr_array

from alphastomics.config import PreprocessingConfig
from alphastomics.errors import InputError
from alphastomics.preprocessing.query_fit import (
    check_depth,
    check_empty_cells,
    check_genes,
    check_units,
    needs_normalizing,
    num_empty,
    opened_query,
)

QUERY = Path("query.h5ad")
COUNTS = csr_array(np.array([[3.0, 0.0, 40.0], [1.0, 7.0, 0.0]], dtype=np.float32))
LOGGED = csr_array(np.log1p(COUNTS.toarray() * 1.7).astype(np.float32))
AS_USUAL = {"has_log1p": False, "asked": True, "as_it_is": False}


def test_counts_are_normalised_without_a_word(caplog):
    assert needs_normalizing(COUNTS, QUERY, **AS_USUAL)
    assert caplog.records == []


def test_what_looks_log_normalised_is_not_normalised_again_and_that_is_said(caplog):
    assert not needs_normalizing(LOGGED, QUERY, **AS_USUAL)
    assert "not normalised again" in caplog.text


def test_the_user_and_the_training_have_the_last_word():
    assert not needs_normalizing(COUNTS, QUERY, **AS_USUAL | {"asked": False})
    assert needs_normalizing(LOGGED, QUERY, **AS_USUAL | {"as_it_is": True})


def test_negative_values_cannot_be_counts():
    with pytest.raises(InputError, match="negative values"):
        needs_normalizing(csr_array(-COUNTS.toarray()), QUERY, **AS_USUAL)


def test_negative_logarithms_are_refused_whoever_took_them():
    with pytest.raises(InputError, match="negative values"):
        needs_normalizing(csr_array(-LOGGED.toarray()), QUERY, **AS_USUAL | {"asked": False})


@pytest.mark.parametrize(
    ("normalization", "refused"),
    [
        ({"log_normalize": True, "scale": True}, True),
        ({"log_normalize": False, "scale": False}, False),
        (None, False),
    ],
)
def test_negative_values_pass_where_training_may_have_had_them(tmp_path, normalization, refused):
    data = anndata.AnnData(-LOGGED.toarray())
    data.var_names = ["a", "b", "c"]
    data.write_h5ad(tmp_path / "query.h5ad")
    options = PreprocessingConfig(log_normalize=False)
    expected = pytest.raises(InputError, match="negative") if refused else nullcontext()
    with expected, opened_query(tmp_path / "query.h5ad", "abc", normalization, options) as query:
        assert not query.form.log_normalize


def test_counts_that_are_called_log_normalised_are_said(caplog):
    assert not needs_normalizing(LOGGED, QUERY, **AS_USUAL | {"asked": False})
    few = csr_array(np.minimum(COUNTS.toarray(), 9))  # may be logarithms that were rounded
    assert not needs_normalizing(few, QUERY, **AS_USUAL | {"asked": False})
    assert caplog.records == []
    assert not needs_normalizing(COUNTS, QUERY, **AS_USUAL | {"asked": False})
    (record,) = caplog.records
    assert "looks like counts (whole numbers, largest 40)" in record.getMessage()


def test_cells_without_counts_are_counted_said_and_refused_where_there_are_no_others(caplog):
    stored = csr_array((np.array([0.0, 2, 0]), [0, 1, 2], [0, 1, 1, 3]), shape=(3, 3))
    assert num_empty(stored) == 2
    assert num_empty(COUNTS) == 0
    check_empty_cells(0, 3, QUERY)
    assert caplog.records == []
    check_empty_cells(2, 3, QUERY)
    assert "query.h5ad: 2 of 3 cells have no count of the model's genes" in caplog.text
    with pytest.raises(InputError, match="none of its 3 cells has a count"):
        check_empty_cells(3, 3, QUERY)


@pytest.mark.parametrize(
    ("measured", "words"),
    [(9, ""), (4, "4 of the model's 10 genes, 40 %: results are unreliable;")],
)
def test_few_shared_genes_are_said(measured, words, caplog):
    check_genes(measured, [f"g{number}" for number in range(10)], QUERY)
    assert (words in caplog.text) if words else caplog.records == []


def test_next_to_no_shared_genes_are_near_chance(caplog):
    check_genes(2, [f"g{number}" for number in range(24)], QUERY)
    assert "8 %: results are unreliable, expect them near chance" in caplog.text


def test_no_shared_gene_is_refused():
    with pytest.raises(InputError, match="none of the model's 2 genes"):
        check_genes(0, ["a", "b"], QUERY)


@pytest.mark.parametrize(("factor", "said"), [(1.0, False), (0.1, True), (1000.0, True)])
def test_other_units_are_said(factor, said, caplog):
    position = np.random.default_rng(0).normal(size=(500, 2)) * 50.0 * factor
    check_units(position, 50.0, "slice")
    assert bool(caplog.records) == said


@pytest.mark.parametrize(
    ("median", "said"), [(40.0, ""), (9.0, ""), (4.0, "train"), (900.0, "reduce")]
)
def test_cells_of_far_more_or_fewer_counts_are_said(median, said, caplog):
    check_depth(median, (20.0, 100.0), "s")
    assert bool(caplog.records) == bool(said)
    assert said in caplog.text
