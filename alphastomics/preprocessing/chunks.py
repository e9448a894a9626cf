"""One chunk of a file: rows of counts enter, a part of normalised and aligned cells leaves.

Each cell is normalised over all genes of its file, before the gene list drops any. The moments of
the genes are written beside the part; what they are joined to is stage1.py's task.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from scipy.sparse import csr_array

from alphastomics.preprocessing.cell_table import PART_SCHEMA, CellTable, to_batch
from alphastomics.preprocessing.formats.registry import opened_source
from alphastomics.preprocessing.inspection import Inspection
from alphastomics.preprocessing.normalize import moments_of_sparse
from alphastomics.preprocessing.parts import write_part
from alphastomics.preprocessing.reader import CellForm, CellReader
from alphastomics.preprocessing.resume import load_done, write_marker
from alphastomics.preprocessing.scaling import Compact, write_moments
from alphastomics.preprocessing.transpose import read_chunk_rows


@dataclass(frozen=True)
class ChunkTask:
    """One chunk of one file, and all that is needed to convert it into a part.

    Parameters
    ----------
    first_slice
        Number in the dataset of the file's first slice.
    first_rows
        For each slice of the file, how many of its cells lie in earlier chunks.
    z
        The z of each slice of the file; None for 3D coordinates, and without any.
    transposed
        Where the rows of a file without ranges were put, else None.
    """

    inspection: Inspection
    start: int
    stop: int
    folder: Path
    name: str
    form: CellForm
    first_slice: int
    first_rows: Int64[np.ndarray, " S"]
    z: tuple[float, ...] | None
    transposed: Path | None


def write_chunk(task: ChunkTask) -> dict[str, Any]:
    """Convert a chunk into a part, unless that is done; return its completion marker."""
    done = task.folder / f"{task.name}.json"
    part = task.folder / f"{task.name}.arrow"
    moments = task.folder / f"{task.name}.npz"
    # A run that was killed at its end had moved the part out of the work folder.
    candidates = [part, task.folder.parent / part.name]
    marker = load_done(done, {"moments_sha256": [moments], "sha256": candidates})
    if marker is not None:
        return marker
    inspection = task.inspection
    with opened_source(inspection.path, inspection.options) as source:
        slices = tuple(inspection.slices)
        reader = CellReader(source, inspection.name, slices, has_positions=inspection.has_positions)
        counts = _read_counts(task, reader)
        cells = reader.read(task.form, task.start, task.stop, counts)
    runs = _runs(task, cells.slice_id)
    cells = _sorted_by_slice(task, cells)
    marker = {
        "moments_file": moments.name,
        "moments_sha256": write_moments(moments, _moments(cells, runs)),
        "file": part.name,
        "sha256": write_part(part, {0: to_batch(cells, PART_SCHEMA)}),
        "cells": len(cells),
        "entries": int(cells.sparse.nnz),
        "runs": runs,
        "empty_cells": int((np.diff(counts.indptr) == 0).sum()),
        "fractions": int((counts.data != np.floor(counts.data)).sum()),
    }
    write_marker(done, marker)
    return marker


def _read_counts(task: ChunkTask, reader: CellReader) -> csr_array:
    if task.transposed is None:
        return reader.counts(task.start, task.stop)
    return read_chunk_rows(task.transposed, task.stop - task.start, len(reader.genes))


def _runs(task: ChunkTask, slices: Int64[np.ndarray, " N"]) -> list[tuple[int, int, int]]:
    """List (slice in the dataset, first cell in the slice, cells) of the sorted rows."""
    numbers, sizes = np.unique(slices, return_counts=True)
    firsts = task.first_rows[numbers]
    columns = (numbers + task.first_slice, firsts, sizes)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _sorted_by_slice(task: ChunkTask, cells: CellTable) -> CellTable:
    """Sort a chunk by slice, numbered through the dataset; `cell_id` counts within the slice."""
    slices = cells.slice_id
    order = np.argsort(slices, kind="stable")
    sizes = np.bincount(slices, minlength=len(task.first_rows))
    rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    if not task.inspection.has_positions:
        cells.position[:] = np.nan
    if task.z is not None:
        cells.position[:, 2] = np.array(task.z, dtype=np.float64)[slices]
    return replace(
        cells.take(order),
        slice_id=(slices[order] + task.first_slice).astype(np.int32),
        cell_id=task.first_rows[slices[order]] + rank,
    )


def _moments(cells: CellTable, runs: list[tuple[int, int, int]]) -> list[Compact]:
    """Gather the moments of every slice's genes in a part."""
    edges = np.cumsum([0, *(size for _, _, size in runs)])
    parts = (cells.sparse[start:stop] for start, stop in pairwise(edges))
    return [Compact.of(moments_of_sparse(part)) for part in parts]
