"""Expression metrics against scipy, scikit-learn and numbers worked by hand."""

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr
from sklearn.metrics import mean_squared_error
from sklearn.metrics.pairwise import cosine_similarity

from alphastomics.errors import InputError
from alphastomics.evaluation import arrays
from alphastomics.utils.metrics import (
    cell_correlations,
    cell_cosines,
    expression_mse,
    gene_correlations,
    summary,
)


@pytest.fixture
def cells(rng) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    true = rng.normal(size=(40, 7))
    return true + rng.normal(size=true.shape), true, np.ones((1, 7), dtype=bool)


def test_errors_and_correlations_equal_scipy_and_sklearn(cells):
    predicted, true, _ = cells
    assert expression_mse(*cells) == pytest.approx(mean_squared_error(true, predicted))
    genes = [pearsonr(predicted[:, g], true[:, g]).statistic for g in range(7)]
    np.testing.assert_allclose(gene_correlations(*cells), genes, atol=1e-12)
    by_cell = [pearsonr(predicted[n], true[n]).statistic for n in range(40)]
    np.testing.assert_allclose(cell_correlations(*cells), by_cell, atol=1e-12)
    cosines = np.diag(cosine_similarity(predicted, true))
    np.testing.assert_allclose(cell_cosines(*cells), cosines, atol=1e-12)


def test_numbers_worked_by_hand():
    true = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    predicted = torch.tensor([[0.0, 1.0], [0.0, 1.0], [2.0, 2.0]])
    measured = torch.ones(1, 2, dtype=torch.bool)
    assert expression_mse(predicted, true, measured) == pytest.approx(2 / 6)
    # Gene 0: true (1, 0, 2), predicted (0, 0, 2): r = 2 / sqrt(2 * 8/3) = sqrt(3)/2.
    assert float(gene_correlations(predicted, true, measured)[0]) == pytest.approx(3**0.5 / 2)
    assert cell_cosines(predicted, true, measured).tolist() == pytest.approx([0, 1, 1])


def test_unmeasured_entries_count_for_nothing_even_when_they_are_nan(cells, rng):
    predicted, true, _ = cells
    measured = rng.random(true.shape) < 0.7
    spoilt = np.where(measured, predicted, np.nan)
    assert expression_mse(spoilt, true, measured) == pytest.approx(
        mean_squared_error(true[measured], predicted[measured])
    )
    genes = [pearsonr(predicted[m, g], true[m, g]).statistic for g, m in enumerate(measured.T)]
    np.testing.assert_allclose(gene_correlations(spoilt, true, measured), genes, atol=1e-12)
    by_cell = [pearsonr(p[m], t[m]).statistic for p, t, m in zip(predicted, true, measured)]  # noqa: B905
    np.testing.assert_allclose(cell_correlations(spoilt, true, measured), by_cell, atol=1e-12)


def test_a_constant_prediction_scores_0_and_a_constant_truth_is_left_out(cells):
    predicted, true, measured = (array.copy() for array in cells)
    predicted[:, 0] = 0.1
    true[:, 1] = 0.1
    result = gene_correlations(predicted, true, measured)
    assert result[0] == 0
    assert torch.isnan(result[1])
    assert summary(result, "genes").num_defined == 6
    assert summary(torch.tensor([3.0, torch.nan, 1.0, 2.0, 6.0]), "x")[:2] == (3.0, 2.5)
    with pytest.raises(InputError, match="genes: undefined for all 2"):
        summary(torch.tensor([torch.nan, torch.nan]), "genes")


def test_blocks_change_nothing(cells, monkeypatch):
    whole = [gene_correlations(*cells), cell_cosines(*cells), expression_mse(*cells)]
    monkeypatch.setattr(arrays, "ENTRIES_ON_CPU", 50)
    torch.testing.assert_close(gene_correlations(*cells), whole[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(cell_cosines(*cells), whole[1], rtol=0, atol=1e-14)
    assert expression_mse(*cells) == pytest.approx(whole[2], rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_double(cells, dtype):
    predicted, true, measured = (torch.from_numpy(array) for array in cells)
    half = predicted.to(dtype), true.to(dtype)
    full = half[0].double(), half[1].double()
    assert expression_mse(*half, measured) == expression_mse(*full, measured)
    torch.testing.assert_close(
        cell_correlations(*half, measured), cell_correlations(*full, measured), rtol=0, atol=0
    )


def test_tiny_values_keep_their_correlation(cells):
    predicted, true, measured = cells
    np.testing.assert_allclose(
        gene_correlations(predicted * 1e-200, true * 1e-200, measured),
        gene_correlations(predicted, true, measured),
        atol=1e-12,
    )


def test_bad_input_is_named(cells):
    predicted, true, measured = cells
    predicted[3, 2] = np.nan
    with pytest.raises(InputError, match=r"predicted expression: 1 values.*cell 3, column 2"):
        expression_mse(predicted, true, measured)
    with pytest.raises(InputError, match="no gene is marked"):
        expression_mse(true, true, ~measured)
    with pytest.raises(InputError, match="expression: 0 cells"):
        expression_mse(true[:0], true[:0], measured)
