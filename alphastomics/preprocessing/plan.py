"""Which cell goes where: sizes, ratios and a seed enter; splits, shards and buckets leave.

Pure functions; nothing is read or written. A *bucket* is a run of output rows that is shuffled in
memory. Cells are drawn without replacement: first how many cells of each slice a bucket receives
(multivariate hypergeometric), then which ones (a permutation of each slice), then their order
(a permutation of each bucket). Together that is one uniform permutation of all cells, though no
array ever holds them all. The split of a cell depends on the slices, the ratios and the seed
alone, not on layout, storage, shard or chunk size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

# Names of the independent random streams that one seed gives.
SPLIT_STREAM, SHARD_STREAM, SLICE_STREAM, BUCKET_STREAM = range(4)


@dataclass(frozen=True)
class PlanRequest:
    """All that the plan depends on."""

    slice_sizes: tuple[int, ...]
    ratios: tuple[float, float, float]
    split_by: str
    layout: str
    max_shard_size: int
    bucket_rows: int
    seed: int
    reference_sizes: tuple[int, ...] = ()
    """Dissociated cells of each input: numbered after the slices, in a split of their own."""
    reference_bucket_rows: int = 1


@dataclass(frozen=True)
class ShufflePlan:
    """How many cells of each slice every bucket receives, and where the bucket belongs.

    Dissociated cells are slices here, after all others, and their split is the fourth.
    """

    counts: Int64[np.ndarray, "K S"]
    split: Int64[np.ndarray, " K"]
    shard: Int64[np.ndarray, " K"]
    seed: int

    def num_shards(self, split: int) -> int:
        """Count the shards of a split."""
        return int(self.shard[self.split == split].max(initial=-1)) + 1

    def buckets_of(self, split: int, shard: int) -> list[int]:
        """List the buckets of a shard in their order."""
        return np.flatnonzero((self.split == split) & (self.shard == shard)).tolist()

    def cells_per_split(self) -> Int64[np.ndarray, "4 S"]:
        """Count the cells of each slice in each split."""
        return np.stack([self.counts[self.split == number].sum(axis=0) for number in range(4)])


def split_sizes(total: int, ratios: Sequence[float]) -> Int64[np.ndarray, " 3"]:
    """Divide a whole number by ratios (largest remainder).

    A split that was asked for gets at least one where there are enough, taken from the largest.
    """
    wanted = np.array(ratios) * total
    sizes = np.floor(wanted + 1e-9).astype(np.int64)
    by_remainder = np.argsort(sizes - wanted, kind="stable")
    sizes[by_remainder[: total - sizes.sum()]] += 1
    for split in range(3):
        if ratios[split] > 1e-9 and sizes[split] == 0 and sizes.max() > 1:
            sizes[np.argmax(sizes)] -= 1
            sizes[split] += 1
    return sizes


def draw_without_replacement(
    available: Int64[np.ndarray, " S"], sizes: Sequence[int], rng: np.random.Generator
) -> list[Int64[np.ndarray, " S"]]:
    """Deal cells of S slices into hands of given sizes: how many of each slice a hand receives."""
    left = available.copy()
    hands = []
    for size in sizes:
        hand = rng.multivariate_hypergeometric(left, int(size), method="marginals")
        left -= hand
        hands.append(hand)
    return hands


def draw_splits(request: PlanRequest) -> Int64[np.ndarray, "3 S"]:
    """Draw how many cells of each slice go to train, validation and test."""
    rng = np.random.default_rng([request.seed, SPLIT_STREAM])
    cells = np.array(request.slice_sizes, dtype=np.int64)
    if request.split_by == "cell":
        sizes = split_sizes(int(cells.sum()), request.ratios)
        return np.stack(draw_without_replacement(cells, sizes.tolist(), rng))
    sizes = split_sizes(len(cells), request.ratios)
    split_of_slice = rng.permutation(np.repeat(np.arange(3), sizes))
    return np.stack([np.where(split_of_slice == split, cells, 0) for split in range(3)])


def runs(total: int, longest: int) -> list[int]:
    """Cut a length into runs of at most `longest`; only the last is shorter."""
    return [min(longest, total - start) for start in range(0, total, longest)]


def mixed_shards(
    cells: Int64[np.ndarray, " S"], request: PlanRequest, split: int, bucket_rows: int
) -> list[list[Int64[np.ndarray, " S"]]]:
    """Layout `shuffled`: every shard, and every bucket in it, samples all slices."""
    rng = np.random.default_rng([request.seed, SHARD_STREAM, split])
    sizes = runs(int(cells.sum()), request.max_shard_size)
    shards = draw_without_replacement(cells, sizes, rng)
    return [
        draw_without_replacement(shard, runs(size, bucket_rows), rng)
        for shard, size in zip(shards, sizes, strict=True)
    ]


def shards_by_slice(
    cells: Int64[np.ndarray, " S"], request: PlanRequest, bucket_rows: int
) -> list[list[Int64[np.ndarray, " S"]]]:
    """Layout `slice`: a bucket has cells of one slice; a shard starts anew rather than cut one."""
    shards: list[list[Int64[np.ndarray, " S"]]] = []
    left = 0
    for number in np.flatnonzero(cells):
        for piece in runs(int(cells[number]), request.max_shard_size):
            if piece > left:
                shards.append([])
                left = request.max_shard_size
            left -= piece
            for rows in runs(piece, bucket_rows):
                bucket = np.zeros_like(cells)
                bucket[number] = rows
                shards[-1].append(bucket)
    return shards


def make_shuffle_plan(request: PlanRequest) -> ShufflePlan:
    """Plan the whole of stage 2."""
    counts: list[Int64[np.ndarray, " S"]] = []
    split_of, shard_of = [], []
    slices, references = len(request.slice_sizes), len(request.reference_sizes)
    reference = np.array(request.reference_sizes, dtype=np.int64)
    # What is sampled of slices does not depend on the dissociated cells.
    parts = [(cells, request.bucket_rows, (0, references)) for cells in draw_splits(request)]
    parts.append((reference, request.reference_bucket_rows, (slices, 0)))
    for split, (cells, bucket_rows, others) in enumerate(parts):
        shards = (
            mixed_shards(cells, request, split, bucket_rows)
            if request.layout == "shuffled"
            else shards_by_slice(cells, request, bucket_rows)
        )
        for number, buckets in enumerate(shards):
            counts.extend(np.pad(bucket, others) for bucket in buckets)
            split_of.extend([split] * len(buckets))
            shard_of.extend([number] * len(buckets))
    table = np.array(counts, dtype=np.int64).reshape(-1, slices + references)
    where = np.array([split_of, shard_of], dtype=np.int64).reshape(2, -1)
    return ShufflePlan(table, where[0], where[1], request.seed)


def destinations(plan: ShufflePlan, slice_number: int) -> Int64[np.ndarray, " N"]:
    """Return the bucket of each cell of a slice."""
    counts = plan.counts[:, slice_number]
    rng = np.random.default_rng([plan.seed, SLICE_STREAM, slice_number])
    return rng.permutation(np.repeat(np.arange(len(counts)), counts))


def order_in_bucket(plan: ShufflePlan, bucket: int) -> Int64[np.ndarray, " N"]:
    """Return the order in which a bucket's cells, sorted by cell id, are written."""
    rng = np.random.default_rng([plan.seed, BUCKET_STREAM, bucket])
    return rng.permutation(int(plan.counts[bucket].sum()))
