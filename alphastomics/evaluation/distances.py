"""Distances between cells: predicted and true positions enter, pairwise scores leave.

No score here needs an alignment: each is the same for a rotated, shifted or mirrored prediction.
All go over the pairs in blocks and hold O(N) numbers besides.
"""

import math
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from alphastomics.errors import InputError
from alphastomics.evaluation.arrays import (
    Array,
    over_blocks,
    pair_spans,
    position_pair,
    squared_distances,
)

DIGIT_BITS = 16  # of the 64 of a key that one pass settles
PAIRS_TO_PICK_FROM = 1 << 21
LIMITS_KEPT = 8  # of the truth: two shares of a slice, for one method after the other


class ContactScores(NamedTuple):
    """How well the nearest pairs were found; by chance precision and recall are `share`."""

    precision: float
    recall: float
    f1: float


def distance_mse(predicted: Float[Array, "N D"], true: Float[Array, "N D"]) -> float:
    """Mean over pairs of cells of (|p_i - p_j| - |t_i - t_j|)^2: section 8's position error."""
    p, t = position_pair(predicted, true, least=2)

    def errors(blocks: list[slice]) -> list[float]:
        return [float(_distance_errors(p, t, rows).square_().sum()) for rows in blocks]

    shares = over_blocks(errors, pair_spans(len(p), p.device), p.device)
    # Exactly rounded: the number of threads changes no digit.
    return math.fsum(error for share in shares for error in share) / (len(p) * (len(p) - 1))


def _distance_errors(
    p: Float[Tensor, "N D"], t: Float[Tensor, "N D"], rows: slice
) -> Float[Tensor, "M N"]:
    return squared_distances(p[rows], p).sqrt_() - squared_distances(t[rows], t).sqrt_()


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
    limit_p, limit_t = nth_smallest_key(p, num_contacts), known_limit(t, num_contacts)

    def counts(blocks: list[slice]) -> Int64[Tensor, " 3"]:
        total = torch.zeros(3, dtype=torch.int64, device=p.device)
        for rows in blocks:
            near_p, near_t = pair_keys(p, rows) <= limit_p, pair_keys(t, rows) <= limit_t
            total += torch.stack([near_p.sum(), near_t.sum(), (near_p & near_t).sum()])
        return total

    shares = over_blocks(counts, pair_spans(len(p), p.device), p.device)
    predicted_contacts, true_contacts, both = torch.stack(shares).sum(0).tolist()
    return ContactScores(
        both / predicted_contacts,
        both / true_contacts,
        2 * both / (predicted_contacts + true_contacts),
    )


def known_limit(true: Float[Tensor, "N D"], rank: int) -> int:
    """Return `nth_smallest_key` of a truth, which is searched once for all that is scored by it."""
    if true.device.type != "cpu":
        return nth_smallest_key(true, rank)
    return _limit_of(true.numpy().tobytes(), true.dtype, true.shape[1], rank)


@lru_cache(maxsize=LIMITS_KEPT)
def _limit_of(content: bytes, dtype: torch.dtype, dims: int, rank: int) -> int:
    position = torch.frombuffer(bytearray(content), dtype=dtype).reshape(-1, dims)
    return nth_smallest_key(position, rank)


def pair_keys(position: Float[Tensor, "N D"], rows: slice) -> Int64[Tensor, "M K"]:
    """Return integers ordered as the distances of pairs i < j, i in `rows`; others are larger."""
    block = squared_distances(position[rows], position[rows.start :])
    square = block[:, : len(block)]
    square.masked_fill_(torch.ones_like(square, dtype=torch.bool).tril_(), torch.inf)
    # The bits of non-negative floats are ordered as the floats are.
    return block.view(torch.int64)


def nth_smallest_key(position: Float[Tensor, "N D"], rank: int) -> int:
    """Return the `rank`-th smallest key of all pairs (from 1), without holding the keys.

    Radix selection: count the pairs by their leading 16 bits, keep those that lead as the wanted
    one does, go on with the next 16 bits; as soon as few are left, pick from them.
    """
    prefix, blocks = 0, pair_spans(len(position), position.device)
    for shift in range(64 - DIGIT_BITS, -1, -DIGIT_BITS):
        count = partial(_digit_counts, position, prefix, shift)
        counts = torch.stack(over_blocks(count, blocks, position.device)).sum(0)
        below = counts.cumsum(0)
        digit = int(torch.searchsorted(below, rank))
        left = int(counts[digit])
        rank -= int(below[digit]) - left
        prefix = prefix << DIGIT_BITS | digit
        if left <= PAIRS_TO_PICK_FROM:
            pick = partial(_keys_that_lead, position, prefix, shift)
            rest = torch.cat(over_blocks(pick, blocks, position.device))
            return int(rest.kthvalue(rank).values)
    return prefix


def _keys_that_lead(
    position: Float[Tensor, "N D"], prefix: int, shift: int, blocks: list[slice]
) -> Int64[Tensor, " K"]:
    """Keys whose bits from `shift` on are `prefix`."""
    keys = [torch.empty(0, dtype=torch.int64, device=position.device)]
    for rows in blocks:
        key = pair_keys(position, rows)
        keys.append(key[key >> shift == prefix])
    return torch.cat(keys)


def _digit_counts(
    position: Float[Tensor, "N D"], prefix: int, shift: int, blocks: list[slice]
) -> Int64[Tensor, " digits"]:
    """Count keys by the digit at `shift`, among those with `prefix` before it."""
    counts = torch.zeros(1 << DIGIT_BITS, dtype=torch.int64, device=position.device)
    for rows in blocks:
        leading = pair_keys(position, rows) >> shift
        digit = leading[leading >> DIGIT_BITS == prefix] & (len(counts) - 1)
        counts += torch.bincount(digit, minlength=len(counts))
    return counts
