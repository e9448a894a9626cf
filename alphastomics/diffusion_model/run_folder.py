"""The folder of a run: what was asked for, on what, how it goes, and how it ended.

outputs/EXP_NAME/: config.yaml, environment.json, metrics.csv, status.json, checkpoints/, report.
"""

import csv
import json
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from alphastomics import __version__
from alphastomics.config import Config
from alphastomics.config.file import to_yaml
from alphastomics.errors import InputError
from alphastomics.io.files import output_folder, write_text
from alphastomics.preprocessing.resume import CHECKSUM_KEY, unaltered

LIBRARIES = ("torch", "lightning", "numpy", "pyarrow")
WRITTEN = (
    *("config.yaml", "environment.json", "metrics.csv", "status.json", "report.json"),
    *("judged.json", "plan.json", "verdict.json"),
)
# Files below the run's folder that a run writes; everything else there is the user's. The last
# checkpoint comes first: where it is tells a killed process which of two runs is complete.
OWN_PATTERNS = (
    "checkpoints/last.ckpt",
    *WRITTEN,
    "checkpoints/epoch*-step*.ckpt",
    "export/model.safetensors",
    "export/config.json",
    "export/record.json",
)
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

    @property
    def summary(self) -> Path:
        """Return what `train` writes at the end of a run."""
        return self.path / "report.json"

    def exists(self) -> bool:
        """Say whether a run has begun here."""
        return (self.path / "status.json").is_file()

    def claimed(self, *, first: bool) -> AbstractContextManager[None]:
        """Keep the folder to this run: its first rank holds it against every other process."""
        return output_folder(self.path) if first else nullcontext()

    @property
    def replaced(self) -> Path:
        """Return where an overwritten run waits until the new one has its first checkpoint."""
        return self.path / ".replaced"

    def require_free(self, checkpoint: Path | None, *, resume: bool, overwrite: bool) -> None:
        """Refuse a folder that holds another run than the one to go on with."""
        if not self.exists() or overwrite or self.holds(checkpoint):
            return
        if resume and not self.has_checkpoint():
            return  # it ended before it had anything to go on from
        if checkpoint is None:
            raise InputError(
                f"{self.path}: holds a run already; go on with --resume last, choose another "
                "--exp_name, or replace it with --overwrite"
            )
        raise InputError(
            f"{self.path}: holds another run than {checkpoint}; go on with that one under its own "
            "--exp_name, choose a new one, or replace this run with --overwrite"
        )

    def holds(self, checkpoint: Path | None) -> bool:
        """Tell whether a checkpoint is one of this run."""
        return checkpoint is not None and checkpoint.resolve().parent == self.checkpoints.resolve()

    def prepare(
        self, config: Config, checkpoint: Path | None, *, resume: bool, overwrite: bool
    ) -> None:
        """Make the folder; an overwritten run is set aside until there is a new checkpoint.

        Parameters
        ----------
        config
            The run's settings.
        checkpoint
            What the run goes on from; None starts anew.
        resume
            Whether the caller asked to go on.
        overwrite
            Replace another run that is there.
        """
        self.recover()
        self.require_free(checkpoint, resume=resume, overwrite=overwrite)
        if overwrite and self.exists() and not self.holds(checkpoint):
            self.set_aside()
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        write_text(self.path / "config.yaml", to_yaml(config))
        write_text(self.path / "environment.json", json.dumps(environment(), indent=2) + "\n")

    def own_files(self, root: Path) -> list[Path]:
        """List what a run wrote, relative to its folder."""
        paths = [path for pattern in OWN_PATTERNS for path in root.glob(pattern)]
        return [path.relative_to(root) for path in paths if path.is_file()]

    def has_checkpoint(self) -> bool:
        """Tell whether there is something to go on from."""
        return self.last.is_file()

    def set_aside(self) -> None:
        """Move what a run wrote out of the way, never a user's own file beside it."""
        _move(self.own_files(self.path), self.path, self.replaced)

    @rank_zero_only
    def recover_if_free(self) -> None:
        """Do so unless another process is at work here, which is refused."""
        if self.replaced.is_dir():
            with output_folder(self.path):
                self.recover()

    @rank_zero_only
    def recover(self) -> None:
        """Bring an overwritten run back if the new one was killed before its first checkpoint."""
        if not self.replaced.is_dir():
            return
        if not self.has_checkpoint():
            # The last checkpoint returns last, so that a second kill finds the rest still to do.
            _move(self.own_files(self.replaced)[::-1], self.replaced, self.path)
        self.discard_replaced()

    @rank_zero_only
    def discard_replaced(self) -> None:
        """Remove an overwritten run: the new one has a checkpoint."""
        if self.replaced.is_dir():
            shutil.rmtree(self.replaced)

    def remove(self) -> None:
        """Remove what a run writes, never a user's own file beside it."""
        for name in self.own_files(self.path):
            (self.path / name).unlink(missing_ok=True)
        for folder in (self.checkpoints, self.path / "export"):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    @contextmanager
    def running(self, *, first: bool) -> Iterator[None]:
        """Mark the run as running, and as failed when it does: the first rank's task."""
        if first:
            self.mark("running")
        try:
            yield
        except BaseException as error:
            if first:
                self._clean_up(error)
            raise

    def _clean_up(self, error: BaseException) -> None:
        """Leave a failed run as it is to be found: as failed, or as if it had never begun."""
        if not self.has_checkpoint() and self.replaced.is_dir():
            self.remove()
            self.recover()
        elif isinstance(error, InputError) and not self.has_checkpoint():
            self.remove()  # bad input, seen before there was anything to keep
        elif isinstance(error, Exception):
            with suppress(OSError):  # a full disk, say: the first error is the one to tell
                self.mark("failed", reason=str(error))

    def mark(self, state: str, **details: Any) -> None:
        """Write down how the run stands: running, interrupted, finished or failed."""
        write_text(
            self.path / "status.json", json.dumps({"state": state, **details}, indent=2) + "\n"
        )


def _move(names: list[Path], source: Path, target: Path) -> None:
    """Move files from one folder to another, each in one step; folders left empty go."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).replace(target / name)
    for folder in {(source / name).parent for name in names} - {source}:
        if not any(folder.iterdir()):
            folder.rmdir()


def best_checkpoint(folder: RunFolder) -> Path:
    """Return the checkpoint that a run holds for its best, or else its last."""
    if not folder.exists():
        raise InputError(f"{folder.path}: not the folder of a run (train makes one)")
    if folder.summary.is_file():
        summary = read_record(folder.summary, "name the checkpoint with --checkpoint")
        # By its name alone: the folder may have been moved since.
        best = folder.checkpoints / Path(str(summary.get("best_checkpoint"))).name
        if best.is_file():
            return best
    if not folder.last.is_file():
        raise InputError(f"{folder.path}: has no checkpoint yet; wait for one, or name another run")
    return folder.last


def read_record(path: Path, advice: str = "remove it, or write it again") -> dict[str, Any]:
    """Read keys and values that a run wrote, or say what to do about a damaged file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: damaged: not JSON; {advice}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: damaged: it holds no keys and values; {advice}")
    if not unaltered(content):
        raise InputError(f"{path}: damaged: its content differs from its checksum; {advice}")
    return {key: value for key, value in content.items() if key != CHECKSUM_KEY}


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
