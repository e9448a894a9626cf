"""New tissue against real tissue: alike scores as alike, and each kind of wrong is seen."""

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance

from alphastomics.evaluation.clusters import TypedCells
from alphastomics.evaluation.registry import tissue_scores
from alphastomics.evaluation.separability import two_sample_auc
from alphastomics.evaluation.tissue import (
    Tissue,
    gene_wasserstein,
    measured_part,
    neighbour_types,
    shuffled_genes,
    shuffled_positions,
    type_neighbour_distance,
    type_share_distance,
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
    assert mixed["wasserstein_mean"] == pytest.approx(alike["wasserstein_mean"])


def test_scores_of_tissue_ignore_the_frame(typed):
    real, other = layered(1)[0], layered(2)[0]
    turn, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(2, 2)))
    moved = Tissue(other.expression, 30 * other.position @ turn + 100)
    one, two = (tissue_scores(tissue, real, typed, seed=0) for tissue in (other, moved))
    assert one == pytest.approx(two)


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


def test_the_classifier_is_at_chance_on_one_distribution_and_sure_on_two():
    rng = np.random.default_rng(0)
    one, two = rng.normal(size=(2, 300, 5))
    assert abs(two_sample_auc(one, two, seed=0) - 0.5) < 0.08
    assert two_sample_auc(one, two + 3, seed=0) > 0.98


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
