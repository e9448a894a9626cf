"""The metrics of expression and of its cell types, one entry each.

They are of an `ExpressionPair`, of Moran's I of any pair that has it, and of a `TypePair`.
"""

import numpy as np

from alphastomics.evaluation.clusters import transferred_labels
from alphastomics.evaluation.expression import cell_cosines, expression_mse, summary
from alphastomics.evaluation.metric import (
    NEIGHBOURS,
    Metric,
    error_metric,
    no_signal,
    score_metric,
)
from alphastomics.evaluation.pairs import TypePair

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
    score_metric(
        "moran_correlation",
        lambda pair: None if pair.moran is None else pair.moran.correlation,
        "Moran's I, correlation",
        "Are the same genes spatial in the prediction as in the truth?",
        chance=no_signal,
    ),
    error_metric(
        "moran_mae",
        lambda pair: None if pair.moran is None else pair.moran.mean_absolute_error,
        "Moran's I, error",
        "How far their spatial order is off.",
        bounded=False,
    ),
)
EXPRESSION_METRICS = (
    score_metric(
        "pearson_gene_mean",
        lambda pair: pair.by_gene.mean,
        "Pearson r by gene",
        "Does a gene's pattern over the tissue agree? Mean over genes.",
        chance=no_signal,
        short="r by gene",
    ),
    score_metric(
        "pearson_gene_median",
        lambda pair: pair.by_gene.median,
        "Pearson r by gene, median",
        "The same, median over genes.",
        chance=no_signal,
    ),
    score_metric(
        "pearson_cell_mean",
        lambda pair: None if pair.by_cell is None else pair.by_cell.mean,
        "Pearson r by cell",
        "Does a cell's profile over the genes agree? Mean over cells.",
    ),
    score_metric(
        "pearson_cell_median",
        lambda pair: None if pair.by_cell is None else pair.by_cell.median,
        "Pearson r by cell, median",
        "The same, median over cells.",
    ),
    score_metric(
        "cosine_mean",
        lambda pair: summary(cell_cosines(*pair.arrays), "cosine of cells").mean,
        "Cosine by cell",
        "Angle between true and predicted profiles.",
    ),
    error_metric(
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
    score_metric(
        "type_accuracy",
        _type_accuracy,
        "Cell type by expression kNN",
        "Share of cells whose nearest real cells in expression space are of their type.",
    ),
    score_metric(
        "cluster_ari",
        lambda pair: pair.clusters.ari,
        "Clusters, ARI",
        "Do clusters of the prediction agree with the types?",
    ),
    score_metric(
        "cluster_nmi",
        lambda pair: pair.clusters.nmi,
        "Clusters, NMI",
        "The same, as shared information.",
    ),
    score_metric(
        "cluster_accuracy",
        lambda pair: pair.clusters.accuracy,
        "Clusters, accuracy",
        "The same, after the best naming.",
    ),
)
