"""Assignment: every cell has a position of its own, at the least cost, whatever their numbers."""

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from scipy.spatial import cKDTree
from scipy.spatial.distance import cdist

from alphastomics.generation import assignment
from alphastomics.generation.assignment import as_many, assigned, halved_order, matched


def cost(expected: np.ndarray, available: np.ndarray, choice: np.ndarray) -> float:
    return float(((expected - available[choice]) ** 2).sum())


def test_few_cells_are_assigned_as_scipy_does(rng):
    expected, available = rng.normal(size=(80, 2)), rng.normal(size=(80, 2))
    best = linear_sum_assignment(cdist(expected, available, "sqeuclidean"))[1]
    np.testing.assert_array_equal(matched(expected, available), best)


@pytest.mark.parametrize("dims", [2, 3])
def test_halves_of_many_cells_cost_little_more(rng, monkeypatch, dims):
    available = rng.uniform(size=(601, dims))
    # Drawn to the middle, as expected positions are.
    expected = 0.5 + 0.4 * (available - 0.5) + 0.05 * rng.normal(size=available.shape)
    exact = linear_sum_assignment(cdist(expected, available, "sqeuclidean"))[1]
    monkeypatch.setattr(assignment, "EXACT_CELLS", 50)
    halved = matched(expected, available)
    assert sorted(halved) == list(range(601))
    assert cost(expected, available, halved) < 1.1 * cost(expected, available, exact)
    random = rng.permutation(601)
    assert cost(expected, available, halved) < 0.5 * cost(expected, available, random)


def test_order_of_cells_does_not_matter(rng):
    expected, available = rng.normal(size=(70, 2)), rng.normal(size=(70, 2))
    order = rng.permutation(70)
    np.testing.assert_array_equal(
        assigned(expected[order], available, 0), assigned(expected, available, 0)[order]
    )


@pytest.mark.parametrize("number", [1, 40, 100, 101, 150, 250])
def test_as_many_positions_as_cells_fill_the_same_outline(rng, number):
    ring = rng.normal(size=(100, 2))
    ring /= np.linalg.norm(ring, axis=1, keepdims=True)
    ring *= rng.uniform(0.9, 1.1, size=(100, 1))
    made = as_many(ring, number, 0)
    assert made.shape == (number, 2)
    assert len(np.unique(made, axis=0)) == number
    # New ones lie between neighbours: none in the hole.
    assert np.linalg.norm(made, axis=1).min() > 0.8
    assert cKDTree(ring).query(made)[0].max() < 0.3
    if number > 100:
        np.testing.assert_array_equal(made[:100], ring)


@pytest.mark.parametrize("number", [1300, 1500, 5000])
def test_new_positions_are_as_dense_everywhere_as_those_that_are_there(rng, number):
    square = rng.uniform(size=(1000, 2))
    square[:, 0] **= 2  # denser on the left
    made = as_many(square, number, 0)[1000:]
    for axis, end in ((0, 0.25), (1, 0.5)):
        there = (square[:, axis] < end).mean()
        assert (made[:, axis] < end).mean() == pytest.approx(there, abs=0.05)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_planar_tissue_stays_planar_when_it_is_filled_up(rng, axis):
    plane = np.insert(rng.uniform(size=(60, 2)), axis, 500.0, axis=1)
    made = as_many(plane, 300, 0)
    np.testing.assert_array_equal(made[:, axis], 500.0)
    flat = as_many(np.delete(plane, axis, axis=1), 300, 0)
    assert np.ptp(made, axis=0).max() == pytest.approx(np.ptp(flat, axis=0).max(), abs=0.2)
    np.testing.assert_array_equal(as_many(plane[:1], 3, 0), plane[[0, 0, 0]])


def test_few_of_many_positions_are_taken_evenly():
    line = np.stack([np.arange(100.0), np.zeros(100)], 1)
    assert sorted(as_many(line, 10, 0)[:, 0]) == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert list(halved_order(line[::-1].copy())[:3]) == [99, 98, 97]
