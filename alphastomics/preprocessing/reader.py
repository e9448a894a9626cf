"""One reader of cells: an open source enters; aligned, normalised cells leave, by ranges of rows.

`preprocess`, `sample`, `test` and `extract` read cells through it, so that a query becomes what the
training cells became. Standardising needs a whole slice, and is left to the caller.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from jaxtyping import Float64, Int64
from scipy.sparse import csr_array

from alphastomics.errors import InputError
from alphastomics.preprocessing.cell_source import CellSource, Coordinates, Matrix
from alphastomics.preprocessing.cell_table import CellTable
from alphastomics.preprocessing.genes import Alignment, require_unique
from alphastomics.preprocessing.normalize import log_normalized

SLICE_KEY = "slice_id"
USUAL_SLICE_KEYS = ("library_id", "sample_id")
OBS_ROWS = 1_000_000  # rows of obs that are read at a time: a few bytes each


@dataclass(frozen=True)
class CellForm:
    """What cells are to become: genes of a list, normalised or not, with these columns.

    Parameters
    ----------
    alignment
        How the file's genes map onto the list.
    log_normalize
        Bring each cell to a total, over all genes of its file, and take the logarithm.
    position_key
        Key of obsm with the coordinates.
    cell_type_key, cell_types
        Column of obs with the cell types, None for none; the names that their numbers stand for.
    partial
        Cells may lack a position: they have NaN instead.
    """

    alignment: Alignment
    log_normalize: bool
    position_key: str
    cell_type_key: str | None
    cell_types: tuple[str, ...]
    partial: bool = False


class CellReader:
    """The cells of an open source.

    Parameters
    ----------
    source
        The open file or folder.
    name
        What its slice is called where `obs` names none.
    slices
        Names of its slices, where they are known from an inspection.
    has_positions
        Whether its cells have coordinates: the usual columns name slices of those alone.
    """

    def __init__(
        self,
        source: CellSource,
        name: str,
        slices: tuple[str, ...] | None = None,
        *,
        has_positions: bool,
    ) -> None:
        self.source, self.path, self.name = source, source.path, name
        self.obs, self.num_cells, self.genes = source.obs, source.num_cells, source.genes
        remedy = "make them unique (adata.var_names_make_unique()) or add them up"
        require_unique(self.genes, f"{self.path}: var_names", remedy)
        self._slices, self._has_positions = slices, has_positions
        self._latest: tuple[tuple[int, int], csr_array] | None = None

    @cached_property
    def expression(self) -> Matrix:
        """Open the counts."""
        return self.source.expression

    def positions(self, key: str) -> Coordinates | None:
        """Open the coordinates; dissociated cells have none."""
        return self.source.positions(key) if key in self.source.position_keys else None

    @cached_property
    def slice_key(self) -> str | None:
        """Name the column of obs that says which slice a cell is of; None makes all one slice.

        Columns that may mean something else count only where they name more than one.
        """
        if SLICE_KEY in self.obs.columns:
            return SLICE_KEY
        usual = USUAL_SLICE_KEYS if self._has_positions else ()
        for key in (*self.source.slice_keys, *usual):
            if len(self.names_that_occur(key) or ()) > 1:
                return key
        return None

    @cached_property
    def slices(self) -> tuple[str, ...]:
        """Name the slices: numbers in their order, other names by the alphabet."""
        if self._slices is not None:
            return self._slices
        names = self.names_that_occur(self.slice_key)
        if names is None:
            return (self.name,)
        try:
            numbers = {name: float(name) for name in names}
        except ValueError:
            return names
        # "nan" is read as a number, too, and is not one of them.
        ordered = all(map(math.isfinite, numbers.values()))
        return tuple(sorted(names, key=numbers.__getitem__)) if ordered else names

    def names_that_occur(self, column: str | None) -> tuple[str, ...] | None:
        """List the names in a column of obs, sorted; None where there is no such column."""
        if column is None or column not in self.obs.columns:
            return None
        occurring: set[str] = set()
        for start in range(0, self.num_cells, OBS_ROWS):
            codes, labels = self.obs.labels(column, start, min(start + OBS_ROWS, self.num_cells))
            used = np.unique(codes[codes >= 0])
            occurring.update(labels.take(pa.array(used)).to_pylist())
        occurring -= {name for name in occurring if not name.strip()}  # a blank is no label
        return tuple(sorted(occurring))

    def numbers(
        self, column: str, names: tuple[str, ...], start: int, stop: int
    ) -> Int64[np.ndarray, " N"]:
        """Return the index in `names` of each row's name in a column of obs; -1: it has none."""
        codes, labels = self.obs.labels(column, start, stop)
        index_of = {name: number for number, name in enumerate(names)}
        # The code -1 (missing) finds the last entry.
        index = [*(index_of.get(label, -1) for label in labels.to_pylist()), -1]
        return np.array(index, dtype=np.int64)[codes]

    def slice_id(self, start: int, stop: int) -> Int64[np.ndarray, " N"]:
        """Return the slice of each row, counted within the file."""
        if self.slice_key is None:
            return np.zeros(stop - start, dtype=np.int64)
        numbers = self.numbers(self.slice_key, self.slices, start, stop)
        missing = np.flatnonzero(numbers < 0)
        if len(missing):
            raise InputError(
                f"{self.path}: obs[{self.slice_key!r}] is missing for some cells (first in row "
                f"{start + missing[0]}): name the slice of every cell, or drop the column"
            )
        return numbers

    @cached_property
    def _whole(self) -> csr_array:
        return self.expression.whole()

    def counts(self, start: int, stop: int) -> csr_array:
        """Read some rows of X, checked; the latest ones are kept. Without ranges, all are read."""
        if self._latest is None or self._latest[0] != (start, stop):
            in_ranges = self.expression.has_rows
            rows = self.expression.rows(start, stop) if in_ranges else self._whole[start:stop]
            self._latest = ((start, stop), rows)
        return self._latest[1]

    def read(
        self, form: CellForm, start: int, stop: int, counts: csr_array | None = None
    ) -> CellTable:
        """Read some rows as cells of a form; slices and cells are counted within the file.

        `counts` are the rows of X where they were read in another way. What lacks a coordinate, be
        it z or all of them, has 0 instead.
        """
        counts = self.counts(start, stop) if counts is None else counts
        if form.log_normalize:
            self._require_counts(counts, start)
            counts = log_normalized(counts)
        types = np.full(stop - start, -1, dtype=np.int32)
        if form.cell_type_key is not None and form.cell_type_key in self.obs.columns:
            numbers = self.numbers(form.cell_type_key, form.cell_types, start, stop)
            types = numbers.astype(np.int32)
        return CellTable(
            form.alignment.apply(counts),
            self._position(form, start, stop),
            types,
            self.slice_id(start, stop),
            np.arange(start, stop),
            self.obs.names(start, stop),
        )

    def _position(self, form: CellForm, start: int, stop: int) -> Float64[np.ndarray, "N 3"]:
        position = np.zeros((stop - start, 3))
        positions = self.positions(form.position_key)
        if positions is not None:
            rows = positions.rows(start, stop, partial=form.partial)
            position[:, : positions.columns] = rows
        return position

    def _require_counts(self, counts: csr_array, start: int) -> None:
        """Refuse negative values where a logarithm is asked."""
        negative = np.flatnonzero(counts.data < 0)
        if len(negative):
            row = start + int(np.searchsorted(counts.indptr, negative[0], side="right")) - 1
            raise InputError(
                f"{self.path}: X has negative values (first in row {row}), so these are no counts: "
                "give --skip-log-normalize if they are already normalised"
            )
