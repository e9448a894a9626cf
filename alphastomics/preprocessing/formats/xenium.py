"""Xenium output folders: cell_feature_matrix.h5 and cells.parquet enter, cells in µm leave."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alphastomics.errors import InputError
from alphastomics.preprocessing.anndata_file import opened
from alphastomics.preprocessing.cell_source import CellSource, Format, SourceOptions
from alphastomics.preprocessing.formats.columns import (
    CellColumns,
    PlainCoordinates,
    PlainSource,
    TableFile,
    read_coordinates,
    require_all_rows,
)
from alphastomics.preprocessing.formats.tenx import TenxCounts

MATRIX = "cell_feature_matrix.h5"
OTHER_MATRICES = (
    "cell_feature_matrix.zarr.zip",
    "cell_feature_matrix",
    "cell_feature_matrix.tar.gz",
)
CELLS = ("cells.parquet", "cells.csv.gz", "cells.csv")


def files_of_run(folder: Path, _: SourceOptions) -> list[Path]:
    """Return the matrix and the table of cells."""
    if not (folder / MATRIX).is_file():
        others = [name for name in OTHER_MATRICES if (folder / name).exists()]
        there = f" ({others[0]} is there, and is not read)" if others else ""
        raise InputError(
            f"{folder}: {MATRIX} is missing{there}: copy it from the output of the run"
        )
    for name in CELLS:
        if (folder / name).is_file():
            return [folder / MATRIX, folder / name]
    raise InputError(
        f"{folder}: {CELLS[0]} is missing (nor is there {' or '.join(CELLS[1:])}), so the cells "
        "have no positions: copy it from the output of the run"
    )


@contextmanager
def opened_run(folder: Path, options: SourceOptions) -> Iterator[CellSource]:
    """Open a Xenium output folder."""
    matrix, cells = files_of_run(folder, options)
    table = TableFile(cells)
    columns = [table.require(f"the {axis} of the centroid", f"{axis}_centroid") for axis in "xy"]
    names = table.read_text(table.require("the name of the cell", "cell_id"))
    with opened(matrix) as root:
        counts = TenxCounts(matrix, root)
        order = require_all_rows(counts.barcodes, names, matrix, cells)
        position = read_coordinates(table, *columns)[order]
        yield PlainSource(
            folder,
            counts.features.genes,
            CellColumns(counts.barcodes, table, order),
            counts,
            counts.cells,
            PlainCoordinates(cells, "x_centroid, y_centroid", position),
            notes=counts.features.notes,
        )


def _is_run(path: Path) -> bool:
    if not path.is_dir():
        return False
    marks = ("experiment.xenium", MATRIX, *OTHER_MATRICES[:1])
    return any((path / name).exists() for name in marks)


FORMAT = Format(
    name="xenium",
    content="a folder with cell_feature_matrix.h5 and cells.parquet",
    recognises=_is_run,
    files=files_of_run,
    opened=opened_run,
)
