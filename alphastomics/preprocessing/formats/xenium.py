"""Xenium output folders: the matrix and cells.parquet enter, cells in µm leave."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alphastomics.errors import InputError
from alphastomics.preprocessing.cell_source import CellSource, Format, SourceOptions
from alphastomics.preprocessing.formats.columns import (
    CellColumns,
    PlainCoordinates,
    PlainSource,
    TableFile,
    lists_columns,
    read_coordinates,
    require_all_rows,
)
from alphastomics.preprocessing.formats.xenium_matrix import (
    FOLDER,
    H5,
    ZIP,
    matrix_files,
    opened_matrix,
)

CELLS = ("cells.parquet", "cells.csv.gz", "cells.csv")
AXES = ("x_centroid", "y_centroid")


def files_of_run(folder: Path, _: SourceOptions) -> list[Path]:
    """Return the files of the matrix, and the table of cells at the end."""
    matrix = matrix_files(folder)
    for name in CELLS:
        if (folder / name).is_file():
            return [*matrix, folder / name]
    raise InputError(
        f"{folder}: {CELLS[0]} is missing (nor is there {' or '.join(CELLS[1:])}), so the cells "
        "have no positions: copy it from the output of the run"
    )


@contextmanager
def opened_run(folder: Path, options: SourceOptions) -> Iterator[CellSource]:
    """Open a Xenium output folder."""
    matrix, *_, cells = files_of_run(folder, options)
    table = TableFile(cells)
    columns = [table.require(f"the {name[0]} of the centroid", name) for name in AXES]
    known = table.read_text(table.require("the name of the cell", "cell_id"))
    with opened_matrix(folder, known) as (counts, names, features):
        order = require_all_rows(names, known, matrix, cells)
        position = read_coordinates(table, *columns)[order]
        yield PlainSource(
            folder,
            features.genes,
            CellColumns(names, table, order),
            counts,
            len(names),
            PlainCoordinates(cells, ", ".join(AXES), position),
            notes=features.notes,
        )


def _is_run(path: Path) -> bool:
    if not path.is_dir():
        return False
    marks = ("experiment.xenium", H5, ZIP, FOLDER)
    return any((path / name).exists() for name in marks) or lists_columns(path, CELLS, *AXES)


FORMAT = Format(
    name="xenium",
    content="a folder with cell_feature_matrix.h5 (or .zarr.zip, or a folder) and cells.parquet",
    recognises=_is_run,
    files=files_of_run,
    opened=opened_run,
)
