"""Counts of a Xenium run: any of its three forms of the matrix enters, counts and cell names leave.

The .h5 is read by ranges of cells. The .zarr.zip is stored gene by gene and the folder of .mtx in
any order, so both are read in blocks. Cell names in the .zarr.zip are two numbers: eight hex digits
written as the letters a to p, and a suffix (10x Genomics, Xenium Onboard Analysis 1.3 and later).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Shaped
from scipy.sparse import coo_array, csr_array

from alphastomics.errors import InputError
from alphastomics.preprocessing.anndata_file import opened, reading
from alphastomics.preprocessing.cell_source import Matrix
from alphastomics.preprocessing.formats.columns import BLOCK_BYTES
from alphastomics.preprocessing.formats.delimited import whole_of
from alphastomics.preprocessing.formats.tenx import (
    Features,
    TenxCounts,
    market_files,
    market_matrix,
)
from alphastomics.preprocessing.matrix import BYTES_PER_ENTRY, require_finite_values

H5, ZIP, FOLDER = "cell_feature_matrix.h5", "cell_feature_matrix.zarr.zip", "cell_feature_matrix"
GENE = "gene"  # of feature_types; other features are controls
TO_LETTERS = str.maketrans("0123456789abcdef", "abcdefghijklmnop")


class RunMatrix(NamedTuple):
    """Counts of a run, the names of their cells, and their features."""

    counts: Matrix
    names: pa.StringArray
    features: Features


def matrix_files(run: Path) -> list[Path]:
    """Return the files of the matrix: of its forms, the one that is fastest to read."""
    for name in (H5, ZIP):
        if (run / name).is_file():
            return [run / name]
    if (run / FOLDER).is_dir():
        return market_files(run / FOLDER)
    raise InputError(
        f"{run}: {H5} is missing (nor is there {ZIP} or {FOLDER}/): copy it from the output of "
        "the run"
    )


@contextmanager
def opened_matrix(run: Path, known: pa.StringArray) -> Iterator[RunMatrix]:
    """Open the matrix of a run, whose table of cells has these names."""
    path = matrix_files(run)[0]
    if path.name == H5:
        with opened(path) as root:
            counts = TenxCounts(path, root)
            yield RunMatrix(counts, counts.barcodes, counts.features)
    elif path.name == ZIP:
        with _zip_root(path) as root:
            zipped = ZippedCounts(path, root)
            yield RunMatrix(zipped, zipped.names(known), zipped.features)
    else:
        yield RunMatrix(*market_matrix(run / FOLDER))


@contextmanager
def _zip_root(path: Path) -> Iterator[Any]:
    """Open the group of counts in a zipped Zarr store."""
    try:
        import zarr
        from zarr.storage import ZipStore
    except ImportError as error:
        raise InputError(
            f"{path}: reading it needs the zarr package: pip install zarr, or copy {H5} from the "
            "output of the run"
        ) from error
    with reading(path, "the zipped Zarr store"):
        store = ZipStore(path, mode="r")
        root = zarr.open_group(store, mode="r")["cell_features"]
    try:
        yield root
    finally:
        store.close()


class ZippedCounts:
    """The `cell_features` group of a .zarr.zip: one row of cell numbers and counts per gene."""

    has_rows = False

    def __init__(self, path: Path, root: Any) -> None:
        self.path = path
        with reading(path, "cell_features"):
            attributes = dict(root.attrs)
            names = [str(name) for name in attributes["feature_keys"]]
            kinds = [str(kind) for kind in attributes["feature_types"]]
            self.cells = int(attributes["number_cells"])
            self._cell, self._count, self._id = root["indices"], root["data"], root["cell_id"]
            pointer = np.asarray(root["indptr"][...]).astype(np.int64)
            filled = self._count.shape[0]
            fits = (
                len(names) == len(kinds) == len(pointer) - 1
                and self._cell.shape[0] == filled == pointer[-1]
                and pointer[0] == 0
                and bool((np.diff(pointer) >= 0).all())
                and self._id.shape[0] == self.cells
            )
            if not fits:
                raise ValueError("its arrays are of different lengths")
        self.features = Features(path, names, kinds, GENE)
        self._start, self._stop = pointer[self.features.kept], pointer[self.features.kept + 1]

    def names(self, known: pa.StringArray) -> pa.StringArray:
        """Return the names of the cells; plain numbers where the table of cells has such."""
        with reading(self.path, "cell_id"):
            numbers = np.asarray(self._id[...])
        is_number = len(known) > 0 and known[0].as_py().isdigit()
        if is_number or numbers.ndim == 1:
            first = numbers if numbers.ndim == 1 else numbers[:, 0]
            return pa.array(first.astype(np.int64)).cast(pa.string())
        return pa.array(cell_names(numbers), pa.string())

    def pieces(self) -> Iterator[coo_array]:
        """Read all entries, some genes at a time."""
        most = BLOCK_BYTES // BYTES_PER_ENTRY
        first = 0
        while first < len(self._start):
            last = first + 1
            while last < len(self._start) and self._stop[last] - self._start[first] <= most:
                last += 1
            yield self._piece(first, last)
            first = last

    def _piece(self, first: int, last: int) -> coo_array:
        """Read the genes from the first to before the last."""
        start, stop = int(self._start[first]), int(self._stop[last - 1])
        with reading(self.path, "the counts"):
            cell = np.asarray(self._cell[start:stop]).astype(np.int64)
            count = np.asarray(self._count[start:stop]).astype(np.float32)
        # Features between two genes are controls, and are left out.
        where = [np.arange(a - start, b - start) for a, b in self._ranges(first, last)]
        sizes = [len(part) for part in where]
        kept = np.concatenate(where)
        gene = np.repeat(np.arange(first, last), sizes)
        if len(kept) and (cell[kept].min() < 0 or cell[kept].max() >= self.cells):
            raise InputError(
                f"{self.path}: the counts cannot be read (a cell beyond the {self.cells} listed): "
                "the file is damaged or was cut short; copy it again from its source"
            )
        shape = (self.cells, len(self._start))
        return coo_array((count[kept], (cell[kept], gene)), shape=shape)

    def _ranges(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Return where the entries of each gene begin and end."""
        return zip(self._start[first:last].tolist(), self._stop[first:last].tolist(), strict=True)

    def rows(self, start: int, stop: int) -> csr_array:
        """Read some rows, which takes a pass over the file."""
        return self.whole()[start:stop]

    def whole(self) -> csr_array:
        """Read all rows."""
        counts = whole_of(self.pieces(), (self.cells, len(self._start)))
        require_finite_values(self.path, counts, 0)
        return counts

    def bytes_per_row(self) -> float:
        """Return what a row takes."""
        return float((self._stop - self._start).sum()) / max(self.cells, 1) * BYTES_PER_ENTRY


def cell_names(numbers: Shaped[np.ndarray, "N 2"]) -> list[str]:
    """Write the two numbers of each cell as the table of cells does: (992, 1) is aaaaadoa-1."""
    return [f"{prefix:08x}".translate(TO_LETTERS) + f"-{suffix}" for prefix, suffix in numbers]
