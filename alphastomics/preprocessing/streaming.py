"""Shards read as they are needed: windows of the shuffle buffer are planned, read and cut to sets.

Random sets come from shuffled row groups, permuted within the window. Sets of a slice, and patches,
come from whole slices, which the layout `slice` keeps together.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np
from jaxtyping import Float, Int64

from alphastomics.errors import InputError
from alphastomics.preprocessing import order
from alphastomics.preprocessing.cell_table import (
    CellTable,
    Rows,
    empty_table,
    joined_tables,
    put_rows,
)
from alphastomics.preprocessing.patches import patches
from alphastomics.preprocessing.sets import Window
from alphastomics.preprocessing.shard_reader import Piece, ShardReader

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Draw:
    """How sets are drawn, and which of them belong to this rank."""

    kind: Literal["random", "slice", "patch"]
    set_size: int
    window_rows: int
    seed: int
    rank: int
    world_size: int

    def share_of(self, units: int) -> tuple[int, int]:
        """Return the range of cells, or sets, that is this rank's."""
        return order.share_of(units, self.rank, self.world_size)

    def divided(
        self, position: Float[np.ndarray, "N 3"], number: int, epoch: int
    ) -> list[Int64[np.ndarray, " M"]]:
        """Divide the cells of a slice into sets: at random, or patches."""
        rng = order.slice_generator(self.seed, epoch, number)
        if self.kind == "slice":
            return order.random_sets(len(position), self.set_size, rng)
        return patches(position, self.set_size, rng)


def mapped(
    pool: Executor | None, act: Callable[[Item], Result], items: Sequence[Item]
) -> list[Result]:
    """Apply a function to all items, in a pool's threads if there is one."""
    return list(map(act, items) if pool is None else pool.map(act, items))


class Source(ABC):
    """Where windows come from: the cells of a split, and how sets of them are drawn."""

    def __init__(self, reader: ShardReader, draw: Draw) -> None:
        self.reader, self.draw = reader, draw

    def cells_per_slice(self) -> dict[int, int]:
        """Count the cells of each slice that has any, over all ranks."""
        slices = enumerate(self.reader.metadata.slices)
        counts = {number: record.cells_per_split[self.reader.split] for number, record in slices}
        return {number: count for number, count in counts.items() if count}

    @property
    def num_cells(self) -> int:
        """Count the cells, over all ranks."""
        return sum(self.cells_per_slice().values())

    def count_units(self) -> int:
        """Count what is shared out among the ranks: cells for random sets, else whole sets."""
        if self.draw.kind == "random":
            return self.num_cells
        sizes = self.cells_per_slice().values()
        return sum(order.sets_of_slice(size, self.draw.set_size) for size in sizes)

    @abstractmethod
    def windows(
        self, epoch: int, first_set: int, pool: Executor | None
    ) -> Iterator[Callable[[], Window]]:
        """Yield how to load each window of this rank, from the one with `first_set` on."""


class RandomStream(Source):
    """Sets at random across slices, from a shuffle buffer that is refilled window by window."""

    def windows(
        self, epoch: int, first_set: int, pool: Executor | None
    ) -> Iterator[Callable[[], Window]]:
        """Yield how to load each window of this rank, from the one with `first_set` on."""
        draw = self.draw
        start, stop = draw.share_of(self.count_units())
        pieces = order.shuffled_pieces(self.reader.pieces, draw.seed, epoch)
        windows = order.random_windows(order.cut(pieces, start, stop), draw.window_rows)
        loader = WindowLoader(self.reader, pool)
        for number, window in enumerate(windows):
            skipped = first_set * draw.set_size - number * draw.window_rows
            if skipped < draw.window_rows:
                first = max(skipped, 0)
                yield lambda number=number, window=window, first=first: self._window(  # type: ignore[misc]
                    loader, window, number, epoch, first
                )

    def _window(
        self, loader: "WindowLoader", pieces: list[Piece], number: int, epoch: int, first: int
    ) -> Window:
        draw = self.draw
        size = sum(map(len, pieces))
        mixed = order.order_in_window(size, draw.seed, epoch, draw.rank, number)
        starts = range(first, size, draw.set_size)
        sets = [slice(start, min(start + draw.set_size, size)) for start in starts]
        if self.reader.metadata.storage == "dense":
            return Window(loader.read_positioned(pieces, mixed), [*sets])
        # Sparse cells are copied anyway when they are made dense: no need to move them before.
        return Window(loader.read_joined(pieces), [mixed[rows] for rows in sets])


class WindowLoader:
    """Reads windows one after the other; a row group cut by a window's end is read only once."""

    def __init__(self, reader: ShardReader, pool: Executor | None) -> None:
        self.reader, self.pool = reader, pool
        self._cut: tuple[tuple[int, int], CellTable] | None = None

    def read_joined(self, pieces: list[Piece]) -> CellTable:
        """Read the pieces of a window in their order."""
        return joined_tables(self._read(pieces, lambda _, cells: cells))

    def read_positioned(self, pieces: list[Piece], mixed: Int64[np.ndarray, " N"]) -> CellTable:
        """Read the pieces of a window; its row i is row `mixed[i]` of the pieces in their order.

        Each piece is copied to its rows as soon as it is read: its memory serves the next one.
        """
        table = empty_table(len(mixed), self.reader.metadata.num_genes)
        row_of = np.empty_like(mixed)
        row_of[mixed] = np.arange(len(mixed))
        targets = np.split(row_of, np.cumsum([len(piece) for piece in pieces])[:-1])
        self._read(pieces, lambda number, cells: put_rows(table, targets[number], cells))
        return table

    def _read(self, pieces: list[Piece], act: Callable[[int, CellTable], Result]) -> list[Result]:
        """Read the pieces of a window, and do something with each; keep what its end cuts."""
        before, last = self._cut, pieces[-1]
        sizes = [self.reader.shards[piece.shard].row_groups[piece.group] for piece in pieces]

        def read(number: int) -> Result:
            piece = pieces[number]
            key = (piece.shard, piece.group)
            if before is not None and before[0] == key:
                group = before[1]
            else:
                group = self.reader.read(Piece(*key, 0, sizes[number]))
            if piece is last:
                self._cut = (key, group) if piece.stop < sizes[number] else None
            return act(number, group.take(slice(piece.start, piece.stop)))

        return mapped(self.pool, read, range(len(pieces)))


class SliceStream(Source):
    """Sets of one slice each, or contiguous patches, from the layout that keeps slices together."""

    def __init__(self, reader: ShardReader, draw: Draw) -> None:
        super().__init__(reader, draw)
        if reader.metadata.layout != "slice":
            raise InputError(
                f"{reader.folder.where}: set_draw {draw.kind!r} cannot be streamed from the layout "
                "'shuffled': preprocess again with --layout slice, or load without --streaming"
            )

    def windows(
        self, epoch: int, first_set: int, pool: Executor | None
    ) -> Iterator[Callable[[], Window]]:
        """Yield how to load each window of this rank, from the one with `first_set` on."""
        draw = self.draw
        cells = self.cells_per_slice()
        start, stop = draw.share_of(self.count_units())
        start += first_set
        before = 0
        windows = order.slice_windows(cells, draw.set_size, draw.window_rows, draw.seed, epoch)
        for window in windows:
            mine = window[max(start - before, 0) : max(stop - before, 0)]
            before += len(window)
            if mine:
                yield lambda mine=mine: self._window(mine, epoch, pool)  # type: ignore[misc]

    def _window(self, sets: list[order.SliceSet], epoch: int, pool: Executor | None) -> Window:
        numbers = list(dict.fromkeys(cell_set.slice_number for cell_set in sets))
        pieces = [self.pieces_of(number) for number in numbers]
        flat = [piece for group in pieces for piece in group]
        table = joined_tables(mapped(pool, self.reader.read, flat))
        sizes = [sum(map(len, group)) for group in pieces]
        rows: dict[int, list[np.ndarray]] = {}
        first = 0
        for number, size in zip(numbers, sizes, strict=True):
            divided = self.draw.divided(table.position[first : first + size], number, epoch)
            rows[number] = [chosen + first for chosen in divided]
            first += size
        chosen: list[Rows] = [rows[cell_set.slice_number][cell_set.number] for cell_set in sets]
        return Window(table, chosen)

    def pieces_of(self, slice_number: int) -> list[Piece]:
        """Return where the cells of a slice lie."""
        return self._pieces_by_slice.get(slice_number, [])

    @cached_property
    def _pieces_by_slice(self) -> dict[int, list[Piece]]:
        """Find where the cells of every slice lie, in one pass over the row groups."""
        by_slice: dict[int, list[Piece]] = {}
        for number, shard in enumerate(self.reader.shards):
            group, used = 0, 0  # the row group that is next, and how many of its rows are taken
            for run, cells in shard.slices or []:
                left = cells
                while left and group < len(shard.row_groups):
                    rows = min(left, shard.row_groups[group] - used)
                    if rows:
                        piece = Piece(number, group, used, used + rows)
                        by_slice.setdefault(run, []).append(piece)
                    left, used = left - rows, used + rows
                    if used == shard.row_groups[group]:
                        group, used = group + 1, 0
        return by_slice
