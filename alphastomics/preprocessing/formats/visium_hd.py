"""Visium HD: a folder of bins, or of segmented cells, enters; cells in µm leave.

Space Ranger writes the same tissue at several bin sizes, and as segmented cells. One of them is
read: the folder itself, or the one that --table names. Positions are in pixels of the full image.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float64

from alphastomics.errors import InputError
from alphastomics.preprocessing.anndata_file import opened, reading
from alphastomics.preprocessing.cell_source import CellSource, Format, SourceOptions, require_table
from alphastomics.preprocessing.formats.columns import (
    CellColumns,
    PlainCoordinates,
    PlainSource,
    TableFile,
    read_coordinates,
    require_rows,
)
from alphastomics.preprocessing.formats.outlines import centroids_of
from alphastomics.preprocessing.formats.tenx import TenxCounts

BINS, CELLS = "filtered_feature_bc_matrix.h5", "filtered_feature_cell_matrix.h5"
POSITIONS, SCALES = "spatial/tissue_positions.parquet", "spatial/scalefactors_json.json"
OUTLINES = "cell_segmentations.geojson"
SEGMENTED = "segmented_outputs"


def tables_in(folder: Path) -> dict[str, Path]:
    """List the bin sizes, and the segmented cells, below the output folder of a run."""
    above = [folder, folder / "binned_outputs"]
    bins = [path for parent in above for path in parent.glob("square_*um") if path.is_dir()]
    cells = [path for path in [folder / SEGMENTED] if path.is_dir()]
    return {path.name: path for path in (*sorted(bins), *cells)}


def is_table(folder: Path) -> bool:
    """Tell a folder of bins, or of segmented cells, from the folders above it."""
    marks = (CELLS, OUTLINES, POSITIONS)
    if folder.name == SEGMENTED or any((folder / mark).exists() for mark in marks):
        return True
    # The positions of these bins are missing, or in another folder.
    has_bins = (folder / BINS).exists() and (folder / "spatial").is_dir()
    return has_bins and not tables_in(folder)


def chosen(folder: Path, options: SourceOptions) -> Path:
    """Return the folder to read: this one, or the table in it that is asked for."""
    if is_table(folder) or not (tables := tables_in(folder)):
        return folder
    return tables[require_table(folder, list(tables), options.table)]


def files_of_table(folder: Path, options: SourceOptions) -> list[Path]:
    """Return the matrix, the positions and the scale."""
    table = chosen(folder, options)
    is_cells = table.name == SEGMENTED or any((table / n).is_file() for n in (CELLS, OUTLINES))
    names = (CELLS, OUTLINES, SCALES) if is_cells else (BINS, POSITIONS, SCALES)
    if not is_cells and not (table / POSITIONS).exists():
        _refuse_visium(table)
    for name in names:
        if not (table / name).is_file():
            raise InputError(f"{table}: {name} is missing: copy it from the output of Space Ranger")
    return [table / name for name in names]


def _refuse_visium(table: Path) -> None:
    """Refuse the output of Visium, which lists positions in CSV; that of Visium HD is Parquet."""
    for path in table.glob("spatial/tissue_positions*.csv"):
        raise InputError(
            f"{path}: is of Visium, not of Visium HD: save the slice as .h5ad, with positions in "
            "µm as obsm['spatial'], and move this folder out of --input_dir"
        )


def pixel_size(path: Path, options: SourceOptions) -> float:
    """Return the µm of a pixel."""
    if options.pixel_size is not None:
        return options.pixel_size
    with reading(path, "the scale factors"):
        scales: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        size = scales.get("microns_per_pixel")
    if not isinstance(size, int | float) or not 0 < size < np.inf:
        raise InputError(
            f"{path}: microns_per_pixel is missing, so positions are in pixels of unknown size: "
            "give --pixel_size in µm"
        )
    return float(size)


def _bins(table: Path, counts: TenxCounts) -> Float64[np.ndarray, "N 2"]:
    """Return the centre of each bin, in pixels."""
    positions = TableFile(table)
    axes = ("pxl_col_in_fullres", "pxl_row_in_fullres")
    columns = [positions.require("the position of the bin", name) for name in axes]
    barcodes = positions.read_text(positions.require("the name of the bin", "barcode"))
    order = require_rows(counts.barcodes, barcodes, counts.path, table)
    return read_coordinates(positions, *columns)[order]


def _cells(outlines: Path, counts: TenxCounts) -> Float64[np.ndarray, "N 2"]:
    """Return the centroid of each segmented cell, in pixels."""
    numbers, centroids = centroids_of(outlines)
    # A barcode is cellid_000000012-1; the outline has the number alone.
    barcodes = pc.extract_regex(counts.barcodes, r"^cellid_0*(?P<number>\d+)(?:-\d+)?$")
    own = pc.struct_field(barcodes, "number").fill_null("")
    known = pa.array(numbers).cast(pa.string())
    return centroids[require_rows(own, known, counts.path, outlines)]


@contextmanager
def opened_table(folder: Path, options: SourceOptions) -> Iterator[CellSource]:
    """Open a folder of bins or segmented cells."""
    matrix, where, scales = files_of_table(folder, options)
    scale = pixel_size(scales, options)
    with opened(matrix) as root:
        counts = TenxCounts(matrix, root)
        pixels = _cells(where, counts) if where.name == OUTLINES else _bins(where, counts)
        yield PlainSource(
            folder,
            counts.features.genes,
            CellColumns(counts.barcodes),
            counts,
            counts.cells,
            PlainCoordinates(where, "positions", pixels * scale),
            notes=[
                *counts.features.notes,
                f"{matrix.parent.name} is read; positions are converted from pixels of "
                f"{scale:.6g} µm",
            ],
        )


def _uses(path: Path, options: SourceOptions) -> tuple[str, ...]:
    """Say that a table which was named by its own path is not chosen by --table."""
    is_chosen = is_table(path) and path.resolve().name != options.table
    return ("pixel_size",) if is_chosen else ("table", "pixel_size")


def _is_run(path: Path) -> bool:
    return path.is_dir() and (is_table(path) or bool(tables_in(path)))


FORMAT = Format(
    name="visium_hd",
    content="square_008um/ (filtered_feature_bc_matrix.h5, spatial/) or segmented_outputs/",
    recognises=_is_run,
    files=files_of_table,
    opened=opened_table,
    uses=_uses,
)
