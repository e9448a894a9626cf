"""Every metric, one entry each: what the scores, tables and report know of it.

A metric is added here and nowhere else: its function, which way is better, its chance level, and
how to read it. Methods that are compared are in `methods.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from alphastomics.evaluation.calibration import Calibration
from alphastomics.evaluation.clusters import transferred_labels
from alphastomics.evaluation.distances import distance_mse
from alphastomics.evaluation.expression import cell_cosines, expression_mse, summary
from alphastomics.evaluation.neighbours import knn_preservation
from alphastomics.evaluation.pairs import (
    CONTACT_SHARES,
    ExpressionPair,
    PositionPair,
    TissuePair,
    TypePair,
)
from alphastomics.evaluation.position import class_rssd, procrustes, rmsd, rssd
from alphastomics.evaluation.tissue import (
    gene_wasserstein,
    two_sample_auc,
    type_neighbour_distance,
    type_share_distance,
)

NEIGHBOURS = 10  # of kNN preservation, as published
Direction = Literal["higher", "lower", "nearest", "unknown"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes
    ----------
    name
        Key in the scores.
    function
        The value for a pair of prediction and truth; None where it does not apply.
    better
        Which way is better; `nearest` to `ideal`, or not known.
    label, meaning
        What the report calls it, and how to read it.
    ideal
        The best value.
    bounded
        Whether no value exceeds 1: then a bar is full at 1.
    chance
        Score of a prediction that knows nothing, by the number of cells, where it is known.
    """

    name: str
    function: Callable[[Any], float | None]
    better: Direction
    label: str
    meaning: str
    ideal: float = 1.0
    bounded: bool = True
    chance: Callable[[int], float] | None = None

    def rank(self, value: float) -> float:
        """Return a number that is smaller, the better a value is."""
        if self.better == "nearest":
            return abs(value - self.ideal)
        return value if self.better == "lower" else -value


def _error(
    name: str, function: Callable[[Any], float | None], label: str, meaning: str, **more: Any
) -> Metric:
    """Return a metric whose best value is 0."""
    return Metric(name, function, "lower", label, meaning, ideal=0.0, **more)


def _score(
    name: str, function: Callable[[Any], float | None], label: str, meaning: str, **more: Any
) -> Metric:
    """Return a metric whose best value is 1."""
    return Metric(name, function, "higher", label, meaning, **more)


def _contact(kind: str, share: str, meaning: str) -> Metric:
    label = "Contact precision" if kind == "precision" else "Contact F1"
    return _score(
        f"contact_{kind}_{share}",
        lambda pair: getattr(pair.contacts[share], kind),
        f"{label}, {share.removesuffix('pct')} %",
        meaning,
        chance=lambda _: CONTACT_SHARES[share],
    )


def _axis(number: int, axis: str) -> Metric:
    return _error(
        f"rmse_{axis}",
        lambda pair: pair.axis_errors[number] if number < len(pair.axis_errors) else None,
        f"RMSE along {axis}",
        "Error along one axis.",
        bounded=False,
    )


def _procrustes(name: str, label: str, meaning: str, *, scale: bool, reflection: bool) -> Metric:
    return _error(
        name,
        lambda pair: procrustes(pair.predicted, pair.true, scale=scale, reflection=reflection),
        label,
        meaning,
        chance=(lambda _: 1.0) if scale else None,
    )


def _none(_: int) -> float:
    return 0.0


CLOSEST = "Of the closest {} % of predicted pairs, how many are truly among them?"
POSITION_METRICS = (
    _score(
        "spearman_mean",
        lambda pair: pair.spearman.mean,
        "Spearman of distances",
        "Are cells that lie far apart predicted far apart? Mean over cells.",
        chance=_none,
    ),
    _score(
        "spearman_median",
        lambda pair: pair.spearman.median,
        "Spearman of distances, median",
        "The same, median over cells.",
        chance=_none,
    ),
    _score(
        "knn_preservation",
        lambda pair: float(knn_preservation(pair.predicted, pair.true, k=NEIGHBOURS).mean()),
        "10 nearest neighbours kept",
        "Share of a cell's true neighbours that are predicted beside it.",
        chance=lambda num_cells: NEIGHBOURS / (num_cells - 1),
    ),
    _contact("precision", "1pct", CLOSEST.format(1)),
    _contact("precision", "10pct", CLOSEST.format(10)),
    _contact("f1", "1pct", "Precision and recall of contacts."),
    _contact("f1", "10pct", "Precision and recall of contacts."),
    _procrustes(
        "procrustes",
        "Procrustes disparity",
        "Squared error left after the best shift, rotation and scale; 1 knows nothing.",
        scale=True,
        reflection=True,
    ),
    _procrustes(
        "procrustes_no_reflection",
        "Procrustes, not mirrored",
        "The same, but a mirror image counts as wrong.",
        scale=True,
        reflection=False,
    ),
    _procrustes(
        "procrustes_no_scale",
        "Procrustes, not scaled",
        "The same in the tissue's own size.",
        scale=False,
        reflection=True,
    ),
    _error(
        "distance_mse",
        lambda pair: distance_mse(pair.predicted, pair.true),
        "Distance MSE",
        "Mean squared error of pair distances.",
        bounded=False,
    ),
    _error(
        "rmsd",
        lambda pair: rmsd(pair.predicted, pair.true, reflection=True),
        "RMSD",
        "Root mean square distance from the true position, in the data's units.",
        bounded=False,
    ),
    _error(
        "rssd",
        lambda pair: rssd(pair.predicted, pair.true),
        "RSSD",
        "Root of summed squared distances, for comparison with LUNA.",
        bounded=False,
    ),
    _error(
        "class_rssd",
        lambda pair: (
            None if pair.labels is None else class_rssd(pair.predicted, pair.true, pair.labels)
        ),
        "RSSD by cell type",
        "The same, cell type by cell type.",
        bounded=False,
    ),
    _axis(0, "x"),
    _axis(1, "y"),
    _axis(2, "z"),
)
MORAN_METRICS = (
    Metric(
        "moran_i",
        lambda pair: float(pair.moran_pair[0].nanmean()),
        "unknown",
        "Moran's I",
        "Spatial autocorrelation of the prediction, mean over genes.",
    ),
    Metric(
        "moran_i_true",
        lambda pair: float(pair.moran_pair[1].nanmean()),
        "unknown",
        "Moran's I of the truth",
        "The same of the true tissue.",
    ),
    _score(
        "moran_correlation",
        lambda pair: pair.moran.correlation,
        "Moran's I, correlation",
        "Are the same genes spatial in the prediction as in the truth?",
        chance=_none,
    ),
    _error(
        "moran_mae",
        lambda pair: pair.moran.mean_absolute_error,
        "Moran's I, error",
        "How far their spatial order is off.",
        bounded=False,
    ),
)
EXPRESSION_METRICS = (
    _score(
        "pearson_gene_mean",
        lambda pair: pair.by_gene.mean,
        "Pearson r by gene",
        "Does a gene's pattern over the tissue agree? Mean over genes.",
        chance=_none,
    ),
    _score(
        "pearson_gene_median",
        lambda pair: pair.by_gene.median,
        "Pearson r by gene, median",
        "The same, median over genes.",
        chance=_none,
    ),
    _score(
        "pearson_cell_mean",
        lambda pair: pair.by_cell.mean,
        "Pearson r by cell",
        "Does a cell's profile over the genes agree? Mean over cells.",
    ),
    _score(
        "pearson_cell_median",
        lambda pair: pair.by_cell.median,
        "Pearson r by cell, median",
        "The same, median over cells.",
    ),
    _score(
        "cosine_mean",
        lambda pair: summary(cell_cosines(*pair.arrays), "cosine of cells").mean,
        "Cosine by cell",
        "Angle between true and predicted profiles.",
    ),
    _error(
        "expression_mse",
        lambda pair: expression_mse(*pair.arrays),
        "Expression MSE",
        "Mean squared error over cells and genes.",
        bounded=False,
    ),
    *MORAN_METRICS,
)


def _type_accuracy(pair: TypePair) -> float | None:
    if pair.real is None:
        return None
    k = min(NEIGHBOURS, len(pair.real[0]))
    types = transferred_labels(pair.predicted, *pair.real, k=k, seed=pair.seed)
    return float(np.mean(types == np.asarray(pair.labels)))


TYPE_METRICS = (
    _score(
        "type_accuracy",
        _type_accuracy,
        "Cell type by expression kNN",
        "Share of cells whose nearest real cells in expression space are of their type.",
    ),
    _score(
        "cluster_ari",
        lambda pair: pair.clusters.ari,
        "Clusters, ARI",
        "Do clusters of the prediction agree with the types?",
    ),
    _score(
        "cluster_nmi",
        lambda pair: pair.clusters.nmi,
        "Clusters, NMI",
        "The same, as shared information.",
    ),
    _score(
        "cluster_accuracy",
        lambda pair: pair.clusters.accuracy,
        "Clusters, accuracy",
        "The same, after the best naming.",
    ),
)
TISSUE_METRICS = (
    Metric(
        "auc_cells",
        lambda pair: two_sample_auc(
            pair.generated.expression, pair.real.expression, seed=pair.seed
        ),
        "nearest",
        "New against real cells, AUC",
        "Can a classifier separate new from real cells? 0.5: it cannot.",
        ideal=0.5,
    ),
    _error(
        "type_neighbour_distance",
        lambda pair: type_neighbour_distance(
            (pair.codes[0], pair.generated.position),
            (pair.codes[1], pair.real.position),
            num_types=len(pair.typed.names),
        ),
        "Neighbours by type",
        "How far the types around a cell differ from the real tissue's; 0: not at all.",
    ),
    _error(
        "type_share_distance",
        lambda pair: type_share_distance(*pair.codes, num_types=len(pair.typed.names)),
        "Shares of types",
        "How far the composition differs; 0: not at all.",
    ),
    _error(
        "wasserstein_mean",
        lambda pair: gene_wasserstein(pair.generated.expression, pair.real.expression),
        "Values of genes",
        "Wasserstein distance of each gene's values from the real ones.",
        bounded=False,
    ),
    *MORAN_METRICS,
)
CALIBRATION_METRICS = (
    Metric(
        "std_coverage",
        lambda result: result.coverage,
        "unknown",
        "Truth within the samples",
        "Share of true values between the least and the largest sample.",
    ),
    Metric(
        "std_coverage_expected",
        lambda result: result.expected,
        "unknown",
        "… expected",
        "The share that calibrated samples would have.",
    ),
    Metric(
        "std_error_ratio",
        lambda result: result.error_over_std,
        "nearest",
        "Error over std",
        "1: the std is right; above: too sure.",
        bounded=False,
    ),
    _score(
        "std_error_spearman",
        lambda result: result.spearman,
        "Std follows error",
        "Rank correlation over cells: is the std large where the error is?",
    ),
)
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metrics in (POSITION_METRICS, EXPRESSION_METRICS, TYPE_METRICS, TISSUE_METRICS)
    for metric in metrics
} | {metric.name: metric for metric in CALIBRATION_METRICS}
Pair = PositionPair | ExpressionPair | TypePair | TissuePair | Calibration


def values_of(metrics: tuple[Metric, ...], pair: Pair) -> dict[str, float]:
    """Compute every metric that applies."""
    values = {metric.name: metric.function(pair) for metric in metrics}
    return {name: value for name, value in values.items() if value is not None}


def metric_named(name: str) -> Metric:
    """Return a metric; one of another program has its name alone."""
    unknown = Metric(name, lambda _: math.nan, "unknown", name.replace("_", " "), "", bounded=False)
    return METRICS.get(name, unknown)
