"""All metrics of one slice at once: what `test` and the report put into a table, by name.

One number of neighbours and two shares of contacts, those that others report, hold for all tables.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float

from alphastomics.evaluation.arrays import Array, as_tensor
from alphastomics.evaluation.clusters import (
    Labels,
    cluster_scores,
    clustered,
    transferred_labels,
)
from alphastomics.evaluation.distances import contact_scores, distance_mse
from alphastomics.evaluation.expression import (
    cell_correlations,
    cell_cosines,
    expression_mse,
    gene_correlations,
    summary,
)
from alphastomics.evaluation.neighbours import (
    knn_preservation,
    moran_agreement,
    morans_i,
    spatial_neighbours,
)
from alphastomics.evaluation.position import axis_rmse, class_rssd, procrustes, rmsd, rssd
from alphastomics.evaluation.ranks import distance_spearman

NEIGHBOURS = 10  # of kNN preservation, as published
MORAN_NEIGHBOURS = 6  # squidpy's default
CONTACT_SHARES = {"1pct": 0.01, "10pct": 0.10}  # G2T's and LUNA's


def position_scores(
    predicted: Float[Array, "N D"], true: Float[Array, "N D"], labels: Labels | None = None
) -> dict[str, float]:
    """Every metric of positions; with cell types, the RSSD of classes too.

    Mirror images count as right, as in the training loss and in LUNA's metrics, except in
    `procrustes_no_reflection`.
    """
    spearman = summary(distance_spearman(predicted, true), "Spearman of distances")
    scores = {
        "distance_mse": distance_mse(predicted, true),
        "procrustes": procrustes(predicted, true, scale=True, reflection=True),
        "procrustes_no_reflection": procrustes(predicted, true, scale=True, reflection=False),
        "procrustes_no_scale": procrustes(predicted, true, scale=False, reflection=True),
        "rmsd": rmsd(predicted, true, reflection=True),
        "rssd": rssd(predicted, true),
        "spearman_mean": spearman.mean,
        "spearman_median": spearman.median,
        "knn_preservation": float(knn_preservation(predicted, true, k=NEIGHBOURS).mean()),
    }
    errors = axis_rmse(predicted, true, reflection=True)
    scores |= {f"rmse_{axis}": float(error) for axis, error in zip("xyz", errors, strict=False)}
    for name, share in CONTACT_SHARES.items():
        contact = contact_scores(predicted, true, share=share)
        scores |= {f"contact_precision_{name}": contact.precision, f"contact_f1_{name}": contact.f1}
    if labels is not None:
        scores["class_rssd"] = class_rssd(predicted, true, labels)
    return scores


def expression_scores(
    predicted: Float[Array, "N G"],
    true: Float[Array, "N G"],
    measured: Bool[Array, " G"],
    position: Float[Array, "N D"],
) -> dict[str, float]:
    """Every metric of expression over the slice's measured genes; Moran's I over `position`."""
    x, y, genes = as_tensor(predicted), as_tensor(true), torch.as_tensor(measured)
    arrays = x, y, genes[None]
    by_gene = summary(gene_correlations(*arrays), "Pearson r of genes")
    by_cell = summary(cell_correlations(*arrays), "Pearson r of cells")
    graph = spatial_neighbours(position, k=MORAN_NEIGHBOURS)
    found, real = (morans_i(values[:, genes], graph) for values in (x, y))
    moran = moran_agreement(found, real, num_cells=len(true))
    return {
        "expression_mse": expression_mse(*arrays),
        "pearson_gene_mean": by_gene.mean,
        "pearson_gene_median": by_gene.median,
        "pearson_cell_mean": by_cell.mean,
        "pearson_cell_median": by_cell.median,
        "cosine_mean": summary(cell_cosines(*arrays), "cosine of cells").mean,
        "moran_i": float(found.nanmean()),
        "moran_i_true": float(real.nanmean()),
        "moran_correlation": moran.correlation,
        "moran_mae": moran.mean_absolute_error,
    }


def type_scores(
    predicted: Float[Array, "N G"],
    labels: Labels,
    real: tuple[Float[Array, "M G"], Labels] | None,
    *,
    seed: int,
) -> dict[str, float]:
    """Score the cell types of generated expression.

    Its k-means clusters, as many as there are types, against the true types; and, where real cells
    with types are given, the share of cells whose likest real cells have the right type.
    """
    names = np.unique(np.asarray(labels))
    scores = cluster_scores(clustered(predicted, num_clusters=len(names), seed=seed), labels)
    found = {f"cluster_{name}": value for name, value in scores._asdict().items()}
    if real is not None:
        k = min(NEIGHBOURS, len(real[0]))
        types = transferred_labels(predicted, *real, k=k, seed=seed)
        found["type_accuracy"] = float(np.mean(types == np.asarray(labels)))
    return found


def chance_levels(num_cells: int) -> dict[str, float]:
    """Scores of a prediction that knows nothing, where they are known beforehand."""
    shares = {
        f"contact_{score}_{name}": share
        for name, share in CONTACT_SHARES.items()
        for score in ("precision", "f1")
    }
    return shares | {
        "procrustes": 1.0,
        "procrustes_no_reflection": 1.0,
        "spearman_mean": 0.0,
        "spearman_median": 0.0,
        "knn_preservation": NEIGHBOURS / (num_cells - 1),
        "pearson_gene_mean": 0.0,
        "pearson_gene_median": 0.0,
        "moran_correlation": 0.0,
    }
