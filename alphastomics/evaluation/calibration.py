"""Is the std right: samples, an estimate and the truth enter, shares and ratios leave.

If the samples come from the posterior, the truth is one more sample: it lies between the least and
the largest of n of them with probability (n - 1) / (n + 1), whatever the distribution. And the
mean square error of the posterior mean is then the variance of the samples.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.stats import spearmanr

from alphastomics.errors import InputError

LEAST_SAMPLES = 2


class Envelope(NamedTuple):
    """What n samples say of each entry: the least, the largest, and the unbiased deviation."""

    low: Float[ndarray, "N K"]
    high: Float[ndarray, "N K"]
    deviation: Float[ndarray, "N K"]
    num_samples: int


class Calibration(NamedTuple):
    """How far the std predicts the error.

    Attributes
    ----------
    coverage, expected
        Share of true values between the least and the largest sample, and what it should be.
    error_over_std
        Root mean square error over root mean square deviation: 1 is right, more is too sure.
    spearman
        Rank correlation, over cells, of the std and the error; 0 where either is constant.
    """

    coverage: float
    expected: float
    error_over_std: float
    spearman: float


def envelope(samples: Float[ndarray, "S N K"]) -> Envelope:
    """Sum up samples of the same cells."""
    deviation = samples.std(0, ddof=1) if len(samples) > 1 else np.zeros(samples.shape[1:])
    return Envelope(samples.min(0), samples.max(0), deviation, len(samples))


def calibration(
    estimate: Float[ndarray, "N K"], true: Float[ndarray, "N K"], sampled: Envelope
) -> Calibration:
    """Compare the std of samples with the error of the estimate, in one frame."""
    if sampled.num_samples < LEAST_SAMPLES:
        raise InputError(
            f"calibration: {sampled.num_samples} sample(s); at least {LEAST_SAMPLES} are needed"
        )
    inside = (sampled.low <= true) & (true <= sampled.high)
    error = np.square(estimate.astype(np.float64) - true).sum(1)
    variance = np.square(sampled.deviation.astype(np.float64)).sum(1)
    expected = (sampled.num_samples - 1) / (sampled.num_samples + 1)
    return Calibration(
        float(inside.mean()), expected, *error_and_std(np.sqrt(error), np.sqrt(variance))
    )


def error_and_std(error: Float[ndarray, " N"], std: Float[ndarray, " N"]) -> tuple[float, float]:
    """Return root mean square error over root mean square std, and their rank correlation.

    The one definition of both: infinite without any std, and 0 where either is constant.
    """
    squares = [np.square(part, dtype=np.float64) for part in (error, std)]
    ratio = np.sqrt(squares[0].mean() / squares[1].mean()) if squares[1].any() else np.inf
    known = min(np.ptp(error), np.ptp(std)) > 0
    return float(ratio), float(spearmanr(error, std).statistic) if known else 0.0
