"""Checkpoints beside the training: a checkpoint enters, a copy of it is written by a thread.

The training goes on as soon as the copy is made. Files appear complete or not at all, one after
the other; what failed is said when the next one is asked for, or waited for.
"""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from alphastomics.diffusion_model.checkpoint import ChecksummedCheckpointIO, plain
from alphastomics.io.files import replacing


class BackgroundCheckpointIO(ChecksummedCheckpointIO):
    """Writes a checkpoint at a time, in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future[None] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Copy a checkpoint, and begin to write it."""
        self.wait()
        content = _copied(plain(checkpoint))
        self.pending = self.writer.submit(super().save_checkpoint, content, path, storage_options)

    def then(self, act: Callable[[], None]) -> None:
        """Do something once all that was asked for is written."""
        before = self.pending

        def follow() -> None:
            if before is not None:
                before.result()
            act()

        self.pending = self.writer.submit(follow)

    def wait(self) -> None:
        """Wait until all that was asked for is written; raise what went wrong."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result()

    def teardown(self) -> None:
        """Leave nothing unwritten."""
        self.wait()


def _copied(value: Any) -> Any:
    """Copy the tensors of plain data to memory that the training does not write to."""
    if isinstance(value, Tensor):
        return value.cpu() if value.device.type != "cpu" else value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def after_saving(trainer: pl.Trainer, act: Callable[[], None]) -> None:
    """Do something on the first rank, once the checkpoints asked for so far are written."""
    if not trainer.is_global_zero:
        return
    files = trainer.strategy.checkpoint_io
    if isinstance(files, BackgroundCheckpointIO):
        files.then(act)
    else:
        act()


def wait_for_checkpoints(trainer: pl.Trainer) -> None:
    """Return once the checkpoints asked for so far are written."""
    files = trainer.strategy.checkpoint_io
    if isinstance(files, BackgroundCheckpointIO):
        files.wait()


def same_file(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where a file can have but one."""
    with replacing(target) as partial:
        partial.unlink()
        try:
            os.link(source, partial)
        except OSError:
            shutil.copyfile(source, partial)
