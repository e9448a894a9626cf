"""The whole split in memory: sets are drawn from one resident table, from any layout."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from threading import Lock

import numpy as np

from alphastomics.preprocessing import order
from alphastomics.preprocessing.cell_table import CellTable, Rows, joined_tables
from alphastomics.preprocessing.sets import Window
from alphastomics.preprocessing.shard_reader import ShardReader
from alphastomics.preprocessing.streaming import Draw, Source, mapped

# The expression of a slice (N, G) enters, smoothed (N, F) it leaves.
Smooth = Callable[[np.ndarray], np.ndarray]
# Slice numbers (N) and positions (N, 3) of cells enter, True for those to draw from leaves.
Chosen = Callable[[np.ndarray, np.ndarray], np.ndarray]


class MemorySource(Source):
    """Samples sets from a split that is read once, when its first batch is asked for.

    Parameters
    ----------
    reader, draw
        The split, and how sets are drawn.
    chosen
        Which of the split's cells there are to draw from; None is all of them.
    smooth
        Smooths the expression of a slice; None leaves that to whom it concerns.
    """

    def __init__(
        self,
        reader: ShardReader,
        draw: Draw,
        chosen: Chosen | None = None,
        smooth: Smooth | None = None,
    ) -> None:
        super().__init__(reader, draw)
        self.chosen, self.smooth = chosen, smooth
        self._table: CellTable | None = None
        self._lock = Lock()

    def table(self) -> CellTable:
        """Return the cells to draw from."""
        return self._loaded(None)

    def cells_per_slice(self) -> dict[int, int]:
        """Count the cells of each slice that are there to draw from, over all ranks."""
        if self.chosen is None:
            return super().cells_per_slice()
        numbers, counts = np.unique(self._loaded(None).slice_id, return_counts=True)
        return dict(zip(numbers.tolist(), counts.tolist(), strict=True))

    def windows(
        self, epoch: int, first_set: int, pool: Executor | None
    ) -> Iterator[Callable[[], Window]]:
        """Yield one window with all sets of this rank from `first_set` on."""
        if self.reader.shards:
            yield lambda: self._window(epoch, first_set, pool)

    def _window(self, epoch: int, first_set: int, pool: Executor | None) -> Window:
        table = self._loaded(pool)
        if self.draw.kind == "random":
            return Window(table, self._random_sets(epoch)[first_set:])
        return Window(table, self._slice_sets(table, epoch, first_set))

    def _loaded(self, pool: Executor | None) -> CellTable:
        with self._lock:
            if self._table is None:
                tables = mapped(pool, self.reader.read, self.reader.pieces)
                table = joined_tables(tables)
                if self.chosen is not None:
                    rows = np.flatnonzero(self.chosen(table.slice_id, table.position))
                    table = table.take(rows)
                self._table = table if self.smooth is None else self._smoothed(table, self.smooth)
            return self._table

    def _smoothed(self, table: CellTable, smooth: Smooth) -> CellTable:
        """Smooth every slice as a whole, so that a set does not depend on who else is in it."""
        expression = self.reader.dense(table)
        smoothed: np.ndarray | None = None
        for number in np.unique(table.slice_id):
            rows = np.flatnonzero(table.slice_id == number)
            values = smooth(expression[rows])
            if smoothed is None:
                smoothed = np.zeros((len(table), values.shape[1]), np.float32)
            smoothed[rows] = values
        return replace(table, smoothed=smoothed)

    def _random_sets(self, epoch: int) -> list[Rows]:
        draw = self.draw
        cells = self.count_units()
        start, stop = draw.share_of(cells)
        rng = np.random.default_rng([draw.seed, order.GROUP_STREAM, epoch])
        mine = rng.permutation(cells)[start:stop]
        return [mine[first : first + draw.set_size] for first in range(0, len(mine), draw.set_size)]

    def _slice_sets(self, table: CellTable, epoch: int, first_set: int) -> list[Rows]:
        draw = self.draw
        by_slice = np.argsort(table.slice_id, kind="stable")
        numbers, starts = np.unique(table.slice_id[by_slice], return_index=True)
        rows_of = dict(zip(numbers.tolist(), np.split(by_slice, starts[1:]), strict=True))
        cells = {number: len(rows) for number, rows in rows_of.items()}
        windows = order.slice_windows(cells, draw.set_size, len(table), draw.seed, epoch)
        chosen = [chosen for window in windows for chosen in window]
        start, stop = draw.share_of(len(chosen))
        divided: dict[int, list[np.ndarray]] = {}
        sets: list[Rows] = []
        for cell_set in chosen[start + first_set : stop]:
            number = cell_set.slice_number
            rows = rows_of[number]
            if number not in divided:
                divided[number] = draw.divided(table.position[rows], number, epoch)
            sets.append(rows[divided[number][cell_set.number]])
        return sets
