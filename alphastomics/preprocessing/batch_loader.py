"""Processed shards become batches: a folder enters, three loaders of `DataHolder` leave.

Every cell of a split is seen exactly once in an epoch, over all ranks together; ranks get equally
many batches by padding. The order is a pure function of (seed, epoch, rank), so a loader can be
stopped after any batch and goes on with the very next one.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from alphastomics.config import LoadingConfig, SeedConfig, TrainingConfig
from alphastomics.errors import InputError
from alphastomics.preprocessing import order
from alphastomics.preprocessing.cell_table import CellTable, Rows
from alphastomics.preprocessing.folder import DataFolder
from alphastomics.preprocessing.holdout import Holdout
from alphastomics.preprocessing.memory import MemorySource, Smooth
from alphastomics.preprocessing.resident import ResidentCells, fits
from alphastomics.preprocessing.schema import SPLITS, Metadata
from alphastomics.preprocessing.sets import BatchShape, Window, batch_of
from alphastomics.preprocessing.shard_reader import ShardReader
from alphastomics.preprocessing.streaming import Draw, RandomStream, SliceStream, Source
from alphastomics.utils.dataholder import DataHolder

Result = TypeVar("Result")
logger = logging.getLogger(__name__)

SetDraw = Literal["auto", "random", "slice", "patch"]
# Smaller slices that share a frame make larger sets together.
SMALL_SLICE = 256

LOADING, TRAINING, SEED = LoadingConfig(), TrainingConfig(), SeedConfig()


class BatchLoader:
    """Yields the batches of one split; iterating again is the next epoch.

    Parameters
    ----------
    source
        Where windows of cells come from.
    draw
        How sets are drawn.
    shape
        How a batch is laid out.
    num_workers
        Threads that read and assemble ahead; 0 does all in the caller's. They do not change the
        order. Threads, not processes: reading and copying leave Python's lock, and a batch need not
        be sent from one process to another.
    same_every_epoch
        Draw the same sets in the same order in every epoch: for validation and test.
    device
        A GPU that will use the batches: cells in memory stay on it where they fit, others lie in
        page-locked memory, from which it reads while it computes.
    held_out
        What is held out of the split, in words.
    """

    def __init__(
        self,
        source: Source,
        draw: Draw,
        shape: BatchShape,
        *,
        num_workers: int,
        same_every_epoch: bool,
        device: torch.device | None = None,
        held_out: str = "nothing",
    ) -> None:
        self.device, self.held_out = device, held_out
        self.source, self.draw, self.shape = source, draw, shape
        self.num_workers, self.same_every_epoch = num_workers, same_every_epoch
        self._resident: ResidentCells | None = None
        self.reader: ShardReader = source.reader
        self._epoch, self._start = 0, 0
        self._current: tuple[int, int] | None = None

    @property
    def metadata(self) -> Metadata:
        """Return what the folder's metadata.json says."""
        return self.reader.metadata

    @property
    def num_cells(self) -> int:
        """Count the cells of the split that are not held out, over all ranks."""
        return self.source.num_cells

    def __len__(self) -> int:
        """Count the batches of an epoch: the same for every rank."""
        units = self.source.count_units()
        random = self.draw.kind == "random"
        per_batch = self.shape.cells if random else self.shape.sets_per_batch
        return order.batches_per_rank(units, per_batch, self.draw.world_size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; a resumed epoch goes on where it was."""
        if epoch != self._epoch:
            self._start = 0
        self._epoch, self._current = epoch, None

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader is: plain numbers, the same on every rank."""
        epoch, batch = self._current or (self._epoch, self._start)
        if batch >= len(self):
            epoch, batch = epoch + 1, 0
        return {"epoch": epoch, "batch": batch, "loader": self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the batch after the last one before `state_dict` was called."""
        now, before = self._identity(), state["loader"]
        differing = [key for key in now if before.get(key) != now[key]]
        if differing:
            key = differing[0]
            raise InputError(
                f"the loader's state was saved with {key} {before.get(key)!r}, but {key} is now "
                f"{now[key]!r}: resume with the same data and settings, or start a new epoch"
            )
        self._epoch, self._start, self._current = state["epoch"], state["batch"], None

    def _identity(self) -> dict[str, Any]:
        """Name all that the order of batches depends on, the rank apart."""
        shards = "".join(shard.sha256 for shard in self.reader.shards)
        return {
            "data": sha256(shards.encode()).hexdigest(),
            "seed": self.draw.seed,
            "world_size": self.draw.world_size,
            "batch_size": self.shape.cells,
            "set_size": self.shape.set_size,
            "set_draw": self.draw.kind,
            "streaming": not isinstance(self.source, MemorySource),
            "buffer_size": self.draw.window_rows,
            "held_out": self.held_out,
        }

    def __iter__(self) -> Iterator[DataHolder]:
        """Yield the batches of the next epoch, or the rest of a resumed one.

        An epoch begins with its first batch: trainers make iterators that they never use.
        """
        epoch, start = self._epoch, self._start
        self._epoch, self._start, self._current = epoch + 1, 0, (epoch, start)
        self._settle()
        with ExitStack() as stack:
            readers, coordinator, makers = (self._pool(stack, number) for number in (0, 1, 2))
            drawn = 0 if self.same_every_epoch else epoch
            first_set = start * self.shape.sets_per_batch
            thunks = self.source.windows(drawn, first_set, readers)
            windows = ahead(thunks, coordinator, 1)
            making = self._makers(windows, len(self) - start)
            batches = ahead(making, makers, max(self.num_workers, 1))
            for number, batch in enumerate(batches, start + 1):
                self._current = (epoch, number)
                yield batch

    def _settle(self) -> None:
        """Copy cells in memory to the GPU that will use them, if they fit."""
        source = self.source
        if self._resident is None and self.device is not None and isinstance(source, MemorySource):
            table = source.table()
            if fits(table, self.metadata.num_genes, self.device):
                self._resident = ResidentCells(self.reader, table, self.device)

    def _pool(self, stack: ExitStack, number: int) -> Executor | None:
        """Open the threads that read (0), that put windows together (1), that make batches (2)."""
        if self.num_workers == 0 or self._resident is not None:
            return None
        pool = ThreadPoolExecutor(1 if number == 1 else self.num_workers)
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        return pool

    def _makers(
        self, windows: Iterator[Window], num_batches: int
    ) -> Iterator[Callable[[], DataHolder]]:
        """Cut windows into batches; a rank that runs out of cells goes on with empty ones."""
        waiting: list[tuple[CellTable, Rows]] = []
        left = num_batches
        for window in windows:
            waiting.extend((window.table, rows) for rows in window.sets)
            while len(waiting) >= self.shape.sets_per_batch:
                chosen = waiting[: self.shape.sets_per_batch]
                waiting = waiting[self.shape.sets_per_batch :]
                left -= 1
                yield partial(self._make, chosen)
        for _ in range(left):
            yield partial(self._make, waiting)
            waiting = []

    def _make(self, chosen: list[tuple[CellTable, Rows]]) -> DataHolder:
        """Lay out one batch."""
        if self._resident is not None:
            return self._resident.batch(self.shape, [rows for _, rows in chosen])
        batch = batch_of(self.reader, self.shape, chosen)
        return batch if self.device is None else batch.pin_memory()


def ahead(
    thunks: Iterator[Callable[[], Result]], pool: Executor | None, depth: int
) -> Iterator[Result]:
    """Yield the results in order, while a pool already works on the next `depth` of them."""
    if pool is None:
        yield from (thunk() for thunk in thunks)
        return
    waiting: deque[Future[Result]] = deque()
    for thunk in thunks:
        waiting.append(pool.submit(thunk))
        if len(waiting) > depth:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def create_dataloaders(
    data_dir: str | Path,
    batch_size: int = TRAINING.batch_size,
    *,
    streaming: bool = LOADING.streaming,
    buffer_size: int = LOADING.buffer_size,
    num_workers: int = LOADING.num_workers,
    set_size: int | None = LOADING.set_size,
    set_draw: SetDraw = LOADING.set_draw,
    seed: int = SEED.global_seed,
    rank: int | None = None,
    world_size: int | None = None,
    verify_checksums: bool = LOADING.verify_checksums,
    device: torch.device | None = None,
    holdout: Holdout | None = None,
    smooth: Smooth | None = None,
) -> tuple[BatchLoader, BatchLoader, BatchLoader]:
    """Return loaders of the training, validation and test cells.

    Parameters
    ----------
    data_dir
        A folder that `preprocess` wrote, or the Hub id (`owner/name`) of one.
    batch_size
        Cells in a batch, on this rank.
    streaming
        Read shards as they are needed; else the whole split is read at the first batch.
    buffer_size
        Cells in the shuffle buffer of a streaming loader; while one is used up, the next is filled.
    num_workers
        Threads that read ahead; 0 reads in the caller's. The order does not depend on it.
    set_size
        Cells that attend to one another; None makes the whole batch one set.
    set_draw
        Cells of a set: at random across slices of one frame, of one slice, or a contiguous patch of
        one; auto never mixes slices without a common frame.
    seed, rank, world_size
        Seed of the order of cells; which share of them is this process's, None asks torch.
    verify_checksums, device
        Compare shards with their checksums; a GPU that will use the batches.
    holdout, smooth
        Not for streaming: training cells that take the validation cells' part; what smooths the
        expression of a slice, for `DataHolder.smoothed`.
    """
    shape = _shape(batch_size, set_size)
    _check(buffer_size=buffer_size, num_workers=num_workers, set_draw=set_draw, seed=seed)
    folder = DataFolder(data_dir)
    metadata = folder.metadata()
    drawn = resolve_set_draw(set_draw, metadata, folder.where, streaming=streaming)
    streaming = streaming and _streamable(set_draw, drawn, metadata, folder.where)
    window_rows = max(buffer_size // batch_size, 1) * batch_size  # whole batches
    draw = Draw(drawn, shape.set_size, window_rows, seed, *_rank_of_process(rank, world_size))
    readers = [ShardReader(folder, metadata, split, verify=verify_checksums) for split in SPLITS]
    sources = _sources(readers, draw, smooth, holdout, streaming=streaming)
    make = partial(BatchLoader, draw=draw, shape=shape, num_workers=num_workers)
    training, validation, test = (
        make(source, same_every_epoch=held, device=device, held_out=words)
        for (source, words), held in zip(sources, (False, True, True), strict=True)
    )
    return training, validation, test


def _sources(
    readers: list[ShardReader],
    draw: Draw,
    smooth: Smooth | None,
    holdout: Holdout | None,
    *,
    streaming: bool,
) -> list[tuple[Source, str]]:
    """Return where the cells of each loader come from, and what is held out of them."""
    if holdout is not None:
        training, _, test = readers
        words = holdout.describe()

        def rest(slice_id: np.ndarray, position: np.ndarray) -> np.ndarray:
            return ~holdout.mask(slice_id, position)

        return [
            (MemorySource(training, draw, rest, smooth), words),
            (MemorySource(training, draw, holdout.mask, smooth), f"all but {words}"),
            (MemorySource(test, draw, None, smooth), "nothing"),
        ]
    if not streaming:
        return [(MemorySource(reader, draw, None, smooth), "nothing") for reader in readers]
    kind = RandomStream if draw.kind == "random" else SliceStream
    return [(kind(reader, draw), "nothing") for reader in readers]


def _streamable(asked: SetDraw, drawn: str, metadata: Metadata, where: str) -> bool:
    """Say whether sets can be streamed; if not, what nobody asked for is read into memory."""
    if asked != "auto" or drawn == "random" or metadata.layout == "slice":
        return True
    logger.warning(
        "%s: slices without a common frame cannot be streamed from the layout 'shuffled': all "
        "cells are read into memory; preprocess with --layout slice to stream them",
        where,
    )
    return False


def resolve_set_draw(
    set_draw: SetDraw, metadata: Metadata, where: str, *, streaming: bool
) -> Literal["random", "slice", "patch"]:
    """Resolve `auto`, and refuse to mix slices whose positions cannot be compared.

    `auto` is `slice`: a query is a slice, too. Slices of one frame are mixed where each by itself
    is too small to be a set, or where their layout allows no other stream.
    """
    if set_draw == "random" and not metadata.shares_frame:
        raise InputError(
            f"{where}: set_draw random (data.loading.set_draw) mixes slices, but these "
            f"{len(metadata.slices)} 2D slices share no frame, so that their positions cannot be "
            "compared: leave set_draw at auto, or preprocess with --common_frame if the slices "
            "are registered to one another"
        )
    if set_draw != "auto":
        return set_draw
    sizes = sorted(record.cells for record in metadata.slices)
    small = len(sizes) > 1 and sizes[len(sizes) // 2] < SMALL_SLICE
    unstreamable = streaming and metadata.layout != "slice"
    return "random" if metadata.shares_frame and (small or unstreamable) else "slice"


def _rank_of_process(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if (rank is None) != (world_size is None):
        raise InputError("rank and world_size: give both, or neither")
    if rank is None or world_size is None:
        from torch import distributed

        if not (distributed.is_available() and distributed.is_initialized()):
            return 0, 1
        return distributed.get_rank(), distributed.get_world_size()
    if not 0 <= rank < world_size:
        raise InputError(f"rank ({rank}): must be from 0 to world_size - 1 ({world_size - 1})")
    return rank, world_size


def _shape(batch_size: int, set_size: int | None) -> BatchShape:
    """Lay a batch out in sets."""
    if batch_size < 1:
        raise InputError(f"batch_size ({batch_size}): must be at least 1")
    size = batch_size if set_size is None else set_size
    if size < 1 or batch_size % size:
        raise InputError(f"batch_size ({batch_size}): must be a multiple of set_size ({size})")
    return BatchShape(batch_size // size, size)


def _check(*, buffer_size: int, num_workers: int, set_draw: str, seed: int) -> None:
    """Refuse settings that cannot be meant."""
    if buffer_size < 1:
        raise InputError(f"buffer_size ({buffer_size}): must be at least 1")
    if num_workers < 0:
        raise InputError(f"num_workers ({num_workers}): must be 0 or more")
    if set_draw not in ("auto", "random", "slice", "patch"):
        raise InputError(f"set_draw ({set_draw!r}): must be auto, random, slice or patch")
    if seed < 0:
        raise InputError(f"seed ({seed}): must be 0 or more")
