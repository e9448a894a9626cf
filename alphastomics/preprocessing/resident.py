"""Cells that stay on a GPU: rows of a table enter, a batch leaves, and no cell is copied again."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from alphastomics.preprocessing.cell_table import CellTable, Rows
from alphastomics.preprocessing.sets import BatchShape, length, shared_tensor
from alphastomics.preprocessing.shard_reader import ShardReader
from alphastomics.utils.dataholder import NONE, DataHolder

# Cells that take more memory than this, or this share of the GPU's, are copied batch by batch: the
# network needs most of it, and validation cells stay beside the training cells.
MOST_BYTES, MOST_SHARE = 8_000_000_000, 0.2


def fits(table: CellTable, genes: int, device: torch.device) -> bool:
    """Say whether cells may stay on a device."""
    smoothed = 0 if table.smoothed is None else table.smoothed.shape[1]
    most: float = MOST_BYTES
    if device.type == "cuda":
        most = min(most, MOST_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return 4 * len(table) * (genes + smoothed) <= most


class ResidentCells:
    """All cells of a table on a device, and one row more, which is padding.

    Parameters
    ----------
    reader
        Whose shards the table is of.
    table
        The cells.
    device
        Where they stay.
    """

    def __init__(self, reader: ShardReader, table: CellTable, device: torch.device) -> None:
        self.device, self.cell_id = device, np.append(table.cell_id, NONE)
        self.measured_genes = torch.from_numpy(np.array(reader.measured_genes)).to(device)
        slice_id = table.slice_id.astype(np.int64)
        self.columns = {
            "expression": self._column(reader.dense(table), 0),
            "positions": self._column(table.position, 0),
            "node_mask": self._column(np.ones(len(table), dtype=bool), 0),
            "cell_type": self._column(table.cell_type.astype(np.int64), NONE),
            "slice_id": self._column(slice_id, NONE),
            "cell_id": self._column(table.cell_id, NONE),
            "panel": self._column(reader.panel_of_slice[slice_id], 0),
        }
        if table.smoothed is not None:
            self.columns["smoothed"] = self._column(table.smoothed, 0)

    def _column(self, values: np.ndarray, fill: int) -> Tensor:
        """Copy a column to the device, with the row of padding."""
        cells = shared_tensor(values)
        column = cells.new_full((len(cells) + 1, *cells.shape[1:]), fill, device=self.device)
        column[:-1] = cells
        return column

    def batch(self, shape: BatchShape, sets: Sequence[Rows]) -> DataHolder:
        """Make a batch of at most `sets_per_batch` sets; what is lacking is padded and masked."""
        sizes = [length(each) for each in sets]
        rows = np.full((shape.sets_per_batch, shape.set_size), len(self.cell_id) - 1)
        for number, (each, size) in enumerate(zip(sets, sizes, strict=True)):
            chosen_rows = np.arange(each.start, each.stop) if isinstance(each, slice) else each
            rows[number, :size] = chosen_rows
        index = torch.from_numpy(rows.ravel())
        if self.device.type == "cuda":
            index = index.pin_memory()
        index = index.to(self.device, non_blocking=True)

        def chosen(column: Tensor) -> Tensor:
            taken = column.index_select(0, index)
            return taken.reshape(shape.sets_per_batch, shape.set_size, *taken.shape[1:])

        first = self.cell_id[rows[:, 0]]
        return DataHolder(
            **{name: chosen(column) for name, column in self.columns.items()},
            measured_genes=self.measured_genes,
            first_cells=tuple(first.tolist()),
            real_cells=sum(sizes),
        )
