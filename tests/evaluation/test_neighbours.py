"""Neighbourhood metrics against loops and scanpy."""

import numpy as np
import pytest
import scanpy
import torch
from scipy.sparse import csr_matrix
from sklearn.neighbors import NearestNeighbors

from alphastomics.errors import InputError
from alphastomics.evaluation import arrays, neighbours
from alphastomics.evaluation.registry import expression_scores
from alphastomics.utils.metrics import (
    knn_preservation,
    moran_agreement,
    morans_i,
    spatial_neighbours,
)
from tests.evaluation.reference import knn_naive, moran_naive, rotated

LATTICE = np.stack(np.meshgrid(np.arange(8.0), np.arange(7.0)), -1).reshape(-1, 2) * 0.1
LINE = np.array([[0.0, 0.0], [1.0, 0.0], [3.0, 0.0], [6.0, 0.0], [10.0, 0.0]])


def graph_matrix(graph: torch.Tensor) -> csr_matrix:
    """Return the row-standardised weights of a neighbour list."""
    cells, k = graph.shape
    rows = np.repeat(np.arange(cells), k)
    return csr_matrix((np.full(cells * k, 1 / k), (rows, graph.numpy().ravel())), (cells, cells))


@pytest.mark.parametrize("k", [1, 4, 10])
def test_knn_preservation_equals_the_loop_with_and_without_ties(k, rng, monkeypatch):
    true = rng.normal(size=(56, 2))
    doubled = np.repeat(true[:14], 4, axis=0)
    sides = {"plain": true, "lattice": LATTICE, "doubled": doubled, "collapsed": true * 0}
    monkeypatch.setattr(neighbours, "ENTRIES_ON_CPU", 300)
    for one in sides.values():
        for other in sides.values():
            result = knn_preservation(one + 1, other, k=k)
            np.testing.assert_allclose(result, knn_naive(one + 1, other, k), atol=1e-12)


def test_knn_preservation_worked_by_hand():
    # Truly nearest two of cell 0: 1, 2; of 1: 0, 2; of 2: 1, 0 and 3 (as near as 0); of 3: 2, 4.
    swapped = LINE[[0, 1, 4, 3, 2]]
    result = knn_preservation(swapped, LINE, k=2)
    # Cell 0 has 1 and 4 now: one of two.
    assert float(result[0]) == 0.5


def test_a_rotated_or_mirrored_lattice_keeps_all_neighbours():
    for mirror in (False, True):
        moved = rotated(LATTICE * 37.0, 0.3, mirror=mirror)
        assert float(knn_preservation(moved, LATTICE, k=10).min()) == 1


def test_knn_preservation_of_shuffled_and_collapsed_cells_is_chance(rng):
    true = rng.normal(size=(500, 3))
    assert float(knn_preservation(true * 0, true, k=10).mean()) == pytest.approx(10 / 499)
    shuffled = knn_preservation(rng.permutation(true), true, k=10)
    assert float(shuffled.mean()) == pytest.approx(10 / 499, rel=0.5)


def test_the_order_of_cells_does_not_matter(pair, rng):
    order = rng.permutation(len(pair[0]))
    mixed = knn_preservation(*(side[order] for side in pair), k=5)
    torch.testing.assert_close(mixed, knn_preservation(*pair, k=5)[order])


def test_neighbours_are_those_of_sklearn_and_never_the_cell_itself(rng):
    position = rng.normal(size=(80, 3))
    expected = NearestNeighbors(n_neighbors=7).fit(position).kneighbors()[1][:, :6]
    assert (spatial_neighbours(position, k=6).numpy() == expected).all()
    crowd = spatial_neighbours(np.zeros((20, 2)), k=3)
    assert crowd.shape == (20, 3)
    assert not (crowd == torch.arange(20)[:, None]).any()


def test_morans_i_equals_scanpy_and_the_double_loop(rng, monkeypatch):
    position = rng.normal(size=(90, 2))
    expression = np.hstack([position, rng.normal(size=(90, 3))])
    graph = spatial_neighbours(position, k=6)
    monkeypatch.setattr(arrays, "ENTRIES_ON_CPU", 200)
    result = morans_i(expression, graph)
    naive = [moran_naive(gene, graph.numpy()) for gene in expression.T]
    np.testing.assert_allclose(result, naive, atol=1e-12)
    theirs = scanpy.metrics.morans_i(graph_matrix(graph), expression.T)
    np.testing.assert_allclose(result, theirs, atol=1e-6)
    assert result[:2].min() > 0.6 > 0.2 > result[2:].abs().max()


def test_morans_i_worked_by_hand():
    # Cells on a line, one neighbour each: 0-1, 1-0, 2-1, 3-2. z = (-1.5, -.5, .5, 1.5).
    graph = torch.tensor([[1], [0], [1], [2]])
    values = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    assert float(morans_i(values, graph)) == pytest.approx((0.75 + 0.75 - 0.25 + 0.75) / 5)


def test_a_constant_gene_has_no_morans_i_and_is_left_out_of_the_agreement():
    graph = spatial_neighbours(LATTICE, k=4)
    genes = np.stack([LATTICE[:, 0], LATTICE[:, 1] ** 2, np.full(len(LATTICE), 0.1)], axis=1)
    true = morans_i(genes, graph)
    assert torch.isnan(true).tolist() == [False, False, True]
    same = moran_agreement(true, true, num_cells=len(LATTICE))
    assert (same.correlation, same.mean_absolute_error, same.num_genes) == (pytest.approx(1), 0, 2)
    flat = moran_agreement(true * torch.nan, true, num_cells=len(LATTICE))
    assert flat.correlation == 0
    assert flat.mean_absolute_error == pytest.approx(float(true[:2].mean()) + 1 / 55)


def test_too_few_cells_and_nan_are_refused_with_what_to_do(rng):
    few = rng.normal(size=(10, 2))
    with pytest.raises(InputError, match=r"10 neighbours: 10 cells have at most 9.*larger slice"):
        knn_preservation(few, few, k=10)
    with pytest.raises(InputError, match="0 neighbours"):
        spatial_neighbours(few, k=0)
    with pytest.raises(InputError, match="0 cells"):
        knn_preservation(few[:0], few[:0], k=1)
    few[4, 1] = np.nan
    with pytest.raises(InputError, match="cell 4, column 1"):
        spatial_neighbours(few, k=2)
    with pytest.raises(InputError, match="expression: 1 values"):
        morans_i(few, torch.zeros(10, 1, dtype=torch.int64))
    with pytest.raises(InputError, match="0 of 2 genes vary"):
        moran_agreement(torch.zeros(2), torch.full((2,), torch.nan), num_cells=10)


@pytest.mark.gpu
def test_morans_i_on_the_gpu_is_that_of_the_cpu(rng):
    position, expression = rng.normal(size=(500, 2)), torch.from_numpy(rng.normal(size=(500, 9)))
    graph = spatial_neighbours(position, k=6)
    torch.testing.assert_close(
        morans_i(expression.cuda(), graph).cpu(), morans_i(expression, graph)
    )


def test_the_scores_report_morans_i_itself(rng):
    position = torch.tensor(rng.normal(size=(60, 2)))
    true = torch.stack([position[:, 0], position[:, 1] ** 2, position.sum(1)], 1).float()
    predicted = true[torch.tensor(rng.permutation(60))]
    scores = expression_scores(predicted, true, torch.ones(3, dtype=torch.bool), position)
    graph = spatial_neighbours(position, k=6)
    assert scores["moran_i"] == pytest.approx(float(morans_i(predicted, graph).mean()))
    assert scores["moran_i_true"] == pytest.approx(float(morans_i(true, graph).mean()))
    assert scores["moran_i"] < 0.3 < scores["moran_i_true"]
