"""Intervals of expression: errors of left-out cells enter, a range for each value leaves.

Split conformal prediction by gene, within cells of about the same prediction (Vovk et al. 2005,
"Algorithmic Learning in a Random World", section 4.5: Mondrian): a gene that is expected near zero
varies less than where it is expected to be high. Of cells like those that were left out, the share
`level` lies within the interval, whatever the distribution.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64

from alphastomics.generation.radii import ROUNDING

# Bins of predictions at most, and left-out cells that a bin has at least, over those it needs.
BINS, CELLS_OVER_LEAST, LEAST_IN_BIN = 10, 5, 50
# Left-out cells that intervals are made of: more take time, and change little.
MOST_CELLS = 5_000


class ExpressionIntervals(NamedTuple):
    """Ranges that hold the true value of a share of the cells, gene by gene.

    NaN where nothing is known of a gene. `calibrated_by` says what they were found by.
    """

    low: Float32[np.ndarray, "N G"]
    high: Float32[np.ndarray, "N G"]
    level: float
    calibrated_by: str


class Bins(NamedTuple):
    """Of one gene: between which predictions a bin lies, and the errors that its interval spans."""

    edges: Float64[np.ndarray, " B"]
    low: Float64[np.ndarray, " C"]
    high: Float64[np.ndarray, " C"]


class IntervalFit:
    """Finds intervals about predictions.

    Parameters
    ----------
    predicted, error
        Predictions of left-out cells, and the true values minus them.
    counted
        Which of these were measured.
    level
        Share of the cells that an interval holds.
    seed
        Seed of the choice of cells where there are very many.
    """

    def __init__(
        self,
        predicted: Float64[np.ndarray, "M G"],
        error: Float64[np.ndarray, "M G"],
        counted: Bool[np.ndarray, "M G"],
        level: float,
        seed: int,
    ) -> None:
        self.level = level
        some = np.random.default_rng(seed).permutation(len(predicted))[:MOST_CELLS]
        self.genes = []
        for gene in range(predicted.shape[1]):
            rows = some[counted[some, gene]]
            self.genes.append(bins_of(predicted[rows, gene], error[rows, gene], level))

    def about(
        self, predicted: Float64[np.ndarray, "N G"]
    ) -> tuple[Float32[np.ndarray, "N G"], Float32[np.ndarray, "N G"]]:
        """Return the lower and the upper end about each prediction."""
        low, high = (np.empty(predicted.shape, np.float32) for _ in range(2))
        for gene, bins in enumerate(self.genes):
            values = predicted[:, gene]
            number = np.searchsorted(bins.edges, values, side="right")
            low[:, gene], high[:, gene] = values + bins.low[number], values + bins.high[number]
        return low, high


def least_for(level: float) -> int:
    """Return how many left-out cells an interval needs: one beyond each of its ends."""
    return int(np.ceil(2 / (1 - level) - 1 - ROUNDING))


def bins_of(
    predicted: Float64[np.ndarray, " M"], error: Float64[np.ndarray, " M"], level: float
) -> Bins:
    """Divide left-out cells by their prediction, and find the ends of the errors in each bin."""
    least = max(CELLS_OVER_LEAST * least_for(level), LEAST_IN_BIN)
    parts = np.array_split(
        np.argsort(predicted, kind="stable"), int(np.clip(len(predicted) // least, 1, BINS))
    )
    ends = [conformal_ends(np.sort(error[part]), level) for part in parts]
    low, high = (np.array(side) for side in zip(*ends, strict=True))
    return Bins(np.array([predicted[part[0]] for part in parts[1:]]), low, high)


def conformal_ends(errors: Float64[np.ndarray, " M"], level: float) -> tuple[float, float]:
    """Return the ends of sorted errors that leave the same share below and above; else NaN."""
    beyond = int(np.floor((len(errors) + 1) * (1 - level) / 2 + ROUNDING))
    if beyond < 1:
        return float("nan"), float("nan")
    return float(errors[beyond - 1]), float(errors[-beyond])
