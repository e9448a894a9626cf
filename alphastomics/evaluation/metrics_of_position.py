"""The metrics of positions, one entry each: of a `PositionPair`."""

from alphastomics.evaluation.distances import distance_mse
from alphastomics.evaluation.metric import (
    NEIGHBOURS,
    Metric,
    error_metric,
    no_signal,
    score_metric,
)
from alphastomics.evaluation.neighbours import knn_preservation
from alphastomics.evaluation.pairs import CONTACT_SHARES
from alphastomics.evaluation.position import class_rssd, procrustes, rmsd, rssd


def _contact(kind: str, share: str, meaning: str) -> Metric:
    label = "Contact precision" if kind == "precision" else "Contact F1"
    return score_metric(
        f"contact_{kind}_{share}",
        lambda pair: getattr(pair.contacts[share], kind),
        f"{label}, {share.removesuffix('pct')} %",
        meaning,
        chance=lambda _: CONTACT_SHARES[share],
    )


def _axis(number: int, axis: str) -> Metric:
    return error_metric(
        f"rmse_{axis}",
        lambda pair: pair.axis_errors[number] if number < len(pair.axis_errors) else None,
        f"RMSE along {axis}",
        "Error along one axis.",
        bounded=False,
    )


def _procrustes(name: str, label: str, meaning: str, *, scale: bool, reflection: bool) -> Metric:
    return error_metric(
        name,
        lambda pair: procrustes(pair.predicted, pair.true, scale=scale, reflection=reflection),
        label,
        meaning,
        chance=(lambda _: 1.0) if scale else None,
    )


CLOSEST = "Of the closest {} % of predicted pairs, how many are truly among them?"
POSITION_METRICS = (
    score_metric(
        "spearman_mean",
        lambda pair: pair.spearman.mean,
        "Spearman of distances",
        "Are cells that lie far apart predicted far apart? Mean over cells.",
        chance=no_signal,
        short="Spearman",
    ),
    score_metric(
        "spearman_median",
        lambda pair: pair.spearman.median,
        "Spearman of distances, median",
        "The same, median over cells.",
        chance=no_signal,
    ),
    score_metric(
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
    error_metric(
        "distance_mse",
        lambda pair: distance_mse(*pair.paired),
        "Distance MSE",
        "Mean squared error of pair distances.",
        bounded=False,
    ),
    error_metric(
        "rmsd",
        lambda pair: rmsd(pair.predicted, pair.true, reflection=True),
        "RMSD",
        "Root mean square distance from the true position, in the data's units.",
        bounded=False,
    ),
    error_metric(
        "rssd",
        lambda pair: rssd(pair.predicted, pair.true),
        "RSSD",
        "Root of summed squared distances, for comparison with LUNA.",
        bounded=False,
    ),
    error_metric(
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
