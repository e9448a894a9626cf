"""AnnData on disk: the path of an .h5ad or .zarr enters, checked chunks of rows leave.

Read with h5py (or zarr) alone and row by row, so that memory is bounded by the chunk. Every number
that is used to address memory is checked first: a damaged file ends in one line, never in a crash.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float64, Int32
from scipy.sparse import csr_array

from alphastomics.errors import InputError
from alphastomics.io.files import require_file

MatrixKind = Literal["csr", "csc", "dense"]

# What h5py, zarr and numpy raise on damaged content; each is the file's fault here.
READ_ERRORS = (
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
    if path.suffix.lower() == ".zarr":
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
            f"{path}: is not an HDF5 file, though its name ends in .h5ad (cut short, or of another "
            "format): copy it again, or remove it from the folder"
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
            if "tables" in root and name not in root:
                raise InputError(
                    f"{path}: is a SpatialData store, not AnnData: save its table by itself "
                    "(sdata.tables['table'].write_h5ad(...)) and give that file"
                )
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


class Expression:
    """The matrix `X` of an open file, read in ranges of rows."""

    def __init__(self, path: Path, root: Any, cells: int, genes: int) -> None:
        self.path, self.cells, self.genes = path, cells, genes
        with reading(path, "X"):
            if "X" not in root:
                raise InputError(f"{path}: X is missing: put the counts into adata.X and save it")
            self.element = root["X"]
            self.kind = self._kind()
            self.filled = self._check_structure()

    def _kind(self) -> MatrixKind:
        if not is_group(self.element):
            if len(self.element.shape) != 2 or self.element.dtype.kind not in "biuf":
                raise InputError(
                    f"{self.path}: X has shape {tuple(self.element.shape)} and type "
                    f"{self.element.dtype}: it must be a matrix of real numbers"
                )
            return "dense"
        named = str(attribute(self.element, "encoding-type", "h5sparse_format") or "nothing")
        for kind in ("csr", "csc"):
            if named.startswith(kind):
                return kind
        raise InputError(f"{self.path}: X is stored as {named!r}: save it dense, as CSR or as CSC")

    def _check_structure(self) -> int:
        """Compare the sizes of X's arrays with one another; return the number of stored values."""
        expected = (self.cells, self.genes)
        if self.kind == "dense":
            self._require(tuple(self.element.shape) == expected, f"shape {self.element.shape}")
            return self.cells * self.genes
        shape = tuple(int(size) for size in attribute(self.element, "shape", "h5sparse_shape"))
        self._require(shape == expected, f"shape {shape}")
        pointers, values = self.element["indptr"], self.element["data"]
        self._require(values.dtype.kind in "biuf", f"values of type {values.dtype}")
        lines = self.cells if self.kind == "csr" else self.genes
        self._require(pointers.shape == (lines + 1,), f"indptr of shape {pointers.shape}")
        self._require(values.shape == self.element["indices"].shape, "indices and data that differ")
        ends = int(pointers[0]), int(pointers[lines])
        self._require(ends == (0, values.shape[0]), f"indptr from {ends[0]} to {ends[1]}")
        return int(values.shape[0])

    def _require(self, holds: bool, present: str) -> None:  # noqa: FBT001
        if not holds:
            raise InputError(
                f"{self.path}: X has {present}, which does not fit {self.cells} cells x "
                f"{self.genes} genes: the file is damaged; copy it again from its source"
            )

    def rows(self, start: int, stop: int) -> csr_array:
        """Read some rows of a CSR or dense X, checked, as float32."""
        with reading(self.path, f"X, rows {start} to {stop}"):
            if self.kind == "dense":
                block = as_float32(np.asarray(self.element[start:stop]))
                return self._finite(csr_array(block), start)
            return self._finite(self.lines(start, stop, self.genes), start)

    def lines(self, start: int, stop: int, width: int) -> csr_array:
        """Read some rows of a CSR, or columns of a CSC; every index is checked against `width`."""
        with reading(self.path, f"X, entries {start} to {stop}"):
            pointers = np.asarray(self.element["indptr"][start : stop + 1]).astype(np.int64)
            ends_fit = pointers[0] >= 0 and pointers[-1] <= self.filled
            rising = bool(ends_fit and (np.diff(pointers) >= 0).all())
            self._require(rising, "indptr that does not rise")
            indices = np.asarray(self.element["indices"][pointers[0] : pointers[-1]])
            values = np.asarray(self.element["data"][pointers[0] : pointers[-1]])
            inside = not len(indices) or (indices.min() >= 0 and indices.max() < width)
            self._require(bool(inside), "indices outside the matrix")
        parts = (as_float32(values), indices.astype(np.int32), pointers - pointers[0])
        return csr_array(parts, shape=(stop - start, width))

    def whole(self) -> csr_array:
        """Read all of X by rows, also where it is stored by columns."""
        if self.kind == "csc":
            return self._finite(self.lines(0, self.genes, self.cells).T.tocsr(), 0)
        return self.rows(0, self.cells)

    def _finite(self, values: csr_array, start: int) -> csr_array:
        require_finite_values(self.path, values, start)
        values.sum_duplicates()
        values.eliminate_zeros()
        return values


def as_float32(values: np.ndarray) -> np.ndarray:
    """Narrow values; what does not fit becomes infinite, and is refused as that."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32, copy=False)


def require_finite_values(path: Path, values: csr_array, first_row: int) -> None:
    """Refuse NaN and infinity in X, with the first cell that has one."""
    bad = np.flatnonzero(~np.isfinite(values.data))
    if len(bad):
        row = first_row + int(np.searchsorted(values.indptr, bad[0], side="right")) - 1
        raise InputError(
            f"{path}: X has NaN or infinite values as float32 (first in row {row}, column "
            f"{values.indices[bad[0]]}): remove those cells or genes, or set the values"
        )


class Positions:
    """The coordinates of an open file: `obsm[key]`, as an array or as a table."""

    def __init__(self, path: Path, root: Any, key: str, cells: int) -> None:
        self.path, self.field, self.cells = path, f"obsm[{key!r}]", cells
        with reading(path, self.field):
            keys = sorted(root["obsm"]) if "obsm" in root else []
            if key not in keys:
                there = ", ".join(keys) or "none"
                raise InputError(
                    f"{path}: {self.field} is missing (keys of obsm: {there}): name the "
                    "coordinates with --position_key"
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

    def rows(self, start: int, stop: int) -> Float64[np.ndarray, "N C"]:
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
            with np.errstate(over="ignore"):  # what does not fit becomes inf, and is named below
                narrow = values.astype(np.float32)
        bad = np.flatnonzero(~np.isfinite(narrow).all(axis=1))
        if len(bad):
            raise InputError(
                f"{self.path}: {self.field} has NaN or infinite coordinates (first in row "
                f"{start + bad[0]}): remove the cells that have no position"
            )
        return values.astype(np.float64)
