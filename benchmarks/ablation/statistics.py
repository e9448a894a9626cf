"""Is a difference larger than the noise? Figures of paired runs enter, intervals and words leave.

Runs of one seed share cells, order, noise and times, so two configurations are compared seed by
seed: the mean of the differences with Student's interval. It covers the chance of training, not
that of the data: another tissue may answer otherwise.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.ablation.configurations import EXPECTED
from benchmarks.ablation.figures import Figure

LEVEL = 0.95
LEAST_SEEDS = 3  # two differences may agree by chance, and then seem certain


class Summary(NamedTuple):
    """Mean and standard deviation over seeds; the deviation is NaN for one seed."""

    mean: float
    deviation: float
    median: float


class Difference(NamedTuple):
    """A configuration against the reference: in per cent of its mean, or in points."""

    configuration: str
    figure: str
    unit: str
    change: float
    low: float
    high: float
    verdict: str


def summary(values: Sequence[float]) -> Summary:
    """Sum up one figure over the seeds."""
    found = np.asarray(values, dtype=np.float64)
    deviation = float(found.std(ddof=1)) if len(found) > 1 else math.nan
    return Summary(float(found.mean()), deviation, float(np.median(found)))


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean of paired differences and its interval: mean ± t s / √n."""
    from scipy.stats import t

    found = np.asarray(differences, dtype=np.float64)
    mean = float(found.mean())
    if len(found) < LEAST_SEEDS:
        return mean, -math.inf, math.inf
    quantile = float(t.ppf((1 + LEVEL) / 2, len(found) - 1))
    half = quantile * float(found.std(ddof=1)) / math.sqrt(len(found))
    return mean, mean - half, mean + half


def compare(
    name: str, figure: Figure, values: Mapping[int, float], reference: Mapping[int, float]
) -> Difference | None:
    """Compare two configurations over the seeds that both have; None without a figure.

    Parameters
    ----------
    name, figure
        What is compared, in what.
    values, reference
        The figure of each seed.
    """
    seeds = [
        seed
        for seed in values
        if seed in reference and math.isfinite(values[seed]) and math.isfinite(reference[seed])
    ]
    if not seeds:
        return None
    whole = abs(float(np.mean([reference[seed] for seed in seeds]))) if figure.unit == "%" else 1.0
    if whole == 0:
        return None
    mean, low, high = interval([100 * (values[seed] - reference[seed]) / whole for seed in seeds])
    return Difference(name, figure.key, figure.unit, mean, low, high, verdict(figure, low, high))


def verdict(figure: Figure, low: float, high: float) -> str:
    """Say whether an interval leaves zero out, and to which side."""
    if low <= 0 <= high:
        return "within the noise"
    return "better" if (high < 0) == (figure.better == "lower") else "worse"


def expectation(difference: Difference) -> tuple[float, float, str] | None:
    """Return what was once expected of a difference, and what became of it."""
    expected = EXPECTED.get(difference.configuration, {}).get(difference.figure)
    if expected is None:
        return None
    low, high = expected
    if difference.low > high:
        words = "not reached" if difference.high > 0 else "smaller than expected"
    elif difference.high < low:
        words = "surpassed"
    elif low <= difference.low and difference.high <= high:
        words = "confirmed"
    else:
        words = "undecided: the interval is wider than the question"
    return low, high, words
