"""Neighbourhoods: positions enter; who is near whom, and how expression follows that, leave.

Neighbours are exact, by k-d tree. Moran's I of a gene x, with z = x - mean x, over weights w:

    I = N / sum_ij w_ij * sum_ij w_ij z_i z_j / sum_i z_i^2,     w_ij = 1/k for the k nearest of i

which is 1 for a gene equal among neighbours, and -1 / (N - 1) on average without any order
in space. With such weights the inner sum is one sparse product: z times the mean of z around it.
"""

from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from numpy import ndarray
from scipy.spatial import cKDTree
from torch import Tensor

from alphastomics.errors import InputError
from alphastomics.evaluation.arrays import (
    ENTRIES_ON_CPU,
    Array,
    checked,
    over_blocks,
    position_pair,
    spans,
)
from alphastomics.evaluation.expression import gene_correlations

# Distances that differ by less than this share are ties: rounding parts those of a lattice.
TIE = 1e-9


class MoranAgreement(NamedTuple):
    """How well the genes' spatial order agrees in generated and in true tissue."""

    correlation: float
    mean_absolute_error: float
    num_genes: int


class Reach(NamedTuple):
    """For each cell of a tree: how far its k-th neighbour is, and how many lie that near."""

    tree: cKDTree
    radius: Float64[ndarray, " N"]
    size: Int64[ndarray, " N"]


def knn_preservation(
    predicted: Float[Array, "N D"], true: Float[Array, "N D"], *, k: int
) -> Float64[Tensor, " N"]:
    """Share of each cell's k true nearest neighbours that are among its k predicted ones.

    |A_i & B_i| / max(|A_i|, |B_i|), where A_i holds the cells as near as the k-th true neighbour of
    i and B_i those as near as the k-th predicted one: k each, or more when some are equally near.
    So no order of the cells decides a tie, and a prediction of one single position gets
    k / (N - 1), as chance does. The mean over cells is the score.
    """
    p, t = (side.cpu().numpy() for side in position_pair(predicted, true, least=1))
    _require_neighbours(len(t), k)
    reach_predicted, reach_true = _reach(p, k), _reach(t, k)
    # Listing the smaller of the two sets is enough: the larger one is asked by its radius.
    first = reach_predicted.size <= reach_true.size
    common = np.empty(len(p))
    common[first] = _num_common(reach_predicted, reach_true, np.flatnonzero(first))
    common[~first] = _num_common(reach_true, reach_predicted, np.flatnonzero(~first))
    return torch.from_numpy(common / np.maximum(reach_predicted.size, reach_true.size))


def spatial_neighbours(position: Float[Array, "N D"], *, k: int) -> Int64[Tensor, "N k"]:
    """Return the k nearest other cells of each cell, nearest first: the graph of Moran's I."""
    points = checked(position, "positions").double()
    _require_neighbours(len(points), k)
    at = points.cpu().numpy()
    _, index = cKDTree(at).query(at, k=k + 1, workers=torch.get_num_threads())
    own = index == np.arange(len(at))[:, None]
    # Among more than k cells at one position the cell itself may be missing: then drop the last.
    own[:, -1] |= ~own.any(1)
    return torch.from_numpy(index[~own].reshape(len(at), k)).to(points.device)


def morans_i(
    expression: Float[Array, "N G"], neighbours: Int64[Tensor, "N k"]
) -> Float64[Tensor, " G"]:
    """Moran's I of each gene; NaN for a gene that is constant, as in scanpy and squidpy."""
    values = checked(expression, "expression", least=2)
    graph = neighbours.to(values.device)
    result = torch.empty(values.shape[1], dtype=torch.float64, device=values.device)

    def fill(blocks: list[slice]) -> None:
        for genes in blocks:
            z = values[:, genes].double()
            constant = (z == z[:1]).all(0)
            z = z - z.mean(0)
            around = F.embedding_bag(graph, z, mode="mean")
            index = (z * around).sum(0) / z.square().sum(0)
            result[genes] = index.masked_fill(constant, torch.nan)

    over_blocks(fill, spans(values.shape[1], len(values), values.device), values.device)
    return result


def moran_agreement(
    predicted: Float[Tensor, " G"], true: Float[Tensor, " G"], *, num_cells: int
) -> MoranAgreement:
    """Pearson correlation and mean absolute error, over genes, of two vectors of Moran's I.

    Genes that are constant in the truth are left out; one that is constant in the prediction alone
    counts as without order there, -1 / (N - 1).
    """
    defined = ~torch.isnan(true)
    if int(defined.sum()) < 2:
        raise InputError(
            f"Moran's I: {int(defined.sum())} of {len(true)} genes vary in the true tissue, but "
            "two are needed to compare. Check that the true values are the right layer."
        )
    x, y = predicted.to(true)[defined].nan_to_num(-1 / (num_cells - 1)), true[defined]
    everything = torch.ones(1, 1, dtype=torch.bool)
    r = gene_correlations(x[:, None], y[:, None], everything)
    return MoranAgreement(float(r.nan_to_num(0)), float((x - y).abs().mean()), len(y))


def _require_neighbours(num_cells: int, k: int) -> None:
    if k < 1 or num_cells < k + 1:
        raise InputError(
            f"{k} neighbours: {num_cells} cells have at most {max(0, num_cells - 1)}. Evaluate a "
            "larger slice, or ask for between 1 and that many neighbours."
        )


def _reach(position: Float64[ndarray, "N D"], k: int) -> Reach:
    """Distance to each cell's k-th neighbour, ties included, and how many others lie within."""
    tree, workers = cKDTree(position), torch.get_num_threads()
    gap, _ = tree.query(position, k=[k + 1], workers=workers)
    radius = gap[:, 0] * (1 + TIE)
    size = tree.query_ball_point(position, radius, return_length=True, workers=workers)
    return Reach(tree, radius, size - 1)


def _num_common(listed: Reach, other: Reach, cells: Int64[ndarray, " M"]) -> Int64[ndarray, " M"]:
    """Count the neighbours that the cells have in both, going through the lists of one."""
    # A part at a time: in a crowd at one position every list is long.
    full = np.cumsum(listed.size[cells]) // ENTRIES_ON_CPU
    common = [np.empty(0, dtype=np.int64)]
    for own in np.split(cells, np.flatnonzero(np.diff(full)) + 1):
        lists = listed.tree.query_ball_point(listed.tree.data[own], listed.radius[own])
        near = np.fromiter(chain.from_iterable(lists), np.int64)
        index = np.repeat(np.arange(len(own)), listed.size[own] + 1)  # the cell itself is in it
        cell = own[index]
        gap = np.linalg.norm(other.tree.data[near] - other.tree.data[cell], axis=1)
        both = (gap <= other.radius[cell]) & (near != cell)
        common.append(np.bincount(index[both], minlength=len(own)))
    return np.concatenate(common)
