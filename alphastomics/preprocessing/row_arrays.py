"""Matrices of many rows in an .npz, a few rows in memory at a time: blocks enter, blocks leave.

A row is a slice, a column a gene: 2,000 slices of 20,000 genes are 320 MB. Most genes of a small
slice were not seen, and their zeros compress to nothing. `numpy.load` reads the files as any other.
"""

import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int64

from alphastomics.errors import InputError
from alphastomics.io.files import replacing
from alphastomics.preprocessing.normalize import Moments, merged

BLOCK_BYTES = 16 << 20
COMPRESSION_LEVEL = 1  # zeros are what there is to gain

Blocks = Callable[[], Iterable[Float[np.ndarray, "K G"]]]


def write_rows(path: Path, shape: tuple[int, int], arrays: Mapping[str, Blocks]) -> None:
    """Write matrices of float64, complete or not at all, with the same bytes every time."""
    options: dict[str, Any] = {
        "compression": zipfile.ZIP_DEFLATED,
        "compresslevel": COMPRESSION_LEVEL,
    }
    with replacing(path) as partial, zipfile.ZipFile(partial, "w", **options) as archive:
        for name, blocks in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy")  # its date is fixed
            entry.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(entry, "w", force_zip64=True) as file:
                write_header(file, shape)
                for block in blocks():
                    file.write(np.ascontiguousarray(block, dtype=np.float64).tobytes())


def write_header(file: Any, shape: tuple[int, int], kind: str = "<f8") -> None:
    """Begin an .npy file of one matrix."""
    header = {"descr": kind, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def read_rows(
    path: Path, name: str, shape: tuple[int, int]
) -> Iterator[Float64[np.ndarray, "K G"]]:
    """Yield the rows of a matrix in blocks; refuse one of another shape or kind."""
    damaged = f"{path}: holds no {name} of {shape[0]} slices x {shape[1]} genes: it is damaged"
    rows = max(BLOCK_BYTES // (8 * shape[1]), 1)
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
            version = np.lib.format.read_magic(file)
            stored_shape, order, kind = np.lib.format.read_array_header_1_0(file)
            if version != (1, 0) or stored_shape != shape or order or kind != np.dtype("<f8"):
                raise InputError(damaged)
            for start in range(0, shape[0], rows):
                size = min(rows, shape[0] - start)
                content = file.read(size * shape[1] * 8)
                yield np.frombuffer(content, np.float64).reshape(size, shape[1])
    except InputError:
        raise
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        raise InputError(damaged) from error


class Compact(NamedTuple):
    """Moments of a slice's genes, those genes alone that have any."""

    cells: int
    genes: Int64[np.ndarray, " K"]
    mean: Float64[np.ndarray, " K"]
    squares: Float64[np.ndarray, " K"]

    @classmethod
    def of(cls, moments: Moments) -> "Compact":
        """Leave out the genes that were never seen."""
        genes = np.flatnonzero((moments.mean != 0) | (moments.squares != 0))
        return cls(moments.count, genes, moments.mean[genes], moments.squares[genes])

    def whole(self, num_genes: int) -> Moments:
        """Return the moments of all genes."""
        mean, squares = np.zeros(num_genes), np.zeros(num_genes)
        mean[self.genes], squares[self.genes] = self.mean, self.squares
        return Moments(self.cells, mean, squares)

    def joined(self, other: "Compact", num_genes: int) -> "Compact":
        """Join the moments of two parts of a slice."""
        if not self.cells:
            return other
        return Compact.of(merged(self.whole(num_genes), other.whole(num_genes)))


NOTHING = Compact(0, np.empty(0, np.int64), np.empty(0), np.empty(0))


def packed_moments(moments: list[Compact]) -> dict[str, np.ndarray]:
    """Put the moments of several slices into a few arrays."""
    return {
        "count": np.array([moment.cells for moment in moments]),
        "length": np.array([len(moment.genes) for moment in moments]),
        "genes": np.concatenate([moment.genes for moment in moments]),
        "mean": np.concatenate([moment.mean for moment in moments]),
        "squares": np.concatenate([moment.squares for moment in moments]),
    }


def unpacked(arrays: dict[str, np.ndarray]) -> list[Compact]:
    """Undo `packed`."""
    cuts = np.cumsum(arrays["length"])[:-1]
    columns = (np.split(arrays[name], cuts) for name in ("genes", "mean", "squares"))
    counts = arrays["count"].tolist()
    return [Compact(*parts) for parts in zip(counts, *columns, strict=True)]
