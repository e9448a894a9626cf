"""How much of a training run is spent in its steps: bare step and whole run, side by side.

    PYTHONPATH=. python3 benchmarks/run_speed.py [--cells 5000 25000] [--json out.json]

For each size a synthetic tissue is made and preprocessed. `bare` repeats the step on batches that
are already on the device: noise, network, loss, backward, clipping, AdamW, average. `run` is
`train` as a user calls it, on the same data with the same settings; its time is divided into the
position head, steps, validation, checkpoints and the rest. Cells per second count real cells.
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
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop

from alphastomics.config import Config, SimulationConfig
from alphastomics.config.file import parse_document
from alphastomics.diffusion_model import train as training_run
from alphastomics.main import main as alphastomics
from alphastomics.preprocessing.batch_loader import create_dataloaders
from alphastomics.simulate import write_tissue

GENES, SLICES, SET_SIZE = 254, 5, 1024
WARM_UP, BARE_STEPS = 5, 30
# (name, sets of a batch, settings of the layers, streaming)
VARIANTS = (
    ("1 set", 1, {}, False),
    ("8 sets", 8, {}, False),
    ("8 sets, experts", 8, {"use_moe": True}, False),
    ("8 sets, streaming", 8, {}, True),
)


def processed_folder(folder: Path, cells: int) -> Path:
    """Make a tissue and preprocess it."""
    size = SimulationConfig(cells=cells // SLICES, slices=SLICES, genes=GENES)
    write_tissue(size, 0, folder / "slices", overwrite=True)
    words = ["--input_dir", folder / "slices", "--output_dir", folder / "processed"]
    status = alphastomics(["preprocess", *map(str, words), "--layout", "slice"])
    assert status == 0
    return folder / "processed"


def settings(folder: Path, cells: int, variant: tuple[Any, ...], updates: int) -> Config:
    """Return the settings of a run of about so many updates."""
    _, sets, layer, streaming = variant
    batch = sets * SET_SIZE
    document = {
        "training": {
            "batch_size": batch,
            "max_epochs": max(updates * batch // cells, 1),
            "position_head_updates": 5,
            "validate_every_n_epochs": max(updates * batch // cells // 10, 1),
        },
        "diffusion": {"position_frame": "registered"},
        "loss": {"position": "aligned"},
        "TransformerLayer_setting": layer,
        "data": {
            "processed_data_dir": str(folder / "processed"),
            "loading": {"set_size": SET_SIZE, "streaming": streaming},
        },
        "logging": {"save_dir": str(folder), "exp_name": "run"},
    }
    return parse_document(document, "benchmark")


def wait() -> None:
    """Let the GPU finish."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def bare_rate(config: Config) -> float:
    """Return the cells per second of the step alone."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loading = config.data.loading
    loader, *_ = create_dataloaders(
        config.data.processed_data_dir,
        batch_size=config.training.batch_size,
        set_size=loading.set_size,
        num_workers=0,
    )
    module = training_run.make_module(config, loader)
    # The loader's slices are in their own frames: which rotation they get is no matter here.
    eye = torch.eye(3, dtype=torch.float64)
    module.slice_rotation = eye.repeat(len(loader.metadata.slices), 1, 1)
    module.to(device).train()
    batches = [batch.to(device) for batch in islice(loader, 4)]
    optimizer = torch.optim.AdamW(module.model.parameters(), 1e-4, fused=True)

    def step(batch: Any, number: int) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = module.training_step(batch, number)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        training_run_average(module)

    steps = BARE_STEPS if device.type == "cuda" else BARE_STEPS // 5
    queue = list(islice(cycle(batches), WARM_UP + steps))
    for number, batch in enumerate(queue[:WARM_UP]):
        step(batch, number)
    wait()
    start = time.perf_counter()
    for number, batch in enumerate(queue[WARM_UP:]):
        step(batch, number)
    wait()
    seconds = time.perf_counter() - start
    return sum(batch.count_cells() for batch in queue[WARM_UP:]) / seconds


def training_run_average(module: Any) -> None:
    """Move the average, as the optimizer's step does in a run."""
    from alphastomics.diffusion_model.ema import update_average

    update_average(module.average, module.model, 0.99)
    module.seen_slices.clear()


@contextmanager
def timed(parts: dict[str, float]) -> Iterator[None]:
    """Add up the time of the parts of a run that are no steps."""
    wrapped = (
        (training_run, "fit_position_head", "position head"),
        (training_run, "make_loaders", "set-up"),
        (training_run, "rotate_slices", "set-up"),
        (training_run, "conclude", "conclusion"),
        (pl.Trainer, "fit", "fit"),
        (pl.Trainer, "save_checkpoint", "checkpoints"),
        (_EvaluationLoop, "run", "validation"),
    )

    def clocked(act: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            wait()
            start = time.perf_counter()
            try:
                return act(*args, **kwargs)
            finally:
                wait()
                parts[name] += time.perf_counter() - start

        return run

    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in wrapped]
    for owner, name, part in wrapped:
        setattr(owner, name, clocked(getattr(owner, name), part))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def measure(config: Config, cells: int) -> dict[str, Any]:
    """Time the bare step and a whole run."""
    bare = bare_rate(config)
    parts: dict[str, float] = defaultdict(float)
    start = time.perf_counter()
    with timed(parts):
        summary = training_run.train(config, training_run.TrainRequest(overwrite=True))
    whole = time.perf_counter() - start
    trained = cells * summary["epochs"]
    # The checkpoint of the conclusion is written after the fit.
    inside = parts["fit"] - parts["validation"]
    return {
        "bare_cells_per_s": bare,
        "fit_cells_per_s": trained / parts["fit"],
        "run_cells_per_s": trained / whole,
        "fit_of_bare": trained / parts["fit"] / bare,
        "steps_of_bare": trained / max(inside - parts["checkpoints"], 1e-9) / bare,
        "updates": summary["steps"],
        "seconds": {**parts, "whole": whole},
    }


def main() -> None:
    """Measure every size and variant, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, nargs="+", default=[5_000, 25_000, 250_000])
    parser.add_argument("--updates", type=int, default=300, help="updates of a run, about")
    parser.add_argument("--variants", nargs="+", default=[row[0] for row in VARIANTS])
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
    print(f"{'case':<34}{'bare':>12}{'fit':>12}{'fit / bare':>12}{'steps / bare':>14}")
    for cells in asked.cells:
        with tempfile.TemporaryDirectory() as folder:
            processed_folder(Path(folder), cells)
            for variant in VARIANTS:
                if variant[0] not in asked.variants:
                    continue
                config = settings(Path(folder), cells, variant, asked.updates)
                result = measure(config, cells)
                record["cases"][f"{cells:,} cells, {variant[0]}"] = result
                print(
                    f"{f'{cells:,} cells, {variant[0]}':<34}{result['bare_cells_per_s']:>12,.0f}"
                    f"{result['fit_cells_per_s']:>12,.0f}{result['fit_of_bare']:>12.2f}"
                    f"{result['steps_of_bare']:>14.2f}",
                    flush=True,
                )
                if asked.json:
                    asked.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
