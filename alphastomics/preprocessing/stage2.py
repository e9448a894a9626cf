"""Stage 2: normalised slices enter; split, shuffled Parquet shards and metadata.json leave.

An external shuffle in two passes (shards.py) over a plan that is a pure function of sizes, ratios
and seed (plan.py). Both passes run side by side and go on where they were stopped.
"""

import logging
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from alphastomics import __version__
from alphastomics.config import PreprocessingConfig
from alphastomics.io.files import write_text
from alphastomics.io.progress import track
from alphastomics.preprocessing import owned, resume
from alphastomics.preprocessing.datasets import Merged, merge
from alphastomics.preprocessing.frames import frame_notes, slice_extents
from alphastomics.preprocessing.genes import hint_at_unmeasured
from alphastomics.preprocessing.matrix import BYTES_PER_ENTRY
from alphastomics.preprocessing.normalize import Moments, merged
from alphastomics.preprocessing.parts import rows_that_fit
from alphastomics.preprocessing.plan import PlanRequest, ShufflePlan
from alphastomics.preprocessing.scaling import publish_scaling, write_scaling
from alphastomics.preprocessing.schema import (
    ABSENT_VALUE,
    ALL_SPLITS,
    DATA_FOLDER,
    FORMAT_VERSION,
    INTERMEDIATE_FOLDER,
    METADATA_FILE,
    SCALING_FILE,
    SHUFFLE_FOLDER,
    SPLITS,
    STAGED_FOLDER,
    TARGET_SUM,
    Metadata,
    Normalization,
    PositionStatistics,
    shard_name,
)
from alphastomics.preprocessing.shards import (
    ShardTask,
    SortTask,
    plan_of,
    row_group_rows,
    sort_part,
    write_shard,
)
from alphastomics.preprocessing.worker_pool import WorkerPool
from alphastomics.preprocessing.workspace import Workspace, first_file

logger = logging.getLogger(__name__)

RATIO_ROUNDING = 1e-9  # 1 - 0.7 - 0.3 is not exactly 0 in binary
BYTES_PER_CELL = 64  # position, numbers and name of a cell, about
# Settings on which the bytes depend; the number of workers is not one of them.
FLAGS = (
    "train_ratio",
    "val_ratio",
    "max_shard_size",
    "max_cells_per_file",
    "split_by",
    "layout",
    "storage",
)


def request_of(options: PreprocessingConfig, seed: int) -> dict[str, Any]:
    """Gather all settings that the result depends on."""
    return {"seed": seed, **{key: getattr(options, key) for key in FLAGS}}


def run(
    options: PreprocessingConfig,
    input_dirs: list[Path],
    output_dir: Path,
    seed: int,
    pool: WorkerPool,
    *,
    overwrite: bool,
) -> Metadata:
    """Bring an output folder to the state that was asked for; return its metadata.

    The shards are made in work folders inside; what was there before stays until all are complete.
    """
    datasets = merge(input_dirs)
    request = request_of(options, seed)
    whole_request = {"inputs": inputs_of(datasets), **request}
    space = workspace_of(output_dir)
    space.require_outside(datasets.folders)
    is_finished = (output_dir / METADATA_FILE).is_file()
    if not is_finished and not overwrite:
        space.require_same_request(whole_request)
    require_ours(output_dir)
    hint_at_unmeasured(datasets.panels, datasets.genes)
    empty = [space.work.parent, space.staged.parent]
    with space.working(whole_request, empty=empty):
        metadata = _act(options, datasets, space, request, pool)
    space.move_into_place(
        shard.file for split in metadata.splits.values() for shard in split.shards
    )
    if metadata.normalization.scale:
        digest = publish_scaling(space.work, output_dir)
        metadata = metadata.model_copy(update={"scaling_sha256": digest})
    record = resume.with_checksum(metadata.model_dump(exclude={resume.CHECKSUM_KEY}))
    write_text(output_dir / METADATA_FILE, resume.dump(record))
    clear(output_dir)
    return metadata


def workspace_of(output_dir: Path) -> Workspace:
    """Say where in the output folder the work is done."""
    return Workspace(
        output_dir,
        METADATA_FILE,
        work=output_dir / INTERMEDIATE_FOLDER / SHUFFLE_FOLDER,
        staged=output_dir / DATA_FOLDER / STAGED_FOLDER,
        markers="shard-*.json",
        listed=owned.processed_files,
    )


def inputs_of(datasets: Merged) -> dict[str, str]:
    """Name the inputs by their order and their content: names may repeat, and order counts."""
    pairs = enumerate(zip(datasets.names, datasets.digests, strict=True))
    return {f"{number}: {name}": digest for number, (name, digest) in pairs}


def require_ours(output_dir: Path) -> None:
    """Refuse a folder in which somebody else keeps files where ours would be."""
    space = workspace_of(output_dir)
    space.require_ours(
        [
            *(output_dir / name for name in (METADATA_FILE, SCALING_FILE)),
            first_file(output_dir / DATA_FOLDER, {STAGED_FOLDER}),
            first_file(space.work),
        ]
    )


def clear(output_dir: Path) -> None:
    """Remove what only the work itself needed."""
    workspace_of(output_dir).clear()
    middle = output_dir / INTERMEDIATE_FOLDER
    if middle.is_dir() and not any(middle.iterdir()):
        middle.rmdir()


def _act(
    options: PreprocessingConfig,
    datasets: Merged,
    space: Workspace,
    request: dict[str, Any],
    pool: WorkerPool,
) -> Metadata:
    """Sort the parts and write the shards; return what metadata.json says."""
    shuffle = space.work.resolve()
    if datasets.scale:
        write_scaling(datasets, shuffle)
    asked = plan_request(options, datasets, request["seed"])
    plan = plan_of(asked)
    _require_free_names(space, plan)
    total = sum(datasets.slice_sizes) + sum(datasets.reference_sizes)
    with track("stage 2, sort", total, "cells") as advance:
        sorted_parts = pool.run(
            sort_part,
            sort_tasks(datasets, asked, shuffle),
            lambda task: advance(task.part.cells),
        )
    holders = holders_of(sorted_parts)
    tasks = shard_tasks(options, datasets, asked, space.staged.resolve(), shuffle, holders)
    with track("stage 2, write", len(tasks), "shards") as advance:
        shards = pool.run(write_shard, tasks, lambda _: advance(1))
    moments = [moment for part in sorted_parts for moment in part["training_positions"]]
    metadata = metadata_of(options, datasets, plan, shards, moments, request)
    for note in frame_notes(metadata, slice_extents(moments)):
        logger.warning("%s", note)
    return metadata


def _require_free_names(space: Workspace, plan: ShufflePlan) -> None:
    """Refuse to write a shard over a file that no record of ours lists."""
    ours = {*space.replaced(), *space.moved_in()}
    for split, name in enumerate(ALL_SPLITS):
        total = plan.num_shards(split)
        for number in range(total):
            file = f"{DATA_FOLDER}/{shard_name(name, number, total)}"
            if file not in ours and (space.output / file).exists():
                raise owned.not_ours(space.output / file)


class RowsHeld(NamedTuple):
    """Rows of a bucket, and of a row group."""

    bucket: int
    group: int


def rows_held(options: PreprocessingConfig, datasets: Merged, *, slices: bool) -> RowsHeld:
    """Choose how many rows of slices, or of dissociated cells, are held at a time."""
    parts = datasets.parts_of(slices=slices)
    cells = max(sum(part.cells for part in parts), 1)
    entries = sum(part.entries for part in parts) / cells
    group = row_group_rows(len(datasets.genes), entries, options.storage)
    bytes_per_cell = entries * BYTES_PER_ENTRY + BYTES_PER_CELL
    fitting = rows_that_fit(options.max_cells_per_file, bytes_per_cell, bytes_per_cell * cells)
    # Whole row groups, so that only the last one of a shard is short.
    return RowsHeld(max(fitting // group, 1) * group, group)


def plan_request(options: PreprocessingConfig, datasets: Merged, seed: int) -> PlanRequest:
    """Gather what the plan depends on."""
    rest = max(0.0, 1.0 - options.train_ratio - options.val_ratio)
    return PlanRequest(
        slice_sizes=datasets.slice_sizes,
        ratios=(options.train_ratio, options.val_ratio, rest),
        split_by=options.split_by,
        layout=options.layout,
        max_shard_size=options.max_shard_size,
        bucket_rows=rows_held(options, datasets, slices=True).bucket,
        seed=seed,
        reference_sizes=datasets.reference_sizes,
        reference_bucket_rows=rows_held(options, datasets, slices=False).bucket,
    )


def sort_tasks(datasets: Merged, asked: PlanRequest, shuffle: Path) -> list[SortTask]:
    """List the parts to be sorted."""
    firsts = (0, *accumulate((*datasets.slice_sizes, *datasets.reference_sizes)))
    z_values = tuple(record.get("z") for record in (*datasets.slices, *datasets.references))
    return [
        SortTask(
            part=part,
            folder=shuffle,
            number=number,
            num_genes=len(datasets.genes),
            plan=asked,
            scaled=datasets.scale,
            z_values=z_values,
            first_cells=firsts,
        )
        for number, part in enumerate(datasets.parts)
    ]


def holders_of(sorted_parts: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Return the sorted parts that hold cells of each bucket: in layout `slice` these are few."""
    holders: dict[int, list[int]] = {}
    for number, part in enumerate(sorted_parts):
        for bucket in part["buckets"]:
            holders.setdefault(bucket, []).append(number)
    return holders


def shard_tasks(
    options: PreprocessingConfig,
    datasets: Merged,
    asked: PlanRequest,
    staged: Path,
    shuffle: Path,
    holders: dict[int, list[int]],
) -> list[ShardTask]:
    """List the shards to be written."""
    plan = plan_of(asked)
    of_slices, of_references = (
        rows_held(options, datasets, slices=slices).group for slices in (True, False)
    )
    return [
        ShardTask(
            split=split,
            shard=shard,
            staged_folder=staged,
            folder=shuffle,
            holders={bucket: tuple(holders[bucket]) for bucket in plan.buckets_of(split, shard)},
            num_genes=len(datasets.genes),
            plan=asked,
            storage=options.storage,
            with_cell_type=datasets.cell_types is not None,
            row_group_rows=of_slices if split < len(SPLITS) else of_references,
            scaled=datasets.scale,
        )
        for split in range(len(ALL_SPLITS))
        for shard in range(plan.num_shards(split))
    ]


def position_statistics(records: list[dict[str, Any]]) -> PositionStatistics | None:
    """Join where the training cells of all parts lie; None without training cells."""
    if not records:
        return None
    by_slice: dict[int, Moments] = {}
    for record in records:
        moments = Moments(record["count"], np.array(record["mean"]), np.array(record["squares"]))
        known = by_slice.get(record["slice"])
        by_slice[record["slice"]] = moments if known is None else merged(known, moments)
    slices = [by_slice[number] for number in sorted(by_slice)]
    total = slices[0]
    for moments in slices[1:]:
        total = merged(total, moments)
    within: Float64[np.ndarray, " 3"] = np.sum([moments.squares for moments in slices], axis=0)
    return PositionStatistics(
        center=total.mean.tolist(),
        scale=_root_mean_square(total.squares, total.count),
        within_slice_scale=_root_mean_square(within, total.count),
        minimum=np.min([record["minimum"] for record in records], axis=0).tolist(),
        maximum=np.max([record["maximum"] for record in records], axis=0).tolist(),
    )


def _root_mean_square(squares: Float64[np.ndarray, " 3"], count: int) -> float:
    """Return the isotropic root mean square over the axes that vary; 1 where none does."""
    varying = int((squares > 0).sum())
    return float(np.sqrt(squares.sum() / (count * varying))) if varying else 1.0


def metadata_of(
    options: PreprocessingConfig,
    datasets: Merged,
    plan: ShufflePlan,
    shards: list[dict[str, Any]],
    moments: list[dict[str, Any]],
    request: dict[str, Any],
) -> Metadata:
    """Describe the whole processed folder."""
    counts = plan.cells_per_split()
    slices = [
        {**record, "cells_per_split": dict(zip(SPLITS, counts[:3, number].tolist(), strict=True))}
        for number, record in enumerate(datasets.slices)
    ]
    waiting = iter(shards)
    splits = {
        name: {
            "cells": int(counts[number].sum()),
            "shards": [next(waiting) for _ in range(plan.num_shards(number))],
        }
        for number, name in enumerate(ALL_SPLITS if datasets.references else SPLITS)
    }
    _warn_of_empty_splits(options, splits)
    names = zip(datasets.names, datasets.requests, strict=True)
    known = [{"name": name, "request": request} for name, request in names]
    described = {
        "format_version": FORMAT_VERSION,
        "version": __version__,
        "num_genes": len(datasets.genes),
        "genes": list(datasets.genes),
        "cell_types": None if datasets.cell_types is None else list(datasets.cell_types),
        "layout": options.layout,
        "storage": options.storage,
        "split_by": options.split_by,
        "common_frame": datasets.common_frame,
        "normalization": Normalization(
            log_normalize=datasets.log_normalize,
            target_sum=TARGET_SUM if datasets.log_normalize else None,
            scale=datasets.scale,
            absent_value=ABSENT_VALUE,
            fractions=datasets.fractions,
        ),
        "position_statistics": position_statistics(moments),
        "splits": splits,
        "slices": slices,
        "references": list(datasets.references),
        "panels": [{"missing": list(panel)} for panel in datasets.panels],
        "scaling_sha256": None,
        "provenance": {"datasets": known, "request": request},
    }
    return Metadata.model_validate(described, strict=False)


def _warn_of_empty_splits(options: PreprocessingConfig, splits: dict[str, Any]) -> None:
    asked = (options.train_ratio, options.val_ratio, 1 - options.train_ratio - options.val_ratio)
    for name, ratio in zip(SPLITS, asked, strict=True):
        if not splits[name]["cells"] and ratio > RATIO_ROUNDING:
            logger.warning("the split %r is empty: there are too few cells or slices for it", name)
