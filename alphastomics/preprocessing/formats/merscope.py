"""MERSCOPE output folders: cell_by_gene.csv and cell_metadata.csv enter, cells in µm leave.

Cells come in the order of the metadata. Older versions leave the column with the cell's name
without a name of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alphastomics.preprocessing.cell_source import CellSource, Format, SourceOptions
from alphastomics.preprocessing.formats.columns import (
    CellColumns,
    PlainCoordinates,
    PlainSource,
    TableFile,
    lists_columns,
    only_file,
    other_columns_note,
    read_coordinates,
    require_names,
    without_other_columns,
)
from alphastomics.preprocessing.formats.delimited import TableCounts
from alphastomics.preprocessing.formats.matching import RowMatch, require_same_cells

COUNTS, METADATA = "*cell_by_gene*.csv", "*cell_metadata*.csv"
CELL_NAMES = ("cell", "EntityID", "cell_id", "")
AXES = ("center_x", "center_y")
BLANK = "blank"


def files_of_run(folder: Path, _: SourceOptions) -> list[Path]:
    """Return the counts and the metadata."""
    return [
        only_file(folder, "the table of counts", COUNTS),
        only_file(folder, "the table of cells", METADATA),
    ]


@contextmanager
def opened_run(folder: Path, options: SourceOptions) -> Iterator[CellSource]:
    """Open a MERSCOPE output folder."""
    counts_path, metadata_path = files_of_run(folder, options)
    table, metadata = TableFile(counts_path), TableFile(metadata_path)
    key = table.require("the name of the cell", *CELL_NAMES)
    own_key = metadata.require("the name of the cell", *CELL_NAMES[1:], CELL_NAMES[0])
    axes = [metadata.require(f"the {name[-1]} of the centre", name) for name in AXES]
    names = require_names(metadata_path, metadata.read_text(own_key))
    every = [number for number in range(len(table.header)) if number != key]
    others = without_other_columns(table.header, every)
    genes = [number for number in others if not table.header[number].lower().startswith(BLANK)]
    match = RowMatch(names, lambda batch: batch[0])
    blanks = len(others) - len(genes)
    yield PlainSource(
        folder,
        [table.header[number] for number in genes],
        CellColumns(names, metadata),
        TableCounts(table, genes, [key], match, len(names)),
        len(names),
        PlainCoordinates(metadata_path, ", ".join(AXES), read_coordinates(metadata, *axes)),
        notes=[
            *([f"{blanks} blank barcodes are left out"] if blanks else []),
            *other_columns_note(table.header, every),
        ],
        check=lambda: require_same_cells(table, [key], match, metadata_path),
    )


def _is_run(path: Path) -> bool:
    if not path.is_dir():
        return False
    return any(path.glob(COUNTS)) or lists_columns(path, [METADATA], *AXES)


FORMAT = Format(
    name="merscope",
    content="a folder with cell_by_gene.csv and cell_metadata.csv",
    recognises=_is_run,
    files=files_of_run,
    opened=opened_run,
)
