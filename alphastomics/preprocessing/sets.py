"""Sets of cells become a batch: rows of tables enter, a padded `DataHolder` leaves."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64

from alphastomics.preprocessing.cell_table import CellTable, Rows
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
    sizes = [length(rows) for _, rows in sets]
    padded_rows = None if sum(sizes) == shape.cells else _padded_rows(sizes, shape.set_size)

    def column(blocks: list[np.ndarray], fill: int, width: tuple[int, ...]) -> np.ndarray:
        return _padded(blocks, padded_rows, shape, fill, width)

    genes = reader.metadata.num_genes
    slice_id = column([cells.slice_id for cells in chosen], NONE, ()).astype(np.int64)
    mask = column([np.ones(len(cells), dtype=bool) for cells in chosen], 0, ())
    panel, measured = _panels(reader, np.where(mask, slice_id, 0))
    cell_type = column([cells.cell_type for cells in chosen], NONE, ()).astype(np.int64)
    known = [cells.smoothed for cells in chosen if cells.smoothed is not None]
    width = known[0].shape[1] if known else 0
    return DataHolder(
        expression=_tensor(column([reader.dense(cells) for cells in chosen], 0, (genes,))),
        positions=_tensor(column([cells.position for cells in chosen], 0, (3,))),
        node_mask=_tensor(mask.astype(bool)),
        cell_type=_tensor(cell_type),
        slice_id=_tensor(slice_id),
        cell_id=_tensor(column([cells.cell_id for cells in chosen], NONE, ())),
        panel=_tensor(panel),
        measured_genes=_tensor(measured),
        smoothed=_tensor(column(known, 0, (width,))) if known else None,
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


def _padded_rows(sizes: list[int], set_size: int) -> Int64[np.ndarray, " N"]:
    """Return the row of each cell in the flattened batch."""
    first = np.arange(len(sizes)) * set_size
    before = np.cumsum([0, *sizes])[:-1]
    return np.arange(sum(sizes)) + np.repeat(first - before, sizes)


def _padded(
    blocks: list[np.ndarray],
    padded_rows: Int64[np.ndarray, " N"] | None,
    shape: BatchShape,
    fill: int,
    width: tuple[int, ...],
) -> np.ndarray:
    """Join blocks of cells and lay them out as sets."""
    layout = (shape.sets_per_batch, shape.set_size, *width)
    if padded_rows is None:
        whole = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return whole.reshape(layout)
    # Float is what all but numbers and masks are, and an empty batch has no block to ask.
    kind = blocks[0].dtype if blocks else np.dtype(np.float32 if width else np.int64)
    flat = np.full((shape.cells, *width), fill, dtype=kind)
    start = 0
    for block in blocks:
        flat[padded_rows[start : start + len(block)]] = block
        start += len(block)
    return flat.reshape(layout)


def _panels(reader: ShardReader, slice_id: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each cell's panel among those of this batch, and the panels themselves."""
    if len(reader.measured_genes) == 1:
        return np.zeros_like(slice_id), reader.measured_genes
    panels, panel = np.unique(reader.panel_of_slice[slice_id], return_inverse=True)
    return panel.reshape(slice_id.shape), reader.measured_genes[panels]


def _tensor(array: np.ndarray) -> torch.Tensor:
    """Share an array's memory with torch, which wants it writable."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
