"""Stage 1: AnnData slices enter; aligned, normalised cells and per-slice statistics leave.

The unit of work is a chunk of rows of one file (chunks.py); the moments of a slice's genes are
joined in the order of its chunks. Standardising needs the whole slice, so it is left to the reader
of the parts: each file is read once.
"""

import logging
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from alphastomics import __version__
from alphastomics.config import PreprocessingConfig
from alphastomics.errors import InputError, counted
from alphastomics.io.files import sha256_of, write_text
from alphastomics.io.progress import track
from alphastomics.preprocessing import genes as gene_names
from alphastomics.preprocessing import owned, resume
from alphastomics.preprocessing.cell_source import SourceOptions
from alphastomics.preprocessing.chunks import ChunkTask, write_chunk
from alphastomics.preprocessing.dissociated import (
    default_genes,
    require_slices,
    say_what_they_teach,
    slices_first,
)
from alphastomics.preprocessing.formats.registry import require_one_unit
from alphastomics.preprocessing.inspection import (
    Inspection,
    InspectionTask,
    digest_of,
    say_what_was_read,
    size_of,
    slice_name,
)
from alphastomics.preprocessing.reader import CellForm
from alphastomics.preprocessing.scaling import NOTHING, read_moments, write_moments
from alphastomics.preprocessing.schema import DATASET_FILE, SHUFFLE_FOLDER, STATISTICS_FILE
from alphastomics.preprocessing.subprocess_reader import inspected_in_subprocess
from alphastomics.preprocessing.transpose import TransposeTask, transpose
from alphastomics.preprocessing.worker_pool import WorkerPool
from alphastomics.preprocessing.workspace import Workspace, first_file

logger = logging.getLogger(__name__)

WORK_FOLDER = ".stage1-work"
# More labels than any atlas of a tissue has.
MANY_TYPES = 200
# Settings on which the bytes depend; the number of workers is not one of them.
FLAGS = (
    "scale",
    "log_normalize",
    "position_key",
    "position_is_3d",
    "common_frame",
    "z_spacing",
    "cell_type_key",
    "max_cells_per_file",
    "format",
    "table",
    "pixel_size",
)


def request_of(
    options: PreprocessingConfig,
    name: str,
    inputs: dict[str, Path],
    gene_list_file: Path | None,
    pool: WorkerPool,
) -> dict[str, Any]:
    """Gather all that the result depends on; input files count by their content."""
    listed = None
    if gene_list_file is not None:
        gene_names.read_gene_list(gene_list_file)
        listed = sha256_of(gene_list_file)
    source = SourceOptions.of(options)
    digests = pool.run(partial(digest_of, source), list(inputs.values()), lambda _: None)
    return {
        "name": name,
        "inputs": dict(zip(inputs, digests, strict=True)),
        "gene_list": listed,
        "flags": {key: getattr(options, key) for key in FLAGS},
    }


def run(
    options: PreprocessingConfig,
    request: dict[str, Any],
    inputs: dict[str, Path],
    gene_list_file: Path | None,
    folder: Path,
    pool: WorkerPool,
    *,
    overwrite: bool,
    needs_slices: bool,
) -> dict[str, Any]:
    """Bring a folder to the state that was asked for; return what dataset.json says.

    With `needs_slices`, inputs none of which has positions are refused. The parts are made in a
    work folder inside; what was there before stays until they are complete.
    """
    work = folder / WORK_FOLDER
    space = Workspace(folder, DATASET_FILE, work, work, "part-*.json", owned.dataset_files)
    space.require_outside(inputs.values())
    finished = None if overwrite else _finished(folder)
    if finished is not None and checked(finished, folder, request):
        space.clear()
        return dict(finished)
    if finished is None and not overwrite:
        space.require_same_request(request)
    # Our own subfolders do not count.
    space.require_ours([first_file(folder, {WORK_FOLDER, SHUFFLE_FOLDER})])
    inspections, genes = _look(options, inputs, gene_list_file, pool)
    if needs_slices:
        require_slices(inspections, options.position_key)
    say_what_they_teach(inspections, genes)
    with space.working(request, empty=[folder]):
        dataset = _act(options, request, inspections, genes, work, pool)
    space.move_into_place([*(part["file"] for part in dataset["parts"]), STATISTICS_FILE])
    write_text(folder / DATASET_FILE, resume.dump(dataset))
    space.clear()
    return dataset


def _finished(folder: Path) -> dict[str, Any] | None:
    """Read what a finished folder says of itself; None where it says nothing."""
    record = resume.load(folder / DATASET_FILE)
    if (folder / DATASET_FILE).exists() and not isinstance(record, dict):
        raise InputError(
            f"{folder / DATASET_FILE}: is damaged: give --overwrite to start again, or another "
            "--output_dir"
        )
    return record


def checked(finished: dict[str, Any], folder: Path, request: dict[str, Any]) -> bool:
    """Refuse a finished dataset of another request; tell whether one of this request is whole."""
    resume.require_same_request(finished.get("request"), request, folder)
    if not resume.checksum_holds(finished):
        return False
    parts = {part["file"]: part["sha256"] for part in finished["parts"]}
    return resume.are_files_of(folder, {**parts, STATISTICS_FILE: finished["statistics_sha256"]})


def _look(
    options: PreprocessingConfig,
    inputs: dict[str, Path],
    gene_list_file: Path | None,
    pool: WorkerPool,
) -> tuple[list[Inspection], list[str]]:
    """Inspect all files and fix the gene list, before anything is written."""
    source = SourceOptions.of(options)
    sizes = {name: size_of(source, path) for name, path in inputs.items()}
    tasks = [
        InspectionTask(
            path=path.resolve(),
            name=name,
            bytes=sizes[name],
            total_bytes=sum(sizes.values()),
            position_key=options.position_key,
            position_is_3d=options.position_is_3d,
            cell_type_key=options.cell_type_key,
            max_cells=options.max_cells_per_file,
            options=source,
        )
        for name, path in inputs.items()
    ]
    with track("stage 1, inspection", len(tasks), "files") as advance:
        inspections = pool.run(inspected_in_subprocess, tasks, lambda _: advance(1))
    say_what_was_read(inspections)
    located = [inspection.path for inspection in inspections if inspection.has_positions]
    require_one_unit(located, SourceOptions.of(options))
    _check_cell_types(options, inspections)
    _point_out_generated(inspections)
    inspections = slices_first(inspections)
    _point_out_strangers(inspections)
    gene_names.hint_at_case(gene_names.union_of(inspection.genes for inspection in inspections))
    if gene_list_file is None:
        genes = default_genes(inspections)
    else:
        genes = gene_names.read_gene_list(gene_list_file)
    for inspection in inspections:
        gene_names.align(inspection.genes, genes, inspection.path)
    return inspections, genes


def _point_out_strangers(inspections: list[Inspection]) -> None:
    """Warn of inputs that share no gene with any other: nothing relates them."""
    several = [(inspection.path, inspection.genes) for inspection in inspections]
    strangers = gene_names.strangers_among(several) if len(several) > 1 else []
    if strangers:
        logger.warning(
            "%s: shares no gene with any other input (%d such inputs): are gene names of one kind "
            "(symbols or Ensembl ids), and of one species?",
            *(strangers[0], len(strangers)),
        )


def _check_cell_types(options: PreprocessingConfig, inspections: list[Inspection]) -> None:
    key = options.cell_type_key
    lacking = [inspection for inspection in inspections if inspection.cell_types is None]
    if key is not None and len(lacking) == len(inspections):
        raise InputError(
            f"{lacking[0].path}: obs[{key!r}] is missing, in this and every other file (columns of "
            f"obs: {', '.join(lacking[0].obs_columns) or 'none'}): check --cell_type_key"
        )
    types = {name for inspection in inspections for name in inspection.cell_types or ()}
    if len(types) > MANY_TYPES:
        logger.warning(
            "obs[%r] has %d different labels (%s): is it a column of cell types?",
            *(key, len(types), ", ".join(sorted(types)[:3])),
        )
    if key is not None and lacking:
        logger.warning(
            "%s without obs[%r] (first %s): their cells get no cell type",
            counted(len(lacking), "file"),
            key,
            lacking[0].path,
        )


def _point_out_generated(inspections: list[Inspection]) -> None:
    """Name what `sample` wrote: by default it lies beside its input, among the slices."""
    generated = [inspection.path for inspection in inspections if inspection.is_generated]
    if generated:
        logger.warning(
            "%s written by `alphastomics sample` (first %s): their cells are taken like those of "
            "any slice; move them away if that is not meant",
            counted(len(generated), "file"),
            generated[0],
        )


def _act(
    options: PreprocessingConfig,
    request: dict[str, Any],
    inspections: list[Inspection],
    genes: list[str],
    work: Path,
    pool: WorkerPool,
) -> dict[str, Any]:
    """Write all parts, and describe them."""
    transposes, tasks = chunk_tasks(inspections, genes, options, work.resolve())
    pool.run(transpose, transposes, lambda _: None)
    with track("stage 1", sum(inspection.cells for inspection in inspections), "cells") as advance:
        markers = pool.run(write_chunk, tasks, lambda task: advance(task.stop - task.start))
    say_what_was_noted(tasks, markers)
    return resume.with_checksum(dataset_of(request, genes, inspections, tasks, markers))


def chunk_tasks(
    inspections: list[Inspection], genes: list[str], options: PreprocessingConfig, folder: Path
) -> tuple[list[TransposeTask], list[ChunkTask]]:
    """Plan stage 1: which files are transposed first, and which chunks become parts."""
    types = tuple(gene_names.union_of(inspection.cell_types or () for inspection in inspections))
    transposes, chunks = [], []
    first_slice = 0
    for number, inspection in enumerate(inspections):
        form = CellForm(
            alignment=gene_names.align(inspection.genes, genes, inspection.path),
            log_normalize=options.log_normalize,
            position_key=options.position_key,
            cell_type_key=options.cell_type_key,
            cell_types=types,
        )
        transpose = TransposeTask(inspection, folder, f"file-{number:05d}")
        if not inspection.has_rows:
            transposes.append(transpose)
        firsts = np.cumsum(inspection.chunk_counts, axis=0) - inspection.chunk_counts
        slices = range(first_slice, first_slice + len(inspection.slices))
        is_planar = inspection.has_positions and not options.position_is_3d
        z = tuple(i * options.z_spacing for i in slices) if is_planar else None
        for chunk, (start, stop) in enumerate(inspection.chunks()):
            chunks.append(
                ChunkTask(
                    inspection=inspection,
                    start=start,
                    stop=stop,
                    folder=folder,
                    name=f"part-{number:05d}-{chunk:05d}",
                    form=form,
                    first_slice=first_slice,
                    first_rows=firsts[chunk],
                    z=z,
                    transposed=transpose.chunk_path(chunk) if not inspection.has_rows else None,
                )
            )
        first_slice += len(inspection.slices)
    return transposes, chunks


def write_statistics(
    folder: Path, markers: list[dict[str, Any]], num_slices: int, num_genes: int
) -> str:
    """Join the moments of all parts, in their order, to those of each slice; return the sha256."""
    joined = [NOTHING] * num_slices
    for marker in markers:
        of_runs = read_moments(folder / marker["moments_file"])
        for (number, _, _), moments in zip(marker["runs"], of_runs, strict=True):
            joined[number] = joined[number].joined(moments, num_genes)
    return write_moments(folder / STATISTICS_FILE, joined)


def unique_slice_names(inspections: list[Inspection]) -> list[str]:
    """Name the slices of all files; a name that two files use gets its file's name in front."""
    uses = Counter(name for inspection in inspections for name in inspection.slices)
    clashing = sorted(name for name, count in uses.items() if count > 1)
    if clashing:
        logger.warning(
            "%d slice names occur in more than one file (first %s): these are kept apart as "
            "different slices, named file:slice",
            len(clashing),
            gene_names.shown(clashing),
        )
    return [
        f"{slice_name(inspection.name)}:{name}" if uses[name] > 1 else name
        for inspection in inspections
        for name in inspection.slices
    ]


def slice_records(
    inspections: list[Inspection], tasks: list[ChunkTask], flags: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Describe every slice, and list the distinct sets of genes that were not measured."""
    missing_of = {task.inspection.name: tuple(task.form.alignment.missing()) for task in tasks}
    panels = list(dict.fromkeys(missing_of[inspection.name] for inspection in inspections))
    names = iter(unique_slice_names(inspections))
    records: list[dict[str, Any]] = []
    for inspection in inspections:
        sizes = inspection.chunk_counts.sum(axis=0).tolist()
        for size, sample in zip(sizes, inspection.samples, strict=True):
            is_planar = inspection.has_positions and not flags["position_is_3d"]
            made_up = len(records) * flags["z_spacing"] if is_planar else None
            panel = panels.index(missing_of[inspection.name])
            records.append(
                {"name": next(names), "file": inspection.name, "cells": size, "panel": panel}
                | {"z": made_up, "sample": sample, "has_positions": inspection.has_positions}
            )
    return records, [list(panel) for panel in panels]


def say_what_was_noted(tasks: list[ChunkTask], markers: list[dict[str, Any]]) -> None:
    """Warn, once for each file, of cells without counts and of values that are no counts."""
    empty: Counter[Path] = Counter()
    fractions: Counter[Path] = Counter()
    for task, marker in zip(tasks, markers, strict=True):
        empty[task.inspection.path] += marker["empty_cells"]
        fractions[task.inspection.path] += marker["fractions"] if task.form.log_normalize else 0
    for path, number in empty.items():
        if number:
            logger.warning(
                "%s: X: %d cells have zero counts; they are kept as they are", path, number
            )
    for path, number in fractions.items():
        if number:
            logger.warning(
                "%s: X: %s not whole numbers: X may be normalised already, and is log-normalised "
                "again; if that was done before, give --skip-log-normalize",
                path,
                f"{counted(number, 'value')} {'is' if number == 1 else 'are'}",
            )


def dataset_of(
    request: dict[str, Any],
    genes: list[str],
    inspections: list[Inspection],
    tasks: list[ChunkTask],
    markers: list[dict[str, Any]],
) -> dict[str, Any]:
    """Write the statistics, and describe all that stage 1 made."""
    folder, flags = tasks[0].folder, request["flags"]
    records, panels = slice_records(inspections, tasks, flags)
    parts = [
        {key: marker[key] for key in ("file", "sha256", "cells", "entries", "runs")}
        for marker in markers
    ]
    return {
        "version": __version__,
        "name": request["name"],
        "request": request,
        "genes": genes,
        "cell_types": None if flags["cell_type_key"] is None else list(tasks[0].form.cell_types),
        "slices": records,
        "panels": panels,
        "parts": parts,
        # Of slices: whether a query is to be taken for counts is judged by them.
        "fractions": any(
            marker["fractions"]
            for task, marker in zip(tasks, markers, strict=True)
            if task.inspection.has_positions
        ),
        "statistics_sha256": write_statistics(folder, markers, len(records), len(genes)),
    }
