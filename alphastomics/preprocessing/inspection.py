"""A first look at every input file: paths enter, what they hold leaves.

All that can be checked without reading X is checked here, before anything is written.
"""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from alphastomics.errors import InputError
from alphastomics.io.files import require_file, require_text_name, sha256_of
from alphastomics.preprocessing.anndata_file import SUFFIXES, Expression, MatrixKind, Positions
from alphastomics.preprocessing.parts import rows_that_fit
from alphastomics.preprocessing.reader import OBS_ROWS, CellReader

logger = logging.getLogger(__name__)

# Columns of obs that name the animal or sample that a slice is of, most telling first.
SAMPLE_KEYS = (
    *("animal_id", "animal", "donor_id", "donor", "subject_id", "subject", "mouse_id", "mouse"),
    *("patient_id", "patient", "individual", "embryo", "sample_id", "sample"),
)
BYTES_PER_ENTRY = 12  # a stored value while it is worked on: value, index, and a copy of one


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
    genes: list[str]
    kind: MatrixKind
    chunk_rows: int
    slices: list[str]
    chunk_counts: Int64[np.ndarray, "C S"]
    cell_types: list[str] | None
    samples: list[str | None]
    """The animal or sample of each slice, where obs names one for all of its cells."""
    obs_columns: list[str]
    is_generated: bool
    """Whether `alphastomics sample` wrote the file."""

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


def inspect_file(task: InspectionTask, root: Any) -> Inspection:
    """Look at one open file and check everything but the values of X."""
    reader = CellReader(task.path, root, Path(task.name).with_suffix("").as_posix())
    cells, genes = reader.num_cells, list(reader.genes)
    if cells == 0 or not genes:
        raise InputError(
            f"{task.path}: X is empty ({cells} cells x {len(genes)} genes): remove the file "
            "from the folder"
        )
    expression = reader.expression
    _check_positions(task, Positions(task.path, root, task.position_key, cells))
    chunk_rows = rows_that_fit(task.max_cells, _bytes_per_row(expression), task.total_bytes)
    types = reader.names_that_occur(task.cell_type_key)
    return Inspection(
        path=task.path,
        name=task.name,
        cells=cells,
        genes=genes,
        kind=expression.kind,
        chunk_rows=chunk_rows,
        slices=list(reader.slices),
        chunk_counts=_cells_of_slices(reader, chunk_rows),
        cell_types=None if types is None else list(types),
        samples=_samples(reader),
        obs_columns=reader.obs.columns,
        is_generated="uns/alphastomics/mode" in root,
    )


def _cells_of_slices(reader: CellReader, chunk_rows: int) -> Int64[np.ndarray, "C S"]:
    """Count the cells of each slice in each chunk."""
    cells = reader.num_cells
    chunks = [(start, min(start + chunk_rows, cells)) for start in range(0, cells, chunk_rows)]
    counts = [
        np.bincount(reader.slice_id(*chunk), minlength=len(reader.slices)) for chunk in chunks
    ]
    return np.stack(counts)


def _samples(reader: CellReader) -> list[str | None]:
    """Name the animal or sample of each slice by the first column that has one for each."""
    for key in (key for key in SAMPLE_KEYS if key in reader.obs.columns):
        seen: list[set[str | None]] = [set() for _ in reader.slices]
        for start in range(0, reader.num_cells, OBS_ROWS):
            stop = min(start + OBS_ROWS, reader.num_cells)
            codes, labels = reader.obs.labels(key, start, stop)
            names = [*labels.to_pylist(), None]  # a missing name has code -1
            pairs = np.stack([reader.slice_id(start, stop), codes])
            for number, code in np.unique(pairs, axis=1).T.tolist():
                seen[number].add(names[code])
        if all(len(samples) == 1 for samples in seen):
            return [samples.pop() for samples in seen]
    return [None] * len(reader.slices)


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
