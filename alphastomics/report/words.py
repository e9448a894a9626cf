"""What the metrics of the table are called and which way is better: names enter, words leave."""

from typing import Literal, NamedTuple


class Words(NamedTuple):
    """A metric in words: its label, which way is better, and how to read it."""

    label: str
    better: Literal["higher", "lower", "unknown"]
    meaning: str


OURS = "alphastomics"
METRICS = {
    "spearman_mean": Words(
        "Spearman of distances",
        "higher",
        "Are cells that lie far apart placed far apart? Mean over cells.",
    ),
    "spearman_median": Words(
        "Spearman of distances, median", "higher", "The same, median over cells."
    ),
    "knn_preservation": Words(
        "10 nearest neighbours kept",
        "higher",
        "Share of a cell's true neighbours that are placed beside it.",
    ),
    "contact_precision_1pct": Words(
        "Contact precision, 1 %",
        "higher",
        "Of the closest 1 % of placed pairs, how many are truly among them?",
    ),
    "contact_precision_10pct": Words(
        "Contact precision, 10 %",
        "higher",
        "Of the closest 10 % of placed pairs, how many are truly among them?",
    ),
    "contact_f1_1pct": Words("Contact F1, 1 %", "higher", "Precision and recall of contacts."),
    "contact_f1_10pct": Words("Contact F1, 10 %", "higher", "Precision and recall of contacts."),
    "procrustes": Words(
        "Procrustes disparity",
        "lower",
        "Squared error left after the best shift, turn and scale; 1 knows nothing.",
    ),
    "procrustes_no_reflection": Words(
        "Procrustes, not mirrored", "lower", "The same, but a mirror image counts as wrong."
    ),
    "procrustes_no_scale": Words(
        "Procrustes, not scaled", "lower", "The same in the tissue's own size."
    ),
    "distance_mse": Words("Distance MSE", "lower", "Mean squared error of pair distances."),
    "rmsd": Words(
        "RMSD", "lower", "Root mean square distance from the true place, in the data's units."
    ),
    "rssd": Words("RSSD", "lower", "Root of summed squared distances, for comparison with LUNA."),
    "class_rssd": Words("RSSD by cell type", "lower", "The same, cell type by cell type."),
    "rmse_x": Words("RMSE along x", "lower", "Error along one axis."),
    "rmse_y": Words("RMSE along y", "lower", "Error along one axis."),
    "rmse_z": Words("RMSE along z", "lower", "Error along one axis."),
    "pearson_gene_mean": Words(
        "Pearson r by gene",
        "higher",
        "Does a gene's pattern over the tissue agree? Mean over genes.",
    ),
    "pearson_gene_median": Words(
        "Pearson r by gene, median", "higher", "The same, median over genes."
    ),
    "pearson_cell_mean": Words(
        "Pearson r by cell",
        "higher",
        "Does a cell's profile over the genes agree? Mean over cells.",
    ),
    "pearson_cell_median": Words(
        "Pearson r by cell, median", "higher", "The same, median over cells."
    ),
    "cosine_mean": Words("Cosine by cell", "higher", "Angle between true and predicted profiles."),
    "expression_mse": Words("Expression MSE", "lower", "Mean squared error over cells and genes."),
    "moran_i": Words(
        "Moran's I", "unknown", "Spatial autocorrelation of the prediction, mean over genes."
    ),
    "moran_i_true": Words("Moran's I of the truth", "unknown", "The same of the true tissue."),
    "moran_correlation": Words(
        "Moran's I, correlation",
        "higher",
        "Are the same genes spatial in the prediction as in the truth?",
    ),
    "moran_mae": Words("Moran's I, error", "lower", "How far their spatial order is off."),
    "type_accuracy": Words(
        "Cell type of the likest cells",
        "higher",
        "Share of cells whose likest real cells are of their type.",
    ),
    "cluster_ari": Words(
        "Clusters, ARI", "higher", "Do clusters of the prediction agree with the types?"
    ),
    "cluster_nmi": Words("Clusters, NMI", "higher", "The same, as shared information."),
    "cluster_accuracy": Words("Clusters, accuracy", "higher", "The same, after the best naming."),
    "auc_cells": Words(
        "Told apart cell by cell",
        "lower",
        "Can a classifier tell new from real cells? 0.5: it cannot.",
    ),
    "type_neighbour_distance": Words(
        "Neighbours by type",
        "lower",
        "How far the types around a cell differ from the real tissue's; 0: alike.",
    ),
    "type_share_distance": Words(
        "Shares of types", "lower", "How far the composition differs; 0: alike."
    ),
    "wasserstein_mean": Words(
        "Values of genes", "lower", "Distance of each gene's values from the real ones."
    ),
    "spread_coverage": Words(
        "Truth within the draws", "unknown", "Share of true values between the draws."
    ),
    "spread_coverage_expected": Words(
        "… expected", "unknown", "The share that a right spread would have."
    ),
    "spread_error_ratio": Words(
        "Error over spread", "unknown", "1: the spread is right; above: too sure."
    ),
    "spread_error_spearman": Words(
        "Spread follows error",
        "higher",
        "Rank correlation over cells: does it spread where it errs?",
    ),
}


def words_of(metric: str) -> Words:
    """Return the words of a metric; one that is not known has its name alone."""
    return METRICS.get(metric, Words(metric.replace("_", " "), "unknown", ""))
