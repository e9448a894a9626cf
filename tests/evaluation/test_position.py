"""Alignment metrics against scipy, by their invariances and by hand."""

import math

import numpy as np
import pytest
import torch
from scipy.spatial import procrustes as scipy_procrustes
from scipy.spatial.transform import Rotation

from alphastomics.errors import InputError
from alphastomics.utils.metrics import (
    aligned,
    axis_rmse,
    class_rssd,
    position_scores,
    procrustes,
    rmsd,
    rssd,
)
from tests.evaluation.reference import rotated

SQUARE = np.array([[0.0, 0.0], [2.0, 0.0], [2.0, 2.0], [0.0, 2.0]])


def test_procrustes_with_scale_and_reflection_is_that_of_scipy(pair):
    predicted, true = pair
    expected = scipy_procrustes(true, predicted)[2]
    assert procrustes(predicted, true, scale=True, reflection=True) == pytest.approx(expected)


@pytest.mark.parametrize("scale", [True, False])
def test_a_rotated_and_shifted_prediction_is_perfect_and_its_mirror_only_with_reflection(
    pair, scale
):
    _, true = pair
    same, mirrored = (rotated(true, 0.7, mirror=mirror) for mirror in (False, True))
    for reflection in (True, False):
        assert procrustes(same, true, scale=scale, reflection=reflection) < 1e-25
    assert procrustes(mirrored, true, scale=scale, reflection=True) < 1e-25
    assert procrustes(mirrored, true, scale=scale, reflection=False) > 0.1


def test_scale_is_forgiven_only_where_it_is_allowed():
    assert procrustes(3 * SQUARE, SQUARE, scale=True, reflection=False) < 1e-25
    # Centred, the square's points have |t|^2 = 2; three times as large the error is |2 t|^2 = 8.
    assert procrustes(3 * SQUARE, SQUARE, scale=False, reflection=False) == pytest.approx(4)
    assert rmsd(3 * SQUARE, SQUARE, reflection=False) == pytest.approx(math.sqrt(8))
    assert rssd(3 * SQUARE, SQUARE) == pytest.approx(math.sqrt(32))


def test_axes_are_never_stretched_one_by_one():
    wide = SQUARE * [2, 1]
    # c = sum |t||p| by axis / |p|^2 = (4 * 2 + 4 * 1) / 20, error = 8 - c * 12 = 0.8, of 8.
    assert procrustes(wide, SQUARE, scale=True, reflection=True) == pytest.approx(0.1)


def test_per_axis_errors_add_up_to_the_rmsd_and_lie_where_the_error_is(rng):
    true = rng.normal(size=(4000, 3)) * [9, 3, 1]
    predicted = rotated(true + rng.normal(size=true.shape) * [0, 0, 0.1], 0.4, mirror=False)
    errors = axis_rmse(predicted, true, reflection=False)
    assert float(errors.square().sum().sqrt()) == pytest.approx(
        rmsd(predicted, true, reflection=False)
    )
    assert errors[2] == pytest.approx(0.1, rel=0.05)
    assert max(errors[:2]) < 0.01


def test_the_aligned_prediction_is_in_the_frame_of_the_truth(pair):
    _, true = pair
    moved = aligned(5 * rotated(true, 2.0, mirror=True), true, scale=True, reflection=True)
    np.testing.assert_allclose(moved, true, atol=1e-12)


def test_rssd_is_that_of_scipys_rotation(pair):
    predicted, true = (side - side.mean(0) for side in pair)
    padded = [np.pad(side, ((0, 0), (0, 3 - side.shape[1]))) for side in (true, predicted)]
    expected = Rotation.align_vectors(*padded)[1]
    assert rssd(predicted + 7, true - 3) == pytest.approx(expected)
    labels = np.arange(len(true)) % 3
    parts = [Rotation.align_vectors(*(side[labels == k] for side in padded))[1] for k in range(3)]
    assert class_rssd(*pair, labels.astype(str)) == pytest.approx(sum(parts) / 3)


def test_the_order_of_cells_does_not_matter(pair, rng):
    order = rng.permutation(len(pair[0]))
    mixed = [side[order] for side in pair]
    for score in (rssd, lambda p, t: procrustes(p, t, scale=False, reflection=False)):
        assert score(*mixed) == pytest.approx(score(*pair), rel=1e-12)


def test_a_collapsed_prediction_explains_nothing():
    flat = np.zeros_like(SQUARE)
    assert procrustes(flat, SQUARE, scale=True, reflection=True) == 1
    assert procrustes(flat, SQUARE, scale=False, reflection=False) == 1


def test_one_and_two_cells_and_bad_input():
    assert rmsd(SQUARE[:1], SQUARE[1:2], reflection=True) == 0
    assert rmsd(SQUARE[:2] * 2, SQUARE[:2], reflection=True) == pytest.approx(1)
    with pytest.raises(InputError, match=r"true positions: 0 cells.*at least 1"):
        rmsd(SQUARE[:0], SQUARE[:0], reflection=True)
    with pytest.raises(InputError, match="1 cells"):
        procrustes(SQUARE[:1], SQUARE[:1], scale=True, reflection=True)
    with pytest.raises(InputError, match="all 4 cells lie at one position"):
        procrustes(SQUARE, np.ones_like(SQUARE), scale=True, reflection=True)
    spoilt = SQUARE.copy()
    spoilt[2, 1] = np.nan
    with pytest.raises(InputError, match="predicted positions: 1 values are NaN"):
        rssd(spoilt, SQUARE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_is_computed_in_double(pair, dtype):
    sides = [torch.from_numpy(side).to(dtype) for side in pair]
    assert rmsd(*sides, reflection=True) == rmsd(*(s.double() for s in sides), reflection=True)


def test_scores_name_the_error_of_every_axis(rng):
    for dims, names in ((2, "xy"), (3, "xyz")):
        true = rng.normal(size=(40, dims))
        scores = position_scores(true + 0.3 * rng.normal(size=true.shape), true, None)
        result = [value for name, value in scores.items() if name.startswith("rmse_")]
        assert [f"rmse_{axis}" in scores for axis in "xyz"] == [axis in names for axis in "xyz"]
        assert np.square(result).sum() == pytest.approx(scores["rmsd"] ** 2)
