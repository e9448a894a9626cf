"""New tissue against real tissue: alike scores as alike, and each kind of wrong is seen."""

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance

from alphastomics.evaluation.clusters import TypedCells
from alphastomics.evaluation.registry import METRICS, tissue_scores
from alphastomics.evaluation.tissue import (
    Tissue,
    correlation_agreement,
    depth_wasserstein,
    gene_wasserstein,
    measured_part,
    neighbour_types,
    shuffled_genes,
    shuffled_positions,
    type_neighbour_distance,
    type_share_distance,
    zero_share_error,
)


def layered(seed: int, cells: int = 400) -> tuple[Tissue, np.ndarray]:
    """Two types, one on each side of a line, with markers and a gene that rises along y."""
    rng = np.random.default_rng(seed)
    position = rng.uniform(size=(cells, 2))
    types = (position[:, 0] > 0.5).astype(int)
    values = rng.normal(size=(cells, 6))
    values[:, :2] += 6 * np.eye(2)[types]
    values[:, 2] += 4 * position[:, 1]
    return Tissue(values, position), types


@pytest.fixture(scope="module")
def typed() -> TypedCells:
    tissue, types = layered(9)
    return TypedCells(tissue.expression, types, k=5, seed=0)


def test_another_sample_of_the_same_tissue_is_close_and_shuffled_ones_are_not(typed):
    real, other = layered(1)[0], layered(2)[0]
    generator = torch.Generator().manual_seed(0)
    alike, placeless, mixed = (
        tissue_scores(tissue, real, typed, seed=0)
        for tissue in (
            other,
            shuffled_positions(other, generator),
            shuffled_genes(other, generator),
        )
    )
    assert alike["moran_correlation"] > 0.95
    assert placeless["moran_correlation"] < 0.5
    assert alike["type_neighbour_distance"] < 0.1
    assert placeless["type_neighbour_distance"] > 0.35
    assert abs(alike["auc_cells"] - 0.5) < 0.08
    assert placeless["auc_cells"] == alike["auc_cells"]
    assert mixed["auc_cells"] > 0.7
    assert abs(alike["auc_cells_linear"] - 0.5) < 0.08
    assert placeless["auc_niches"] > 0.9
    assert alike["auc_niches"] < 0.65
    assert alike["correlation_r"] > 0.9
    assert alike["correlation_slope"] == pytest.approx(1, abs=0.1)
    assert abs(mixed["correlation_slope"]) < 0.2
    assert alike["outline_overlap"] == placeless["outline_overlap"] > 0.8
    assert alike["spacing_distance"] == placeless["spacing_distance"] < 0.2
    assert "zero_share_error" not in alike  # no gene has a smallest value twice
    assert mixed["wasserstein_mean"] == pytest.approx(alike["wasserstein_mean"])


def test_scores_of_tissue_ignore_the_frame_and_the_unit(typed):
    real, other = layered(1)[0], layered(2)[0]
    axes, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(2, 2)))
    rotated = Tissue(other.expression, other.position @ axes + 100)
    in_other_unit = [Tissue(side.expression, 30 * side.position) for side in (other, real)]
    one, two, three = (
        tissue_scores(*pair, typed, seed=0)
        for pair in ((other, real), (rotated, real), in_other_unit)
    )
    assert one == pytest.approx(two)
    assert one == pytest.approx(three)


def test_scores_that_need_no_classifier_ignore_the_order_of_cells(typed):
    real, other = layered(1)[0], layered(2)[0]
    order = np.random.default_rng(0).permutation(len(other.position))
    reordered = Tissue(other.expression[order], other.position[order])
    one, two = (tissue_scores(tissue, real, typed, seed=0) for tissue in (other, reordered))
    for name, value in one.items():
        assert two[name] == pytest.approx(value, abs=0.1 if name.startswith("auc") else 1e-9), name


def test_slow_scores_can_be_left_out(typed):
    real, other = layered(1)[0], layered(2)[0]
    quick = tissue_scores(other, real, typed, seed=0, with_slow=False)
    assert set(METRICS) > set(quick) >= {"auc_cells", "correlation_r", "outline_overlap"}
    assert set(quick).isdisjoint({"auc_niches", "auc_cells_linear"})


def test_types_around_a_cell_are_counted_as_by_a_loop():
    rng = np.random.default_rng(0)
    position, codes = rng.normal(size=(40, 2)), rng.integers(0, 3, size=40)
    table = np.zeros((3, 3))
    for cell in range(40):
        gap = ((position - position[cell]) ** 2).sum(1)
        for other in np.argsort(gap)[1:11]:
            table[codes[cell], codes[other]] += 1
    expected = table / table.sum(1, keepdims=True)
    np.testing.assert_allclose(neighbour_types(codes, position, num_types=3), expected)


def test_a_type_that_is_missing_counts_as_all_wrong():
    rng = np.random.default_rng(0)
    position = rng.normal(size=(40, 2))
    one, both = np.zeros(40, dtype=np.int64), np.repeat([0, 1], 20)
    assert type_share_distance(one, both, num_types=2) == 0.5
    assert type_share_distance(both, both, num_types=2) == 0
    result = type_neighbour_distance((one, position), (both, position), num_types=2)
    around = neighbour_types(both, position, num_types=2)
    assert result == pytest.approx(0.5 * around[0, 1] + 0.5 * 1)


def test_the_wasserstein_distance_is_scipys_gene_by_gene():
    rng = np.random.default_rng(0)
    one, two = rng.normal(size=(30, 3)), rng.normal(size=(50, 3)) + 1
    expected = np.mean([wasserstein_distance(one[:, g], two[:, g]) for g in range(3)])
    assert gene_wasserstein(one, two) == pytest.approx(expected)


def test_zeros_are_counted_below_the_middle_to_the_lowest_other_values():
    real = np.array([[-1.0, -1.0, 1.0, 2.0], [0.0, 0.0, 0.0, 4.0]]).T
    generated = np.array([[-1.2, -0.9, -0.5, 2.0], [0.1, 3.9, 4.0, 5.0]]).T
    # The first gene's other values have the decile 1.1: three of four generated lie below 0.05, two
    # real ones. The second's middle is 2: one of four, where three of the real cells are zero.
    assert zero_share_error(generated, real) == pytest.approx((0.25 + 0.5) / 2)
    assert zero_share_error(real, real) == 0


def test_a_gene_that_is_never_zero_or_always_is_left_out():
    real = np.array([[-1.0, -1.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0], [5.0, 5.0, 5.0, 5.0]]).T
    generated = np.array([[-1.0, 1.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]).T
    assert zero_share_error(generated, real) == pytest.approx(0.25)
    assert zero_share_error(generated[:, 1:], real[:, 1:]) is None


def test_a_zero_that_was_rounded_is_a_zero():
    real = np.array([[-1.0, -1.0 + 1e-7, 1.0, 2.0]]).T
    assert zero_share_error(np.full((4, 1), -1.0), real) == pytest.approx(0.5)


def test_gene_gene_correlations_agree_as_by_numpy():
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(6, 6))
    one, two = rng.normal(size=(80, 6)), rng.normal(size=(50, 6)) @ mixing
    pairs = np.triu_indices(6, 1)
    c, r = (np.corrcoef(side.T)[pairs] for side in (one, two))
    slope = np.linalg.lstsq(r[:, None], c, rcond=None)[0][0]
    expected = pytest.approx((slope, np.corrcoef(c, r)[0, 1]))
    assert correlation_agreement(one, two, seed=0) == expected
    assert correlation_agreement(3 * one + 7, two, seed=0) == expected
    assert correlation_agreement(two, two, seed=0) == pytest.approx((1, 1))


def test_half_of_the_correlation_has_the_slope_of_a_half():
    # Genes are sums of a shared and an own orthogonal pattern: r = shared share of the variance.
    patterns = np.linalg.qr(np.random.default_rng(0).normal(size=(40, 6)))[0][:, 1:]
    patterns = np.linalg.qr(patterns - patterns.mean(0))[0]
    shared, own = patterns[:, :1], patterns[:, 1:]
    signs = np.array([1, 1, -1, 1])  # else every pair has the same r
    strong, weak = (signs * part**0.5 * shared + (1 - part) ** 0.5 * own for part in (0.8, 0.4))
    assert correlation_agreement(weak, strong, seed=0) == pytest.approx((0.5, 1))


def test_constant_genes_correlate_with_none_and_too_few_genes_are_not_compared():
    rng = np.random.default_rng(0)
    real = rng.normal(size=(50, 4)) + rng.normal(size=(50, 1))
    collapsed = np.full((30, 4), 0.1)
    assert correlation_agreement(collapsed, real, seed=0) == pytest.approx((0, 0))
    extended = np.concatenate([real, np.full((50, 1), 0.3)], axis=1)
    both = correlation_agreement(extended, extended, seed=0)
    assert both == pytest.approx(correlation_agreement(real, real, seed=0))
    assert correlation_agreement(real[:, :2], real[:, :2], seed=0) is None


def test_depths_are_compared_by_their_logarithms():
    # log1p: 0, log 2 against log 2, log 4, each half of the cells; all move up by log 2.
    one, two = np.array([0, 1, 0, 1]), np.array([1, 3])
    assert depth_wasserstein(one, two) == pytest.approx(np.log(2))
    assert depth_wasserstein(one[::-1], two) == depth_wasserstein(one, two)


def test_measured_genes_are_kept_and_shuffling_keeps_what_it_says():
    tissue = layered(3)[0]
    kept = measured_part(tissue, np.array([True, False, True, False, False, False]))
    np.testing.assert_array_equal(kept.expression, tissue.expression[:, [0, 2]])
    generator = torch.Generator().manual_seed(0)
    mixed = shuffled_genes(tissue, generator)
    np.testing.assert_array_equal(np.sort(mixed.expression, 0), np.sort(tissue.expression, 0))
    assert not np.array_equal(mixed.expression, tissue.expression)
    moved = shuffled_positions(tissue, generator)
    np.testing.assert_array_equal(moved.expression, tissue.expression)
    assert sorted(moved.position[:, 0]) == sorted(tissue.position[:, 0])
