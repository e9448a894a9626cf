"""What a metric looks at: a prediction and the truth of one slice, and what several metrics share.

A shared quantity, such as Moran's I, is computed once and only where a metric asks for it.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from alphastomics.evaluation.arrays import Array, as_tensor
from alphastomics.evaluation.clusters import (
    ClusterScores,
    Labels,
    TypedCells,
    cluster_scores,
    clustered,
)
from alphastomics.evaluation.distances import ContactScores, contact_scores
from alphastomics.evaluation.expression import (
    Summary,
    cell_correlations,
    gene_correlations,
    summary,
)
from alphastomics.evaluation.neighbours import (
    MoranAgreement,
    moran_agreement,
    morans_i,
    spatial_neighbours,
)
from alphastomics.evaluation.position import axis_rmse
from alphastomics.evaluation.ranks import distance_spearman
from alphastomics.evaluation.tissue import CorrelationAgreement, Tissue, correlation_agreement

MORAN_NEIGHBOURS = 6  # squidpy's default
CONTACT_SHARES = {"1pct": 0.01, "10pct": 0.10}  # G2T's and LUNA's
# Pairs grow with the square of the cells. Of a larger slice they are those of so many random cells,
# whose mean Spearman correlation has a standard error of 0.003 at most.
MOST_PAIRED_CELLS = 10_000


@dataclass(frozen=True)
class PositionPair:
    """Predicted and true positions of the same cells, and their types where they are known."""

    predicted: Float[Array, "N D"]
    true: Float[Array, "N D"]
    labels: Labels | None

    @cached_property
    def paired(self) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:
        """Predicted and true positions of the cells whose pairs are compared."""
        if len(self.true) <= MOST_PAIRED_CELLS:
            return self.predicted, self.true
        rows = np.random.default_rng(len(self.true)).permutation(len(self.true))
        rows = np.sort(rows[:MOST_PAIRED_CELLS])
        return self.predicted[rows], self.true[rows]

    @cached_property
    def spearman(self) -> Summary:
        """Rank correlation of each cell's distances, over cells."""
        return summary(distance_spearman(*self.paired), "Spearman of distances")

    @cached_property
    def contacts(self) -> dict[str, ContactScores]:
        """Precision and F1 of the closest pairs, by their share."""
        return {
            name: contact_scores(*self.paired, share=share)
            for name, share in CONTACT_SHARES.items()
        }

    @cached_property
    def axis_errors(self) -> list[float]:
        """Error along x, y and, in 3D, z."""
        return [float(error) for error in axis_rmse(self.predicted, self.true, reflection=True)]


@dataclass(frozen=True)
class ExpressionPair:
    """Predicted and true expression of the same cells at their positions; measured genes count."""

    predicted: Float[Array, "N G"]
    true: Float[Array, "N G"]
    measured: Bool[Array, " G"]
    position: Float[Array, "N D"]

    @cached_property
    def arrays(self) -> tuple[Float[Tensor, "N G"], Float[Tensor, "N G"], Bool[Tensor, "1 G"]]:
        """Both as tensors, and which genes count."""
        genes = torch.as_tensor(self.measured)
        return as_tensor(self.predicted), as_tensor(self.true), genes[None]

    @cached_property
    def by_gene(self) -> Summary:
        """Correlation of each gene's values over cells."""
        return summary(gene_correlations(*self.arrays), "Pearson r of genes")

    @cached_property
    def by_cell(self) -> Summary | None:
        """Correlation of each cell's values over genes; None of a single gene."""
        if int(self.arrays[2].sum()) < 2:
            return None
        return summary(cell_correlations(*self.arrays), "Pearson r of cells")

    @cached_property
    def moran_pair(self) -> tuple[Float[Tensor, " G"], Float[Tensor, " G"]]:
        """Moran's I of each gene, predicted and true, over the true positions."""
        graph = spatial_neighbours(self.position, k=MORAN_NEIGHBOURS)
        predicted, true, genes = self.arrays
        return morans_i(predicted[:, genes[0]], graph), morans_i(true[:, genes[0]], graph)

    @cached_property
    def moran(self) -> MoranAgreement | None:
        """How far the same genes are ordered in space; None of a single gene."""
        return _agreement(self.moran_pair, len(self.true))


@dataclass(frozen=True)
class TypePair:
    """Predicted expression of cells of known types; `real` are other cells with types."""

    predicted: Float[Array, "N G"]
    labels: Labels
    real: tuple[Float[Array, "M G"], Labels] | None
    seed: int

    @cached_property
    def clusters(self) -> ClusterScores:
        """K-means clusters of the prediction, as many as there are types, against the types."""
        number = len(np.unique(np.asarray(self.labels)))
        labels = clustered(self.predicted, num_clusters=number, seed=self.seed)
        return cluster_scores(labels, self.labels)


@dataclass(frozen=True)
class TissuePair:
    """New and real tissue; cells of both take the types of the nearest real cells in expression."""

    generated: Tissue
    real: Tissue
    typed: TypedCells
    seed: int

    @cached_property
    def moran_pair(self) -> tuple[Float[Tensor, " G"], Float[Tensor, " G"]]:
        """Moran's I of each gene, each tissue over its own positions."""
        predicted, true = (
            morans_i(side.expression, spatial_neighbours(side.position, k=MORAN_NEIGHBOURS))
            for side in (self.generated, self.real)
        )
        return predicted, true

    @cached_property
    def moran(self) -> MoranAgreement | None:
        """How far the same genes are ordered in space; None of a single gene."""
        return _agreement(self.moran_pair, len(self.generated.expression))

    @cached_property
    def codes(self) -> tuple[Int64[np.ndarray, " N"], Int64[np.ndarray, " M"]]:
        """Types of the generated and of the real cells, as numbers."""
        predicted, true = (
            np.searchsorted(self.typed.names, self.typed.labels_of(side.expression))
            for side in (self.generated, self.real)
        )
        return predicted, true

    @cached_property
    def correlations(self) -> CorrelationAgreement | None:
        """How the correlations of every two genes agree."""
        return correlation_agreement(
            self.generated.expression, self.real.expression, seed=self.seed
        )


def _agreement(
    moran_pair: tuple[Float[Tensor, " G"], Float[Tensor, " G"]], num_cells: int
) -> MoranAgreement | None:
    if len(moran_pair[1]) < 2:
        return None
    return moran_agreement(*moran_pair, num_cells=num_cells)
