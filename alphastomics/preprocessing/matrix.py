"""The matrix of counts of an AnnData file: its open root enters, checked rows leave.

Rows are read in ranges where the matrix is stored by rows. Stored by columns (CSC), it comes in
pieces, which transpose.py deals out to chunks of rows.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.sparse import coo_array, csr_array

from alphastomics.errors import InputError
from alphastomics.preprocessing.anndata_file import attribute, is_group, reading
from alphastomics.preprocessing.parts import WORK_BYTES

MatrixKind = Literal["csr", "csc", "dense"]
BYTES_PER_ENTRY = 12  # a stored value while it is worked on: value, index, and a copy of one


class Expression:
    """The matrix `X` of an open file, or the layer that takes its part, read in ranges of rows."""

    def __init__(self, path: Path, root: Any, cells: int, genes: int, name: str = "X") -> None:
        self.path, self.cells, self.genes, self.name = path, cells, genes, name
        with reading(path, name):
            if name not in root:
                raise InputError(f"{path}: X is missing: put the counts into adata.X and save it")
            self.element = root[name]
            self.kind = self._kind()
            self.filled = self._check_structure()
        self.has_rows = self.kind != "csc"

    def _kind(self) -> MatrixKind:
        if not is_group(self.element):
            if len(self.element.shape) != 2 or self.element.dtype.kind not in "biuf":
                raise InputError(
                    f"{self.path}: {self.name} has shape {tuple(self.element.shape)} and type "
                    f"{self.element.dtype}: it must be a matrix of real numbers"
                )
            return "dense"
        named = str(attribute(self.element, "encoding-type", "h5sparse_format") or "nothing")
        for kind in ("csr", "csc"):
            if named.startswith(kind):
                return kind
        raise InputError(
            f"{self.path}: {self.name} is stored as {named!r}: save it dense, as CSR or as CSC"
        )

    def _check_structure(self) -> int:
        """Compare the sizes of X's arrays with one another; return the number of stored values."""
        expected = (self.cells, self.genes)
        if self.kind == "dense":
            self._require(tuple(self.element.shape) == expected, f"shape {self.element.shape}")
            return self.cells * self.genes
        shape = self._shape()
        self._require(shape == expected, f"shape {shape}")
        pointers, values = self.element["indptr"], self.element["data"]
        self._require(values.dtype.kind in "biuf", f"values of type {values.dtype}")
        lines = self.cells if self.kind == "csr" else self.genes
        self._require(pointers.shape == (lines + 1,), f"indptr of shape {pointers.shape}")
        self._require(values.shape == self.element["indices"].shape, "indices and data that differ")
        ends = int(pointers[0]), int(pointers[lines])
        self._require(ends == (0, values.shape[0]), f"indptr from {ends[0]} to {ends[1]}")
        return int(values.shape[0])

    def _shape(self) -> tuple[int, ...]:
        return tuple(int(size) for size in attribute(self.element, "shape", "h5sparse_shape"))

    def _require(self, holds: bool, present: str) -> None:  # noqa: FBT001
        if not holds:
            raise InputError(
                f"{self.path}: {self.name} has {present}, which does not fit {self.cells} cells x "
                f"{self.genes} genes: the file is damaged; copy it again from its source"
            )

    def rows(self, start: int, stop: int) -> csr_array:
        """Read some rows of a CSR or dense X, checked, as float32."""
        with reading(self.path, f"{self.name}, rows {start} to {stop}"):
            if self.kind == "dense":
                block = as_float32(np.asarray(self.element[start:stop]))
                return self._finite(csr_array(block), start)
            return self._finite(self.lines(start, stop, self.genes), start)

    def lines(self, start: int, stop: int, width: int) -> csr_array:
        """Read some rows of a CSR, or columns of a CSC; every index is checked against `width`."""
        with reading(self.path, f"{self.name}, entries {start} to {stop}"):
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

    def bytes_per_row(self) -> float:
        """Return what a row takes while it is worked on."""
        filled = self.filled / self.cells
        if self.kind == "dense":
            # The block as it is stored, as float32, and in sparse form if it is full.
            return filled * (self.element.dtype.itemsize + BYTES_PER_ENTRY)
        return filled * BYTES_PER_ENTRY

    def pieces(self) -> Iterator[coo_array]:
        """Read a CSC by blocks of columns, each a matrix of all cells and genes."""
        for start, stop in self._column_blocks():
            block = self.lines(start, stop, self.cells)  # columns as lines
            require_finite_values(self.path, block, start)
            column, row = block.tocoo().coords
            entries = (block.data, (row, column + start))
            yield coo_array(entries, shape=(self.cells, self.genes))

    def _column_blocks(self) -> list[tuple[int, int]]:
        """Cut the columns into blocks of about equal numbers of entries."""
        with reading(self.path, f"{self.name}/indptr"):
            pointers = np.asarray(self.element["indptr"][...]).astype(np.int64)
        per_block = WORK_BYTES // (2 * BYTES_PER_ENTRY)
        cuts = np.searchsorted(pointers, np.arange(per_block, pointers[-1], per_block))
        edges = np.unique(np.concatenate([[0], cuts, [self.genes]])).tolist()
        return list(pairwise(edges))

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
