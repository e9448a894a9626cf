"""In which order cells are seen: counts, seed, epoch and rank enter; windows and sets leave.

Pure functions; nothing is read. A *window* is what lies in the shuffle buffer at once. Everything
is derived from (seed, epoch, rank): neither the number of workers nor what was read before can
change it, so a loader goes on anywhere without replaying.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from alphastomics.preprocessing.shard_reader import Piece

# Names of the independent random streams that one seed gives.
GROUP_STREAM, WINDOW_STREAM, SLICE_STREAM, SET_STREAM, PATCH_STREAM = range(5)


def share_of(total: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the range of `total` things that belongs to a rank; no two differ by more than one."""
    return rank * total // world_size, (rank + 1) * total // world_size


def batches_per_rank(total: int, per_batch: int, world_size: int) -> int:
    """Count the batches of every rank: as many as the rank with the largest share needs."""
    largest = -(-total // world_size)
    return -(-largest // per_batch)


def cut(pieces: list[Piece], start: int, stop: int) -> list[Piece]:
    """Return the pieces that hold rows `start` to `stop` of their sequence."""
    chosen, first = [], 0
    for piece in pieces:
        low, high = max(start - first, 0), min(stop - first, len(piece))
        if low < high:
            chosen.append(Piece(piece.shard, piece.group, piece.start + low, piece.start + high))
        first += len(piece)
    return chosen


def shuffled_pieces(pieces: list[Piece], seed: int, epoch: int) -> list[Piece]:
    """Shuffle the row groups of all shards."""
    rng = np.random.default_rng([seed, GROUP_STREAM, epoch])
    return [pieces[number] for number in rng.permutation(len(pieces))]


def random_windows(pieces: list[Piece], window_rows: int) -> list[list[Piece]]:
    """Cut a rank's row groups into windows of exactly `window_rows` cells; the last is shorter."""
    windows: list[list[Piece]] = []
    left = 0
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            if left == 0:
                windows.append([])
                left = window_rows
            stop = min(piece.stop, start + left)
            windows[-1].append(Piece(piece.shard, piece.group, start, stop))
            left -= stop - start
            start = stop
    return windows


def order_in_window(
    size: int, seed: int, epoch: int, rank: int, window: int
) -> Int64[np.ndarray, " N"]:
    """Return the order of the cells of a window."""
    return np.random.default_rng([seed, WINDOW_STREAM, epoch, rank, window]).permutation(size)


@dataclass(frozen=True)
class SliceSet:
    """One of the sets that a slice is divided into."""

    slice_number: int
    number: int
    """Which of the slice's sets it is."""


def sets_of_slice(cells: int, set_size: int) -> int:
    """Count the sets of a slice."""
    return -(-cells // set_size)


def slice_windows(
    cells: dict[int, int], set_size: int, window_rows: int, seed: int, epoch: int
) -> list[list[SliceSet]]:
    """Group slices, in random order, into windows, and mix the sets within each window.

    Parameters
    ----------
    cells
        Cells of each slice.
    set_size
        Cells of a set at most.
    window_rows
        Cells of a window at most; a larger slice is a window of its own.
    seed, epoch
        Where randomness starts.
    """
    rng = np.random.default_rng([seed, SLICE_STREAM, epoch])
    numbers = np.array(sorted(cells))[rng.permutation(len(cells))].tolist()
    windows: list[list[SliceSet]] = []
    left = 0
    for number in numbers:
        if cells[number] > left:
            windows.append([])
            left = window_rows
        left -= cells[number]
        count = sets_of_slice(cells[number], set_size)
        windows[-1].extend(SliceSet(number, index) for index in range(count))
    for index, window in enumerate(windows):
        mixing = np.random.default_rng([seed, SET_STREAM, epoch, index]).permutation(len(window))
        windows[index] = [window[chosen] for chosen in mixing]
    return windows


def random_sets(
    cells: int, set_size: int, rng: np.random.Generator
) -> list[Int64[np.ndarray, " M"]]:
    """Divide the cells of a slice into sets at random, as equal in size as can be."""
    return np.array_split(rng.permutation(cells), sets_of_slice(cells, set_size))


def slice_generator(seed: int, epoch: int, slice_number: int) -> np.random.Generator:
    """Return the random stream that divides one slice in one epoch."""
    return np.random.default_rng([seed, PATCH_STREAM, epoch, slice_number])
