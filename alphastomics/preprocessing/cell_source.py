"""What a reader of a file format provides: an open input enters, one interface to its cells leaves.

AnnData, a vendor's output folder or a table of counts: the rest of the package asks a `CellSource`
for genes, names, columns, coordinates and rows of counts, and does not know the format.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from jaxtyping import Float64, Int32
from scipy.sparse import coo_array, csr_array

from alphastomics.config import PreprocessingConfig
from alphastomics.config.data import InputFormat
from alphastomics.errors import InputError

# Where a format has coordinates of its own, they go by the name that AnnData files use.
POSITION_KEY = "spatial"
# Where aligned sections keep positions with a measured z, by convention.
MEASURED_Z = "spatial3d"
USUAL_POSITION_KEYS = (POSITION_KEY, MEASURED_Z, "X_spatial")


@runtime_checkable
class Table(Protocol):
    """Columns of text about the cells."""

    columns: list[str]

    def names(self, start: int, stop: int) -> pa.StringArray:
        """Read the names of some cells."""

    def labels(
        self, column: str, start: int, stop: int
    ) -> tuple[Int32[np.ndarray, " N"], pa.StringArray]:
        """Read a column as codes (-1: missing) into an array of names."""


@runtime_checkable
class Matrix(Protocol):
    """Counts, cells x genes, checked and as float32."""

    has_rows: bool
    """Whether ranges of rows can be read; else `pieces` come in the order of the file."""

    def rows(self, start: int, stop: int) -> csr_array:
        """Read some rows."""

    def pieces(self) -> Iterator[coo_array]:
        """Read all entries, a bounded number at a time; each piece has the shape of the whole."""

    def whole(self) -> csr_array:
        """Read all rows."""

    def bytes_per_row(self) -> float:
        """Return about what a row takes while it is worked on."""


@runtime_checkable
class Coordinates(Protocol):
    """Positions of the cells."""

    field: str
    """What an error calls them."""
    cells: int
    columns: int

    def rows(self, start: int, stop: int, *, partial: bool = False) -> Float64[np.ndarray, "N C"]:
        """Read the coordinates of some rows; NaN is refused, but of a whole row with `partial`."""


class CellSource(ABC):
    """The cells of one open input.

    Parameters
    ----------
    path
        The file or folder, as a message names it.
    genes
        Names of the columns of `expression`.
    num_cells
        Rows of `expression` and `obs`.
    obs
        What is known of the cells beside counts and position.
    notes
        What was left out or chosen, for the log.
    warnings
        What looks wrong, for the log.
    """

    path: Path
    genes: tuple[str, ...]
    num_cells: int
    obs: Table
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    has_log1p = False
    """Whether the input says that a logarithm was taken."""
    generated_mode: str | None = None
    """The mode in which `alphastomics sample` wrote the input; None where it did not."""
    slice_keys: tuple[str, ...] = ()
    """Columns of obs that name slices, beside the documented one."""

    @property
    @abstractmethod
    def expression(self) -> Matrix:
        """Open the counts."""

    @property
    @abstractmethod
    def position_keys(self) -> list[str]:
        """List the names of the coordinates; none for dissociated cells."""

    @abstractmethod
    def positions(self, key: str) -> Coordinates:
        """Open the coordinates of a name; an unknown one is refused."""

    def is_dissociated(self, key: str) -> bool:
        """Tell cells without positions from slices whose coordinates go by another name."""
        return not self.position_keys

    def verify(self) -> None:  # noqa: B027 (one file has nothing to be compared with)
        """Check what takes a pass over the input: do its files speak of the same cells."""

    @abstractmethod
    def to_anndata(self) -> Any:
        """Read everything into an AnnData object, to be copied with something added."""


@dataclass(frozen=True)
class SourceOptions:
    """What a user says of an input.

    Parameters
    ----------
    format
        Its format; None recognises it by its content.
    table
        Which table of it; None where there is but one.
    pixel_size
        Micrometres of a pixel; None where the input says so, or is in micrometres.
    takes_counts
        Counts are wanted: a layer of them comes before X.
    """

    format: InputFormat | None = None
    table: str | None = None
    pixel_size: float | None = None
    takes_counts: bool = True

    @staticmethod
    def of(options: PreprocessingConfig) -> "SourceOptions":
        """Take from the settings what concerns the reading of an input."""
        return SourceOptions(
            options.format, options.table, options.pixel_size, options.log_normalize
        )


@dataclass(frozen=True)
class Format:
    """A format of input files.

    Parameters
    ----------
    name
        What `--format` calls it.
    content
        What it is recognised by, in words.
    recognises
        Does a path look like it; asked of files and folders, and cheap.
    files
        The files that are read, checked to be there.
    opened
        Open a path as a `CellSource`.
    has_positions
        Whether its cells have coordinates: without, they are a query and no training data.
    is_searched
        Whether `--input_dir` finds it by itself among other files.
    uses
        Which flags count for a path: `table`, `pixel_size`.
    """

    name: InputFormat
    content: str
    recognises: Callable[[Path], bool]
    files: Callable[[Path, SourceOptions], list[Path]]
    opened: Callable[[Path, SourceOptions], AbstractContextManager[CellSource]]
    has_positions: bool = True
    is_searched: bool = True
    uses: Callable[[Path, SourceOptions], tuple[str, ...]] = lambda *_: ()


def may_be_positions(keys: list[str], key: str) -> bool:
    """Tell whether one of the keys of obsm may be that of coordinates.

    Embeddings begin with X_, as scanpy names them, and are none.
    """
    return any(
        name == key or name in USUAL_POSITION_KEYS or not name.startswith("X_") for name in keys
    )


def usual_position_key(present: list[str], options: PreprocessingConfig) -> str:
    """Return the name of the coordinates: the one asked for, or one that is usual and there."""
    if "position_key" in options.model_fields_set:
        return options.position_key
    # Slices in a common frame have their measured z, too, where there is one.
    keys = sorted(
        USUAL_POSITION_KEYS, key=lambda key: key != MEASURED_Z or not options.common_frame
    )
    return next((key for key in keys if key in present), options.position_key)


def require_table(path: Path, tables: list[str], asked: str | None) -> str:
    """Choose one of the tables of an input; the user says which where there are several."""
    there = ", ".join(tables) or "none"
    if asked is not None and asked not in tables:
        raise InputError(
            f"{path}: there is no table {asked!r} in it (there: {there}): check --table"
        )
    if asked is None and len(tables) > 1:
        raise InputError(
            f"{path}: holds {len(tables)} tables of the same tissue ({there}): choose one with "
            f"--table, such as --table {tables[0]}"
        )
    return asked or tables[0]
