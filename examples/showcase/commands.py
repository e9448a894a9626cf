"""A demo from the command line: settings and flags enter, each step's checks are written out."""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from alphastomics.cli.parse import OneLineParser
from alphastomics.config import Config
from alphastomics.config.file import parse_document
from examples.showcase.checks import Check, Tally

if TYPE_CHECKING:
    from examples.showcase.parts import Stage

FAILED = 1
Result = TypeVar("Result")


def showcase(document: Mapping[str, Any], argv: Sequence[str]) -> str:
    """Run a demo with the settings of `document`; leave with status 1 where a check fails."""
    arguments = parser().parse_args(argv)
    config = settings_of(document, arguments)
    started = time.monotonic()
    if arguments.output_dir is None:
        with tempfile.TemporaryDirectory() as folder:
            tally = show(config, Path(folder))
    else:
        tally = show(config, arguments.output_dir)
    summary = tally.summary(time.monotonic() - started)
    if tally.failed:
        tally.write(summary)
        raise SystemExit(FAILED)
    return summary


def parser() -> argparse.ArgumentParser:
    """Return the flags of a demo; all else is in the dict at the top of its script."""
    found = OneLineParser(
        description="Shows each part of the model at work, and checks what it does.",
        allow_abbrev=False,
    )
    add = found.add_argument
    add("--output_dir", "--output-dir", type=Path, help="keep data and run (default: nothing)")
    add("--epochs", type=int, help="epochs of the training (default: as in the script)")
    add("--cells", type=int, help="cells in a simulated slice (default: as in the script)")
    add("--seed", type=int, help="seed of every draw (default: as in the script)")
    return found


def settings_of(document: Mapping[str, Any], arguments: argparse.Namespace) -> Config:
    """Overlay the script's settings with the flags."""
    flags = {
        ("training", "max_epochs"): arguments.epochs,
        ("simulation", "cells"): arguments.cells,
        ("seed", "global_seed"): arguments.seed,
    }
    merged = {section: dict(values) for section, values in document.items()}
    origins = {}
    for (section, key), value in flags.items():
        if value is not None:
            merged.setdefault(section, {})[key] = value
            origins[f"{section}.{key}"] = f"--{key.rpartition('_')[2]}"
    return parse_document(merged, "DEMO_CONFIG", origins)


def show(config: Config, folder: Path) -> Tally:
    """Go through the six steps."""
    from examples.showcase import parts, whole

    tally = Tally()
    stage, seconds = timed(lambda: prepared(config, folder))
    sizes = stage.batch.expression.shape
    batch = f"{sizes[0]} sets of {sizes[1]} cells, {sizes[2]} genes"
    tally.show("A simulated tissue", seconds, [Check("a batch", batch, holds=True)])
    titles: dict[str, Callable[[Stage], list[Check]]] = {
        "1. Forward pass": parts.forward_pass,
        "2. Noise model": parts.noise_model,
        "3. Masked diffusion": parts.masked_diffusion,
        "4. Training step": parts.training_step,
    }
    for title, step in titles.items():
        checks, seconds = timed(lambda: step(stage))  # noqa: B023 - used at once
        tally.show(title, seconds, checks)
    (checks, checkpoint), seconds = timed(lambda: whole.short_training(stage, folder))
    tally.show("5. A whole short training", seconds, checks)
    checks, seconds = timed(lambda: whole.sampling(stage, checkpoint))
    tally.show("6. Diffusion sampling", seconds, checks)
    return tally


def timed(act: Callable[[], Result]) -> tuple[Result, float]:
    """Do something; return what it returns and how long it took."""
    started = time.monotonic()
    return act(), time.monotonic() - started


def prepared(config: Config, folder: Path) -> "Stage":
    """Make the data, an untrained module and a batch."""
    from alphastomics.preprocessing.batch_loader import create_dataloaders
    from examples.showcase.parts import Stage, untrained
    from examples.synthetic import synthetic_folder

    folder.mkdir(parents=True, exist_ok=True)
    processed = synthetic_folder(config, folder)
    data = config.data.model_copy(update={"processed_data_dir": str(processed)})
    devices = config.distributed.model_copy(update={"devices": 0})
    config = config.model_copy(update={"data": data, "distributed": devices})
    loading = config.data.loading
    loader, *_ = create_dataloaders(
        processed,
        config.training.batch_size,
        num_workers=0,
        set_size=loading.set_size,
        set_draw=loading.set_draw,
        seed=config.seed.global_seed,
    )
    module = untrained(config, loader)
    return Stage(config, processed, module, next(iter(loader)))
