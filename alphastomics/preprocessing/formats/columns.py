"""Tables of cells on disk, CSV or Parquet: a path enters; names, columns, coordinates leave.

Names and coordinates of all cells are held in memory; other columns are read when they are asked
for, and counts in blocks.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float64, Int32, Int64

from alphastomics.errors import InputError
from alphastomics.io.files import require_file
from alphastomics.preprocessing.anndata_file import reading, require_finite
from alphastomics.preprocessing.cell_source import POSITION_KEY, CellSource, Coordinates, Matrix

BLOCK_BYTES = 4 << 20  # of a CSV that are parsed at a time; some are read ahead
SHOWN = 8  # columns in a message
# Columns of numbers about a cell, as programs write them beside its counts: in lower case.
NOT_GENES = {
    *("", "index", "__index_level_0__", "unnamed: 0", "cell", "cell_id", "cellid", "barcode"),
    *("entityid", "fov", "fov_id", "slide_id", "slide_id_numeric", "x", "y", "z", "center_x"),
    *("center_y", "x_centroid", "y_centroid", "area", "volume", "cell_area", "nucleus_area"),
    *("n_counts", "n_genes", "total_counts", "ncount_rna", "nfeature_rna", "n_genes_by_counts"),
}


class TableFile:
    """A CSV (also .gz) or Parquet file, read by columns that are numbered from the left."""

    def __init__(self, path: Path) -> None:
        require_file(path)
        self.path = path
        self.is_parquet = path.suffix.lower() == ".parquet"
        with reading(path, "the header"):
            self.header = self._parquet_header() if self.is_parquet else self._csv_header()
        if not self.header:
            raise InputError(f"{path}: is empty: copy it again from its source")

    def _parquet_header(self) -> list[str]:
        import pyarrow.parquet as pq

        return list(pq.read_schema(self.path).names)

    def _csv_header(self) -> list[str]:
        with pa.input_stream(str(self.path), compression="detect") as stream:
            line = b""
            while not line.endswith(b"\n") and (block := stream.read(1 << 16)):
                head, newline, _ = block.partition(b"\n")
                line += head + newline
        return next(csv.reader([line.decode("utf-8-sig").rstrip("\r\n")]), [])

    def number(self, *names: str) -> int | None:
        """Return the column of the first of these names that is there."""
        return next((self.header.index(name) for name in names if name in self.header), None)

    def require(self, what: str, *names: str) -> int:
        """Return the column of one of these names; another version's columns are refused."""
        number = self.number(*names)
        if number is None:
            there = ", ".join(self.header[:SHOWN]) + (", …" if len(self.header) > SHOWN else "")
            expected = " or ".join(name or "one without a name" for name in names)
            raise InputError(
                f"{self.path}: {what} is missing (expected the column {expected}; "
                f"there: {there}): the file is of another software version; export it again, or "
                "save the cells as .h5ad"
            )
        return number

    def batches(self, kinds: dict[int, pa.DataType]) -> Iterator[pa.RecordBatch]:
        """Read some columns, as these types and under their numbers, in blocks of rows."""
        from pyarrow import csv as arrow_csv

        names = [str(number) for number in kinds]
        with reading(self.path, "the table"):
            if self.is_parquet:
                yield from self._parquet_batches(kinds)
                return
            with pa.input_stream(str(self.path), compression="detect") as stream:
                every = [str(number) for number in range(len(self.header))]
                yield from arrow_csv.open_csv(
                    stream,
                    arrow_csv.ReadOptions(block_size=BLOCK_BYTES, column_names=every, skip_rows=1),
                    convert_options=arrow_csv.ConvertOptions(
                        column_types={str(number): kind for number, kind in kinds.items()},
                        include_columns=names,
                        strings_can_be_null=True,
                    ),
                )

    def _parquet_batches(self, kinds: dict[int, pa.DataType]) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq

        columns = [self.header[number] for number in kinds]
        rows = max(1, BLOCK_BYTES // (8 * len(columns)))
        with pq.ParquetFile(self.path) as file:
            for batch in file.iter_batches(rows, columns=columns):
                # Parquet gives columns in its own order.
                arrays = [
                    batch[name].cast(kind)
                    for name, kind in zip(columns, kinds.values(), strict=True)
                ]
                yield pa.RecordBatch.from_arrays(arrays, [str(number) for number in kinds])

    def read(self, number: int, kind: pa.DataType) -> pa.Array:
        """Read a whole column."""
        parts = [batch[0] for batch in self.batches({number: kind})]
        return pa.concat_arrays(parts) if parts else pa.array([], kind)

    def read_text(self, number: int) -> pa.StringArray:
        """Read a column of names, none of which may be missing."""
        names = self.read(number, pa.string())
        if names.null_count:
            row = pc.index(names.is_null(), True).as_py()
            raise InputError(
                f"{self.path}: column {self.header[number]!r} is empty in row {row}: every cell "
                "needs a name"
            )
        return names


class CellColumns:
    """Columns about the cells, of a table file whose rows are put into the order of the cells.

    Parameters
    ----------
    names
        Names of the cells.
    table
        The file with the columns; None for none.
    order
        Row of the table for each cell; None where both have the same order.
    columns
        Names of the columns that are about the cells; None for all.
    """

    def __init__(
        self,
        names: pa.StringArray,
        table: TableFile | None = None,
        order: Int64[np.ndarray, " N"] | None = None,
        columns: Sequence[str] | None = None,
    ) -> None:
        self._names, self._table, self._order = names, table, order
        there = table.header if table is not None and columns is None else columns or ()
        self.columns = sorted(set(there) - {""})

    def names(self, start: int, stop: int) -> pa.StringArray:
        """Read the names of some cells."""
        return self._names[start:stop]

    def labels(
        self, column: str, start: int, stop: int
    ) -> tuple[Int32[np.ndarray, " N"], pa.StringArray]:
        """Read a column as codes (-1: missing) into an array of names."""
        encoded = self._read(column)[start:stop].dictionary_encode()
        codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        return codes.astype(np.int32), encoded.dictionary

    def numbers(self, column: str) -> np.ndarray | None:
        """Read a column of numbers for all cells; None where it holds text."""
        values = self._read(column)
        for kind in (pa.int64(), pa.float64()):
            try:
                return values.cast(kind).to_numpy(zero_copy_only=False)
            except pa.ArrowInvalid:
                continue
        return None

    def _read(self, column: str) -> pa.StringArray:
        """Read a column as text, in the order of the cells."""
        assert self._table is not None
        values = self._table.read(self._table.header.index(column), pa.string())
        return values if self._order is None else values.take(pa.array(self._order))


class PlainCoordinates:
    """Coordinates in memory, in micrometres."""

    def __init__(self, path: Path, field: str, values: Float64[np.ndarray, "N C"]) -> None:
        self.path, self.field, self._values = path, field, values
        self.cells, self.columns = values.shape

    def rows(self, start: int, stop: int, *, partial: bool = False) -> Float64[np.ndarray, "N C"]:
        """Return the coordinates of some rows."""
        values = self._values[start:stop]
        return require_finite(self.path, self.field, values, start, partial=partial)


def read_coordinates(table: TableFile, *columns: int) -> Float64[np.ndarray, "N C"]:
    """Read columns of coordinates; an empty field is NaN."""
    parts = [table.read(column, pa.float64()).to_numpy(zero_copy_only=False) for column in columns]
    return np.stack(parts, axis=1)


class PlainSource(CellSource):
    """Cells that a format's module has put together.

    Parameters
    ----------
    genes
        Names of the genes; a name that occurs again is numbered, as scanpy does.
    coordinates
        Positions in micrometres; None for dissociated cells.
    check
        What takes a pass over the input.
    """

    def __init__(
        self,
        path: Path,
        genes: Sequence[str],
        obs: CellColumns,
        expression: Matrix,
        num_cells: int,
        coordinates: PlainCoordinates | None = None,
        *,
        notes: Sequence[str] = (),
        check: Callable[[], None] | None = None,
    ) -> None:
        self.path, self.num_cells = path, num_cells
        self.obs: CellColumns = obs
        self.genes = unique_genes(genes)
        again = sum(name != own for name, own in zip(genes, self.genes, strict=True))
        doubled = f"{again} gene names occur again, and are numbered (NAME-1, …)"
        self.notes = (*notes, *([doubled] if again else []))
        self._expression, self._coordinates, self._check = expression, coordinates, check

    @property
    def expression(self) -> Matrix:
        """Return the counts."""
        return self._expression

    @property
    def position_keys(self) -> list[str]:
        """Name the coordinates as AnnData files do, where there are any."""
        return [] if self._coordinates is None else [POSITION_KEY]

    def positions(self, key: str) -> Coordinates:
        """Return the coordinates."""
        if key not in self.position_keys or self._coordinates is None:
            there = ", ".join(self.position_keys) or "none"
            raise InputError(
                f"{self.path}: has no positions {key!r} (there: {there}): leave out --position_key"
            )
        return self._coordinates

    def verify(self) -> None:
        """Check that the files speak of the same cells."""
        if self._check is not None:
            self._check()

    def to_anndata(self) -> Any:
        """Read everything into memory."""
        import pandas as pd
        from anndata import AnnData

        every = (0, self.num_cells)
        columns: dict[str, Any] = {}
        for name in self.obs.columns:
            columns[name] = self.obs.numbers(name)
            if columns[name] is None:
                codes, labels = self.obs.labels(name, *every)
                columns[name] = pd.Categorical.from_codes(codes, labels.to_pylist())
        index = pd.Index(self.obs.names(*every).to_pylist(), dtype=object)
        obs = pd.DataFrame(columns, index=index)
        var = pd.DataFrame(index=pd.Index(self.genes, dtype=object))
        data = AnnData(self.expression.whole(), obs=obs, var=var)
        if self._coordinates is not None:
            data.obsm[POSITION_KEY] = self._coordinates.rows(*every)
        return data


def unique_genes(genes: Sequence[str]) -> tuple[str, ...]:
    """Give names that occur again a number: A, A becomes A, A-1."""
    taken, counts, names = set(genes), dict.fromkeys(genes, 0), []
    seen: set[str] = set()
    for gene in genes:
        name = gene
        while name in seen or (name != gene and name in taken):
            counts[gene] += 1
            name = f"{gene}-{counts[gene]}"
        seen.add(name)
        names.append(name)
    return tuple(names)


def require_names(path: Path, names: pa.StringArray) -> pa.StringArray:
    """Refuse a name that two cells have: their rows could not be matched."""
    counts = pc.value_counts(names)
    if len(counts) < len(names):
        first = next(entry["values"] for entry in counts.to_pylist() if entry["counts"] > 1)
        raise InputError(f"{path}: the cell {first!r} occurs more than once: keep one row per cell")
    return names


def rows_of(names: pa.StringArray, known: pa.StringArray) -> Int64[np.ndarray, " N"]:
    """Return the row in `known` of each name; -1 where it is not there."""
    if len(names) <= len(known) and names.equals(known[: len(names)]):
        return np.arange(len(names))
    index = pc.index_in(names, value_set=known)
    return index.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def require_rows(
    names: pa.StringArray, known: pa.StringArray, path: Path, table: Path
) -> Int64[np.ndarray, " N"]:
    """Return the row in a table of each cell; a cell without one is refused."""
    rows = rows_of(names, require_names(table, known))
    missing = np.flatnonzero(rows < 0)
    if len(missing):
        raise InputError(
            f"{path}: {len(missing)} of its {len(names)} cells are not in {table.name} (first "
            f"{names[int(missing[0])].as_py()!r}): the files are of different runs; copy the "
            "folder again from its source"
        )
    return rows


def require_all_rows(
    names: pa.StringArray, known: pa.StringArray, path: Path, table: Path
) -> Int64[np.ndarray, " N"]:
    """Return the row in a table of each cell; both must hold the same cells."""
    rows = require_rows(names, known, path, table)
    without = np.setdiff1d(np.arange(len(known)), rows)
    if len(without):
        raise InputError(
            f"{table}: {len(without)} of its {len(known)} cells are not in {path.name} (first "
            f"{known[int(without[0])].as_py()!r}): the files are of different runs; copy the "
            "folder again from its source"
        )
    return rows


def lists_columns(folder: Path, patterns: Sequence[str], *columns: str) -> bool:
    """Tell whether a table of a folder has these columns: its name alone may mean another thing."""
    tables = (path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    return any(set(columns) <= set(header_of(table)) for table in tables)


def header_of(table: Path) -> list[str]:
    """Return the columns of a file that may be a table; none of one that cannot be read as one."""
    try:
        return TableFile(table).header if table.stat().st_size else []
    except InputError:
        return []


def without_other_columns(header: Sequence[str], columns: Sequence[int]) -> list[int]:
    """Leave out columns of numbers that are known to be no genes."""
    return [number for number in columns if header[number].strip().lower() not in NOT_GENES]


def other_columns_note(header: Sequence[str], columns: Sequence[int]) -> list[str]:
    """Say which columns of numbers are no genes."""
    names = [header[n] for n in columns if header[n].strip().lower() in NOT_GENES]
    shown = ", ".join(name or "one without a name" for name in names)
    return [f"columns that are no genes are left out: {shown}"] if names else []


def only_file(folder: Path, what: str, *patterns: str) -> Path:
    """Return the one file of a folder that matches; none and several are refused."""
    matches = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    if not matches:
        raise InputError(
            f"{folder}: {what} is missing (expected {' or '.join(patterns)}): copy the whole "
            "folder from its source"
        )
    if len(matches) > 1:
        named = ", ".join(path.name for path in matches)
        raise InputError(
            f"{folder}: there are {len(matches)} files of {what} ({named}): keep one, or give each "
            "section a folder of its own"
        )
    return matches[0]
