"""AnnData on disk: the path of an .h5ad or .zarr enters, checked chunks of rows leave.

Read with h5py (or zarr) alone and row by row, so that memory is bounded by the chunk. Every number
that is used to address memory is checked first: a damaged file ends in one line, never in a crash.
"""

import csv
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float64, Int32

from alphastomics.errors import InputError
from alphastomics.io.files import require_file

# What h5py, zarr and numpy raise on damaged content; each is the file's fault here.
READ_ERRORS = (
    csv.Error,
    OSError,
    LookupError,
    ValueError,
    TypeError,
    RuntimeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    EOFError,
    zlib.error,
    zipfile.BadZipFile,
)
SUFFIXES = (".h5ad", ".zarr")
MISSING_FILTER = ("not registered", "can't open directory", "not available", "unavailable")
RESAVE = "open and save it again with a current anndata"


@contextmanager
def reading(path: Path, field: str) -> Iterator[None]:
    """Convert whatever a library says about damaged content into one line with file and field."""
    try:
        yield
    except InputError:
        raise
    except READ_ERRORS as error:
        said = " ".join(str(error).split()) or type(error).__name__
        if "filter" in said and any(words in said for words in MISSING_FILTER):
            raise InputError(
                f"{path}: {field} is compressed with a filter that HDF5 does not have here "
                f"({said[:200]}): pip install hdf5plugin, open it with `import hdf5plugin`, and "
                "save it with compression='gzip'"
            ) from error
        raise InputError(
            f"{path}: {field} cannot be read ({said[:200]}): the file is damaged or was cut short; "
            "copy it again from its source"
        ) from error


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open the root group of an AnnData file for reading."""
    suffix = path.suffix.lower()
    if suffix == ".zarr" or (path.is_dir() and suffix not in SUFFIXES):
        with reading(path, "the Zarr store"):
            try:
                import zarr
            except ImportError as error:
                raise InputError(
                    f"{path}: reading .zarr needs the zarr package: pip install zarr"
                ) from error
            group = zarr.open_group(str(path), mode="r")
        yield group
        return
    import h5py

    require_file(path)
    with path.open("rb"):  # an unreadable file says so under its own name
        pass
    if not h5py.is_hdf5(path):
        raise InputError(
            f"{path}: is not an HDF5 file, though its name ends in {path.suffix} (cut short, or of "
            "another format): copy it again, or remove it from the folder"
        )
    with reading(path, "the HDF5 structure"):
        # A read-only file system may not know locks, and nobody writes through us.
        file = h5py.File(path, "r", locking="best-effort")
    with file:
        yield file


def read_whole(path: Path) -> Any:
    """Read all of a file as an AnnData object, to be copied with something added."""
    import anndata

    read = anndata.read_zarr if path.suffix.lower() == ".zarr" else anndata.read_h5ad
    with reading(path, "the whole of it"):
        return read(path)


def walk(path: Path, root: Any) -> None:
    """Touch every part of an open file: whoever survives this may read it."""
    with reading(path, "the HDF5 structure"):
        for name in root:
            element = root[name]
            dict(element.attrs)
            if is_group(element):
                walk(path, element)
            elif element.shape and all(element.shape):
                # The first and the last entry: the way to all others starts there.
                element[(0,) * element.ndim]
                element[tuple(size - 1 for size in element.shape)]


def is_group(element: Any) -> bool:
    """Tell a group from an array, in HDF5 and in Zarr."""
    return hasattr(element, "keys")


def attribute(element: Any, *names: str) -> Any:
    """Return the first of these attributes that is there, or None."""
    for name in names:
        if name in element.attrs:
            value = element.attrs[name]
            return value.decode() if isinstance(value, bytes) else value
    return None


def as_text(values: Any) -> pa.StringArray:
    """Convert a column's raw values into strings without a loop over cells; NaN becomes null."""
    array = np.asarray(values)
    if array.dtype.kind == "S":
        array = array.astype(object)
    elif array.dtype.kind in "UT":
        return pa.array(array.astype(object), type=pa.string())
    if array.dtype.kind == "O":
        is_bytes = array.size > 0 and isinstance(array.flat[0], bytes)
        return pa.array(array, type=pa.binary() if is_bytes else pa.string()).cast(pa.string())
    if array.dtype.kind == "f":
        return pc.if_else(pa.array(np.isnan(array)), None, pa.array(array).cast(pa.string()))
    return pa.array(array).cast(pa.string())


class Frame:
    """The `obs` or `var` table of an open file, read by column and row range."""

    def __init__(self, path: Path, root: Any, name: str) -> None:
        self.path, self.root, self.name = path, root, name
        with reading(path, name):
            if name not in root or not is_group(root[name]):
                raise InputError(f"{path}: {name} is missing or of a format before 2019: {RESAVE}")
            self.group = root[name]
            self.index = str(attribute(self.group, "_index") or "_index")
            if self.index not in self.group:
                raise InputError(f"{path}: {name} has no index {self.index!r}: {RESAVE}")
            self.columns = sorted(set(self.group) - {self.index, "__categories"})

    def __len__(self) -> int:
        """Count the rows."""
        with reading(self.path, f"{self.name}/{self.index}"):
            element = self.group[self.index]
            if is_group(element):
                element = element["codes" if "codes" in element else "values"]
            return int(element.shape[0])

    def names(self, start: int, stop: int) -> pa.StringArray:
        """Read the index of some rows as strings."""
        codes, names = self.labels(self.index, start, stop)
        if len(codes) and codes.min() < 0:
            raise InputError(f"{self.path}: {self.name}/{self.index} has missing names: fill them")
        return names.take(pa.array(codes))

    def labels(
        self, column: str, start: int, stop: int
    ) -> tuple[Int32[np.ndarray, " N"], pa.StringArray]:
        """Read a column as codes (-1: missing) into an array of names."""
        with reading(self.path, f"{self.name}[{column!r}]"):
            codes, names = self._labels(self.group[column], start, stop)
        if len(codes) != stop - start:
            raise InputError(
                f"{self.path}: {self.name}[{column!r}] has fewer rows than {self.name}: the file "
                "is damaged; copy it again from its source"
            )
        if len(codes) and (codes.min() < -1 or codes.max() >= len(names)):
            raise InputError(
                f"{self.path}: {self.name}[{column!r}] has codes without a category: the file is "
                "damaged; copy it again from its source"
            )
        return codes.astype(np.int32), names

    def _labels(self, element: Any, start: int, stop: int) -> tuple[np.ndarray, pa.StringArray]:
        if not is_group(element):
            reference = attribute(element, "categories")  # how anndata 0.6 kept categories
            if reference is not None:
                return np.asarray(element[start:stop]), as_text(self.root[reference][...])
            encoded = as_text(element[start:stop]).dictionary_encode()
        elif "codes" in element:
            codes = np.asarray(element["codes"][start:stop]).astype(np.int64)
            names = element["categories"]
            return codes, as_text((names["values"] if is_group(names) else names)[...])
        else:  # a nullable array: values, and a mask that is true where one is missing
            missing = pa.array(np.asarray(element["mask"][start:stop], dtype=bool))
            encoded = pc.if_else(missing, None, as_text(element["values"][start:stop]))
            encoded = encoded.dictionary_encode()
        return encoded.indices.fill_null(-1).to_numpy(), encoded.dictionary


class Positions:
    """The coordinates of an open file: `obsm[key]`, as an array or as a table."""

    def __init__(self, path: Path, root: Any, key: str, cells: int) -> None:
        self.path, self.field, self.cells = path, f"obsm[{key!r}]", cells
        with reading(path, self.field):
            keys = sorted(root["obsm"]) if "obsm" in root else []
            if key not in keys:
                there = ", ".join(keys) or "none"
                has_columns = "obs" in root and {"x", "y"} <= set(root["obs"])
                by_key, by_columns = (
                    "name the coordinates with --position_key",
                    f"put obs['x'] and obs['y'] into {self.field} (--format stereoseq takes them "
                    "as they are)",
                )
                ways = [by_key] * (bool(keys) or not has_columns) + [by_columns] * has_columns
                raise InputError(
                    f"{path}: {self.field} is missing (keys of obsm: {there}): {', or '.join(ways)}"
                )
            self.element = root["obsm"][key]
            self.columns = self._columns()

    def _columns(self) -> int:
        if is_group(self.element):
            order = attribute(self.element, "column-order")
            if order is None:
                raise InputError(f"{self.path}: {self.field} must be a dense array or a table")
            for name in map(str, order):
                rows = self._numbers(name).shape
                if rows != (self.cells,):
                    raise InputError(
                        f"{self.path}: {self.field}[{name!r}] has shape {rows}, not "
                        f"({self.cells},): the file is damaged; copy it again from its source"
                    )
            return len(order)
        shape = tuple(self.element.shape)
        if len(shape) != 2 or shape[0] != self.cells:
            raise InputError(
                f"{self.path}: {self.field} has shape {shape}, not ({self.cells}, 2) or "
                f"({self.cells}, 3)"
            )
        return int(shape[1])

    def _numbers(self, name: str) -> Any:
        if is_group(self.element[name]):  # categories, or numbers some of which may be missing
            raise InputError(
                f"{self.path}: {self.field}[{name!r}] is not a plain column of numbers: store "
                "float32 without missing values"
            )
        return self.element[name]

    def rows(self, start: int, stop: int, *, partial: bool = False) -> Float64[np.ndarray, "N C"]:
        """Read the coordinates of some rows; NaN, and what float32 cannot hold, is refused.

        They stay float64 until a set is centred: far from the origin float32 has few digits left.
        """
        with reading(self.path, self.field):
            if is_group(self.element):
                order = [str(name) for name in attribute(self.element, "column-order")]
                columns = [self._numbers(name)[start:stop] for name in order]
                values = np.stack(columns, axis=1)
            else:
                values = np.asarray(self.element[start:stop])
            if values.dtype.kind not in "biuf":
                raise InputError(
                    f"{self.path}: {self.field} holds values of type {values.dtype}, not numbers"
                )
        return require_finite(
            self.path, self.field, values.astype(np.float64), start, partial=partial
        )


def require_finite(
    path: Path,
    field: str,
    values: Float64[np.ndarray, "N C"],
    start: int,
    *,
    partial: bool,
) -> Float64[np.ndarray, "N C"]:
    """Refuse coordinates that are no numbers, or do not fit float32.

    With `partial`, all coordinates of a row may be NaN: nobody knows where that cell is.
    """
    with np.errstate(over="ignore"):  # what does not fit becomes inf
        known = np.isfinite(values.astype(np.float32)).all(axis=1)
    missing = np.isnan(values).all(axis=1) & partial
    bad = np.flatnonzero(~known & ~missing)
    if len(bad):
        remedy = (
            "give a cell all of its coordinates, or NaN for all where its position is not known"
            if partial
            else "remove the cells that have no position"
        )
        raise InputError(
            f"{path}: {field} has NaN or infinite coordinates (first in row {start + bad[0]}): "
            f"{remedy}"
        )
    return values
