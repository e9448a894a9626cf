"""Classifiers of new against real cells: at chance on one distribution, and sure of two."""

import numpy as np
import pytest

from alphastomics.evaluation.separability import linear_auc, niche_auc, niches, two_sample_auc
from alphastomics.evaluation.tissue import Tissue


def waves(seed: int, cells: int = 1200) -> Tissue:
    """Genes that follow position smoothly, with noise as large."""
    rng = np.random.default_rng(seed)
    position = rng.uniform(size=(cells, 2))
    pattern = np.sin(position @ np.random.default_rng(0).normal(scale=6, size=(2, 8)))
    return Tissue(pattern + rng.normal(size=(cells, 8)), position)


@pytest.mark.parametrize("auc", [two_sample_auc, linear_auc])
def test_the_classifiers_are_at_chance_on_one_distribution_and_sure_on_two(auc):
    rng = np.random.default_rng(0)
    one, two = rng.normal(size=(2, 300, 5))
    assert abs(auc(one, two, seed=0) - 0.5) < 0.08
    assert auc(one, two + 3, seed=0) > 0.98


def test_the_linear_classifier_sees_means_and_the_trees_see_correlations():
    rng = np.random.default_rng(0)
    one, two = rng.normal(size=(2, 600, 4))
    two[:, 1] = two[:, 0]
    assert abs(linear_auc(one, two, seed=0) - 0.5) < 0.08
    assert two_sample_auc(one, two, seed=0) > 0.8


def test_a_shift_of_one_gene_has_the_auc_of_two_gaussians():
    rng = np.random.default_rng(0)
    one, two = rng.normal(size=(2, 2000, 3))
    two[:, 1] += 1
    # P(N(1, 1) > N(0, 1)) = Phi(1 / sqrt 2)
    assert linear_auc(one, two, seed=0) == pytest.approx(0.7602, abs=0.02)


def test_the_mean_of_the_neighbours_is_that_of_a_loop_and_without_the_cell():
    tissue = waves(1, cells=60)
    rows = np.random.default_rng(2).permutation(60)[:30]
    cells, means = niches(tissue, rows, size=7)
    for cell in range(7):
        gap = ((tissue.position[rows] - tissue.position[rows[cell]]) ** 2).sum(1)
        nearest = rows[np.argsort(gap)[1:11]]
        np.testing.assert_allclose(means[cell], tissue.expression[nearest].mean(0))
        np.testing.assert_array_equal(cells[cell], tissue.expression[rows[cell]])


def test_niches_of_one_distribution_are_at_chance_although_they_share_cells():
    areas = [niche_auc(waves(2 * n), waves(2 * n + 1), seed=n) for n in range(3)]
    assert abs(np.mean(areas) - 0.5) < 0.06


def test_right_cells_in_no_order_are_seen_by_their_niches_alone():
    real, other = waves(1), waves(2)
    order = np.random.default_rng(0).permutation(len(other.position))
    shuffled = Tissue(other.expression, other.position[order])
    assert two_sample_auc(shuffled.expression, real.expression, seed=0) < 0.58
    assert niche_auc(shuffled, real, seed=0) > 0.9


def test_niches_ignore_the_frame_and_the_order_of_cells_changes_little():
    real, other = waves(1), waves(2)
    axes, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(2, 2)))
    rotated = Tissue(other.expression, 30 * other.position @ axes + 100)
    expected = niche_auc(other, real, seed=0)
    assert niche_auc(rotated, real, seed=0) == pytest.approx(expected)
    order = np.random.default_rng(1).permutation(len(other.position))
    reordered = Tissue(other.expression[order], other.position[order])
    assert niche_auc(reordered, real, seed=0) == pytest.approx(expected, abs=0.1)


def test_too_few_cells_have_no_auc():
    few = waves(1, cells=4)
    assert linear_auc(few.expression, few.expression, seed=0) is None
    assert niche_auc(few, waves(2), seed=0) is None
    assert 0 <= niche_auc(waves(1, cells=11), waves(2, cells=11), seed=0) <= 1
