"""The commands `preprocess`, `stage1` and `stage2`: settings and folders enter, a summary leaves.

This file says what a finished folder is and what is refused; the work is in stage1.py and
stage2.py. Neither torch nor anndata is imported.
"""

import logging
from pathlib import Path
from typing import Any

from alphastomics.config import PreprocessingConfig
from alphastomics.errors import InputError
from alphastomics.io.files import output_folder
from alphastomics.preprocessing import resume
from alphastomics.preprocessing import stage1 as first_stage
from alphastomics.preprocessing import stage2 as second_stage
from alphastomics.preprocessing.anndata_file import SUFFIXES
from alphastomics.preprocessing.cell_source import SourceOptions
from alphastomics.preprocessing.datasets import merge
from alphastomics.preprocessing.inspection import find_inputs
from alphastomics.preprocessing.schema import (
    INTERMEDIATE_FOLDER,
    METADATA_FILE,
    Metadata,
    parse_metadata,
)
from alphastomics.preprocessing.usual_positions import with_usual_positions
from alphastomics.preprocessing.worker_pool import WorkerPool

logger = logging.getLogger(__name__)


def preprocess(
    options: PreprocessingConfig,
    *,
    input_dir: Path,
    output_dir: Path,
    gene_list_file: Path | None,
    seed: int,
    overwrite: bool,
    scheduler: str | None,
) -> dict[str, Any]:
    """Convert a folder of slices into a processed folder: both stages in one go.

    Parameters
    ----------
    options
        What is done to the data.
    input_dir
        Folder of .h5ad files, .zarr stores or folders of instruments, searched with its subfolders
        in sorted order; or one such folder.
    output_dir
        The processed folder; an unfinished one is finished, a finished one recognised.
    gene_list_file
        One gene per line; None takes the sorted union of all genes.
    seed
        Seed of the split and of the order of cells.
    overwrite
        Start again, whatever the folder holds.
    scheduler
        Address of a Dask scheduler, or None for `options.workers` local processes.
    """
    check_output_among_inputs(input_dir, output_dir)
    with output_folder(output_dir), WorkerPool(options.workers, scheduler) as pool:
        name, inputs = input_dir.resolve().name, find_inputs(input_dir, SourceOptions.of(options))
        options = with_usual_positions(options, inputs)
        request = first_stage.request_of(options, name, inputs, gene_list_file, pool)
        known = None if overwrite else _metadata(output_dir)
        if known is not None:
            done = _finished(output_dir, known, [request], second_stage.request_of(options, seed))
            if done is not None:
                return done
        second_stage.require_ours(output_dir)
        middle = output_dir / INTERMEDIATE_FOLDER
        first_stage.run(
            *(options, request, inputs, gene_list_file, middle, pool),
            overwrite=overwrite,
            needs_slices=True,
        )
        metadata = second_stage.run(options, [middle], output_dir, seed, pool, overwrite=overwrite)
    return _summary(output_dir, metadata)


def stage1(
    options: PreprocessingConfig,
    *,
    input_dir: Path,
    output_dir: Path,
    gene_list_file: Path | None,
    overwrite: bool,
    scheduler: str | None,
) -> dict[str, Any]:
    """Align and normalise one dataset's slices; `preprocess` has the parameters."""
    if gene_list_file is None:
        raise InputError(
            "--gene_list_file: stage1 needs a gene list, so that datasets can be merged; "
            "`preprocess` can do without"
        )
    check_output_among_inputs(input_dir, output_dir)
    with output_folder(output_dir), WorkerPool(options.workers, scheduler) as pool:
        name, inputs = input_dir.resolve().name, find_inputs(input_dir, SourceOptions.of(options))
        options = with_usual_positions(options, inputs)
        request = first_stage.request_of(options, name, inputs, gene_list_file, pool)
        # A dataset of dissociated cells may be merged with slices.
        dataset = first_stage.run(
            *(options, request, inputs, gene_list_file, output_dir, pool),
            overwrite=overwrite,
            needs_slices=False,
        )
    return {
        "output_dir": str(output_dir),
        "genes": len(dataset["genes"]),
        "slices": len(dataset["slices"]),
        "cells": sum(record["cells"] for record in dataset["slices"]),
    }


def stage2(
    options: PreprocessingConfig,
    *,
    input_dirs: list[Path],
    output_dir: Path,
    seed: int,
    overwrite: bool,
    scheduler: str | None,
) -> dict[str, Any]:
    """Merge, split and shuffle datasets that stage 1 wrote; `preprocess` has the parameters."""
    with output_folder(output_dir), WorkerPool(options.workers, scheduler) as pool:
        known = None if overwrite else _metadata(output_dir)
        if known is not None:
            requests = list(merge(input_dirs).requests)
            done = _finished(output_dir, known, requests, second_stage.request_of(options, seed))
            if done is not None:
                return done
        metadata = second_stage.run(
            options, input_dirs, output_dir, seed, pool, overwrite=overwrite
        )
    return _summary(output_dir, metadata)


def check_output_among_inputs(input_dir: Path, output_dir: Path) -> None:
    """Warn of an output folder among the slices; refuse one that would be read as a slice."""
    output, source = output_dir.resolve(), input_dir.resolve()
    if not output.is_relative_to(source):
        return
    if any(Path(part).suffix.lower() in SUFFIXES for part in output.relative_to(source).parts):
        raise InputError(
            f"{output_dir}: the next run would read it as a slice of {input_dir}: choose an "
            "--output_dir outside --input_dir"
        )
    logger.warning(
        "%s: lies in --input_dir %s. The next run searches it too: every .h5ad that is written "
        "there, as `sample` does, becomes a slice. Choose an --output_dir outside --input_dir",
        output_dir,
        input_dir,
    )


def _metadata(folder: Path) -> Metadata | None:
    """Read what a folder says of itself; None where it says nothing."""
    path = folder / METADATA_FILE
    return parse_metadata(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else None


def _finished(
    folder: Path, known: Metadata, datasets: list[dict[str, Any]], request: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the summary of a finished folder, refuse one of another request, else None."""
    before = [dict(dataset.request) for dataset in known.provenance.datasets]
    if len(before) != len(datasets):
        raise InputError(
            f"{folder}: was made of {len(before)} datasets, not of {len(datasets)}: give "
            "--overwrite to start again, or another --output_dir"
        )
    for old, new in zip(before, datasets, strict=True):
        resume.require_same_request(old, new, folder)
    resume.require_same_request(known.provenance.request, request, folder)
    if not resume.are_files_of(folder, known.checksums):
        return None
    second_stage.clear(folder)
    return {**_summary(folder, known), "state": "was finished before"}


def _summary(folder: Path, metadata: Metadata) -> dict[str, Any]:
    """Describe a processed folder in a few plain values."""
    return {
        "output_dir": str(folder),
        "genes": metadata.num_genes,
        "slices": len(metadata.slices),
        "cells": {name: split.cells for name, split in metadata.splits.items()},
        "shards": {name: len(split.shards) for name, split in metadata.splits.items()},
        "state": "finished",
    }
