"""What happens around a step: checkpoints, a stop on request, progress, and a time split."""

import logging
import math
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from alphastomics.config import Config
from alphastomics.diffusion_model.background_save import files_of
from alphastomics.diffusion_model.run_folder import RunFolder
from alphastomics.diffusion_model.step import TASK_NAMES
from alphastomics.io.progress import track
from alphastomics.utils.dataholder import DataHolder

logger = logging.getLogger(__name__)

MONITORED = "val/loss"
LOGGED_KEY = "logged_bytes"


def validation_follows(trainer: pl.Trainer) -> bool:
    """Say whether the epoch's validation comes next.

    A checkpoint of this moment would be resumed without it: wait until it is done.
    """
    every = trainer.check_val_every_n_epoch or 1
    due = (trainer.current_epoch + 1) % every == 0
    return trainer.is_last_batch and trainer.enable_validation and due


def save_last(trainer: pl.Trainer, folder: RunFolder) -> None:
    """Make the checkpoint that a resumed run goes on from; a run that it replaces can go then."""
    trainer.save_checkpoint(folder.last)
    if trainer.is_global_zero:
        files_of(trainer).then(folder.discard_replaced)


class Updates(pl.Callback):
    """Tells whether the batch that has just ended updated the weights.

    Between updates gradients add up (`accumulate_grad_batches`), and a checkpoint does not hold
    them: only one of an update can be resumed to the same weights.
    """

    step_before = -1

    def on_train_batch_start(self, trainer: pl.Trainer, *_args: Any) -> None:
        """Remember how many updates there were."""
        self.step_before = trainer.global_step

    def just_updated(self, trainer: pl.Trainer) -> bool:
        """Say whether there has been one since."""
        return trainer.global_step > self.step_before


class Keeper(Updates):
    """Keeps the last checkpoint every few steps and the best ones by validation loss.

    It also stops a run whose validation loss no longer falls: the losses are in its hands, and with
    them in its state a resumed run stops where an uninterrupted one does.
    """

    def __init__(self, folder: RunFolder, config: Config) -> None:
        self.folder = folder
        self.every = config.logging.save_every_n_steps
        self.keep_best = config.logging.save_top_k
        training = config.training
        self.patience = training.patience if training.early_stopping else None
        self.best: dict[str, float] = {}
        self.lowest, self.waited = math.inf, 0
        self.saved_step = -1

    def state_dict(self) -> dict[str, Any]:
        """Return the best checkpoints, how long none was better, and how much was logged."""
        metrics = self.folder.metrics
        return {
            "best": dict(self.best),
            "lowest": self.lowest,
            "waited": self.waited,
            LOGGED_KEY: metrics.stat().st_size if metrics.is_file() else 0,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint; files that were removed since do not count."""
        files = {path.name for path in self.folder.checkpoints.glob("*.ckpt")}
        self.best = {name: loss for name, loss in state_dict["best"].items() if name in files}
        self.lowest, self.waited = state_dict["lowest"], state_dict["waited"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave a run that had stopped early, and is resumed, as it is."""
        self.stop_early(trainer)

    def stop_early(self, trainer: pl.Trainer) -> None:
        """Stop when validation no longer improves."""
        if self.patience is not None and self.waited >= self.patience:
            logger.info("stopping early: validation has not improved for %d epochs", self.waited)
            trainer.should_stop = True

    def on_train_batch_end(self, trainer: pl.Trainer, *_args: Any) -> None:
        """Write the last checkpoint when it is due."""
        step = trainer.global_step
        due = step != self.saved_step and step % self.every == 0 and self.just_updated(trainer)
        if due and not validation_follows(trainer):
            self.saved_step = step
            save_last(trainer, self.folder)
            files_of(trainer).write()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the last checkpoint, and a good one; stop when nothing improves any more."""
        loss = float(trainer.callback_metrics[MONITORED])
        self.waited = 0 if loss < self.lowest else self.waited + 1
        self.lowest = min(loss, self.lowest)
        self.stop_early(trainer)
        self.saved_step = trainer.global_step
        name = f"epoch{trainer.current_epoch:04d}-step{trainer.global_step:07d}.ckpt"
        ranked = sorted({**self.best, name: loss}.items(), key=lambda item: item[1])
        self.best = dict(ranked[: self.keep_best])
        save_last(trainer, self.folder)
        if trainer.is_global_zero:
            files, folder = files_of(trainer), self.folder.checkpoints
            if name in self.best:
                files.keep(self.folder.last, folder / name)
            for dropped, _ in ranked[self.keep_best :]:
                files.remove(folder / dropped)
            files.write_if_due()

    def best_step(self) -> int | None:
        """Return the update at which the best checkpoint was written, if there is one."""
        path = self.best_path()
        return None if path is None else int(path.stem.rpartition("-step")[2])

    def best_path(self) -> Path | None:
        """Return the best checkpoint, if there is one."""
        if not self.best:
            return None
        return self.folder.checkpoints / min(self.best, key=lambda key: self.best[key])


class StopOnRequest(Updates):
    """On SIGTERM or Ctrl-C: finish the update, save, mark the run interrupted, and leave."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.received: int | None = None
        self.previous: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen for signals, after Lightning has set up its own listening."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self.previous[number] = signal.signal(number, self.receive)

    def receive(self, number: int, _frame: Any) -> None:
        """Remember a signal; a second Ctrl-C leaves at once."""
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def on_train_batch_end(self, trainer: pl.Trainer, *_args: Any) -> None:
        """Stop between two updates."""
        if self.just_updated(trainer) and not validation_follows(trainer):
            self.stop_if_asked(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop after an epoch's validation."""
        self.stop_if_asked(trainer)

    def stop_if_asked(self, trainer: pl.Trainer) -> None:
        """Stop here if any rank was asked to."""
        asked = self.received is not None
        if trainer.world_size > 1:
            asked = trainer.strategy.reduce_boolean_decision(asked, all=False)
        if asked:
            save_last(trainer, self.folder)
            files_of(trainer).wait()
            if trainer.is_global_zero:
                self.folder.mark("interrupted", step=trainer.global_step)
            # A launcher that sees one rank end may kill the others: not before all is written.
            trainer.strategy.barrier("interrupted")
            logger.info("interrupted at step %d; go on with --resume last", trainer.global_step)
            raise SystemExit(128 + (self.received or signal.SIGTERM))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the signals back."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous.clear()


class TaskErrors:
    """Running mean of the error of each task: one step's loss jumps from task to task."""

    DECAY = 0.98

    def __init__(self) -> None:
        self.sums: torch.Tensor | None = None

    def add(self, tasks: torch.Tensor) -> None:
        """Count the sets of a step, without waiting for them."""
        # A recorded step writes its next sums to the same memory.
        self.sums = tasks.clone() if self.sums is None else tasks + self.DECAY * self.sums

    def words(self) -> str:
        """Say how every task goes that was trained so far."""
        if self.sums is None:
            return ""
        totals, counts = self.sums.tolist()
        parts = zip(TASK_NAMES, totals, counts, strict=True)
        return "error: " + ", ".join(f"{name} {t / n:.3f}" for name, t, n in parts if n > 0)


class Progress(pl.Callback):
    """Shows cells per second, the running error of each task and the time left."""

    def __init__(self) -> None:
        self.total = 0
        self.errors = TaskErrors()
        self.stack = ExitStack()
        self.advance: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the bar on the first rank, at the step where a resumed run goes on."""
        if trainer.is_global_zero:
            done = trainer.fit_loop.epoch_progress.current.completed / (trainer.max_epochs or 1)
            before = round(done * self.total)
            self.advance = self.stack.enter_context(
                track("train", self.total, "cells", done=before)
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: DataHolder,
        batch_idx: int,
    ) -> None:  # fmt: skip
        """Count the cells of the step, over all ranks."""
        if self.advance is not None:
            cells = batch.count_cells() * trainer.world_size
            last = getattr(pl_module, "last", None)
            if last is not None:
                self.errors.add(last.tasks)
            self.advance(cells, note=self.errors.words)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Close the bar."""
        self.stack.close()


class TimeSplit(pl.Callback):
    """Measures where a step's time goes: data, forward, backward, optimizer."""

    PARTS = ("data", "forward", "backward", "optimizer")

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(self.PARTS, 0.0)
        self.steps = 0
        self.clock: float | None = None

    def lap(self, part: str | None) -> None:
        """Add the time since the last lap to a part."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if part is not None and self.clock is not None:
            self.seconds[part] += now - self.clock
        self.clock = now

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock: what comes before the first batch is waiting for data."""
        self.lap(None)

    def on_train_batch_start(self, *_args: Any) -> None:
        """Count the wait for data."""
        self.lap("data")

    def on_before_backward(self, *_args: Any) -> None:
        """Count the forward pass."""
        self.lap("forward")

    def on_after_backward(self, *_args: Any) -> None:
        """Count the backward pass."""
        self.lap("backward")

    def on_train_batch_end(self, *_args: Any) -> None:
        """Count the update of the weights."""
        self.lap("optimizer")
        self.steps += 1

    def table(self) -> dict[str, float]:
        """Return milliseconds a step of each part."""
        return {part: 1e3 * self.seconds[part] / max(self.steps, 1) for part in self.PARTS}
