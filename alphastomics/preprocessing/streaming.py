"""Shards read as they are needed: windows of the shuffle buffer are planned, read and cut to sets.

Random sets come from shuffled row groups, permuted within the window. Sets of a slice, and patches,
come from whole slices, which the layout `slice` keeps together.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, TypeVar

import numpy as np
from jaxtyping import Int64

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

    def count_units(self, cells: dict[int, int]) -> int:
        """Count what is shared out among the ranks: cells for random sets, else whole sets."""
        if self.kind == "random":
            return sum(cells.values())
        return sum(order.sets_of_slice(size, self.set_size) for size in cells.values())


def mapped(
    pool: Executor | None, act: Callable[[Item], Result], items: Sequence[Item]
) -> list[Result]:
    """Apply a function to all items, in a pool's threads if there is one."""
    return list(map(act, items) if pool is None else pool.map(act, items))


def cells_per_slice(reader: ShardReader) -> dict[int, int]:
    """Count the cells of each slice in the split that a reader reads."""
    counts = {
        number: record.cells_per_split[reader.split]
        for number, record in enumerate(reader.metadata.slices)
    }
    return {number: count for number, count in counts.items() if count}


class RandomStream:
    """Sets at random across slices, from a shuffle buffer that is refilled window by window."""

    def __init__(self, reader: ShardReader, draw: Draw) -> None:
        self.reader, self.draw = reader, draw

    @property
    def num_cells(self) -> int:
        """Count the cells of the split, over all ranks."""
        return self.reader.metadata.splits[self.reader.split].cells

    def count_units(self) -> int:
        """Count what is shared out among the ranks."""
        return self.draw.count_units(cells_per_slice(self.reader))

    def windows(
        self, epoch: int, first_set: int, pool: Executor | None
    ) -> Iterator[Callable[[], Window]]:
        """Yield how to load each window of this rank, from the one with `first_set` on."""
        draw = self.draw
        start, stop = order.share_of(self.count_units(), draw.rank, draw.world_size)
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
        self._left_over: dict[tuple[int, int], CellTable] = {}

    def read_joined(self, pieces: list[Piece]) -> CellTable:
        """Read the pieces of a window in their order."""
        keep = self._cut_group(pieces)
        table = joined_tables(mapped(self.pool, partial(self._piece, keep), pieces))
        self._forget_all_but(keep)
        return table

    def read_positioned(self, pieces: list[Piece], mixed: Int64[np.ndarray, " N"]) -> CellTable:
        """Read the pieces of a window; its row i is row `mixed[i]` of the pieces in their order.

        Each piece is copied to its rows as soon as it is read: its memory serves the next one.
        """
        keep = self._cut_group(pieces)
        table = empty_table(len(mixed), self.reader.metadata.num_genes)
        row_of = np.empty_like(mixed)
        row_of[mixed] = np.arange(len(mixed))
        targets = np.split(row_of, np.cumsum([len(piece) for piece in pieces])[:-1])

        def fill(job: tuple[Piece, np.ndarray]) -> None:
            put_rows(table, job[1], self._piece(keep, job[0]))

        mapped(self.pool, fill, list(zip(pieces, targets, strict=True)))
        self._forget_all_but(keep)
        return table

    def _cut_group(self, pieces: list[Piece]) -> tuple[int, int] | None:
        """Return the row group that the window's end cuts, if it does."""
        last = pieces[-1]
        whole = self.reader.shards[last.shard].row_groups[last.group]
        return (last.shard, last.group) if last.stop < whole else None

    def _forget_all_but(self, keep: tuple[int, int] | None) -> None:
        self._left_over = {key: group for key, group in self._left_over.items() if key == keep}

    def _piece(self, keep: tuple[int, int] | None, piece: Piece) -> CellTable:
        group = self._group(piece)
        if keep == (piece.shard, piece.group):
            self._left_over[keep] = group
        return group.take(slice(piece.start, piece.stop))

    def _group(self, piece: Piece) -> CellTable:
        kept = self._left_over.get((piece.shard, piece.group))
        if kept is not None:
            return kept
        rows = self.reader.shards[piece.shard].row_groups[piece.group]
        return self.reader.read(Piece(piece.shard, piece.group, 0, rows))


class SliceStream:
    """Sets of one slice each, or contiguous patches, from the layout that keeps slices together."""

    def __init__(self, reader: ShardReader, draw: Draw) -> None:
        self.reader, self.draw = reader, draw
        if reader.metadata.layout != "slice":
            raise InputError(
                f"{reader.folder.where}: set_draw {draw.kind!r} cannot be streamed from the layout "
                "'shuffled': preprocess again with --layout slice, or load without --streaming"
            )

    @property
    def num_cells(self) -> int:
        """Count the cells of the split, over all ranks."""
        return self.reader.metadata.splits[self.reader.split].cells

    def count_units(self) -> int:
        """Count what is shared out among the ranks."""
        return self.draw.count_units(cells_per_slice(self.reader))

    def windows(
        self, epoch: int, first_set: int, pool: Executor | None
    ) -> Iterator[Callable[[], Window]]:
        """Yield how to load each window of this rank, from the one with `first_set` on."""
        draw = self.draw
        cells = cells_per_slice(self.reader)
        start, stop = order.share_of(self.count_units(), draw.rank, draw.world_size)
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
            rows[number] = self._divided(table.position[first : first + size], number, epoch, first)
            first += size
        chosen: list[Rows] = [rows[cell_set.slice_number][cell_set.number] for cell_set in sets]
        return Window(table, chosen)

    def _divided(
        self, position: np.ndarray, number: int, epoch: int, first: int
    ) -> list[np.ndarray]:
        """Divide a slice into sets of rows of the window."""
        rng = order.slice_generator(self.draw.seed, epoch, number)
        divided = (
            order.random_sets(len(position), self.draw.set_size, rng)
            if self.draw.kind == "slice"
            else patches(position, self.draw.set_size, rng)
        )
        return [rows + first for rows in divided]

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
