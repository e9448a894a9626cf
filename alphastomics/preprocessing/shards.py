"""The two acts of the external shuffle: parts enter, sorted parts leave; they enter, shards leave.

First each part is sorted by the bucket that its cells go to; then each shard gathers its buckets
from all parts, one at a time, permutes each and writes it. Memory holds a part or a bucket.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int64

from alphastomics.errors import InputError, quoted
from alphastomics.io.files import HashedFile, hashing
from alphastomics.preprocessing.cell_table import (
    PART_SCHEMA,
    CellTable,
    joined_tables,
    shard_schema,
    to_batch,
)
from alphastomics.preprocessing.datasets import Part
from alphastomics.preprocessing.normalize import (
    Moments,
    densified,
    moments_of_dense,
    standardized_entries,
)
from alphastomics.preprocessing.parts import SortedParts, read_part, write_part
from alphastomics.preprocessing.plan import (
    PlanRequest,
    ShufflePlan,
    destinations,
    make_shuffle_plan,
    order_in_bucket,
)
from alphastomics.preprocessing.resume import load_done, write_marker
from alphastomics.preprocessing.scaling import mapped_scaling
from alphastomics.preprocessing.schema import ALL_SPLITS, DATA_FOLDER, SPLITS, shard_name

ROW_GROUP_BYTES = 8 << 20  # read in a few milliseconds, yet large enough to read at full speed
LONGEST_ROW_GROUP = 8192
TRAIN = SPLITS.index("train")

plan_of = lru_cache(maxsize=1)(make_shuffle_plan)


@dataclass(frozen=True)
class SortTask:
    """A part to be sorted by bucket."""

    part: Part
    folder: Path
    number: int
    num_genes: int
    plan: PlanRequest
    scaled: bool
    """Whether the slices are to be standardised, by what scaling.py wrote into `folder`."""
    z_values: tuple[float | None, ...]
    """The made-up z of each slice; None where the file had one."""
    first_cells: tuple[int, ...]
    """The id of each slice's first cell."""

    @property
    def target(self) -> Path:
        """Return where the sorted part goes."""
        return self.folder / f"sorted-{self.number:06d}.arrow"


@dataclass(frozen=True)
class ShardTask:
    """A shard to be written from sorted parts."""

    split: int
    shard: int
    staged_folder: Path
    folder: Path
    holders: dict[int, tuple[int, ...]]
    """Which sorted parts hold cells of each bucket of the shard."""
    num_genes: int
    plan: PlanRequest
    storage: str
    with_cell_type: bool
    row_group_rows: int
    scaled: bool
    """Whether an entry that is not stored stands for its slice's standardised zero, or for 0."""


def row_group_rows(num_genes: int, entries_per_cell: float, storage: str) -> int:
    """Choose how many cells a row group holds, so that it is quick to read and not too small."""
    bytes_per_cell = 4 * num_genes if storage == "dense" else 8 * entries_per_cell
    return int(min(LONGEST_ROW_GROUP, max(64, ROW_GROUP_BYTES / max(bytes_per_cell, 1))))


def sort_part(task: SortTask) -> dict[str, Any]:
    """Standardise a part and sort it by bucket, unless that is done; return its marker."""
    done = task.target.with_suffix(".json")
    marker = load_done(done, {"sha256": [task.target]})
    if marker is not None:
        return marker
    cells = _renumbered(task, _standardized(task, _read(task.part, task.num_genes)))
    plan = plan_of(task.plan)
    bucket = np.concatenate(
        [destinations(plan, number)[first : first + size] for number, first, size in task.part.runs]
    )
    order = np.argsort(bucket, kind="stable")
    numbers, starts = np.unique(bucket[order], return_index=True)
    batch = to_batch(cells.take(order), PART_SCHEMA)
    stops = [*starts[1:].tolist(), len(order)]
    pieces = zip(numbers.tolist(), starts.tolist(), stops, strict=True)
    batches = {number: batch.slice(start, stop - start) for number, start, stop in pieces}
    marker = {
        "training_positions": _position_moments(cells, plan.split[bucket] == TRAIN),
        "sha256": write_part(task.target, batches),
        "buckets": list(batches),
    }
    write_marker(done, marker)
    return marker


def _read(part: Part, num_genes: int) -> CellTable:
    """Read one of stage 1's parts, and make sure that it is what stage 1 wrote."""
    content = part.path.read_bytes()
    if hashlib.sha256(content).hexdigest() != part.sha256:
        raise InputError(
            f"{part.path}: is not what stage1 wrote (sha256 differs): run stage1 again with "
            "--overwrite"
        )
    try:
        cells = read_part(content, num_genes, len(part.cell_type_numbers))
        expected = np.concatenate(
            [np.arange(first, first + size) for _, first, size in part.runs], dtype=np.int64
        )
        if not np.array_equal(cells.cell_id, expected):
            raise ValueError("its cells are not those that dataset.json lists")
    except (ValueError, pa.ArrowException, OSError, LookupError) as error:
        raise InputError(
            f"{part.path}: is damaged ({quoted(error, 150)}): run stage1 again with --overwrite"
        ) from error
    return cells


def _standardized(task: SortTask, cells: CellTable) -> CellTable:
    """Standardise each slice's run of rows."""
    if not task.scaled:
        return cells
    mean, std = (mapped_scaling(task.folder, name) for name in ("mean", "std"))
    edges = np.cumsum([0, *(size for _, _, size in task.part.runs)])
    values = cells.sparse
    data = np.empty_like(values.data)
    for (number, _, _), start, stop in zip(task.part.runs, edges[:-1], edges[1:], strict=True):
        first, last = values.indptr[start], values.indptr[stop]
        run = values[start:stop]
        data[first:last] = standardized_entries(
            run, np.array(mean[number]), np.array(std[number])
        ).data
    values.data = data
    return cells


def _renumbered(task: SortTask, cells: CellTable) -> CellTable:
    """Give slices, cells and cell types their merged numbers, and 2D slices their merged z."""
    sizes = [size for _, _, size in task.part.runs]
    numbers = np.array([number for number, _, _ in task.part.runs])
    first_cells = np.array(task.first_cells)[numbers]
    types = np.array([*task.part.cell_type_numbers, -1], dtype=np.int32)
    z_values = np.array(
        [task.z_values[number] for number in numbers], dtype=np.float64
    )  # None: nan
    z = np.repeat(z_values, sizes)
    position = np.array(cells.position)
    position[:, 2] = np.where(np.isnan(z), position[:, 2], z)
    return replace(
        cells,
        position=position,
        cell_type=types[cells.cell_type],
        slice_id=np.repeat(numbers, sizes).astype(np.int32),
        cell_id=cells.cell_id + np.repeat(first_cells, sizes),
    )


def _position_moments(cells: CellTable, chosen: np.ndarray) -> list[dict[str, Any]]:
    """Gather where the training cells of each slice lie."""
    records = []
    for number in np.unique(cells.slice_id[chosen]).tolist():
        position = cells.position[chosen & (cells.slice_id == number)]
        moments: Moments = moments_of_dense(position)
        records.append(
            {
                "slice": number,
                "count": moments.count,
                "mean": moments.mean.tolist(),
                "squares": moments.squares.tolist(),
                "minimum": position.min(axis=0).tolist(),
                "maximum": position.max(axis=0).tolist(),
            }
        )
    return records


def write_shard(task: ShardTask) -> dict[str, Any]:
    """Write one shard, unless that is done; return its record for metadata.json.

    It waits in `staged_folder` until all are complete: then they replace older ones together.
    """
    plan = plan_of(task.plan)
    name = shard_name(ALL_SPLITS[task.split], task.shard, plan.num_shards(task.split))
    path = task.staged_folder / name
    done = task.folder / f"shard-{task.split}-{task.shard:05d}.json"
    marker = load_done(done, {"sha256": [path, task.staged_folder.parent / name]})
    if marker is not None:
        return marker
    groups: list[int] = []
    parts = SortedParts(task.num_genes)
    with (
        hashing(path) as file,
        _writer(file, task) as writer,
    ):
        for bucket in plan.buckets_of(task.split, task.shard):
            cells = _gathered(task, plan, bucket, parts)
            for start in range(0, len(cells), task.row_group_rows):
                rows = np.arange(start, min(start + task.row_group_rows, len(cells)))
                writer.write_batch(_batch(task, cells.take(rows)))
                groups.append(len(rows))
    marker = {
        "file": f"{DATA_FOLDER}/{name}",
        "cells": sum(groups),
        "bytes": path.stat().st_size,
        "sha256": file.sha256,
        "row_groups": groups,
        "slices": _runs_of(plan, task) if task.plan.layout == "slice" else None,
    }
    write_marker(done, marker)
    return marker


def _writer(file: HashedFile, task: ShardTask) -> pq.ParquetWriter:
    # Dense values hardly compress and plain pages read fastest; sparse indices rise, so their
    # differences are small and take a byte where the number would take four.
    encoding = {"gene_index.list.element": "DELTA_BINARY_PACKED"}
    return pq.ParquetWriter(
        file,
        shard_schema(task.storage, with_cell_type=task.with_cell_type),
        compression="none",
        use_dictionary=False,
        column_encoding=encoding if task.storage == "sparse" else None,
        write_page_checksum=True,
        write_statistics=["slice_id", "cell_id"],
    )


def _gathered(task: ShardTask, plan: ShufflePlan, bucket: int, parts: SortedParts) -> CellTable:
    """Collect a bucket's cells from all parts and bring them into their final order."""
    paths = (task.folder / f"sorted-{number:06d}.arrow" for number in task.holders[bucket])
    cells = joined_tables([parts.read(path, bucket) for path in paths])
    by_id = np.argsort(cells.cell_id, kind="stable")
    return cells.take(by_id[order_in_bucket(plan, bucket)])


def _batch(task: ShardTask, cells: CellTable) -> pa.RecordBatch:
    """Convert cells into the columns of a shard."""
    if task.storage == "dense":
        absent = mapped_scaling(task.folder, "absent") if task.scaled else None
        cells = replace(cells, expression=densified(cells.sparse, cells.slice_id, absent))
    return to_batch(cells, shard_schema(task.storage, with_cell_type=task.with_cell_type))


def _runs_of(plan: ShufflePlan, task: ShardTask) -> list[tuple[int, int]]:
    """List (slice, cells) of a shard whose slices lie together."""
    counts: Int64[np.ndarray, " S"] = plan.counts[plan.buckets_of(task.split, task.shard)].sum(
        axis=0
    )
    return [(number, int(counts[number])) for number in np.flatnonzero(counts).tolist()]
