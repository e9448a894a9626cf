"""Mean and std of every slice's genes: moments of parts enter; those of slices leave, as files.

A row is a slice, a column a gene: 2,000 slices of 20,000 genes are 320 MB. Most genes of a small
slice were not seen, so moments are kept of the genes that were, and whole rows one at a time.
"""

import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int64

from alphastomics.errors import InputError
from alphastomics.io.files import hashing, sha256_of
from alphastomics.preprocessing.datasets import Merged
from alphastomics.preprocessing.normalize import Moments, absent, merged, standard_deviation
from alphastomics.preprocessing.schema import SCALING_FILE, STATISTICS_FILE

KINDS = {"mean": "<f8", "std": "<f8", "absent": "<f4"}


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


def write_moments(path: Path, moments: list[Compact]) -> str:
    """Write the moments of several slices, complete or not at all; return the file's sha256."""
    arrays = {
        "count": np.array([moment.cells for moment in moments]),
        "length": np.array([len(moment.genes) for moment in moments]),
        "genes": np.concatenate([moment.genes for moment in moments]),
        "mean": np.concatenate([moment.mean for moment in moments]),
        "squares": np.concatenate([moment.squares for moment in moments]),
    }
    with hashing(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    return file.sha256


def read_moments(path: Path) -> list[Compact]:
    """Read what `write_moments` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        cuts = np.cumsum(arrays["length"])[:-1]
        columns = [np.split(arrays[name], cuts) for name in ("genes", "mean", "squares")]
        counts = arrays["count"].tolist()
    return [Compact(*parts) for parts in zip(counts, *columns, strict=True)]


def _stored_moments(path: Path, digest: str, num_slices: int, num_genes: int) -> list[Compact]:
    """Read the moments of a dataset's slices, and make sure that they are what stage 1 wrote."""
    if sha256_of(path) != digest:
        raise InputError(
            f"{path}: is not what stage1 wrote (sha256 differs): run stage1 again with --overwrite"
        )
    try:
        moments = read_moments(path)
        genes = np.concatenate([moment.genes for moment in moments])
        fit = len(moments) == num_slices and not ((genes < 0) | (genes >= num_genes)).any()
    except (ValueError, LookupError, EOFError, zipfile.BadZipFile):
        fit = False
    if not fit:
        raise InputError(
            f"{path}: does not hold {num_slices} slices x {num_genes} genes: it is damaged, or of "
            "another version; run stage1 again with --overwrite"
        )
    return moments


def slice_scaling(
    datasets: Merged,
) -> Iterator[tuple[Float64[np.ndarray, " G"], Float64[np.ndarray, " G"]]]:
    """Yield every slice's mean and std.

    They are 0 and 1 for genes that a slice did not measure, and throughout for slices that are not
    standardised. Dissociated cells come last, as in their numbers.
    """
    genes = len(datasets.genes)
    slices, references = (
        [record["dataset"] for record in records]
        for records in (datasets.slices, datasets.references)
    )
    for records in (slices, references):
        for number, folder in enumerate(datasets.folders):
            size = records.count(number)
            if not size or not datasets.requests[number]["flags"]["scale"]:
                yield from [(np.zeros(genes), np.ones(genes))] * size
                continue
            digest = datasets.statistics_sha256[number]
            path, both = folder / STATISTICS_FILE, (slices.count(number), references.count(number))
            stored = _stored_moments(path, digest, sum(both), genes)
            for moments in stored[:size] if records is slices else stored[both[0] :]:
                whole = moments.whole(genes)
                yield whole.mean, standard_deviation(whole)


def write_scaling(datasets: Merged, shuffle: Path) -> None:
    """Write each slice's mean, std and what an absent value stands for, for tasks to map."""
    shape = (len(datasets.slices) + len(datasets.references), len(datasets.genes))
    with ExitStack() as stack:
        files = [stack.enter_context(hashing(shuffle / f"{name}.npy")) for name in KINDS]
        for file, kind in zip(files, KINDS.values(), strict=True):
            header = {"descr": kind, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
        for mean, std in slice_scaling(datasets):
            for file, values in zip(files, (mean, std, absent(mean, std)), strict=True):
                file.write(values.tobytes())


def mapped_scaling(shuffle: Path, name: str) -> Float[np.ndarray, "S G"]:
    """Map what `write_scaling` wrote: mean, std or absent."""
    return np.load(shuffle / f"{name}.npy", mmap_mode="r")


def publish_scaling(shuffle: Path, output_dir: Path) -> str:
    """Write the mean and std of all slices to the processed folder; return the file's sha256."""
    with hashing(output_dir / SCALING_FILE) as file:
        arrays = {name: mapped_scaling(shuffle, name) for name in ("mean", "std")}
        np.savez_compressed(file, allow_pickle=False, **arrays)
    return file.sha256
