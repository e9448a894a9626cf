"""Sets of cells become a batch: rows of tables enter, a padded `DataHolder` leaves."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64

from alphastomics.preprocessing.cell_table import CellTable, Rows, empty_table, joined_tables
from alphastomics.preprocessing.shard_reader import ShardReader
from alphastomics.utils.dataholder import NONE, DataHolder


@dataclass(frozen=True)
class Window:
    """Cells in memory, and the sets to be made of them, in order."""

    table: CellTable
    sets: list[Rows]


@dataclass(frozen=True)
class BatchShape:
    """How a batch is laid out: every batch of a loader has the same shape."""

    sets_per_batch: int
    set_size: int

    @property
    def cells(self) -> int:
        """Count the rows for cells, padding included."""
        return self.sets_per_batch * self.set_size


def batch_of(
    reader: ShardReader, shape: BatchShape, sets: Sequence[tuple[CellTable, Rows]]
) -> DataHolder:
    """Make a batch of at most `sets_per_batch` sets; what is lacking is padded and masked."""
    chosen = [_runs_joined(table, rows) for table, rows in _grouped(sets)]
    cells = joined_tables(chosen) if chosen else empty_table(0, reader.metadata.num_genes)
    sizes = [length(rows) for _, rows in sets]
    target = None if sum(sizes) == shape.cells else padded_rows(sizes, shape.set_size)

    def column(values: np.ndarray, fill: int) -> np.ndarray:
        """Lay a column of the cells out as sets."""
        if target is not None:
            padded = np.full((shape.cells, *values.shape[1:]), fill, dtype=values.dtype)
            padded[target] = values
            values = padded
        return values.reshape(shape.sets_per_batch, shape.set_size, *values.shape[1:])

    slice_id = column(cells.slice_id, NONE).astype(np.int64)
    mask = column(np.ones(len(cells), dtype=bool), 0)
    cell_id = column(cells.cell_id, NONE)
    panel, measured = _panels(reader, np.where(mask, slice_id, 0))
    return DataHolder(
        expression=shared_tensor(column(reader.dense(cells), 0)),
        positions=shared_tensor(column(cells.position, 0)),
        node_mask=shared_tensor(mask),
        cell_type=shared_tensor(column(cells.cell_type, NONE).astype(np.int64)),
        slice_id=shared_tensor(slice_id),
        cell_id=shared_tensor(cell_id),
        panel=shared_tensor(panel),
        measured_genes=shared_tensor(measured),
        smoothed=None if cells.smoothed is None else shared_tensor(column(cells.smoothed, 0)),
        first_cells=tuple(cell_id[:, 0].tolist()),
        real_cells=sum(sizes),
    )


def length(rows: Rows) -> int:
    """Count the cells of a set."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def _grouped(
    sets: Sequence[tuple[CellTable, Rows]],
) -> list[tuple[CellTable, list[Rows]]]:
    """Put neighbouring sets of one table together, so that they are taken in one go."""
    groups: list[tuple[CellTable, list[Rows]]] = []
    for table, rows in sets:
        if not groups or groups[-1][0] is not table:
            groups.append((table, []))
        groups[-1][1].append(rows)
    return groups


def _runs_joined(table: CellTable, sets: list[Rows]) -> CellTable:
    """Take several sets of a table; sets that lie one behind the other are only viewed."""
    slices = [rows for rows in sets if isinstance(rows, slice)]
    if len(slices) == len(sets):
        return table.take(slice(slices[0].start, slices[-1].stop))
    return table.take(np.concatenate([np.r_[rows] for rows in sets]))


def padded_rows(sizes: list[int], set_size: int) -> Int64[np.ndarray, " N"]:
    """Return the row of each cell in the flattened batch."""
    first = np.arange(len(sizes)) * set_size
    before = np.cumsum([0, *sizes])[:-1]
    return np.arange(sum(sizes)) + np.repeat(first - before, sizes)


def _panels(reader: ShardReader, slice_id: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each cell's panel among those of this batch, and the panels themselves."""
    if len(reader.measured_genes) == 1:
        return np.zeros_like(slice_id), reader.measured_genes
    panels, panel = np.unique(reader.panel_of_slice[slice_id], return_inverse=True)
    return panel.reshape(slice_id.shape), reader.measured_genes[panels]


def shared_tensor(array: np.ndarray) -> torch.Tensor:
    """Share an array's memory with torch, which wants it writable."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
