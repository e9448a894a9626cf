"""Noise or not: intervals are scipy's, and words follow from them."""

import math

import numpy as np
import pytest
from scipy.stats import ttest_rel

from benchmarks.ablation.configurations import EXPECTED
from benchmarks.ablation.figures import FIGURES
from benchmarks.ablation.statistics import Difference, compare, expectation, interval, summary

ERROR = next(figure for figure in FIGURES if figure.key == "expression_mse")
SCORE = next(figure for figure in FIGURES if figure.key == "cluster_ari")


def paired(rng: np.random.Generator, shift: float) -> tuple[dict, dict]:
    """Figures whose seeds differ far more than the configurations do."""
    seeds = rng.normal(5, 2, 6)
    reference = dict(enumerate(seeds))
    return {n: value + shift + rng.normal(0, 0.01) for n, value in reference.items()}, reference


def test_the_interval_is_that_of_scipys_paired_test():
    values, reference = paired(np.random.default_rng(0), 0.3)
    ours = interval([values[n] - reference[n] for n in values])
    theirs = ttest_rel(list(values.values()), list(reference.values())).confidence_interval(0.95)
    np.testing.assert_allclose(ours[1:], [theirs.low, theirs.high], rtol=1e-9)


@pytest.mark.parametrize(("shift", "figure", "word"), [
    (-0.3, ERROR, "better"), (0.3, ERROR, "worse"), (0.3, SCORE, "better"), (-0.3, SCORE, "worse"),
    (0.0, ERROR, "within the noise"), (0.0, SCORE, "within the noise"),
])  # fmt: skip
def test_a_shift_is_found_under_a_spread_of_seeds_that_is_larger(shift, figure, word):
    values, reference = paired(np.random.default_rng(1), shift)
    assert compare("one", figure, values, reference).verdict == word


def test_errors_change_by_per_cent_and_scores_by_points():
    reference, values = {1: 2.0, 2: 2.0, 3: 2.0}, {1: 1.5, 2: 1.5, 3: 1.5}
    assert compare("one", ERROR, values, reference)[2:6] == ("%", -25.0, -25.0, -25.0)
    assert compare("one", SCORE, values, reference)[2:6] == ("points", -50.0, -50.0, -50.0)


@pytest.mark.parametrize("few", [1, 2])
def test_fewer_than_three_seeds_decide_nothing(few):
    values = dict.fromkeys(range(few), 1.0)
    found = compare("one", ERROR, values, dict.fromkeys(range(few), 2.0))
    assert found.change == -50
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert found.verdict == "within the noise"


def test_seeds_without_a_figure_are_left_out():
    values, reference = {1: 1.0, 2: math.nan, 3: 1.0, 4: 1.0}, {1: 2.0, 2: 2.0, 3: 2.0, 5: 9.0}
    assert compare("one", ERROR, values, reference).change == -50
    assert compare("one", ERROR, {1: math.nan}, {1: 1.0}) is None
    assert compare("one", ERROR, {1: 1.0}, {1: 0.0}) is None


def test_the_summary_has_the_deviation_of_a_sample():
    found = summary([1.0, 2.0, 6.0])
    assert (found.mean, found.median) == (3.0, 2.0)
    assert found.deviation == pytest.approx(math.sqrt(7))
    assert math.isnan(summary([4.0]).deviation)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (-9, -6, "confirmed"),
        (-4, -1, "smaller than expected"),
        (-3, 2, "not reached"),
        (1, 2, "not reached"),
        (-14, -11, "surpassed"),
        (-12, -6, "undecided"),
        (-7, 3, "undecided"),
    ],
)
def test_an_expectation_is_held_to_the_interval(low, high, words):
    assert EXPECTED["Gated"]["expression_mse"] == (-10, -5)
    found = Difference("Gated", "expression_mse", "%", (low + high) / 2, low, high, "")
    assert expectation(found)[2].startswith(words)


def test_nothing_was_expected_of_other_figures():
    assert expectation(Difference("Gated", "cluster_ari", "points", 0, 0, 0, "")) is None
