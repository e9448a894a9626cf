"""A table of counts, CSV or Parquet, a row per cell and a column per gene: cells, no positions.

The first column of text whose entries all differ names the cells, else that of the index. Columns
of text are no genes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from alphastomics.errors import InputError
from alphastomics.preprocessing.anndata_file import reading
from alphastomics.preprocessing.cell_source import CellSource, Format, SourceOptions
from alphastomics.preprocessing.formats.columns import (
    CellColumns,
    PlainSource,
    TableFile,
    other_columns_note,
    without_other_columns,
)
from alphastomics.preprocessing.formats.delimited import TableCounts

SUFFIXES = (".csv", ".csv.gz", ".parquet")
# What pandas calls the column of an index that has no name of its own.
INDEX_NAMES = ("", "index", "__index_level_0__")


def columns_of_text(table: TableFile) -> list[int]:
    """Tell columns of text from columns of numbers, by their type or by the first rows."""
    if table.is_parquet:
        import pyarrow.parquet as pq

        kinds = pq.read_schema(table.path).types
    else:
        from pyarrow import csv

        with (
            reading(table.path, "the table"),
            pa.input_stream(str(table.path), compression="detect") as stream,
        ):
            kinds = csv.open_csv(stream).schema.types
    numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    return [n for n, kind in enumerate(kinds) if not any(is_kind(kind) for is_kind in numbers)]


def cell_names(table: TableFile, candidates: list[int], other: int) -> pa.StringArray:
    """Return the first column that has a name of its own for each cell; numbers without one."""
    for number in candidates:
        names = table.read(number, pa.string())
        if not names.null_count and len(names.unique()) == len(names):
            return names
    cells = len(table.read(other, pa.string()))
    return pa.array([f"cell_{number}" for number in range(cells)], pa.string())


@contextmanager
def opened_table(path: Path, _: SourceOptions) -> Iterator[CellSource]:
    """Open a table of counts."""
    table = TableFile(path)
    texts = columns_of_text(table)
    indices = [number for number, name in enumerate(table.header) if name in INDEX_NAMES]
    every = [n for n in range(len(table.header)) if n not in {*texts, *indices}]
    genes = without_other_columns(table.header, every)
    if not genes:
        raise InputError(
            f"{path}: no column is of numbers: expected a row per cell, and a column "
            "of counts per gene"
        )
    names = cell_names(table, [*texts, *indices], genes[0])
    counts = TableCounts(
        table, genes, [], lambda batch, before: np.arange(before, before + len(batch)), len(names)
    )
    about = CellColumns(names, table, columns=[table.header[n] for n in texts])
    yield PlainSource(
        *(path, [table.header[n] for n in genes], about, counts, len(names)),
        notes=other_columns_note(table.header, every),
    )


def _is_table(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES) and path.is_file()


FORMAT = Format(
    name="table",
    content="a .csv[.gz] or .parquet file, a row per cell and a column per gene; no positions",
    recognises=_is_table,
    files=lambda path, _: [path],
    opened=opened_table,
    has_positions=False,
    is_searched=False,
)
