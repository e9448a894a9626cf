"""Spearman of distances: predicted and true positions enter, one correlation a cell leaves.

For cell i, over all other cells j: the Pearson correlation of the ranks of |p_i - p_j| with those
of |t_i - t_j|; ties have their average rank. It is that of `scipy.stats.spearmanr`, row by row.

Ranks of a row are those of its squared distances, so that no root is taken. With the order o of
the true distances, ordering the predicted ones *as gathered by o* leaves for each predicted rank
its true rank: two orderings a row, and nothing is scattered back.
"""

from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, Shaped
from numpy import ndarray
from torch import Tensor

from alphastomics.evaluation.arrays import (
    Array,
    in_threads,
    position_pair,
    require_extent,
    spans,
    squared_distances,
)

# Large enough that calls cost nothing beside their work, small enough for a core's cache.
PAIRS_AT_A_TIME = 1 << 17


def distance_spearman(
    predicted: Float[Array, "N D"], true: Float[Array, "N D"]
) -> Float64[Tensor, " N"]:
    """Spearman correlation of each cell's distances to all others.

    A cell whose true distances are all equal has no order to find: NaN, which `summary` leaves out.
    One whose predicted distances alone are all equal has found none: 0.
    """
    p, t = position_pair(predicted, true, least=3)
    require_extent(t)
    if p.device.type != "cpu":
        rows = spans(len(p), 8 * len(p), p.device)
        return torch.cat([spearman_by_sorting(p, t, row) for row in rows])
    columns_p, columns_t = (np.ascontiguousarray(side.numpy().T) for side in (p, t))
    shares = in_threads(partial(_spearman_of_share, columns_p, columns_t))
    return torch.from_numpy(np.sum(shares, axis=0))


def spearman_by_sorting(
    p: Float[Tensor, "N D"], t: Float[Tensor, "N D"], rows: slice
) -> Float64[Tensor, " M"]:
    """Correlate average ranks found by the library's sort: the plain way, and that of GPUs."""
    ranks = []
    for side in (p, t):
        squared = squared_distances(side[rows], side)
        own = torch.arange(rows.start, rows.stop, device=side.device)[:, None]
        squared.scatter_(1, own, -1.0)  # a cell itself comes first, alone
        ordered, order = squared.sort(dim=1)
        centred = centred_ranks(ordered)
        ranks.append(torch.empty_like(centred).scatter_(1, order, centred))
    return _correlation(*ranks)


def centred_ranks(ordered: Shaped[Tensor, "M N"]) -> Float64[Tensor, "M N"]:
    """Average rank of each entry of ascending rows, less the mean rank; 0 for the cell itself."""
    rank = torch.arange(ordered.shape[1], device=ordered.device).expand(ordered.shape)
    edge = torch.ones_like(ordered[:, :1], dtype=torch.bool)
    new = torch.cat([edge, ordered[:, 1:] != ordered[:, :-1]], dim=1)
    first = torch.where(new, rank, 0).cummax(1).values
    ends = torch.cat([new[:, 1:], edge], dim=1)
    last = torch.where(ends, rank, rank[0, -1]).flip(1).cummin(1).values.flip(1)
    centred = (first + last).double() / 2 - ordered.shape[1] / 2
    centred[:, 0] = 0
    return centred


def _correlation(x: Float[Tensor, "M N"], y: Float[Tensor, "M N"]) -> Float[Tensor, " M"]:
    """Cosine of centred ranks; 0 where x is constant, NaN where y is."""
    power_x, power_y = x.square().sum(1), y.square().sum(1)
    rho = (x * y).sum(1) / (power_x * power_y).sqrt()
    return rho.masked_fill(power_x == 0, 0).masked_fill(power_y == 0, torch.nan)


class Scratch:
    """Buffers for one block of rows, used again and again.

    Asking the system for new memory at every step took longer than all of the arithmetic.
    """

    def __init__(self, rows: int, num_cells: int) -> None:
        self.squared, self.spare, self.gathered = (np.empty((rows, num_cells)) for _ in range(3))
        self.key = np.empty((rows, num_cells), dtype=np.uint16)
        self.order = np.empty((rows, num_cells), dtype=np.int64)


def _spearman_of_share(
    p: Float64[ndarray, "D N"], t: Float64[ndarray, "D N"], share: int, num_shares: int
) -> Float64[ndarray, " N"]:
    """Do the same on a CPU, for every `num_shares`-th block of rows; other cells are left at 0."""
    num_cells = p.shape[1]
    rows = min(num_cells, max(1, PAIRS_AT_A_TIME // num_cells))
    scratch, rho = Scratch(rows, num_cells), np.zeros(num_cells)
    for start in range(share * rows, num_cells, num_shares * rows):
        # The last block reaches back rather than being shorter, so that it fits the buffers.
        first = min(start, num_cells - rows)
        spearman = _spearman_of_rows(p, t, np.arange(first, first + rows), scratch)
        rho[start : start + rows] = spearman[start - first :]
    return rho


def _spearman_of_rows(
    p: Float64[ndarray, "D N"],
    t: Float64[ndarray, "D N"],
    own: Int64[ndarray, " M"],
    scratch: Scratch,
) -> Float64[ndarray, " M"]:
    """Correlate ranks for the cells `own`: without ties 1 .. N - 1, whose mean is N / 2."""
    order, tied_t = order_rows(_squared(t, own, scratch), own, scratch)
    in_true_order = _gathered(_squared(p, own, scratch), order, scratch.gathered)
    # In the true order, each cell itself is first.
    true_rank, tied_p = order_rows(in_true_order, np.zeros_like(own), scratch)
    plain = np.arange(p.shape[1]) - p.shape[1] / 2
    plain[0] = 0
    if tied_t is None and tied_p is None:
        # Centred ranks add up to 0, so that only one of the two need be centred.
        np.copyto(scratch.spare, true_rank)
        # By torch: numpy's library would start threads of its own.
        covariances = torch.from_numpy(scratch.spare) @ torch.from_numpy(plain)
        return covariances.numpy() / (plain**2).sum()
    ranks_t, ranks_p = (
        torch.from_numpy(plain).expand(true_rank.shape) if ranks is None else ranks
        for ranks in (tied_t, tied_p)
    )
    return _correlation(ranks_p, ranks_t.gather(1, torch.from_numpy(true_rank))).numpy()


def order_rows(
    values: Float64[ndarray, "M N"], own: Int64[ndarray, " M"], scratch: Scratch
) -> tuple[Int64[ndarray, "M N"], Float64[Tensor, "M N"] | None]:
    """Order rows of squared distances, the cell `own` of each first; overwrites the values.

    Returns the order (in `scratch.order`), and the centred ranks where there are ties. The last
    bits of a value give way to its column, so that values are moved and columns come along; what
    differs by less than 2^-32 of itself is a tie. Radix sort by the leading 16 bits of the range
    brings a row nearly into order, and numpy's stable sort, quick on what is nearly sorted,
    finishes it: several times as fast as sorting it outright.
    """
    largest = values.max(1, keepdims=True)
    scale = np.divide(65535, largest, out=np.zeros_like(largest), where=largest > 0)
    np.multiply(values, scale, out=scratch.spare)
    np.copyto(scratch.key, scratch.spare, casting="unsafe")
    column = (1 << (values.shape[1] - 1).bit_length()) - 1
    bits, ordered = values.view(np.int64), scratch.spare.view(np.int64)
    bits &= ~column
    bits |= np.arange(values.shape[1])
    bits[np.arange(len(values)), own] = own - (1 << 62)
    _gathered(bits, scratch.key.argsort(axis=1, kind="stable"), ordered)
    ordered.sort(axis=1, kind="stable")
    np.bitwise_and(ordered, column, out=scratch.order)
    tied = (ordered[:, 2:] ^ ordered[:, 1:-1]) <= column
    ranks = centred_ranks(torch.from_numpy(ordered & ~column)) if tied.any() else None
    return scratch.order, ranks


def _gathered(values: ndarray, order: Int64[ndarray, "M N"], out: ndarray) -> ndarray:
    """`np.take_along_axis` on rows, four times as fast."""
    rows, index, gathered = map(torch.from_numpy, (values, order, out))
    torch.gather(rows, 1, index, out=gathered)
    return out


def _squared(
    position: Float64[ndarray, "D N"], own: Int64[ndarray, " M"], scratch: Scratch
) -> Float64[ndarray, "M N"]:
    """Squared distance of the cells `own` to all (in `scratch.squared`)."""
    total = scratch.squared
    for number, axis in enumerate(position):
        difference = scratch.spare if number else total
        np.subtract(axis[own, None], axis, out=difference)
        np.multiply(difference, difference, out=difference)
        if number:
            np.add(total, difference, out=total)
    return total
