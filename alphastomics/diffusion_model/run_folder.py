"""The folder of a run: what was asked for, on what, how it goes, and how it ended.

outputs/EXP_NAME/: config.yaml, environment.json, metrics.csv, status.json, checkpoints/, report.
"""

import csv
import json
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from alphastomics import __version__
from alphastomics.config import Config
from alphastomics.config_file import to_yaml
from alphastomics.errors import InputError
from alphastomics.files import output_folder, write_text

LIBRARIES = ("torch", "lightning", "numpy", "pyarrow")
WRITTEN = ("config.yaml", "environment.json", "metrics.csv", "status.json", "report.json")
COLUMNS = ("step", "epoch", "name", "value")


@dataclass(frozen=True)
class RunFolder:
    """Where the parts of a run lie."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def last(self) -> Path:
        """Return the checkpoint that a resumed run goes on from."""
        return self.checkpoints / "last.ckpt"

    @property
    def metrics(self) -> Path:
        """Return the file of everything that was logged."""
        return self.path / "metrics.csv"

    def exists(self) -> bool:
        """Say whether a run has begun here."""
        return (self.path / "status.json").is_file()

    @contextmanager
    def claimed(self, *, first: bool) -> Iterator[None]:
        """Keep the folder to this run: its first rank holds it against every other process."""
        with output_folder(self.path) if first else nullcontext():
            yield

    def prepare(self, config: Config, *, resume: bool, overwrite: bool) -> None:
        """Make the folder, or refuse one that holds another run."""
        if self.exists() and not resume:
            if not overwrite:
                raise InputError(
                    f"{self.path}: holds a run already; go on with --resume last, choose another "
                    "--exp_name, or replace it with --overwrite"
                )
            self.remove()
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        write_text(self.path / "config.yaml", to_yaml(config))
        write_text(self.path / "environment.json", json.dumps(environment(), indent=2) + "\n")

    def remove(self) -> None:
        """Remove what a run writes, never a user's own file beside it."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        for name in WRITTEN:
            (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def running(self, *, first: bool) -> Iterator[None]:
        """Mark the run as running, and as failed when it does: the first rank's task."""
        if first:
            self.mark("running")
        try:
            yield
        except Exception as error:
            if first and isinstance(error, InputError) and not any(self.checkpoints.iterdir()):
                self.remove()  # bad input, seen before there was anything to keep
            elif first:
                with suppress(OSError):  # a full disk, say: the first error is the one to tell
                    self.mark("failed", reason=str(error))
            raise

    def mark(self, state: str, **details: Any) -> None:
        """Write down how the run stands: running, interrupted, finished or failed."""
        write_text(
            self.path / "status.json", json.dumps({"state": state, **details}, indent=2) + "\n"
        )


def best_checkpoint(folder: RunFolder) -> Path:
    """Return the checkpoint that a run holds for its best, or else its last."""
    if not folder.exists():
        raise InputError(f"{folder.path}: not the folder of a run (train makes one)")
    summary = folder.path / "report.json"
    if summary.is_file():
        try:
            named = Path(json.loads(summary.read_text(encoding="utf-8"))["best_checkpoint"])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise InputError(
                f"{summary}: damaged; name the checkpoint with --checkpoint"
            ) from error
        # By its name alone: the folder may have been moved since.
        best = folder.checkpoints / named.name
        if best.is_file():
            return best
    if not folder.last.is_file():
        raise InputError(f"{folder.path}: has no checkpoint yet; wait for one, or name another run")
    return folder.last


def checkpoint_of(path: Path) -> Path:
    """Return the checkpoint that a path means: the best one of a run's folder, else the path."""
    folder = RunFolder(path)
    return best_checkpoint(folder) if folder.exists() else path


def environment() -> dict[str, Any]:
    """Return what the run runs on."""
    import torch

    return {
        "alphastomics": __version__,
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        **{name: metadata.version(name) for name in LIBRARIES},
    }


class CsvLog(Logger):
    """Everything that is logged, one value a line, in metrics.csv.

    A resumed run cuts off what was logged after its checkpoint, and so logs what an uninterrupted
    run would have.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def name(self) -> str:
        """Name of the logger."""
        return "csv"

    @property
    def version(self) -> str:
        """Version of the run: there is one in a folder."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Leave them to config.yaml, which the run folder has."""
        assert not kwargs

    @rank_zero_only
    def start(self, kept_bytes: int) -> None:
        """Begin the file, or cut off what was logged after the checkpoint of a resumed run."""
        if kept_bytes and self.path.is_file():
            with self.path.open("r+b") as file:
                file.truncate(min(kept_bytes, self.path.stat().st_size))
        else:
            write_text(self.path, ",".join(COLUMNS) + "\n")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float | Tensor], step: int | None = None) -> None:
        """Append the values of a step."""
        epoch = int(metrics.get("epoch", 0))
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            for name in sorted(set(metrics) - {"epoch"}):
                # repr keeps every digit, so that equal runs have equal files.
                writer.writerow([step, epoch, name, repr(float(metrics[name]))])
