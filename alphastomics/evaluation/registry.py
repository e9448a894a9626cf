"""Every metric by its name: what the scores, tables and report know of it.

A metric is added as an entry of a table in `metrics_of_*.py` and nowhere else. Methods that are
compared are in `methods.py`.
"""

import math

from alphastomics.evaluation.calibration import Calibration
from alphastomics.evaluation.metric import NEIGHBOURS, Direction, Metric
from alphastomics.evaluation.metrics_of_expression import EXPRESSION_METRICS, TYPE_METRICS
from alphastomics.evaluation.metrics_of_position import POSITION_METRICS
from alphastomics.evaluation.metrics_of_tissue import CALIBRATION_METRICS, TISSUE_METRICS
from alphastomics.evaluation.pairs import ExpressionPair, PositionPair, TissuePair, TypePair

__all__ = [
    "CALIBRATION_METRICS",
    "EXPRESSION_METRICS",
    "METRICS",
    "NEIGHBOURS",
    "POSITION_METRICS",
    "TISSUE_METRICS",
    "TYPE_METRICS",
    "Direction",
    "Metric",
    "metric_named",
    "values_of",
]

TABLES = (
    POSITION_METRICS,
    EXPRESSION_METRICS,
    TYPE_METRICS,
    TISSUE_METRICS,
    CALIBRATION_METRICS,
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
