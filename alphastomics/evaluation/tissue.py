"""New tissue against real tissue: two sets of other cells enter, how similar they are leaves.

No cell has a counterpart, so that distributions are compared: of each gene, of whole cells, of
what lies beside what, and of each gene's order in space. All of it ignores the frame.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy import ndarray
from scipy.stats import wasserstein_distance
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.metrics import roc_auc_score

from alphastomics.evaluation.neighbours import spatial_neighbours

NICHE = 10
TREES, MOST_CELLS, COMPONENTS = 100, 2000, 20  # of the classifier, and what it sees


class Tissue(NamedTuple):
    """Cells with expression of the same genes, and positions."""

    expression: Float[ndarray, "N G"]
    position: Float[ndarray, "N D"]


def type_share_distance(
    generated: Int64[ndarray, " N"], real: Int64[ndarray, " M"], *, num_types: int
) -> float:
    """Total variation distance of two compositions: 0 the same, 1 without a type in common."""
    shares = [np.bincount(codes, minlength=num_types) / len(codes) for codes in (generated, real)]
    return float(np.abs(shares[0] - shares[1]).sum() / 2)


def neighbour_types(
    codes: Int64[ndarray, " N"], position: Float[ndarray, "N D"], *, num_types: int
) -> Float[ndarray, "T T"]:
    """Share of each type (columns) among the ten nearest cells of those of a type (rows)."""
    near = spatial_neighbours(position, k=NICHE).numpy()
    table = np.zeros((num_types, num_types))
    np.add.at(table, (np.repeat(codes, NICHE), codes[near].ravel()), 1)
    return table / np.maximum(table.sum(1, keepdims=True), 1)


def type_neighbour_distance(
    generated: tuple[Int64[ndarray, " N"], Float[ndarray, "N D"]],
    real: tuple[Int64[ndarray, " M"], Float[ndarray, "M D"]],
    *,
    num_types: int,
) -> float:
    """Total variation distance of what lies around a cell, mean over the real cells' types.

    A type that is missing in the generated tissue has nothing around it, and counts as 1.
    """
    generated_types, real_types = (
        neighbour_types(*side, num_types=num_types) for side in (generated, real)
    )
    distance = np.abs(generated_types - real_types).sum(1) / 2
    distance[generated_types.sum(1) == 0] = 1
    weight = np.bincount(real[0], minlength=num_types) / len(real[0])
    return float(distance @ weight)


def gene_wasserstein(generated: Float[ndarray, "N G"], real: Float[ndarray, "M G"]) -> float:
    """Wasserstein distance of each gene's values, mean over genes, in the unit of expression."""
    return float(
        np.mean([wasserstein_distance(a, b) for a, b in zip(generated.T, real.T, strict=True)])
    )


def two_sample_auc(
    generated: Float[ndarray, "N G"], real: Float[ndarray, "M G"], *, seed: int
) -> float:
    """Area under the curve of a forest that tells two samples apart, each cell by other trees.

    0.5: it cannot; 1: it always can. It sees 20 principal components of both: by single genes it
    would know a real cell by the value that a count of zero has in its slice. A tree votes on cells
    that it has not seen, so that no cell may be in both samples. At most 2000 cells of either side,
    as many of each, are looked at.
    """
    random = np.random.default_rng(seed)
    size = min(len(generated), len(real), MOST_CELLS)
    both = np.concatenate(
        [side[random.permutation(len(side))[:size]] for side in (generated, real)]
    )
    which = np.repeat([0, 1], size)
    shown = PCA(min(COMPONENTS, *both.shape), random_state=seed).fit_transform(both)
    forest = RandomForestClassifier(
        TREES, oob_score=True, min_samples_leaf=2, random_state=seed, n_jobs=-1
    ).fit(shown, which)
    votes = forest.oob_decision_function_[:, 1]
    return float(roc_auc_score(which, np.nan_to_num(votes, nan=0.5)))


def measured_part(tissue: Tissue, measured: Bool[ndarray, " G"]) -> Tissue:
    """Keep the measured genes."""
    return Tissue(tissue.expression[:, measured], tissue.position)


def shuffled_positions(tissue: Tissue, generator: torch.Generator) -> Tissue:
    """Give each cell the position of another: the right cells in no order."""
    order = torch.randperm(len(tissue.position), generator=generator).numpy()
    return Tissue(tissue.expression, tissue.position[order])


def shuffled_genes(tissue: Tissue, generator: torch.Generator) -> Tissue:
    """Shuffle each gene by itself: the right values, and neither cells nor order."""
    shuffled = np.empty_like(tissue.expression)
    for gene in range(shuffled.shape[1]):
        order = torch.randperm(len(shuffled), generator=generator).numpy()
        shuffled[:, gene] = tissue.expression[order, gene]
    return Tissue(shuffled, tissue.position)
