"""Every metric by its name, and all of one slice at once: what scores, tables and report show.

A metric is added as an entry of a table in `metrics_of_*.py` and nowhere else. Methods that are
compared are in `methods.py`.
"""

import math

from jaxtyping import Bool, Float

from alphastomics.evaluation.arrays import Array
from alphastomics.evaluation.calibration import Calibration
from alphastomics.evaluation.clusters import Labels, TypedCells
from alphastomics.evaluation.metric import Metric
from alphastomics.evaluation.metrics_of_expression import EXPRESSION_METRICS, TYPE_METRICS
from alphastomics.evaluation.metrics_of_position import POSITION_METRICS
from alphastomics.evaluation.metrics_of_tissue import (
    CALIBRATION_METRICS,
    INTERVAL_METRICS,
    TISSUE_METRICS,
)
from alphastomics.evaluation.pairs import ExpressionPair, PositionPair, TissuePair, TypePair
from alphastomics.evaluation.tissue import Tissue

TABLES = (
    POSITION_METRICS,
    EXPRESSION_METRICS,
    TYPE_METRICS,
    TISSUE_METRICS,
    CALIBRATION_METRICS,
    INTERVAL_METRICS,
)
METRICS: dict[str, Metric] = {metric.name: metric for table in TABLES for metric in table}
Pair = PositionPair | ExpressionPair | TypePair | TissuePair | Calibration


def values_of(metrics: tuple[Metric, ...], pair: Pair) -> dict[str, float]:
    """Compute every metric that applies."""
    values = {metric.name: metric.function(pair) for metric in metrics}
    return {name: value for name, value in values.items() if value is not None}


def metric_named(name: str) -> Metric:
    """Return a metric; one of another program has its name alone."""
    unknown = Metric(name, lambda _: math.nan, "unknown", name.replace("_", " "), "", bounded=False)
    return METRICS.get(name, unknown)


def position_scores(
    predicted: Float[Array, "N D"], true: Float[Array, "N D"], labels: Labels | None = None
) -> dict[str, float]:
    """Every metric of positions; with cell types, the RSSD of classes too.

    Mirror images count as right, as in the training loss and in LUNA's metrics, except in
    `procrustes_no_reflection`.
    """
    return values_of(POSITION_METRICS, PositionPair(predicted, true, labels))


def expression_scores(
    predicted: Float[Array, "N G"],
    true: Float[Array, "N G"],
    measured: Bool[Array, " G"],
    position: Float[Array, "N D"],
) -> dict[str, float]:
    """Every metric of expression over the slice's measured genes; Moran's I over `position`."""
    return values_of(EXPRESSION_METRICS, ExpressionPair(predicted, true, measured, position))


def type_scores(
    predicted: Float[Array, "N G"],
    labels: Labels,
    real: tuple[Float[Array, "M G"], Labels] | None,
    *,
    seed: int,
) -> dict[str, float]:
    """Score the cell types of generated expression.

    Its k-means clusters, as many as there are types, against the true types; and, where real cells
    with types are given, the share of cells whose expression kNN among them has the right type.
    """
    return values_of(TYPE_METRICS, TypePair(predicted, labels, real, seed))


def tissue_scores(
    generated: Tissue, real: Tissue, typed: TypedCells, *, seed: int, with_slow: bool = True
) -> dict[str, float]:
    """Every comparison of new with real tissue, over genes that the real one measured.

    Parameters
    ----------
    generated, real
        The two tissues; they need not have the same number of cells.
    typed
        Real cells with known types: cells of both tissues take the types of their expression kNN.
    seed
        Seed of the classifiers.
    with_slow
        Compute the slow metrics, too.
    """
    metrics = tuple(metric for metric in TISSUE_METRICS if with_slow or not metric.slow)
    return values_of(metrics, TissuePair(generated, real, typed, seed))


def chance_levels(num_cells: int) -> dict[str, float]:
    """Scores of a prediction that knows nothing, where they are known beforehand."""
    return {
        name: metric.chance(num_cells)
        for name, metric in METRICS.items()
        if metric.chance is not None
    }
