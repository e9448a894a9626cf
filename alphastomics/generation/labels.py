"""Cell types of query cells: labelled cells and a query enter; calibrated probabilities leave.

Logistic regressions on expression, on that of neighbours and of surroundings, and the frequencies
of types among the nearest labelled cells, are mixed with weights that make left-out cells most
probable (a linear opinion pool; expectation maximisation as for any mixture). A temperature, chosen
in the same way, calibrates the mixture (Guo et al. 2017).
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, Int64
from scipy.optimize import minimize_scalar
from sklearn.linear_model import LogisticRegression

from alphastomics.generation.gene_features import (
    NEAREST_COMPONENTS,
    Features,
    GeneCells,
    features_of_both,
    nearest,
)

UNKNOWN = "unknown"
NEIGHBOURS = (10, 30)
# Inverse penalties of logistic regressions on components of unit size: of own expression, with
# that of neighbours, with surroundings. The more features, the more penalty.
INVERSE_PENALTIES, ITERATIONS = ((1.0, 10.0), (1.0,), (1.0,)), 150
# Labelled cells that are fitted to: more change little.
FIT_CELLS = 10_000
ROUNDS = 200
LEAST, MOST_LOG_TEMPERATURE = 1e-4, 2.0


class Labels(NamedTuple):
    """Types of query cells.

    Attributes
    ----------
    names
        Names of the types.
    probability
        Probability of each type.
    expected_accuracy
        Share of left-out cells whose most probable type is theirs.
    """

    names: list[str]
    probability: Float64[np.ndarray, "N T"]
    expected_accuracy: float


def predict_labels(known: GeneCells, query: GeneCells, seed: int, *, is_log: bool) -> Labels:
    """Predict the types of a query, all of whose slices measured the same genes.

    Parameters
    ----------
    known
        Training and reference cells; those of unknown type are left out.
    query
        Cells to label.
    seed
        Seed of the folds, and of the choice of cells where there are very many.
    is_log
        Whether values are logarithms of shares.
    """
    rng = np.random.default_rng(seed)
    labelled = rng.permutation(np.flatnonzero(known.cell_type != UNKNOWN))[:FIT_CELLS]
    known = known.take(np.sort(labelled))
    names, types = np.unique(known.cell_type.astype(str), return_inverse=True)
    both = features_of_both(known, query, rng, is_log=is_log)
    whole = classified(both.known, types, both.query, len(names))
    left_out = np.empty((len(whole), len(types), len(names)))
    for number in np.unique(both.fold):
        out = both.fold == number
        fitted, asked = both.known.take(~out), both.known.take(out)
        left_out[:, out] = classified(fitted, types[~out], asked, len(names))
    weight = mixture_weights(left_out[:, np.arange(len(types)), types])
    ours, theirs = (np.tensordot(weight, part, axes=1) for part in (left_out, whole))
    temperature = best_temperature(ours, types)
    accuracy = float((ours.argmax(1) == types).mean())
    return Labels(names.tolist(), tempered(theirs, temperature), accuracy)


def classified(
    known: Features, types: Int64[np.ndarray, " M"], asked: Features, number: int
) -> Float64[np.ndarray, "K N T"]:
    """Return the probabilities that each method gives, of `number` types."""
    spaces = [
        [side.leading(kinds, NEAREST_COMPONENTS) for side in (known, asked)]
        for kinds in sorted({1, 2, len(known.blocks)})
    ]
    results = [
        logistic(ours, theirs, types, number, inverse)
        for (ours, theirs), penalties in zip(spaces, INVERSE_PENALTIES, strict=False)
        for inverse in penalties
    ]
    for ours, theirs in spaces[1:]:
        near = types[nearest(ours, theirs, max(NEIGHBOURS))]
        for count in NEIGHBOURS:
            shares = np.eye(number)[near[:, :count]].mean(1)
            results.append(shares)
    # Nothing is impossible: a type that a fold lacks, or that no neighbour has.
    return (1 - LEAST) * np.stack(results) + LEAST / number


def logistic(
    known: Float32[np.ndarray, "M F"],
    asked: Float32[np.ndarray, "N F"],
    types: Int64[np.ndarray, " M"],
    number: int,
    inverse_penalty: float,
) -> Float64[np.ndarray, "N T"]:
    """Return the probabilities of a logistic regression; types that it never saw have none."""
    result = np.zeros((len(asked), number))
    present = np.unique(types)
    if len(present) == 1:
        result[:, present] = 1
        return result
    fit = LogisticRegression(C=inverse_penalty, max_iter=ITERATIONS)
    result[:, present] = fit.fit(known, types).predict_proba(asked)
    return result


def mixture_weights(likelihood: Float64[np.ndarray, "K N"]) -> Float64[np.ndarray, " K"]:
    """Return the weights under which a mixture of methods gives the true types most probability."""
    weight = np.full(len(likelihood), 1 / len(likelihood))
    for _ in range(ROUNDS):
        joint = weight[:, None] * likelihood
        weight = (joint / joint.sum(0)).mean(1)
    return weight


def tempered(
    probability: Float64[np.ndarray, "N T"], temperature: float
) -> Float64[np.ndarray, "N T"]:
    """Raise probabilities to 1 / temperature, and bring them to a sum of one."""
    logs = np.log(probability) / temperature
    powers = np.exp(logs - logs.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def best_temperature(
    probability: Float64[np.ndarray, "N T"], types: Int64[np.ndarray, " N"]
) -> float:
    """Return the temperature with the least logarithmic loss."""

    def loss(log_temperature: float) -> float:
        chance = tempered(probability, float(np.exp(log_temperature)))
        return float(-np.log(np.maximum(chance[np.arange(len(types)), types], 1e-12)).mean())

    bounds = (-MOST_LOG_TEMPERATURE, MOST_LOG_TEMPERATURE)
    return float(np.exp(minimize_scalar(loss, bounds=bounds, method="bounded").x))
