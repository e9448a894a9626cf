"""One chunk of a file: rows of counts enter, a part of normalised and aligned cells leaves.

Each cell is normalised over all genes of its file, before the gene list drops any. The moments of
the genes are written beside the part; what they are joined to is stage1.py's task.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int64
from scipy.sparse import csr_array

from alphastomics.errors import InputError
from alphastomics.preprocessing.anndata_file import Expression, Frame, Positions, opened
from alphastomics.preprocessing.cell_table import PART_SCHEMA, CellTable, to_batch
from alphastomics.preprocessing.genes import Alignment
from alphastomics.preprocessing.inspection import (
    SLICE_KEY,
    Inspection,
    index_of_labels,
    slice_codes,
)
from alphastomics.preprocessing.normalize import log_normalized, moments_of_sparse
from alphastomics.preprocessing.parts import write_part
from alphastomics.preprocessing.resume import is_file_of, load_marker, write_marker
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
        The z of each slice of the file; None for 3D coordinates.
    transposed
        Where the rows of a CSC file were put, else None.
    """

    inspection: Inspection
    start: int
    stop: int
    folder: Path
    name: str
    alignment: Alignment
    first_slice: int
    first_rows: Int64[np.ndarray, " S"]
    z: tuple[float, ...] | None
    cell_types: tuple[str, ...]
    position_key: str
    cell_type_key: str | None
    log_normalize: bool
    transposed: Path | None


def write_chunk(task: ChunkTask) -> dict[str, Any]:
    """Convert a chunk into a part, unless that is done; return its completion marker."""
    done = task.folder / f"{task.name}.json"
    part = task.folder / f"{task.name}.arrow"
    moments = task.folder / f"{task.name}.npz"
    marker = load_marker(done)
    if marker is not None and is_file_of(moments, marker["moments_sha256"]):
        # A run that was killed at its end had moved the part out of the work folder.
        candidates = (part, task.folder.parent / part.name)
        if any(is_file_of(path, marker["sha256"]) for path in candidates):
            return marker
    with opened(task.inspection.path) as root:
        obs = Frame(task.inspection.path, root, "obs")
        counts = _read_counts(task, root)
        slices = _slices_of_rows(task, obs)
        notes = _check_counts(task, counts)
        cells = _cells(task, root, obs, _normalized(task, counts), slices)
    runs = _runs(task, slices)
    marker = {
        "moments_file": moments.name,
        "moments_sha256": write_moments(moments, _moments(cells, runs)),
        "file": part.name,
        "sha256": write_part(part, {0: to_batch(cells, PART_SCHEMA)}),
        "cells": len(cells),
        "entries": int(cells.sparse.nnz),
        "runs": runs,
        **notes,
    }
    write_marker(done, marker)
    return marker


def _read_counts(task: ChunkTask, root: Any) -> csr_array:
    size = task.stop - task.start
    if task.transposed is not None:
        return read_chunk_rows(task.transposed, size, len(task.inspection.genes))
    expression = Expression(
        task.inspection.path, root, task.inspection.cells, len(task.inspection.genes)
    )
    return expression.rows(task.start, task.stop)


def _check_counts(task: ChunkTask, counts: csr_array) -> dict[str, int]:
    """Refuse negative values where a logarithm is asked, and note what the user should know."""
    negative = np.flatnonzero(counts.data < 0)
    if task.log_normalize and len(negative):
        row = task.start + int(np.searchsorted(counts.indptr, negative[0], side="right")) - 1
        raise InputError(
            f"{task.inspection.path}: X has negative values (first in row {row}), so these are no "
            "counts: give --skip-log-normalize if they are already normalised"
        )
    return {
        "empty_cells": int((np.diff(counts.indptr) == 0).sum()),
        "fractions": int((counts.data != np.floor(counts.data)).sum()),
    }


def _normalized(task: ChunkTask, counts: csr_array) -> csr_array:
    values = log_normalized(counts) if task.log_normalize else counts
    return task.alignment.apply(values)


def _slices_of_rows(task: ChunkTask, obs: Frame) -> Int64[np.ndarray, " N"]:
    """Return each row's slice, counted within the file."""
    if SLICE_KEY in obs.columns:
        return slice_codes(obs, task.inspection.slices, task.start, task.stop)
    return np.zeros(task.stop - task.start, dtype=np.int64)


def _runs(task: ChunkTask, slices: Int64[np.ndarray, " N"]) -> list[tuple[int, int, int]]:
    """List (slice in the dataset, first cell in the slice, cells) of the sorted rows."""
    numbers, sizes = np.unique(slices, return_counts=True)
    firsts = task.first_rows[numbers]
    columns = (numbers + task.first_slice, firsts, sizes)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _cells(
    task: ChunkTask, root: Any, obs: Frame, values: csr_array, slices: Int64[np.ndarray, " N"]
) -> CellTable:
    """Gather the columns of a chunk, sorted by slice; `cell_id` counts within the slice."""
    order = np.argsort(slices, kind="stable")
    sizes = np.bincount(slices, minlength=len(task.first_rows))
    rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    path, cells = task.inspection.path, task.inspection.cells
    plane = Positions(path, root, task.position_key, cells).rows(task.start, task.stop)
    position = plane
    if task.z is not None:
        height = np.array(task.z, dtype=np.float64)[slices]
        position = np.concatenate([plane, height[:, None]], axis=1)
    return CellTable(
        values[order],
        position[order],
        _cell_types(task, obs)[order],
        (slices[order] + task.first_slice).astype(np.int32),
        task.first_rows[slices[order]] + rank,
        obs.names(task.start, task.stop).take(pa.array(order)),
    )


def _cell_types(task: ChunkTask, obs: Frame) -> np.ndarray:
    if task.cell_type_key is None or task.cell_type_key not in obs.columns:
        return np.full(task.stop - task.start, -1, dtype=np.int32)
    codes, labels = obs.labels(task.cell_type_key, task.start, task.stop)
    # The code -1 (missing) finds the last entry.
    number = np.append(index_of_labels(labels, task.cell_types), -1)
    return number[codes].astype(np.int32)


def _moments(cells: CellTable, runs: list[tuple[int, int, int]]) -> list[Compact]:
    """Gather the moments of every slice's genes in a part."""
    edges = np.cumsum([0, *(size for _, _, size in runs)])
    parts = (cells.sparse[start:stop] for start, stop in pairwise(edges))
    return [Compact.of(moments_of_sparse(part)) for part in parts]
