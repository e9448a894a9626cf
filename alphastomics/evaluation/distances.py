"""Distances between cells: predicted and true positions enter, pairwise scores leave.

No score here needs an alignment: each is the same for a rotated, shifted or mirrored prediction.
All go over the pairs in blocks and hold O(N) numbers besides.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from alphastomics.errors import InputError
from alphastomics.evaluation.arrays import Array, position_pair, spans, squared_distances

DIGIT_BITS = 16  # of the 64 of a key that one pass settles
PAIRS_TO_PICK_FROM = 1 << 21


class ContactScores(NamedTuple):
    """How well the nearest pairs were found; by chance precision and recall are `share`."""

    precision: float
    recall: float
    f1: float


def distance_mse(predicted: Float[Array, "N D"], true: Float[Array, "N D"]) -> float:
    """Mean over pairs of cells of (|p_i - p_j| - |t_i - t_j|)^2: section 8's position error."""
    p, t = position_pair(predicted, true, least=2)
    total = 0.0
    for rows in spans(len(p), len(p), p.device):
        error = squared_distances(p[rows], p).sqrt_() - squared_distances(t[rows], t).sqrt_()
        total += float(error.square_().sum())
    return total / (len(p) * (len(p) - 1))


def contact_scores(
    predicted: Float[Array, "N D"], true: Float[Array, "N D"], *, share: float
) -> ContactScores:
    """Precision, recall and F1 of contacts: the `share` of all pairs that lie nearest.

    LUNA's definition: one threshold for the slice on each side, the `share` quantile of all
    pairwise distances, so that dense regions hold more contacts than sparse ones. Pairs as near as
    the last one count too; without such ties precision, recall and F1 are equal.
    """
    p, t = position_pair(predicted, true, least=2)
    if not 0 < share <= 1:
        raise InputError(f"share of contacts: {share} is not in (0, 1]. 0.1 means 10 % of pairs.")
    num_contacts = max(1, round(share * len(p) * (len(p) - 1) / 2))
    limit_p, limit_t = (nth_smallest_key(side, num_contacts) for side in (p, t))
    found = real = both = 0
    for key_p, key_t in zip(pair_keys(p), pair_keys(t), strict=True):
        near_p, near_t = key_p <= limit_p, key_t <= limit_t
        found += int(near_p.sum())
        real += int(near_t.sum())
        both += int((near_p & near_t).sum())
    return ContactScores(both / found, both / real, 2 * both / (found + real))


def pair_keys(position: Float[Tensor, "N D"]) -> Iterator[Int64[Tensor, "M K"]]:
    """Yield integers that are ordered as the distances of all pairs i < j; the rest is larger."""
    for rows in spans(len(position), len(position), position.device):
        block = squared_distances(position[rows], position[rows.start :])
        square = block[:, : len(block)]
        square.masked_fill_(torch.ones_like(square, dtype=torch.bool).tril_(), torch.inf)
        # The bits of non-negative floats are ordered as the floats are.
        yield block.view(torch.int64)


def nth_smallest_key(position: Float[Tensor, "N D"], rank: int) -> int:
    """Return the `rank`-th smallest key of all pairs (from 1), without holding the keys.

    Radix selection: count the pairs by their leading 16 bits, keep those that lead as the wanted
    one does, go on with the next 16 bits; as soon as few are left, pick from them.
    """
    prefix, digits = 0, 1 << DIGIT_BITS
    for shift in range(64 - DIGIT_BITS, -1, -DIGIT_BITS):
        counts = torch.zeros(digits, dtype=torch.int64, device=position.device)
        for key in pair_keys(position):
            leading = key >> shift
            digit = leading[(leading >> DIGIT_BITS) == prefix] & (digits - 1)
            counts += torch.bincount(digit, minlength=digits)
        below = counts.cumsum(0)
        digit_of_rank = int(torch.searchsorted(below, rank))
        left = int(counts[digit_of_rank])
        rank -= int(below[digit_of_rank]) - left
        prefix = prefix << DIGIT_BITS | digit_of_rank
        if left <= PAIRS_TO_PICK_FROM:
            rest = torch.cat([key[key >> shift == prefix] for key in pair_keys(position)])
            return int(rest.kthvalue(rank).values)
    return prefix
