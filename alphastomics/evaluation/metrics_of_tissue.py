"""The metrics of new tissue and of the std of samples: of a `TissuePair` and a `Calibration`."""

from alphastomics.evaluation.metric import Metric, error_metric, score_metric
from alphastomics.evaluation.metrics_of_expression import MORAN_METRICS
from alphastomics.evaluation.outline import outline_overlap, spacing_distance
from alphastomics.evaluation.separability import linear_auc, niche_auc, two_sample_auc
from alphastomics.evaluation.tissue import (
    depth_wasserstein,
    gene_wasserstein,
    type_neighbour_distance,
    type_share_distance,
    zero_share_error,
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
    Metric(
        "auc_cells_linear",
        lambda pair: linear_auc(pair.generated.expression, pair.real.expression, seed=pair.seed),
        "nearest",
        "New against real cells, linear AUC",
        "The same by logistic regression on all genes. 0.5: it cannot.",
        ideal=0.5,
        slow=True,
    ),
    Metric(
        "auc_niches",
        lambda pair: niche_auc(pair.generated, pair.real, seed=pair.seed),
        "nearest",
        "New against real niches, AUC",
        "Can a classifier separate them by a cell and the mean of its neighbours? 0.5: it cannot.",
        ideal=0.5,
        slow=True,
    ),
    error_metric(
        "type_neighbour_distance",
        lambda pair: type_neighbour_distance(
            (pair.codes[0], pair.generated.position),
            (pair.codes[1], pair.real.position),
            num_types=len(pair.typed.names),
        ),
        "Neighbours by type",
        "How far the types around a cell differ from the real tissue's; 0: not at all.",
    ),
    error_metric(
        "type_share_distance",
        lambda pair: type_share_distance(*pair.codes, num_types=len(pair.typed.names)),
        "Shares of types",
        "How far the composition differs; 0: not at all.",
    ),
    error_metric(
        "wasserstein_mean",
        lambda pair: gene_wasserstein(pair.generated.expression, pair.real.expression),
        "Values of genes",
        "Wasserstein distance of each gene's values from the real ones.",
        bounded=False,
    ),
    error_metric(
        "zero_share_error",
        lambda pair: zero_share_error(pair.generated.expression, pair.real.expression),
        "Zeros of genes",
        "How far the share of cells in which a gene is zero differs, mean over genes.",
    ),
    error_metric(
        "depth_distance",
        lambda pair: (
            None
            if pair.generated.totals is None or pair.real.totals is None
            else depth_wasserstein(pair.generated.totals, pair.real.totals)
        ),
        "Counts of cells",
        "Wasserstein distance of the logarithm of a cell's counts.",
        bounded=False,
    ),
    Metric(
        "correlation_slope",
        lambda pair: None if pair.correlations is None else pair.correlations.slope,
        "nearest",
        "Gene-gene correlations, slope",
        "How strong correlations of genes are beside the real ones; below 1: too weak.",
        bounded=False,
    ),
    score_metric(
        "correlation_r",
        lambda pair: None if pair.correlations is None else pair.correlations.r,
        "Gene-gene correlations, r",
        "Are the same genes correlated as in real cells? Pearson r over pairs of genes.",
    ),
    *MORAN_METRICS,
    error_metric(
        "spacing_distance",
        lambda pair: spacing_distance(pair.generated.position, pair.real.position),
        "Spacing of cells",
        "Wasserstein distance of nearest-neighbour distances, in medians of the real ones.",
        bounded=False,
    ),
    score_metric(
        "outline_overlap",
        lambda pair: outline_overlap(pair.generated.position, pair.real.position),
        "Overlap of outlines",
        "Intersection over union of both tissues' outlines, in the best orientation.",
    ),
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
    score_metric(
        "std_error_spearman",
        lambda result: result.spearman,
        "Std follows error",
        "Rank correlation over cells: is the std large where the error is?",
    ),
)
INTERVAL_METRICS = (
    Metric(
        "interval_coverage",
        lambda result: result.coverage,
        "unknown",
        "Truth within its interval",
        "Share of true positions within their radius, or of true values within their interval.",
    ),
    Metric(
        "interval_coverage_expected",
        lambda result: result.expected,
        "unknown",
        "… promised",
        "The share that radii and intervals promise.",
    ),
)
