"""The regression on anchors: what it adds to the model's estimate, and how sure it is."""

import numpy as np
import pytest
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.linear_model import Ridge

from alphastomics.generation.anchor_regression import (
    JUDGED,
    AnchorRegression,
    CellFits,
    Correction,
    Features,
    best_of,
    folds_of,
    weights_of,
)
from alphastomics.generation.anchors import left_out_prior
from alphastomics.generation.frame import KnownPositions, fitted
from alphastomics.generation.robust_shift import RobustShift, robust_loss


def test_weights_are_those_of_ridge_regression_about_equal_ones():
    generator = np.random.default_rng(0)
    true = generator.standard_normal((200, 2))
    good, poor = true + generator.standard_normal((2, 200, 2)) * np.array([0.3, 3.0])[:, None, None]
    both = np.stack([good, poor])
    x, left = both.reshape(2, -1), (true - both.mean(0)).ravel()
    model = Ridge(alpha=float((left**2).mean()) / 0.1**2, fit_intercept=False).fit(x.T, left)
    np.testing.assert_allclose(weights_of(both, true), np.clip(0.5 + model.coef_, 0, 1), atol=1e-6)
    assert weights_of(both, true)[0] > 5 * weights_of(both, true)[1]
    np.testing.assert_allclose(weights_of(both[:, :1], true[:1]), 0.5, atol=0.1)  # one says little


def test_errors_of_anchors_are_those_of_cells_that_are_none():
    generator = np.random.default_rng(1)
    x = generator.standard_normal((900, 3))
    position = x[:, :2] + 0.3 * generator.standard_normal((900, 2))
    known = np.arange(900) < 300
    features = Features(np.hstack([x, 0 * position]), x.astype(np.float32))
    nothing = np.zeros((300, 2))
    result = AnchorRegression(features, 0 * position, known, position[known], nothing, 0).result()
    off = np.linalg.norm(result.position - position, axis=1)[~known]
    assert np.array_equal(result.position[known], position[known])
    for share in (0.5, 0.9):
        held = np.quantile(result.errors, share) * result.scale[~known]
        assert abs((off <= held).mean() - share) < 0.06


def test_of_anchors_that_correct_for_the_worse_nothing_is_taken():
    generator = np.random.default_rng(2)
    true = generator.standard_normal((400, 2))
    prior, noise = (true + size * generator.standard_normal(true.shape) for size in (0.3, 2.0))
    none, half, full = (Correction(share, 0.0, 0.05) for share in (0.0, 0.5, 1.0))
    worse = {none: prior, half: (prior + noise) / 2, full: noise}
    assert best_of(worse, true) == none
    better = {none: noise, half: (prior + noise) / 2, full: prior}
    assert best_of(better, true) == full
    # Of a handful of anchors chance has it, and a small gain is not enough.
    little = {none: prior[:8], full: true[:8] + 0.98 * (prior - true)[:8]}
    assert best_of(little, true[:8]) == none


def test_every_anchor_is_left_out_once_or_of_many_enough_are():
    folds = folds_of(37, 0)
    assert sorted(np.concatenate(folds).tolist()) == list(range(37))
    many = np.concatenate(folds_of(50_000, 0))
    assert JUDGED <= len(many) <= 6 * JUDGED
    assert len(np.unique(many)) == len(many)
    assert len(folds_of(3, 0)) == 3


def test_a_left_out_anchor_has_no_say_in_where_it_is_expected():
    generator = np.random.default_rng(3)
    x = generator.standard_normal((300, 3))
    position = x[:, :2] + 0.1 * generator.standard_normal((300, 2))
    known = np.arange(300) < 60
    features = Features(np.hstack([x, 0 * position]), x.astype(np.float32))
    nothing, expected = np.zeros((60, 2)), []
    for moved in (0.0, 30.0):
        at = position[:60].copy()
        at[7] += moved
        regression = AnchorRegression(features, 0 * position, known, at, nothing, 0)
        each = Correction(1.0, 0.0, 0.05)
        left_out = regression.left_out(0 * position, nothing)[each]
        expected.append(left_out[regression.judged.tolist().index(7)])
    # The width of the smoothing follows the std of all positions, which that anchor changes.
    np.testing.assert_allclose(expected[0], expected[1], atol=0.3)
    assert np.abs(expected[1] - position[7]).max() < 2


def test_a_cell_of_two_regions_is_expected_in_the_larger_one_and_not_between():
    generator = np.random.default_rng(4)
    kind = generator.random(600) < 0.5
    x = np.where(kind, 1.0, -1.0)[:, None] + 0.1 * generator.standard_normal((600, 1))
    # One kind lies in one place, the other in two, far apart.
    far = generator.random(600) < 0.3
    place = np.where(kind, 0.0, np.where(far, -8.0, 4.0))
    position = np.column_stack([place, 0 * place]) + 0.2 * generator.standard_normal((600, 2))
    known = np.arange(600) < 300
    features = Features(np.hstack([x, 0 * position]), x.astype(np.float32))
    nothing = np.zeros((300, 2))
    regression = AnchorRegression(features, 0 * position, known, position[known], nothing, 0)
    fits = CellFits(features, 2, 0)
    mean, shift = fits.corrections(0 * position, regression.rows, position[known], shifts=True)
    asked = ~known & ~kind
    assert np.abs(mean[asked, 0].mean() - (0.7 * 4 - 0.3 * 8)) < 1
    assert np.median(np.abs((mean + shift)[asked, 0] - 4)) < 0.5
    assert np.median(np.abs(regression.predicted[asked, 0] - 4)) < 0.5


def test_a_shift_is_the_minimum_of_the_loss_over_anchors_that_share_leaves():
    generator = np.random.default_rng(5)
    x = generator.standard_normal((80, 2)).astype(np.float32)
    error = generator.standard_normal((80, 1)) + 3 * (generator.random((80, 1)) < 0.3)
    trees = ExtraTreesRegressor(20, min_samples_leaf=5, bootstrap=True, random_state=0)
    trees.fit(x, error[:, 0])
    asked = generator.standard_normal((6, 2)).astype(np.float32)
    found = RobustShift(trees, x, error, 1.5).of_cells(asked)
    grid = np.linspace(-4, 6, 4001)
    for cell, shift in zip(asked, found[:, 0], strict=True):
        same = trees.apply(cell[None]) == trees.apply(x)
        loss = robust_loss((grid[:, None] - error[:, 0]).reshape(-1, 1) / 1.5)
        total = (loss.reshape(len(grid), -1) * same.sum(1)).sum(1)
        # An iteration from the mean ends in one of the minima.
        at = np.abs(grid - shift).argmin()
        near = total[max(at - 40, 0) : at + 41]
        assert total[at] < near.min() + 1e-2 * np.ptp(total)


def test_the_best_correction_does_not_depend_on_the_origin():
    generator = np.random.default_rng(6)
    true = generator.standard_normal((60, 2))
    left_out = {
        Correction(amount, 0.0, 0.05): true + (1 - amount) * generator.standard_normal((60, 2))
        for amount in (0.0, 0.5, 1.0)
    }
    far = {each: position + 1e10 for each, position in left_out.items()}
    assert best_of(far, true + 1e10) == best_of(left_out, true)


@pytest.mark.parametrize("kind", ["expected on one point", "on a line"])
def test_an_anchor_without_which_there_is_no_frame_is_left_in_it(kind):
    generator = np.random.default_rng(9)
    true, estimate = generator.normal(size=(2, 8, 3)) * [1, 1, 0]
    rows, where = np.arange(8), {"dims": 2, "scale": True, "reflection": True, "where": "here"}
    at, expected = true[rows].copy(), estimate[rows].copy()
    if kind == "on a line":
        at[:7, 1] = 3.0
    else:
        expected[:7] = expected[0] + 1e-15
    fit = fitted(expected, KnownPositions(rows, at), **where)
    left_out = left_out_prior(expected, at, fit, 2, reflection=True)
    np.testing.assert_array_equal(left_out[7], fit.apply(expected)[7])
    assert np.isfinite(left_out).all()
    assert (left_out[0] != fit.apply(expected)[0]).any()
