"""The figures of a run: what is written down, and which way is better."""

from typing import NamedTuple

from alphastomics.evaluation.metric import Direction
from alphastomics.evaluation.registry import METRICS


class Figure(NamedTuple):
    """A figure of a run: its key, what to call it, and which way is better.

    Errors and times change by per cent of the reference; what lies between -1 and 1 and may be near
    0 changes by points, hundredths of its unit.
    """

    key: str
    title: str
    better: Direction | None

    @property
    def unit(self) -> str:
        """Return the unit of a change."""
        return "%" if self.better == "lower" else "points"


FIGURES = (
    Figure("parameters_total", "parameters", None),
    Figure("parameters_active", "active parameters", None),
    Figure("feed_forward_share", "share of the FFN a cell meets", None),
    Figure("train_loss", "training loss", "lower"),
    Figure("val_loss", "validation loss", "lower"),
    Figure("val_expression", "validation loss, expression", "lower"),
    Figure("val_position", "validation loss, position", "lower"),
    *(
        Figure(name, METRICS[name].label, METRICS[name].better)
        for name in (
            "expression_mse",
            "pearson_gene_mean",
            "moran_correlation",
            "moran_mae",
            "cluster_ari",
            "cluster_nmi",
            "distance_mse",
            "procrustes",
            "spearman_mean",
            "knn_preservation",
        )
    ),
    Figure("ms_per_step", "ms a step", "lower"),
    Figure("seconds", "seconds", "lower"),
)
# Figures in which every configuration is compared with the reference.
COMPARED = tuple(figure for figure in FIGURES if figure.better and figure.key != "seconds")
