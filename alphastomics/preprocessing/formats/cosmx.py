"""CosMx flat files: the matrix and the metadata of a slide enter, cells in µm leave.

Centres are in pixels. What a pixel measures follows from the FOV positions, which newer versions
give in pixels and in millimetres; else the user says it. Row `cell_ID` 0 is the background.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from alphastomics.errors import InputError
from alphastomics.preprocessing.cell_source import CellSource, Format, SourceOptions
from alphastomics.preprocessing.formats.columns import (
    CellColumns,
    PlainCoordinates,
    PlainSource,
    TableFile,
    only_file,
    other_columns_note,
    read_coordinates,
    require_names,
    without_other_columns,
)
from alphastomics.preprocessing.formats.delimited import TableCounts
from alphastomics.preprocessing.formats.matching import RowMatch, require_same_cells

COUNTS, METADATA, FOVS = (f"*{kind}_file.csv" for kind in ("exprMat", "metadata", "fov_positions"))
KEYS = ("cell", "cell_id", "cell_ID", "fov")
CONTROLS = ("negprb", "negative", "systemcontrol", "falsecode")
UM_PER_MM = 1000.0


def _both(pattern: str) -> tuple[str, str]:
    return pattern, f"{pattern}.gz"


def files_of_slide(folder: Path, options: SourceOptions) -> list[Path]:
    """Return the counts, the metadata, and the FOV positions where these are needed and there."""
    files = [
        only_file(folder, "the table of counts", *_both(COUNTS)),
        only_file(folder, "the table of cells", *_both(METADATA)),
    ]
    if options.pixel_size is None and any(any(folder.glob(name)) for name in _both(FOVS)):
        files.append(only_file(folder, "the table of FOV positions", *_both(FOVS)))
    return files


def pixel_size(folder: Path, options: SourceOptions, fovs: Path | None) -> float:
    """Return the µm of a pixel: as the user says, or as the FOVs are apart in px and in mm."""
    if options.pixel_size is not None:
        return options.pixel_size
    if fovs is not None:
        table = TableFile(fovs)
        extents = []
        for unit in ("px", "mm"):
            x, y = (table.number(f"{axis}_global_{unit}") for axis in "xy")
            if x is not None and y is not None:
                extents.append(np.ptp(read_coordinates(table, x, y), axis=0))
        if len(extents) == 2 and extents[0].max() > 0:
            pixels, millimetres = extents
            axis = int(pixels.argmax())
            return float(UM_PER_MM * millimetres[axis] / pixels[axis])
    raise InputError(
        f"{folder}: positions are in pixels, and no file says what a pixel measures (a "
        f"{FOVS} of several FOVs with x_global_px and x_global_mm would): give --pixel_size in µm, "
        "0.12028 for current instruments and 0.18 for data of before 2023"
    )


def _names(batch: pa.RecordBatch) -> pa.StringArray:
    """Name a cell by FOV and number; the background has no name."""
    fov, cell = batch[0], batch[1]
    names = pc.binary_join_element_wise(fov, cell, "_")
    return pc.if_else(pc.equal(cell, "0"), pa.scalar(None, pa.string()), names)


@contextmanager
def opened_slide(folder: Path, options: SourceOptions) -> Iterator[CellSource]:
    """Open a folder of CosMx flat files."""
    counts_path, metadata_path, *fovs = files_of_slide(folder, options)
    table, metadata = TableFile(counts_path), TableFile(metadata_path)
    scale = pixel_size(folder, options, fovs[0] if fovs else None)
    keys, own_keys = (
        [part.require("the FOV", "fov"), part.require("the number of the cell", "cell_ID")]
        for part in (table, metadata)
    )
    axes = [metadata.require(f"the {a} of the centre", f"Center{a}_global_px") for a in "XY"]
    columns = [metadata.read_text(number) for number in own_keys]
    own = _names(pa.RecordBatch.from_arrays(columns, ["fov", "cell"]))
    order = np.flatnonzero(pc.is_valid(own).to_numpy(zero_copy_only=False))
    names = require_names(metadata_path, own.take(pa.array(order)))
    every = [number for number, name in enumerate(table.header) if name not in KEYS]
    others = without_other_columns(table.header, every)
    genes = [n for n in others if not table.header[n].lower().startswith(CONTROLS)]
    match = RowMatch(names, _names)
    position = read_coordinates(metadata, *axes)[order] * scale
    controls = len(others) - len(genes)
    yield PlainSource(
        folder,
        [table.header[number] for number in genes],
        CellColumns(_given_names(metadata, names, order), metadata, order),
        TableCounts(table, genes, keys, match, len(names)),
        len(names),
        PlainCoordinates(metadata_path, "CenterX_global_px, CenterY_global_px", position),
        notes=[
            f"{controls} negative and system control probes are left out",
            f"positions are converted from pixels of {scale:.6g} µm",
            *other_columns_note(table.header, every),
        ],
        check=lambda: require_same_cells(table, keys, match, metadata_path),
    )


def _given_names(metadata: TableFile, names: pa.StringArray, order: np.ndarray) -> pa.StringArray:
    """Return the vendor's own names of the cells where it has some."""
    column = metadata.number("cell_id", "cell")
    if column is None:
        return names
    given = metadata.read_text(column).take(pa.array(order))
    return given if len(given.unique()) == len(given) else names


def _is_slide(path: Path) -> bool:
    patterns = [name for kind in (COUNTS, METADATA, FOVS) for name in _both(kind)]
    return path.is_dir() and any(any(path.glob(name)) for name in patterns)


FORMAT = Format(
    name="cosmx",
    content="a folder with *_exprMat_file.csv[.gz] and *_metadata_file.csv[.gz]",
    recognises=_is_slide,
    files=files_of_slide,
    opened=opened_slide,
    uses=lambda *_: ("pixel_size",),
)
