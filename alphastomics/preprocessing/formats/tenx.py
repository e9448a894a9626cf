"""10x counts: an .h5 file or a folder of matrix.mtx enters, cells without positions leave.

The .h5 is stored by barcodes, so ranges of cells are read as they are. The layout is that of Cell
Ranger 3 and later, which Space Ranger and Xenium use too. Features that are no genes are left out.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.sparse import coo_array, csr_array

from alphastomics.errors import InputError
from alphastomics.preprocessing.anndata_file import as_text, opened, reading
from alphastomics.preprocessing.cell_source import CellSource, Format, SourceOptions
from alphastomics.preprocessing.formats.columns import (
    BLOCK_BYTES,
    CellColumns,
    PlainSource,
    only_file,
)
from alphastomics.preprocessing.formats.delimited import whole_of
from alphastomics.preprocessing.matrix import (
    BYTES_PER_ENTRY,
    Expression,
    MatrixKind,
    require_finite_values,
)

GENES = "Gene Expression"
MATRIX_PATTERNS = ("matrix.mtx", "matrix.mtx.gz")


class Features:
    """The rows of a 10x matrix: which are genes, and their names."""

    def __init__(self, path: Path, names: list[str], kinds: list[str], gene: str = GENES) -> None:
        self.kept = np.flatnonzero([kind == gene for kind in kinds])
        self.genes = [names[number] for number in self.kept]
        if not self.genes:
            there = ", ".join(sorted(set(kinds))) or "none"
            raise InputError(f"{path}: no feature is of type {gene!r} (types: {there})")
        left_out = Counter(kind for kind in kinds if kind != gene)
        listed = ", ".join(f"{count} x {kind}" for kind, count in sorted(left_out.items()))
        total = sum(left_out.values())
        self.notes = (
            [f"{total} features that are no genes are left out ({listed})"] if total else []
        )


class TenxCounts(Expression):
    """The `matrix` group of a 10x .h5: columns are cells, so it reads as rows of cells."""

    def __init__(self, path: Path, root: Any) -> None:
        with reading(path, "matrix"):
            if "matrix" not in root or "features" not in root["matrix"]:
                raise InputError(
                    f"{path}: has no matrix/features: it is no 10x matrix, or one of Cell Ranger "
                    "before 3; save the counts as .h5ad"
                )
            group = root["matrix"]
            self.barcodes = as_text(group["barcodes"][...])
            names = as_text(group["features/name"][...]).to_pylist()
            kinds = as_text(group["features/feature_type"][...]).to_pylist()
        self.features = Features(path, names, kinds)
        super().__init__(path, root, len(self.barcodes), len(names), "matrix")

    def _kind(self) -> MatrixKind:
        return "csr"

    def _shape(self) -> tuple[int, ...]:
        features, cells = (int(size) for size in self.element["shape"][...])
        return cells, features

    def rows(self, start: int, stop: int) -> csr_array:
        """Read the genes of some cells."""
        return super().rows(start, stop)[:, self.features.kept]


class MarketCounts:
    """Counts of a matrix.mtx file: lines of feature, barcode, count, in any order."""

    has_rows = False

    def __init__(self, path: Path, features: Features, num_features: int, cells: int) -> None:
        self.path, self.cells, self.genes = path, cells, len(features.genes)
        self._column_of = np.full(num_features, -1, dtype=np.int64)
        self._column_of[features.kept] = np.arange(self.genes)
        with reading(path, "the header"):
            self._skipped, size = self._header()
        if size[:2] != (num_features, cells):
            raise InputError(
                f"{path}: is of {size[0]} features x {size[1]} barcodes, but the tables beside it "
                f"list {num_features} x {cells}: copy the folder again from its source"
            )
        self.filled = size[2]

    def _header(self) -> tuple[int, tuple[int, int, int]]:
        """Return how many lines come before the entries, and the size."""
        with pa.input_stream(str(self.path), compression="detect") as stream:
            lines = stream.read(1 << 16).split(b"\n")
        if not lines[0].startswith(b"%%MatrixMarket matrix coordinate"):
            raise ValueError("no %%MatrixMarket matrix coordinate in its first line")
        first = next(number for number, line in enumerate(lines) if not line.startswith(b"%"))
        features, cells, filled = map(int, lines[first].split())
        return first + 1, (features, cells, filled)

    def pieces(self) -> Iterator[coo_array]:
        """Read all entries, block by block."""
        from pyarrow import csv

        kinds = {"feature": pa.int64(), "cell": pa.int64(), "count": pa.float32()}
        total = 0
        with (
            reading(self.path, "the entries"),
            pa.input_stream(str(self.path), compression="detect") as stream,
        ):
            for batch in csv.open_csv(
                stream,
                csv.ReadOptions(
                    block_size=BLOCK_BYTES, column_names=list(kinds), skip_rows=self._skipped
                ),
                csv.ParseOptions(delimiter=" "),
                csv.ConvertOptions(column_types=kinds),
            ):
                feature, cell, count = (part.to_numpy() for part in batch.columns)
                inside = (feature > 0) & (feature <= len(self._column_of))
                if not (inside & (cell > 0) & (cell <= self.cells)).all():
                    raise ValueError("an entry outside the matrix")
                total += len(batch)
                column = self._column_of[feature - 1]
                kept = column >= 0
                where = (cell[kept] - 1, column[kept])
                yield coo_array((count[kept], where), shape=(self.cells, self.genes))
            if total != self.filled:
                raise ValueError(f"{total} entries where its header says {self.filled}")

    def rows(self, start: int, stop: int) -> csr_array:
        """Read some rows, which takes a pass over the file."""
        return self.whole()[start:stop]

    def whole(self) -> csr_array:
        """Read all rows."""
        counts = whole_of(self.pieces(), (self.cells, self.genes))
        require_finite_values(self.path, counts, 0)
        return counts

    def bytes_per_row(self) -> float:
        """Return what a row takes."""
        return self.filled / max(self.cells, 1) * BYTES_PER_ENTRY


def lines_of(path: Path) -> list[list[str]]:
    """Read a small table of tab-separated columns without a header."""
    with reading(path, "the lines"), pa.input_stream(str(path), compression="detect") as stream:
        text = stream.read().decode("utf-8")
    return [line.rstrip("\r").split("\t") for line in text.split("\n") if line]


def market_files(folder: Path) -> list[Path]:
    """Return the three files of a matrix folder."""
    return [
        only_file(folder, "the matrix", *MATRIX_PATTERNS),
        only_file(folder, "the list of barcodes", "barcodes.tsv", "barcodes.tsv.gz"),
        only_file(
            folder,
            "the list of features",
            *("features.tsv", "features.tsv.gz", "genes.tsv", "genes.tsv.gz"),
        ),
    ]


def _files(path: Path, _: SourceOptions) -> list[Path]:
    return market_files(path) if path.is_dir() else [path]


def market_matrix(folder: Path) -> tuple[MarketCounts, pa.StringArray, Features]:
    """Return the counts of a matrix folder, the names of its cells, and its features."""
    matrix, barcodes, table = market_files(folder)
    lines = lines_of(table)
    # Before version 3 the table was genes.tsv, without a type: all are genes.
    kinds = [line[2] if len(line) > 2 else GENES for line in lines]
    features = Features(table, [line[min(1, len(line) - 1)] for line in lines], kinds)
    names = pa.array([line[0] for line in lines_of(barcodes)], pa.string())
    return MarketCounts(matrix, features, len(lines), len(names)), names, features


@contextmanager
def opened_10x(path: Path, _: SourceOptions) -> Iterator[CellSource]:
    """Open counts of dissociated cells."""
    if not path.is_dir():
        with opened(path) as root:
            counts = TenxCounts(path, root)
            names, features = CellColumns(counts.barcodes), counts.features
            yield PlainSource(
                path, features.genes, names, counts, counts.cells, notes=features.notes
            )
        return
    market, cells, features = market_matrix(path)
    yield PlainSource(
        path, features.genes, CellColumns(cells), market, len(cells), notes=features.notes
    )


def _is_10x(path: Path) -> bool:
    if path.is_dir():
        return any((path / name).is_file() for name in MATRIX_PATTERNS)
    return path.suffix.lower() == ".h5"


FORMAT = Format(
    name="10x",
    content="a 10x .h5 file, or a folder with matrix.mtx[.gz]; no positions",
    recognises=_is_10x,
    files=_files,
    opened=opened_10x,
    has_positions=False,
    is_searched=False,
)
