"""What loading and watching cost a training step: ratios of whole runs, side by side.

    python benchmarks/training.py PROCESSED [--json out.json]

Each run trains the same network on the same cells. `in memory` repeats one batch that is already
on the device, so that nothing is loaded; `loader` and `streaming` read the processed folder. Times
are means over the steps after a warm-up, without the slowest twentieth.
"""

import argparse
import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from alphastomics.config.file import parse_document
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.monitor import Monitor
from alphastomics.preprocessing.batch_loader import create_dataloaders

WARM_UP = 20


class Clock(pl.Callback):
    """Takes the time between the ends of steps."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *_args: Any) -> None:
        """Note the time, once the device has done its work."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def milliseconds(self) -> float:
        """Return the mean step time after the warm-up, without the slowest twentieth."""
        steps = sorted(end - start for start, end in pairwise(self.times[WARM_UP:]))
        return 1e3 * statistics.mean(steps[: max(1, len(steps) * 19 // 20)])


class TimedMonitor(Monitor):
    """The monitor, with the time it takes."""

    seconds = 0.0

    def on_train_batch_end(self, *args: Any) -> None:
        """Look at the step, and count the time of that."""
        start = time.perf_counter()
        super().on_train_batch_end(*args)
        self.seconds += time.perf_counter() - start

    def on_before_optimizer_step(self, *args: Any) -> None:
        """Look at the gradients, and count the time of that."""
        start = time.perf_counter()
        super().on_before_optimizer_step(*args)
        self.seconds += time.perf_counter() - start


class Repeated:
    """One batch, again and again."""

    def __init__(self, batch: Any, times: int) -> None:
        self.batch, self.times = batch, times

    def __len__(self) -> int:
        """Count the repeats."""
        return self.times

    def __iter__(self) -> Any:
        """Yield the batch."""
        return iter([self.batch] * self.times)


def step_time(settings: Any, loader: Any, genes: int, steps: int) -> tuple[float, float]:
    """Train for some steps; return the time of one, and the monitor's share of all."""
    clock, monitor = Clock(), TimedMonitor(10)
    device = "gpu" if torch.cuda.is_available() else "cpu"
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator=device,
        devices=1,
        precision="bf16-mixed" if device == "gpu" else "32-true",
        callbacks=[monitor, clock],
        logger=pl.loggers.CSVLogger(tempfile.mkdtemp()),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    trainer.fit(AlphaSTomicsModule(settings, genes, position_scale=1000.0), loader)
    share = monitor.seconds / (clock.times[-1] - clock.times[0])
    return clock.milliseconds(), share


def main() -> None:
    """Measure the three ways, twice each, and print their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("processed", type=Path)
    parser.add_argument("--batch_size", type=int, default=8192)
    parser.add_argument("--set_size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    settings = parse_document({"training": {"max_epochs": 10**6}}, "benchmark")
    loaders = {
        way: create_dataloaders(
            arguments.processed,
            arguments.batch_size,
            set_size=arguments.set_size,
            streaming=way == "streaming",
            num_workers=arguments.workers,
            device=torch.device("cuda") if torch.cuda.is_available() else None,
        )[0]
        for way in ("loader", "streaming")
    }
    batch = next(iter(loaders["loader"]))
    genes = batch.expression.shape[-1]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ways: dict[str, Any] = {"in memory": Repeated(batch.to(device), 10**6), **loaders}
    times, shares = {}, []
    for _ in range(2):
        for way, loader in ways.items():
            found, share = step_time(settings, loader, genes, arguments.steps)
            times[way] = min(found, times.get(way, found))
            shares.append(share)
    for way, value in times.items():
        print(f"{way:<10} {value:8.2f} ms a step, {value / times['in memory']:.3f} of in memory")
    print(f"monitor: {statistics.median(shares):.2%} of a step, logging every 10 steps")
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, **times}, indent=2))


if __name__ == "__main__":
    main()
