"""Counts in a table with a column per gene: its blocks enter, entries that are not zero leave.

A compressed CSV has no ranges of rows, so all of it is read in the order of the file; each row is
put where its cell is.
"""

from collections.abc import Callable, Iterator
from functools import cached_property

import numpy as np
import pyarrow as pa
from jaxtyping import Int64
from scipy.sparse import coo_array, csr_array

from alphastomics.errors import InputError
from alphastomics.preprocessing.formats.columns import TableFile
from alphastomics.preprocessing.matrix import BYTES_PER_ENTRY, require_finite_values

RowsOfBlock = Callable[[pa.RecordBatch, int], Int64[np.ndarray, " N"]]


class TableCounts:
    """Counts of a CSV or Parquet file, a row per cell.

    Parameters
    ----------
    table
        The file.
    genes
        Its columns of counts.
    keys
        Its columns that name the cell.
    rows_of_block
        A block's columns of keys, and how many rows came before -> the cell of each row; -1 leaves
        a row out.
    cells
        Number of cells.
    """

    has_rows = False

    def __init__(
        self,
        table: TableFile,
        genes: list[int],
        keys: list[int],
        rows_of_block: RowsOfBlock,
        cells: int,
    ) -> None:
        self.table, self.genes, self.keys = table, genes, keys
        self.rows_of_block, self.cells = rows_of_block, cells

    def _blocks(self) -> Iterator[tuple[Int64[np.ndarray, " N"], csr_array]]:
        """Read blocks of rows: the cell of each row, and its counts."""
        kinds = {number: pa.string() for number in self.keys}
        kinds |= {number: pa.float32() for number in self.genes}
        before = 0
        for batch in self.table.batches(kinds):
            columns = batch.columns[len(self.keys) :]
            empty = [
                number for number, part in zip(self.genes, columns, strict=True) if part.null_count
            ]
            if empty:
                raise InputError(
                    f"{self.table.path}: column {self.table.header[empty[0]]!r} has fields without "
                    f"a number (after row {before}): fill them with 0, or export the file again"
                )
            rows = self.rows_of_block(batch, before)
            dense = np.stack([part.to_numpy() for part in columns], axis=1)
            values = csr_array(dense)
            require_finite_values(self.table.path, values, before)
            before += len(batch)
            yield rows, values

    def pieces(self) -> Iterator[coo_array]:
        """Read all entries, block by block."""
        for rows, block in self._blocks():
            entries = block.tocoo()
            row, column = entries.coords
            kept = rows[row] >= 0
            where = (rows[row][kept], column[kept])
            yield coo_array((entries.data[kept], where), shape=(self.cells, len(self.genes)))

    def rows(self, start: int, stop: int) -> csr_array:
        """Read some rows, which takes a pass over the file."""
        return self.whole()[start:stop]

    def whole(self) -> csr_array:
        """Read all rows."""
        return whole_of(self.pieces(), (self.cells, len(self.genes)))

    @cached_property
    def _entries_per_row(self) -> float:
        rows, block = next(self._blocks(), (np.zeros(0), csr_array((0, 1))))
        return block.nnz / max(len(rows), 1)

    def bytes_per_row(self) -> float:
        """Estimate what a row takes by the first block."""
        return self._entries_per_row * BYTES_PER_ENTRY


def whole_of(pieces: Iterator[coo_array], shape: tuple[int, int]) -> csr_array:
    """Put the pieces of a matrix together."""
    parts = [(*piece.coords, piece.data) for piece in pieces]
    if not parts:
        return csr_array(shape, dtype=np.float32)
    row, column, value = (np.concatenate(part) for part in zip(*parts, strict=True))
    counts = coo_array((value, (row, column)), shape=shape).tocsr()
    counts.eliminate_zeros()
    return counts
