"""A query that does not fit the model is said in words, and never normalised twice."""

from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array

from alphastomics.errors import InputError
from alphastomics.preprocessing.query_fit import (
    check_depth,
    check_genes,
    check_units,
    needs_normalizing,
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
