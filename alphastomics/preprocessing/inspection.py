"""A first look at every input file: paths enter, what they hold leaves.

All that can be checked without reading X is checked here, before anything is written.
"""

import hashlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from jaxtyping import Int64

from alphastomics.errors import InputError
from alphastomics.io.files import require_file, require_text_name, sha256_of
from alphastomics.preprocessing.anndata_file import (
    SUFFIXES,
    Expression,
    Frame,
    MatrixKind,
    Positions,
    opened,
)
from alphastomics.preprocessing.genes import require_unique
from alphastomics.preprocessing.parts import rows_that_fit

logger = logging.getLogger(__name__)

SLICE_KEY = "slice_id"
# Columns of obs that name the animal or sample that a slice is of, most telling first.
SAMPLE_KEYS = (
    *("animal_id", "animal", "donor_id", "donor", "subject_id", "subject", "mouse_id", "mouse"),
    *("patient_id", "patient", "individual", "embryo", "sample_id", "sample"),
)
BYTES_PER_ENTRY = 12  # a stored value while it is worked on: value, index, and a copy of one
OBS_ROWS = 1_000_000  # rows of obs that are read at a time: a few bytes each


@dataclass(frozen=True)
class InspectionTask:
    """One file to look at, and the settings that matter for it."""

    path: Path
    name: str
    bytes: int
    total_bytes: int
    """Size of all files of the dataset together."""
    position_key: str
    position_is_3d: bool
    cell_type_key: str | None
    max_cells: int


@dataclass(frozen=True)
class Inspection:
    """What a file holds.

    Parameters
    ----------
    slices
        Names of its slices in order; the file's own name where `obs` has no slice_id.
    chunk_counts
        Cells of each slice in each chunk of `chunk_rows` rows.
    cell_types
        Names of the cell types that occur; None where the column is missing.
    """

    path: Path
    name: str
    cells: int
    genes: tuple[str, ...]
    kind: MatrixKind
    chunk_rows: int
    slices: tuple[str, ...]
    chunk_counts: Int64[np.ndarray, "C S"]
    cell_types: tuple[str, ...] | None
    samples: tuple[str | None, ...]
    """The animal or sample of each slice, where obs names one for all of its cells."""

    def chunks(self) -> list[tuple[int, int]]:
        """List the row ranges of the chunks."""
        starts = range(0, self.cells, self.chunk_rows)
        return [(start, min(start + self.chunk_rows, self.cells)) for start in starts]


def find_inputs(folder: Path) -> dict[str, Path]:
    """Find the .h5ad files and .zarr stores of a folder, by relative name in sorted order."""
    if not folder.is_dir():
        said = "is not a folder" if folder.exists() else "there is no such folder"
        raise InputError(f"{folder}: {said}: --input_dir must name a folder of .h5ad files")
    inputs = {path.relative_to(folder).as_posix(): path for path in _inputs_below(folder)}
    if not inputs:
        raise InputError(f"{folder}: there is no .h5ad file (nor .zarr) in it: check --input_dir")
    for name in (folder.resolve().name, *inputs):
        require_text_name(Path(name))
    return dict(sorted(inputs.items()))


def _inputs_below(folder: Path) -> Iterator[Path]:
    """Yield the inputs in a folder and below, each once, along links to folders too.

    Hidden names are left-overs of other programs; a store's inside is not an input.
    """
    linked: list[Path] = []
    seen: set[Path] = set()
    waiting = [folder]
    while waiting or linked:
        here = waiting.pop() if waiting else linked.pop(0)
        if here.resolve() in seen:
            if here.is_symlink():
                logger.warning("%s: leads to a folder that was read already: left out", here)
            continue
        seen.add(here.resolve())
        for path in sorted(here.iterdir()):
            if path.name.startswith("."):
                continue
            if path.suffix.lower() in SUFFIXES:
                yield path
            elif path.is_dir():
                # Links come last, so that a folder goes by its own name where it has one here.
                (linked if path.is_symlink() else waiting).append(path)


def size_of(path: Path) -> int:
    """Return the size in bytes of a file, or of all files of a store."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def digest_of(path: Path) -> str:
    """Return the sha256 of a file, or of all names and files of a store."""
    if not path.is_dir():
        require_file(path)
        return sha256_of(path)
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            name = file.relative_to(path).as_posix()
            digest.update(f"{name}\0{sha256_of(file)}\n".encode())
    return digest.hexdigest()


def obs_column_names(path: Path) -> list[str]:
    """List the columns of obs."""
    with opened(path) as root:
        return sorted(Frame(path, root, "obs").columns)


def has_positions(path: Path, key: str) -> bool:
    """Tell whether obsm has coordinates under a key."""
    with opened(path) as root:
        return f"obsm/{key}" in root


def is_generated(path: Path) -> bool:
    """Tell whether `alphastomics sample` wrote a file."""
    with opened(path) as root:
        return "uns/alphastomics/mode" in root


def inspect_file(task: InspectionTask) -> Inspection:
    """Look at one file and check everything but the values of X."""
    with opened(task.path) as root:
        obs, var = Frame(task.path, root, "obs"), Frame(task.path, root, "var")
        cells, genes = len(obs), tuple(var.names(0, len(var)).to_pylist())
        if cells == 0 or not genes:
            raise InputError(
                f"{task.path}: X is empty ({cells} cells x {len(genes)} genes): remove the file "
                "from the folder"
            )
        remedy = "make them unique (adata.var_names_make_unique()) or add them up"
        require_unique(genes, f"{task.path}: var_names", remedy)
        expression = Expression(task.path, root, cells, len(genes))
        _check_positions(task, Positions(task.path, root, task.position_key, cells))
        chunk_rows = rows_that_fit(task.max_cells, _bytes_per_row(expression), task.total_bytes)
        slices, counts = _slices(task, obs, cells, chunk_rows)
        types = _names_that_occur(obs, task.cell_type_key, cells)
        samples = _samples(obs, slices, cells)
    return Inspection(
        task.path,
        task.name,
        cells,
        genes,
        expression.kind,
        chunk_rows,
        slices,
        counts,
        types,
        samples,
    )


def _samples(obs: Frame, slices: tuple[str, ...], cells: int) -> tuple[str | None, ...]:
    """Name the animal or sample of each slice by the first column that has one for each."""
    for key in (key for key in SAMPLE_KEYS if key in obs.columns):
        seen: list[set[str | None]] = [set() for _ in slices]
        for start in range(0, cells, OBS_ROWS):
            stop = min(start + OBS_ROWS, cells)
            codes, labels = obs.labels(key, start, stop)
            names = [*labels.to_pylist(), None]  # a missing name has code -1
            several = SLICE_KEY in obs.columns
            of_slice = slice_codes(obs, slices, start, stop) if several else np.zeros_like(codes)
            for number, code in np.unique(np.stack([of_slice, codes]), axis=1).T.tolist():
                seen[number].add(names[code])
        if all(len(samples) == 1 for samples in seen):
            return tuple(samples.pop() for samples in seen)
    return (None,) * len(slices)


def _bytes_per_row(expression: Expression) -> float:
    filled = expression.filled / expression.cells
    if expression.kind == "dense":
        # The block as it is stored, as float32, and in sparse form if it is full.
        return filled * (expression.element.dtype.itemsize + BYTES_PER_ENTRY)
    return filled * BYTES_PER_ENTRY


def _check_positions(task: InspectionTask, positions: Positions) -> None:
    wanted = 3 if task.position_is_3d else 2
    if positions.columns != wanted:
        remedy = {
            2: "leave out --position_is_3d",
            3: "give --position_is_3d, or keep two columns",
        }.get(positions.columns, f"keep the {wanted} columns that are coordinates")
        raise InputError(
            f"{task.path}: {positions.field} has {positions.columns} columns where {wanted} are "
            f"expected: {remedy}"
        )
    for start in range(0, positions.cells, OBS_ROWS):
        positions.rows(start, min(start + OBS_ROWS, positions.cells))


def _slices(
    task: InspectionTask, obs: Frame, cells: int, chunk_rows: int
) -> tuple[tuple[str, ...], Int64[np.ndarray, "C S"]]:
    """Name the slices of a file and count their cells in each chunk."""
    starts = range(0, cells, chunk_rows)
    if SLICE_KEY not in obs.columns:
        sizes = [[min(chunk_rows, cells - start)] for start in starts]
        return (Path(task.name).with_suffix("").as_posix(),), np.array(sizes)
    names = slice_names(obs, cells)
    counts = [
        np.bincount(
            slice_codes(obs, names, start, min(start + chunk_rows, cells)), minlength=len(names)
        )
        for start in starts
    ]
    return names, np.stack(counts)


def slice_names(obs: Frame, cells: int) -> tuple[str, ...]:
    """Name the slices of `obs["slice_id"]`: numbers in their order, other names by the alphabet."""
    names = _names_that_occur(obs, SLICE_KEY, cells)
    assert names is not None
    try:
        numbers = {name: float(name) for name in names}
    except ValueError:
        return tuple(sorted(names))
    # "nan" is read as a number, too, and is not one of them.
    ordered = all(map(math.isfinite, numbers.values()))
    return tuple(sorted(names, key=numbers.__getitem__ if ordered else None))


def slice_codes(
    obs: Frame, names: tuple[str, ...], start: int, stop: int
) -> Int64[np.ndarray, " N"]:
    """Return the index in `names` of each row's slice."""
    codes, labels = obs.labels(SLICE_KEY, start, stop)
    missing = np.flatnonzero(codes < 0)
    if len(missing):
        raise InputError(
            f"{obs.path}: obs[{SLICE_KEY!r}] is missing for some cells (first in row "
            f"{start + missing[0]}): name the slice of every cell, or drop the column"
        )
    return index_of_labels(labels, names)[codes]


def index_of_labels(labels: pa.StringArray, names: tuple[str, ...]) -> Int64[np.ndarray, " L"]:
    """Return the index in `names` of each label; -1 for one that does not occur there."""
    index_of = {name: number for number, name in enumerate(names)}
    index = [index_of.get(label, -1) for label in labels.to_pylist()]
    return np.array(index, dtype=np.int64).reshape(-1)


def _names_that_occur(obs: Frame, column: str | None, cells: int) -> tuple[str, ...] | None:
    if column is None or column not in obs.columns:
        return None
    occurring: set[str] = set()
    for start in range(0, cells, OBS_ROWS):
        codes, labels = obs.labels(column, start, min(start + OBS_ROWS, cells))
        used = np.unique(codes[codes >= 0])
        occurring.update(labels.take(pa.array(used)).to_pylist())
    return tuple(sorted(occurring))
