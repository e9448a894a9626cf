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

from alphastomics.evaluation.neighbours import spatial_neighbours

NICHE = 10
# Of a gene's range: values that differ by less are equal but for rounding.
ROUNDING, LOWEST_DECILE = 1e-5, 0.1
MOST_GENES = 2000  # whose correlations are compared: their matrix grows with the square


class CorrelationAgreement(NamedTuple):
    """Gene-gene correlations of two tissues: slope of the generated on the real ones, and r."""

    slope: float
    r: float


class Tissue(NamedTuple):
    """Cells with expression of the same genes, and positions; counts of some, if they are known."""

    expression: Float[ndarray, "N G"]
    position: Float[ndarray, "N D"]
    totals: Int64[ndarray, " T"] | None = None


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


def zero_share_error(generated: Float[ndarray, "N G"], real: Float[ndarray, "M G"]) -> float | None:
    """Difference of the shares of cells in which a gene is zero, mean over genes.

    A count of zero is a gene's smallest value in the real cells. A value counts as zero below the
    middle between this and the lowest decile of the gene's larger values. Genes whose smallest
    value occurs once are never zero, and constant ones always: they are left out. None: all are.
    """
    zero, highest = real.min(0), real.max(0)
    is_zero = real <= zero + ROUNDING * (highest - zero)
    counted = (is_zero.sum(0) > 1) & ~is_zero.all(0)
    if not counted.any():
        return None
    errors = []
    for gene in np.flatnonzero(counted):
        larger = np.quantile(real[~is_zero[:, gene], gene], LOWEST_DECILE)
        middle = (zero[gene] + larger) / 2
        shares = (np.mean(side[:, gene] < middle) for side in (generated, real))
        errors.append(abs(float(np.subtract(*shares))))
    return float(np.mean(errors))


def correlation_agreement(
    generated: Float[ndarray, "N G"], real: Float[ndarray, "M G"], *, seed: int
) -> CorrelationAgreement | None:
    """Compare the correlations c of every two genes in generated cells with those r in real ones.

    The slope is that of the line through the origin, sum c r / sum r^2 over pairs. Genes that are
    constant in the real cells are left out; one that is constant in the generated cells alone
    correlates with none. Of more than 2000 genes, 2000 are looked at. None: fewer than three genes.
    """
    varied = np.flatnonzero(np.ptp(real, axis=0) > 0)
    if len(varied) > MOST_GENES:
        varied = np.random.default_rng(seed).choice(varied, MOST_GENES, replace=False)
    if len(varied) < 3:
        return None
    pairs = np.triu_indices(len(varied), 1)
    c, r = (_correlations(side[:, varied])[pairs] for side in (generated, real))
    norm_c, norm_r = (np.linalg.norm(side - side.mean()) for side in (c, r))
    covariance = float((c - c.mean()) @ (r - r.mean()))
    pearson = covariance / (norm_c * norm_r) if norm_c * norm_r > 0 else 0.0
    return CorrelationAgreement(float(c @ r / (r @ r)), float(pearson))


def _correlations(values: Float[ndarray, "N G"]) -> Float[ndarray, "G G"]:
    """Pearson correlation of every two genes; 0 for one that is constant."""
    z = values - values.mean(0, dtype=np.float64)
    z *= np.ptp(values, axis=0) > 0  # rounding leaves a constant not exactly at its mean
    z /= np.maximum(np.linalg.norm(z, axis=0), np.finfo(z.dtype).tiny)
    return z.T @ z


def depth_wasserstein(
    generated_totals: Int64[ndarray, " N"], real_totals: Int64[ndarray, " M"]
) -> float:
    """Wasserstein-1 distance of the sequencing depths: of log(1 + counts of a cell)."""
    return float(wasserstein_distance(np.log1p(generated_totals), np.log1p(real_totals)))


def measured_part(tissue: Tissue, measured: Bool[ndarray, " G"]) -> Tissue:
    """Keep the measured genes."""
    return tissue._replace(expression=tissue.expression[:, measured])


def shuffled_positions(tissue: Tissue, generator: torch.Generator) -> Tissue:
    """Give each cell the position of another: the right cells in no order."""
    order = torch.randperm(len(tissue.position), generator=generator).numpy()
    return tissue._replace(position=tissue.position[order])


def shuffled_genes(tissue: Tissue, generator: torch.Generator) -> Tissue:
    """Shuffle each gene by itself: the right values, and neither cells nor order."""
    shuffled = np.empty_like(tissue.expression)
    for gene in range(shuffled.shape[1]):
        order = torch.randperm(len(shuffled), generator=generator).numpy()
        shuffled[:, gene] = tissue.expression[order, gene]
    return Tissue(shuffled, tissue.position)
