"""Counts back from normalised values: log-normalised values of cells enter, integers leave.

A normalised cell is its counts times one number, so that its smallest value, nearly always a count
of one, gives them all. Values that are no such multiples were never counts, and are said to be so.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

# A smallest count beyond it would be a cell without any small one.
MOST_SMALLEST = 20
# Digits that log1p, standardising and float32 leave.
RELATIVE_ERROR, ABSOLUTE_ERROR = 2e-5, 2e-3
# Below zero only by what rounding does.
LEAST_LOG, LARGEST_LOG = -1e-3, 50.0


class Counts(NamedTuple):
    """Counts (N, G), and which cells (N) have them: the others' values are no multiples of one."""

    values: Int64[np.ndarray, "N G"]
    exact: Bool[np.ndarray, " N"]


def counts_of(log_values: Float[np.ndarray, "N G"]) -> Counts:
    """Return the counts that log(1 + values) of each cell stand for."""
    # No logarithm of a count is as large or below zero: such values are none.
    odd = (log_values.max(1, initial=0) > LARGEST_LOG) | (log_values.min(1, initial=0) < LEAST_LOG)
    values = np.expm1(np.where(odd[:, None], 0, log_values).astype(np.float64))
    # What standardising and back again leaves of a zero.
    values[values < ABSOLUTE_ERROR * values.max(1, keepdims=True, initial=0) / 1e3] = 0
    smallest = np.where(values > 0, values, np.inf).min(1, initial=np.inf)
    exact = ~np.isfinite(smallest)  # nothing was counted
    counts = np.zeros(values.shape, np.int64)
    for smallest_count in range(1, MOST_SMALLEST + 1):
        rows = np.flatnonzero(~exact)
        if not len(rows):
            break
        scaled = values[rows] * (smallest_count / smallest[rows])[:, None]
        near = is_integer(scaled).all(1)
        counts[rows[near]] = np.rint(scaled[near])
        exact[rows[near]] = True
    return Counts(counts, exact & ~odd)


def is_integer(values: Float64[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
    """Say which values are integers but for what rounding did to them."""
    allowed = np.minimum(ABSOLUTE_ERROR + RELATIVE_ERROR * values, 0.25)
    return np.abs(values - np.rint(values)) <= allowed
