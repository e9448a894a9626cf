"""A first look at every input file: paths enter, what they hold leaves.

All that can be checked without reading X is checked here, before anything is written.
"""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from alphastomics.errors import InputError, counted
from alphastomics.io.files import require_file, require_text_name, sha256_of
from alphastomics.preprocessing.anndata_file import SUFFIXES
from alphastomics.preprocessing.cell_source import CellSource, Coordinates, SourceOptions
from alphastomics.preprocessing.formats.registry import (
    AS_STORED,
    FORMATS,
    check_flags,
    files_of,
    format_of,
    is_input,
    is_unsearched,
)
from alphastomics.preprocessing.parts import rows_that_fit
from alphastomics.preprocessing.reader import OBS_ROWS, CellReader
from alphastomics.preprocessing.schema import METADATA_FILE

logger = logging.getLogger(__name__)

SHOWN = 3  # names in a message
# What dissociated cells are good for.
USES = (
    "put slices beside these cells, saved as .h5ad, and they teach genes and types; or train on "
    "slices alone, then predict the positions of these cells with `alphastomics sample "
    "--sample_mode expr_to_pos --input_data`, or learn from them with --sample_mode impute or "
    "label and --reference"
)
# Columns of obs that name the animal or sample that a slice is of, most telling first.
SAMPLE_KEYS = (
    *("animal_id", "animal", "donor_id", "donor", "subject_id", "subject", "mouse_id", "mouse"),
    *("patient_id", "patient", "individual", "embryo", "sample_id", "sample"),
)


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
    options: SourceOptions


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
    has_rows: bool
    chunk_rows: int
    slices: list[str]
    chunk_counts: Int64[np.ndarray, "C S"]
    cell_types: list[str] | None
    samples: list[str | None]
    """The animal or sample of each slice, where obs names one for all of its cells."""
    obs_columns: list[str]
    is_generated: bool
    """Whether `alphastomics sample` wrote the file."""
    has_positions: bool
    """Whether its cells have coordinates; dissociated cells have none."""
    position_keys: list[str]
    """Names in the file that coordinates might go by."""
    options: SourceOptions
    notes: list[str]
    """What the reader left out or chose."""
    warnings: list[str]
    """What looks wrong."""

    def chunks(self) -> list[tuple[int, int]]:
        """List the row ranges of the chunks."""
        starts = range(0, self.cells, self.chunk_rows)
        return [(start, min(start + self.chunk_rows, self.cells)) for start in starts]


def find_inputs(folder: Path, options: SourceOptions) -> dict[str, Path]:
    """Find the inputs of a folder, by relative name in sorted order; it may be one itself.

    An input is an .h5ad file, a .zarr store, or a folder that an instrument wrote.
    """
    if not folder.is_dir():
        said = "is not a folder" if folder.exists() else "there is no such folder"
        raise InputError(
            f"{folder}: {said}: --input_dir must name a folder of .h5ad files, or one that an "
            "instrument wrote"
        )
    left_out: list[Path] = []
    if is_input(folder, options):
        inputs = {folder.resolve().name: folder}
    else:
        paths = _inputs_below(folder, options, left_out)
        inputs = {path.relative_to(folder).as_posix(): path for path in paths}
    if not inputs:
        raise _nothing_in(folder, options)
    _say_what_is_left_out(left_out)
    check_flags(list(inputs.values()), options)
    for name in (folder.resolve().name, *inputs):
        require_text_name(Path(name))
    return dict(sorted(inputs.items()))


def require_positions(path: Path, options: SourceOptions) -> None:
    """Refuse cells of a format without coordinates, from which nothing can be learned."""
    if not FORMATS[format_of(path, options)].has_positions:
        raise InputError(
            f"{path}: counts of dissociated cells have no positions, and training needs slices "
            f"that have them: {USES}"
        )


def _nothing_in(folder: Path, options: SourceOptions) -> InputError:
    """Say that there is nothing to train on: counts without positions, or another format."""
    for path in (folder, *sorted(folder.iterdir())):
        name = format_of(path, options, missing_ok=True)
        if name is not None:
            require_positions(path, options)
    known = "; ".join(
        f"{form.name}: {form.content}" for form in FORMATS.values() if form.is_searched
    )
    asked = "" if options.format is None else f" of --format {options.format}"
    return InputError(
        f"{folder}: there is no .h5ad file (nor .zarr) in it, and no folder of an instrument"
        f"{asked}: check --input_dir (known: {known})"
    )


def _say_what_is_left_out(paths: list[Path]) -> None:
    """Warn of what may be counts beside slices: a search does not know whether they are."""
    if paths:
        shown = ", ".join(map(str, paths[:SHOWN])) + (", …" if len(paths) > SHOWN else "")
        logger.warning(
            "%d files or folders that may hold counts without positions are not read (%s): if they "
            "are dissociated cells to learn from, save them as .h5ad beside the slices",
            *(len(paths), shown),
        )


def _inputs_below(folder: Path, options: SourceOptions, left_out: list[Path]) -> Iterator[Path]:
    """Yield the inputs in a folder and below, each once, along links to folders too.

    Hidden names are left-overs of other programs; the inside of a store, or of a folder that is an
    input, is none. What may hold counts and is not searched for is added to `left_out`.
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
            if is_input(path, options):
                yield path
                continue
            is_shard = (here.parent / METADATA_FILE).is_file()  # of a processed folder
            if not is_shard and is_unsearched(path, options):
                left_out.append(path)
            if path.is_dir():
                # Links come last, so that a folder goes by its own name where it has one here.
                (linked if path.is_symlink() else waiting).append(path)


def size_of(options: SourceOptions, path: Path) -> int:
    """Return the size in bytes of all files that are read of an input."""
    return sum(file.stat().st_size for file in _files_below(files_of(path, options)))


def digest_of(options: SourceOptions, path: Path) -> str:
    """Return the sha256 of a file, or of all names and files that are read of a folder."""
    files = files_of(path, options)
    if files == [path] and not path.is_dir():
        require_file(path)
        return sha256_of(path)
    digest = hashlib.sha256()
    for file in sorted(_files_below(files)):
        name = file.relative_to(path).as_posix()
        digest.update(f"{name}\0{sha256_of(file)}\n".encode())
    return digest.hexdigest()


def _files_below(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        yield from (file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def slice_name(name: str) -> str:
    """Name a slice after its file; the dots in a folder's name are no suffix."""
    path = Path(name)
    return (path.with_suffix("") if path.suffix.lower() in SUFFIXES else path).as_posix()


def inspect_file(task: InspectionTask, source: CellSource) -> Inspection:
    """Look at one open input and check everything but the values of X."""
    has_positions = not source.is_dissociated(task.position_key)
    reader = CellReader(source, slice_name(task.name), has_positions=has_positions)
    cells, genes = reader.num_cells, list(reader.genes)
    if cells == 0 or not genes:
        raise InputError(
            f"{task.path}: X is empty ({cells} cells x {len(genes)} genes): remove the file "
            "from the folder"
        )
    expression = reader.expression
    if has_positions:
        _check_positions(task, source.positions(task.position_key))
    source.verify()
    chunk_rows = rows_that_fit(task.max_cells, expression.bytes_per_row(), task.total_bytes)
    types = reader.names_that_occur(task.cell_type_key)
    return Inspection(
        path=task.path,
        name=task.name,
        cells=cells,
        genes=genes,
        has_rows=expression.has_rows,
        chunk_rows=chunk_rows,
        slices=list(reader.slices),
        chunk_counts=_cells_of_slices(reader, chunk_rows),
        cell_types=None if types is None else list(types),
        samples=_samples(reader),
        obs_columns=reader.obs.columns,
        is_generated=source.generated_mode is not None,
        has_positions=has_positions,
        position_keys=source.position_keys,
        options=task.options,
        notes=list(source.notes),
        warnings=list(source.warnings),
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


def say_what_was_read(inspections: list[Inspection]) -> None:
    """Log what was left out, chosen or assumed, and what looks wrong, each once for all inputs."""
    for level, kind in ((logging.INFO, "notes"), (logging.WARNING, "warnings")):
        paths_of: dict[str, list[Path]] = {}
        for inspection in inspections:
            for words in getattr(inspection, kind):
                paths_of.setdefault(words, []).append(inspection.path)
        for words, paths in paths_of.items():
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            logger.log(level, "%s%s: %s", paths[0], more, words)
    as_stored = [
        inspection
        for inspection in inspections
        if inspection.has_positions
        and inspection.options.pixel_size is None
        and not inspection.warnings
        and format_of(inspection.path, inspection.options) in AS_STORED
    ]
    if as_stored:
        logger.info(
            "coordinates of %s are taken as stored, as µm; --pixel_size converts pixels",
            counted(len(as_stored), "AnnData input"),
        )


def _check_positions(task: InspectionTask, positions: Coordinates) -> None:
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
