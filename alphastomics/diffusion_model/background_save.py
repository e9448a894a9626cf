"""Checkpoints beside the training: a checkpoint enters, a copy of it is written by a thread.

The training goes on as soon as the copy is made. A checkpoint that another one replaces before a
write is due is never written. Files appear complete or not at all, one after the other; what failed
is said when the next ones are written, or waited for.
"""

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from alphastomics.diffusion_model.checkpoint import ChecksummedCheckpointIO, plain
from alphastomics.io.files import replacing

# Training that may be lost: a run that is killed goes on from the last checkpoint on disk.
SECONDS_BETWEEN_WRITES = 10.0

Content = dict[str, Any]


class BackgroundCheckpointIO(ChecksummedCheckpointIO):
    """Holds checkpoints back for a while, and writes them in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.held: dict[Path, Content] = {}
        self.removed: list[Path] = []
        self.afterwards: list[Callable[[], None]] = []
        self.writing: Future[None] | None = None
        self.written_at = time.monotonic()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Copy a checkpoint, to be written."""
        self.held.pop(Path(path), None)
        self.held[Path(path)] = _copied(plain(checkpoint))

    def keep(self, path: Path, name: Path) -> None:
        """Give a checkpoint that is held back a second name, which is written first.

        A run that is killed in between goes on from `path` only where all it counts on is there.
        """
        content = self.held.pop(path)
        self.held |= {name: content, path: content}

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, once those held back are written."""
        self.held.pop(path, None)
        self.removed.append(path)

    def then(self, act: Callable[[], None]) -> None:
        """Do something once all that is held back is written."""
        self.afterwards.append(act)

    def write_if_due(self) -> None:
        """Begin to write what is held back, unless the last time is not long ago."""
        if time.monotonic() >= self.written_at + SECONDS_BETWEEN_WRITES:
            self.write()

    def write(self) -> None:
        """Begin to write what is held back."""
        self._finish()
        work = (self.held, self.removed, self.afterwards)
        self.held, self.removed, self.afterwards = {}, [], []
        self.written_at = time.monotonic()
        self.writing = self.writer.submit(self._write, *work)

    def wait(self) -> None:
        """Write all that is held back; raise what went wrong."""
        self.write()
        self._finish()

    def teardown(self) -> None:
        """Leave nothing unwritten."""
        self.wait()

    def _finish(self) -> None:
        if self.writing is not None:
            writing, self.writing = self.writing, None
            writing.result()

    def _write(
        self, held: dict[Path, Content], removed: list[Path], acts: list[Callable[[], None]]
    ) -> None:
        files: dict[int, Path] = {}
        for path, content in held.items():
            if id(content) in files:
                same_file(files[id(content)], path)
            else:
                super().save_checkpoint(content, path)
                files[id(content)] = path
        for path in removed:
            path.unlink(missing_ok=True)
        for act in acts:
            act()


def _copied(value: Any) -> Any:
    """Copy the tensors of plain data to memory that the training does not write to."""
    if isinstance(value, Tensor):
        return value.cpu() if value.device.type != "cpu" else value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def files_of(trainer: pl.Trainer) -> BackgroundCheckpointIO:
    """Return what writes a run's checkpoints."""
    files = trainer.strategy.checkpoint_io
    assert isinstance(files, BackgroundCheckpointIO)
    return files


def same_file(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where a file can have but one."""
    with replacing(target) as partial:
        partial.unlink()
        try:
            os.link(source, partial)
        except OSError:
            shutil.copyfile(source, partial)
