"""Two tables of the same cells: rows of one enter, the cell of the other that each is leaves."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int64

from alphastomics.errors import InputError
from alphastomics.preprocessing.formats.columns import TableFile


class RowMatch:
    """Which cell each row of a table of counts is.

    Parameters
    ----------
    names
        Names of the cells, in their order.
    name_of
        Columns of keys of a block -> the name of each row; null is no cell.
    """

    def __init__(
        self, names: pa.StringArray, name_of: Callable[[pa.RecordBatch], pa.StringArray]
    ) -> None:
        self.names, self.name_of = names, name_of

    def __call__(self, batch: pa.RecordBatch, before: int) -> Int64[np.ndarray, " N"]:
        """Return the cell of each row of a block; -1 for a row that is no cell."""
        own = self.name_of(batch)
        # In the usual case both tables have the same order, and nothing need be looked up.
        if own.equals(self.names[before : before + len(own)]):
            return np.arange(before, before + len(own))
        return np.array([self._row_of.get(name, -1) for name in own.to_pylist()], dtype=np.int64)

    @cached_property
    def _row_of(self) -> dict[str, int]:
        """Find a cell by its name; made once, for all blocks."""
        return {name: row for row, name in enumerate(self.names.to_pylist())}


def require_same_cells(table: TableFile, keys: list[int], match: RowMatch, other: Path) -> None:
    """Refuse counts and metadata that do not speak of the same cells, each once."""
    times = np.zeros(len(match.names), dtype=np.int64)
    before = 0
    for batch in table.batches({number: pa.string() for number in keys}):
        rows, own = match(batch, before), match.name_of(batch)
        unknown = np.flatnonzero((rows < 0) & ~pc.is_null(own).to_numpy(zero_copy_only=False))
        if len(unknown):
            raise InputError(
                f"{table.path}: the cell {own[int(unknown[0])].as_py()!r} is not in {other.name}, "
                "so it has no position: copy both files from the same run"
            )
        np.add.at(times, rows[rows >= 0], 1)
        before += len(own)
    for bad, said in ((times == 0, "has no row"), (times > 1, "has more than one row")):
        if bad.any():
            first = match.names[int(np.flatnonzero(bad)[0])].as_py()
            raise InputError(
                f"{table.path}: the cell {first!r} of {other.name} {said} ({bad.sum()} cells do "
                "so): copy both files from the same run"
            )
