"""Spacing and outline of tissues: numbers worked by hand, in whatever frame a tissue lies."""

import numpy as np
import pytest

from alphastomics.evaluation.outline import (
    occupied,
    on_principal_axes,
    orientations,
    outline_overlap,
    spacing_distance,
    spacings,
)


def lattice(*sizes: int, step: float = 1.0) -> np.ndarray:
    return step * np.stack(np.meshgrid(*map(np.arange, sizes)), -1).reshape(-1, len(sizes))


def wedge(seed: int, dims: int = 2, cells: int = 3000) -> np.ndarray:
    """A tissue without any symmetry: a box of unequal sides without one of its corners."""
    rng = np.random.default_rng(seed)
    position = rng.uniform(size=(2 * cells, dims)) * [3.0, 2.0, 1.2][:dims]
    return position[(position > 0.6 * np.array([3.0, 2.0, 1.2][:dims])).sum(1) < dims][:cells]


def test_spacings_are_those_of_a_loop():
    position = np.random.default_rng(0).normal(size=(30, 3))
    gap = np.linalg.norm(position[:, None] - position, axis=-1) + np.diag(np.full(30, np.inf))
    np.testing.assert_allclose(spacings(position), gap.min(1))


def test_a_lattice_of_twice_the_step_is_one_median_away():
    assert spacing_distance(lattice(9, 9, step=2.0), lattice(9, 9)) == pytest.approx(1)
    assert spacing_distance(lattice(9, 9), lattice(9, 9, step=2.0)) == pytest.approx(0.5)
    assert spacing_distance(lattice(5, 5), lattice(9, 9)) == 0


def test_spacing_has_no_unit_no_frame_and_no_order():
    one, two = wedge(1), wedge(2, cells=2000)
    axes, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(2, 2)))
    expected = spacing_distance(one, two)
    assert spacing_distance(50 * one, 50 * two) == pytest.approx(expected)
    assert spacing_distance(one @ axes + 7, two) == pytest.approx(expected)
    assert spacing_distance(one[::-1], two[::-1]) == pytest.approx(expected)


def test_real_cells_at_the_same_positions_have_no_spacing():
    assert spacing_distance(lattice(4, 4), np.repeat(lattice(2, 2), 2, axis=0)) is None
    assert outline_overlap(lattice(4, 4), np.ones((9, 2))) is None


def test_boxes_are_counted_around_the_origin_and_small_gaps_are_closed():
    cells = np.array([[0.0, 0.0], [1.4, 0.4], [-6.0, 0.0], [100.0, 0.0]])
    grid = occupied(cells, edge=3.0, half=4)
    # x in boxes -2, 0 (twice) and, from far away, 4; the gap from -2 to 0 is closed, that to 4 not.
    assert sorted(np.argwhere(grid)[:, 0] - 5) == [-2, -1, 0, 4]
    assert set(np.argwhere(grid)[:, 1] - 5) == {0}


def test_a_rectangle_of_half_the_length_covers_half_of_the_outline():
    whole, part = lattice(90, 30), lattice(45, 30)
    assert outline_overlap(whole, whole) == 1
    assert outline_overlap(part, whole) == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("dims", [2, 3])
def test_an_outline_is_found_in_any_frame_and_mirrored(dims):
    one, two = wedge(1, dims), wedge(2, dims)
    expected = outline_overlap(one, two)
    assert expected > 0.8
    axes, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(dims, dims)))
    mirror = np.diag([-1.0] + [1.0] * (dims - 1))
    for frame in (axes, mirror, axes @ mirror):
        assert outline_overlap(one @ frame + 9, two) == pytest.approx(expected)
        assert outline_overlap(one, two @ frame - 9) == pytest.approx(expected, abs=0.03)
    assert outline_overlap(one[::-1], two[::-1]) == pytest.approx(expected)
    assert outline_overlap(40 * one, 40 * two) == pytest.approx(expected)
    assert outline_overlap(3 * one, two) < 0.6 * expected


def test_a_square_needs_no_principal_axes():
    rng = np.random.default_rng(0)
    one, two = rng.uniform(size=(2, 3000, 2))
    axes, _ = np.linalg.qr(rng.normal(size=(2, 2)))
    assert outline_overlap(one @ axes, two) > 0.85


def test_an_outlier_costs_little_and_a_layer_stays_thin():
    one, two = wedge(1), wedge(2)
    far = np.concatenate([one, [[1e6, 1e6]] * 3])
    assert outline_overlap(far - np.median(far, 0), two) <= 1
    layer = np.c_[one, np.zeros(len(one))]
    assert outline_overlap(layer, np.c_[two, np.zeros(len(two))]) > 0.8


def test_the_orientations_are_distinct_rotations_and_reflections():
    for dims, number in ((2, 72), (3, 48)):
        axes = orientations(dims)
        assert len({tuple(np.round(frame, 6).ravel() + 0.0) for frame in axes}) == number
        for frame in axes:
            np.testing.assert_allclose(frame @ frame.T, np.eye(dims), atol=1e-12)
        assert sum(np.linalg.det(frame) > 0 for frame in axes) == number // 2


def test_principal_axes_have_falling_variance_and_no_mean():
    points = on_principal_axes(wedge(3, 3) + 5)
    np.testing.assert_allclose(points.mean(0), 0, atol=1e-12)
    covariance = np.cov(points.T)
    np.testing.assert_allclose(covariance, np.diag(np.diag(covariance)), atol=1e-10)
    assert (np.diff(np.diag(covariance)) < 0).all()
