"""Spearman of distances: predicted and true positions enter, one correlation a cell leaves.

For cell i, over all other cells j: the Pearson correlation of the ranks of |p_i - p_j| with those
of |t_i - t_j|; ties have their average rank. It is that of `scipy.stats.spearmanr`, row by row.

Ranks of a row are those of its squared distances, so that no root is taken. With the order o of
the true distances, ordering the predicted ones *as gathered by o* leaves for each predicted rank
its true rank: two orderings a row, and nothing is scattered back.
"""

import torch
from jaxtyping import Float, Float64, Int64, Shaped
from torch import Tensor

from alphastomics.evaluation.arrays import Array, over_blocks, position_pair, require_extent, spans


def distance_spearman(
    predicted: Float[Array, "N D"], true: Float[Array, "N D"]
) -> Float64[Tensor, " N"]:
    """Spearman correlation of each cell's distances to all others.

    A cell whose true distances are all equal has no order to find: NaN, which `summary` leaves out.
    One whose predicted distances alone are all equal has found none: 0.
    """
    p, t = position_pair(predicted, true, least=3)
    require_extent(t)
    rho = torch.empty(len(p), dtype=torch.float64, device=p.device)

    def fill(blocks: list[slice]) -> None:
        for rows in blocks:
            rho[rows] = _spearman_of_rows(p, t, rows)

    # A pair takes some eight numbers on the way.
    over_blocks(fill, spans(len(p), 8 * len(p), p.device), p.device)
    return rho


def _spearman_of_rows(
    p: Float64[Tensor, "N D"], t: Float64[Tensor, "N D"], rows: slice
) -> Float64[Tensor, " M"]:
    """Correlate ranks for some cells: without ties 1 .. N - 1, whose mean is N / 2."""
    own = torch.arange(rows.start, rows.stop, device=p.device)
    order, tied_t = order_rows(_squared(t[rows], t), own)
    in_true_order = _squared(p[rows], p).gather(1, order)
    # In the true order, each cell itself is first.
    true_rank, tied_p = order_rows(in_true_order, torch.zeros_like(own))
    plain = torch.arange(len(p), dtype=torch.float64, device=p.device) - len(p) / 2
    plain[0] = 0
    if tied_t is None and tied_p is None:
        # Centred ranks add up to 0, so that only one of the two need be centred.
        return true_rank.double() @ plain / plain.square().sum()
    x, y = (plain.expand(order.shape) if ranks is None else ranks for ranks in (tied_p, tied_t))
    y = y.gather(1, true_rank)
    power_x, power_y = x.square().sum(1), y.square().sum(1)
    rho = (x * y).sum(1) / (power_x * power_y).sqrt()
    return rho.masked_fill(power_x == 0, 0).masked_fill(power_y == 0, torch.nan)


def _squared(
    rows: Float64[Tensor, "M D"], columns: Float64[Tensor, "N D"]
) -> Float64[Tensor, "M N"]:
    """Squared distances; fused multiply-adds would part those of (a, b) and (b, a)."""
    total = (rows[:, 0, None] - columns[:, 0]).square_()
    for axis in range(1, rows.shape[1]):
        total += (rows[:, axis, None] - columns[:, axis]).square_()
    return total


def order_rows(
    values: Float64[Tensor, "M N"], own: Int64[Tensor, " M"]
) -> tuple[Int64[Tensor, "M N"], Float64[Tensor, "M N"] | None]:
    """Order rows of squared distances, the cell `own` of each first; overwrites the values.

    Returns the order, and the centred ranks where there are ties. The last bits of a value give way
    to its column, so that numbers alone are sorted and columns come along; what differs by less
    than 2^-32 of itself is a tie.
    """
    num_cells = values.shape[1]
    column = (1 << (num_cells - 1).bit_length()) - 1
    bits = values.view(torch.int64)
    bits &= ~column
    bits |= torch.arange(num_cells, device=bits.device)
    bits.scatter_(1, own[:, None], own[:, None] - (1 << 62))
    if bits.device.type == "cpu":
        bits.numpy().sort(axis=1)  # several times as fast as torch's
    else:
        bits = bits.sort(dim=1).values
    tied = (bits[:, 2:] ^ bits[:, 1:-1]) <= column
    ranks = centred_ranks(bits & ~column) if bool(tied.any()) else None
    return bits & column, ranks


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
