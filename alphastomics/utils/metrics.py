"""The metrics of `test`, under their documented name: arrays of one slice enter, numbers leave.

Each is a pure function of torch tensors (on any device) or numpy arrays; docs/metrics.md has the
formula, range and chance level of every one, and `alphastomics.evaluation` the code.
"""

from alphastomics.evaluation.clusters import (
    ClusterScores,
    cluster_scores,
    clustered,
    transferred_labels,
)
from alphastomics.evaluation.distances import ContactScores, contact_scores, distance_mse
from alphastomics.evaluation.expression import (
    Summary,
    cell_correlations,
    cell_cosines,
    expression_mse,
    gene_correlations,
    summary,
)
from alphastomics.evaluation.neighbours import (
    MoranAgreement,
    knn_preservation,
    moran_agreement,
    morans_i,
    spatial_neighbours,
)
from alphastomics.evaluation.position import (
    aligned,
    axis_rmse,
    class_rssd,
    procrustes,
    rmsd,
    rssd,
)
from alphastomics.evaluation.ranks import distance_spearman
from alphastomics.evaluation.registry import chance_levels, expression_scores, position_scores

__all__ = [
    "ClusterScores",
    "ContactScores",
    "MoranAgreement",
    "Summary",
    "aligned",
    "axis_rmse",
    "cell_correlations",
    "cell_cosines",
    "chance_levels",
    "class_rssd",
    "cluster_scores",
    "clustered",
    "contact_scores",
    "distance_mse",
    "distance_spearman",
    "expression_mse",
    "expression_scores",
    "gene_correlations",
    "knn_preservation",
    "moran_agreement",
    "morans_i",
    "position_scores",
    "procrustes",
    "rmsd",
    "rssd",
    "spatial_neighbours",
    "summary",
    "transferred_labels",
]
