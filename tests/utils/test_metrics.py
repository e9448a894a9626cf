"""The tables of all metrics: names, chance levels, and what a good prediction scores."""

import json
import math

import numpy as np
import pytest
import torch

from alphastomics.utils.metrics import chance_levels, expression_scores, position_scores


@pytest.fixture
def tissue() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions, smooth expression and labels of 300 cells."""
    rng = np.random.default_rng(0)
    position = rng.random((300, 3)) * [900, 500, 100]
    waves = rng.normal(size=(3, 60)) / 200
    expression = np.sin(position @ waves) + 0.1 * rng.normal(size=(300, 60))
    return position, expression, (position[:, 0] > 450).astype(int)


def test_the_truth_itself_scores_best_in_every_table(tissue):
    position, expression, labels = tissue
    scores = position_scores(position, position, labels)
    for name, score in scores.items():
        best = 1 if name.startswith(("spearman", "contact", "knn")) else 0
        assert score == pytest.approx(best, abs=1e-9), name
    values = expression_scores(expression, expression, np.ones(60, dtype=bool), position)
    assert values.pop("moran_i") == values.pop("moran_i_true")  # a property, not an error
    for name, score in values.items():
        assert score == pytest.approx(0 if name in ("expression_mse", "moran_mae") else 1), name


def test_a_shuffled_prediction_scores_as_chance_says(tissue):
    position, expression, labels = tissue
    order = np.random.default_rng(1).permutation(300)
    scores = position_scores(position[order], position, labels)
    scores |= expression_scores(expression[order], expression, np.ones(60, dtype=bool), position)
    for name, level in chance_levels(300).items():
        near = 0.35 if name == "moran_correlation" else 0.06
        assert scores[name] == pytest.approx(level, abs=near), name


def test_unmeasured_genes_change_no_score(tissue):
    position, expression, _ = tissue
    measured = np.arange(60) < 9
    predicted = expression + np.random.default_rng(2).normal(size=expression.shape)
    spoilt = np.where(measured, predicted, np.nan)
    some = expression_scores(spoilt, expression, measured, position)
    few = expression_scores(predicted[:, :9], expression[:, :9], measured[:9], position)
    assert some == pytest.approx(few)


def test_scores_are_plain_numbers_and_alike_for_tensors_of_any_kind(tissue):
    position, _, labels = tissue
    rough = np.float32(position + 50 * np.random.default_rng(3).normal(size=position.shape))
    scores = position_scores(rough, position, labels)
    assert json.loads(json.dumps(scores)) == scores
    assert all(type(score) is float and math.isfinite(score) for score in scores.values())
    tensors = torch.from_numpy(rough).requires_grad_(), torch.from_numpy(position)
    assert position_scores(*tensors, labels) == scores


def test_flat_tissues_have_two_axes_and_no_labels_are_needed(tissue):
    flat = tissue[0][:, :2]
    scores = position_scores(flat + 1, flat, None)
    assert "rmse_y" in scores
    assert not {"rmse_z", "class_rssd"} & set(scores)
