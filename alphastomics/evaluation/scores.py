"""All metrics of one slice at once: what `test` and the report put into a table, by name."""

from jaxtyping import Bool, Float

from alphastomics.evaluation.arrays import Array
from alphastomics.evaluation.clusters import Labels, TypedCells
from alphastomics.evaluation.pairs import ExpressionPair, PositionPair, TissuePair, TypePair
from alphastomics.evaluation.registry import (
    EXPRESSION_METRICS,
    METRICS,
    POSITION_METRICS,
    TISSUE_METRICS,
    TYPE_METRICS,
    values_of,
)
from alphastomics.evaluation.tissue import Tissue


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
    generated: Tissue, real: Tissue, typed: TypedCells, *, seed: int
) -> dict[str, float]:
    """Every comparison of new with real tissue, over genes that the real one measured.

    Parameters
    ----------
    generated, real
        The two tissues; they need not have the same number of cells.
    typed
        Real cells with known types: cells of both tissues take the types of their expression kNN.
    seed
        Seed of the classifier.
    """
    return values_of(TISSUE_METRICS, TissuePair(generated, real, typed, seed))


def chance_levels(num_cells: int) -> dict[str, float]:
    """Scores of a prediction that knows nothing, where they are known beforehand."""
    return {
        name: metric.chance(num_cells)
        for name, metric in METRICS.items()
        if metric.chance is not None
    }
