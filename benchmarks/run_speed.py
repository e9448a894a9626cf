"""How much of a training run is spent in its steps: bare step and whole run, side by side.

    PYTHONPATH=. python3 benchmarks/run_speed.py [--cells 5000 25000] [--json out.json]

For each size a synthetic tissue is made and preprocessed. `bare` repeats the step on batches that
are already on the device: noise, network, loss, backward, clipping, AdamW, average. `run` is
`train` as a user calls it, on the same data with the same settings; its time is divided into the
position head, steps, validation, checkpoints and the rest. Cells per second count real cells.

`plan` is what `train` chooses for these data and this device: smoothed expression, the position
head, latents. The other variants are the schema's network with nothing around it, whose sizes a
plan reaches beyond a million cells.
"""

import argparse
import json
import logging
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop

from alphastomics.config import Config, SimulationConfig
from alphastomics.config.file import parse_document
from alphastomics.diffusion_model import train as training_run
from alphastomics.diffusion_model.ema import update_average
from alphastomics.diffusion_model.recorded_update import RecordedUpdates
from alphastomics.diffusion_model.slice_preparation import slice_smoother
from alphastomics.fit import plan_for
from alphastomics.main import main as alphastomics
from alphastomics.preprocessing.batch_loader import create_dataloaders
from alphastomics.preprocessing.folder import DataFolder
from alphastomics.simulate import write_tissue

GENES, SLICES, SET_SIZE = 254, 5, 1024
WARM_UP, BARE_STEPS = 6, 60


class Variant(NamedTuple):
    """A kind of run."""

    sets: int
    experts: bool = False
    streaming: bool = False
    compile: bool = False
    planned: bool = False


VARIANTS = {
    "plan": Variant(1, planned=True),
    "1 set": Variant(1),
    "8 sets": Variant(8),
    "8 sets, experts": Variant(8, experts=True),
    "8 sets, compiled": Variant(8, compile=True),
    "8 sets, streaming": Variant(8, streaming=True),
}
# Kernels by what they do: the first word that their name holds.
GROUPS = {
    "attention": ("sdpa", "flash", "fmha"),
    "matrix products": ("nvjet", "gemm", "cutlass", "cublas", "splitK"),
    "optimizer and average": ("multi_tensor", "adam", "lerp"),
    "norms": ("norm", "Norm", "GammaBeta"),
    "random numbers": ("distribution", "dropout", "philox"),
    "sums": ("reduce",),
    "copies and casts": ("copy", "Memcpy", "Memset", "fill"),
}


def processed_folder(folder: Path, cells: int) -> Path:
    """Make a tissue and preprocess it."""
    size = SimulationConfig(cells=cells // SLICES, slices=SLICES, genes=GENES)
    write_tissue(size, 0, folder / "slices", overwrite=True)
    words = ["--input_dir", folder / "slices", "--output_dir", folder / "processed"]
    status = alphastomics(["preprocess", *map(str, words), "--layout", "slice"])
    assert status == 0
    return folder / "processed"


def settings(folder: Path, cells: int, variant: Variant, updates: int) -> Config:
    """Return the settings of a run of about so many updates."""
    if variant.planned:
        return planned(folder, cells, updates)
    batch = variant.sets * SET_SIZE
    document = {
        "training": {
            "batch_size": batch,
            "max_epochs": max(updates * batch // cells, 1),
            "position_head_updates": 5,
            "validate_every_n_epochs": max(updates * batch // cells // 10, 1),
            "compile": variant.compile,
        },
        "diffusion": {"position_frame": "registered"},
        "loss": {"position": "aligned"},
        "TransformerLayer_setting": {"use_moe": variant.experts},
        "data": {
            "processed_data_dir": str(folder / "processed"),
            "loading": {"set_size": SET_SIZE, "streaming": variant.streaming},
        },
        "logging": {"save_dir": str(folder), "exp_name": "run"},
    }
    return parse_document(document, "benchmark")


def planned(folder: Path, cells: int, updates: int) -> Config:
    """Return what the plan chooses, but for how long everything takes."""
    document: dict[str, Any] = {
        "data": {"processed_data_dir": str(folder / "processed")},
        "logging": {"save_dir": str(folder), "exp_name": "run"},
    }
    batch = plan_for(parse_document(document, "benchmark")).config.training.batch_size
    epochs = max(round(updates * batch / cells), 1)
    document["training"] = {"max_epochs": epochs, "position_head_updates": 5}
    document["expression"] = {"updates": 5}
    return plan_for(parse_document(document, "benchmark")).config


def wait() -> None:
    """Let the GPU finish."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Bare:
    """The step alone: batches on the device, no Lightning, no validation, no checkpoints."""

    def __init__(self, config: Config) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        metadata = DataFolder(config.data.processed_data_dir).metadata()
        loader, *_ = create_dataloaders(
            config.data.processed_data_dir,
            batch_size=config.training.batch_size,
            set_size=config.data.loading.set_size,
            num_workers=0,
            smooth=slice_smoother(config, metadata, self.device),
        )
        self.module = module = training_run.make_module(config, loader)
        # The loader's slices are in their own frames: which rotation they get is no matter here.
        eye = torch.eye(3, dtype=torch.float64)
        module.slice_rotation = eye.repeat(len(loader.metadata.slices), 1, 1)
        module.to(self.device).train()
        if config.training.compile:
            module.model.compile()
        self.batches = cycle([batch.to(self.device) for batch in islice(loader, 4)])
        rate = config.training.learning_rate
        self.optimizer = torch.optim.AdamW(module.model.parameters(), rate, fused=True)
        if self.device.type == "cuda":
            module.recorded_updates = RecordedUpdates(module, self.optimizer)

    def steps(self, number: int) -> tuple[float, int]:
        """Do some steps; return the seconds they took and the cells they saw."""
        wait()
        start, cells = time.perf_counter(), 0
        for index, batch in enumerate(islice(self.batches, number)):
            cells += batch.count_cells()
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"
            ):
                loss = self.module.training_step(batch, index)
            if not self.module.is_updated:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.module.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                update_average(self.module.average, self.module.model, 0.99)
            self.module.seen_slices.clear()
        wait()
        return time.perf_counter() - start, cells

    def rate(self) -> dict[str, float]:
        """Return cells per second, milliseconds of a step, and seconds until steps are fast."""
        first, _ = self.steps(WARM_UP)
        seconds, cells = self.steps(BARE_STEPS if self.device.type == "cuda" else BARE_STEPS // 10)
        steps = BARE_STEPS if self.device.type == "cuda" else BARE_STEPS // 10
        return {
            "bare_cells_per_s": cells / seconds,
            "bare_ms": 1e3 * seconds / steps,
            "warm_up_s": first,
        }

    def profile(self, steps: int = 10) -> dict[str, float]:
        """Return milliseconds of the GPU a step, by what they are spent on."""
        from torch.profiler import ProfilerActivity, profile

        self.steps(WARM_UP)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self.steps(steps)
        totals: dict[str, float] = defaultdict(float)
        for event in found.key_averages():
            group = next(
                (name for name, words in GROUPS.items() if any(w in event.key for w in words)),
                "other arithmetic",
            )
            totals[group] += event.self_device_time_total / 1e3 / steps
        return dict(sorted(totals.items(), key=lambda item: -item[1]))


@contextmanager
def timed(parts: dict[str, float]) -> Iterator[None]:
    """Add up the time of the parts of a run; a part within another counts for itself alone."""
    wrapped = (
        (training_run, "fit_position_head", "position head"),
        (training_run, "fit_count_model", "count model"),
        (training_run, "make_loaders", "set-up"),
        (training_run, "rotate_slices", "set-up"),
        (training_run, "conclude", "conclusion"),
        (pl.Trainer, "fit", "steps"),
        (pl.Trainer, "save_checkpoint", "checkpoints"),
        (_EvaluationLoop, "run", "validation"),
    )

    inner = [0.0]  # what is timed inside of what is being timed

    def clocked(act: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            wait()
            start = time.perf_counter()
            inner.append(0.0)
            try:
                return act(*args, **kwargs)
            finally:
                wait()
                seconds = time.perf_counter() - start
                parts[name] += seconds - inner.pop()
                inner[-1] += seconds

        return run

    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in wrapped]
    for owner, name, part in wrapped:
        setattr(owner, name, clocked(getattr(owner, name), part))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def measure(config: Config) -> dict[str, Any]:
    """Time the bare step and a whole run."""
    bare = Bare(config).rate()
    parts: dict[str, float] = defaultdict(float)
    start = time.perf_counter()
    with timed(parts):
        summary = training_run.train(config, training_run.TrainRequest(overwrite=True))
    whole = time.perf_counter() - start
    folder = DataFolder(config.data.processed_data_dir)
    trained = folder.metadata().splits["train"].cells * summary["epochs"]
    fit = sum(parts[name] for name in ("steps", "validation", "checkpoints"))
    return {
        **bare,
        "fit_cells_per_s": trained / fit,
        "run_cells_per_s": trained / whole,
        "fit_of_bare": trained / fit / bare["bare_cells_per_s"],
        "steps_of_bare": trained / parts["steps"] / bare["bare_cells_per_s"],
        "updates": summary["steps"],
        "seconds": {**parts, "whole": whole},
    }


def shares(seconds: dict[str, float]) -> str:
    """Say what share of `fit` its parts take."""
    parts = ("steps", "validation", "checkpoints")
    whole = sum(seconds.get(name, 0.0) for name in parts)
    return ", ".join(f"{name} {seconds.get(name, 0.0) / whole:.0%}" for name in parts)


def main() -> None:
    """Measure every size and variant, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, nargs="+", default=[5_000, 25_000, 250_000])
    parser.add_argument("--updates", type=int, default=300, help="updates of a run, about")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--profile", action="store_true", help="the GPU's time by kind of kernel")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    logging.getLogger("alphastomics").setLevel(logging.WARNING)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    record: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": name,
        "versions": {"torch": torch.__version__, "lightning": lightning.__version__},
        "cases": {},
    }
    print(f"{'case':<34}{'bare':>10}{'ms':>8}{'fit':>10}{'fit / bare':>12}{'steps / bare':>14}")
    for cells in asked.cells:
        with tempfile.TemporaryDirectory() as folder:
            processed_folder(Path(folder), cells)
            for name in asked.variants:
                if VARIANTS[name].sets * SET_SIZE * 2 > cells:
                    continue
                config = settings(Path(folder), cells, VARIANTS[name], asked.updates)
                case = f"{cells:,} cells, {name}"
                if asked.profile:
                    record["cases"][case] = result = Bare(config).profile()
                    print(case, {key: round(value, 3) for key, value in result.items()}, flush=True)
                else:
                    record["cases"][case] = result = measure(config)
                    print(
                        f"{case:<34}{result['bare_cells_per_s']:>10,.0f}{result['bare_ms']:>8.2f}"
                        f"{result['fit_cells_per_s']:>10,.0f}{result['fit_of_bare']:>12.2f}"
                        f"{result['steps_of_bare']:>14.2f}   " + shares(result["seconds"]),
                        flush=True,
                    )
                if asked.json:
                    asked.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
