"""One run of the comparison: settings, a configuration and a seed enter, its figures leave.

A finished run is a JSON file: the same command goes on after the last one. The run's own folder,
with its checkpoints, is temporary.
"""

import csv
import json
import logging
import math
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from alphastomics.attn_model.accounting import (
    active_parameters,
    feed_forward_share,
    total_parameters,
)
from alphastomics.config import Config
from alphastomics.config.file import LAYER_SECTION, parse_document, to_document
from alphastomics.diffusion_model.checkpoint import load_module
from alphastomics.diffusion_model.train import TrainRequest, train
from alphastomics.errors import InputError
from alphastomics.io.files import write_text
from benchmarks.ablation.configurations import Configuration
from benchmarks.ablation.figures import FIGURES
from benchmarks.ablation.scoring import held_out, scores

logger = logging.getLogger(__name__)

LAST_SHARE = 0.2  # of the logged training losses: one step's loss depends on its times
CURVES = ("train/loss", "val/loss")


class Run(NamedTuple):
    """A finished run: its figures, and its losses as (name, step, value)."""

    configuration: str
    seed: int
    figures: dict[str, float]
    curves: list[tuple[str, int, float]]


@dataclass(frozen=True)
class Budget:
    """What all runs share: settings, data, the cells they are scored on, and the device."""

    document: Mapping[str, Any]
    processed: Path
    split: str
    test_cells: int
    device: str
    folder: Path

    def settings(self, configuration: Configuration, seed: int) -> Config:
        """Return the settings of one run."""
        document = {section: dict(values) for section, values in self.document.items()}
        layer = document.get(LAYER_SECTION, {})
        document[LAYER_SECTION] = {**layer, **configuration.layer}
        for section, key, value in (
            ("seed", "global_seed", seed),
            ("data", "processed_data_dir", str(self.processed)),
            ("distributed", "devices", 0 if self.device == "cpu" else 1),
        ):
            document.setdefault(section, {})[key] = value
        return parse_document(document, f"BASE_CONFIG with {configuration.name}")

    def record(self, configuration: Configuration, seed: int) -> Path:
        """Return the file of one run."""
        name = re.sub(r"[^a-z0-9]+", "-", configuration.name.lower()).strip("-")
        return self.folder / "runs" / f"{name}-seed{seed}.json"


def run(budget: Budget, configuration: Configuration, seed: int) -> Run:
    """Train and score one configuration with one seed, or read what an earlier call found."""
    config = budget.settings(configuration, seed)
    asked = {"settings": to_document(config), "scored": [budget.split, budget.test_cells]}
    path = budget.record(configuration, seed)
    if path.is_file():
        return read_run(path, configuration, seed, asked)
    with tempfile.TemporaryDirectory() as scratch:
        found = trained(budget, config, configuration, seed, Path(scratch))
    figures = {key: value if math.isfinite(value) else None for key, value in found.figures.items()}
    content = {**asked, "figures": figures, "curves": found.curves}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content) + "\n")
    return found


def read_run(path: Path, configuration: Configuration, seed: int, asked: dict[str, Any]) -> Run:
    """Read a finished run; refuse one of other settings."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        # Through JSON, as the file went: a tuple and a list are the same there.
        same = {key: content[key] for key in asked} == json.loads(json.dumps(asked))
        figures = {
            key: math.nan if value is None else float(value)
            for key, value in content["figures"].items()
        }
        curves = [(str(name), int(step), float(value)) for name, step, value in content["curves"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a run of a comparison; remove it, and run again") from error
    if not same:
        raise InputError(
            f"{path}: a run with other settings; choose another --output_dir, or add --overwrite"
        )
    logger.info("%s, seed %d: found", configuration.name, seed)
    return Run(configuration.name, seed, figures, curves)


def trained(
    budget: Budget, config: Config, configuration: Configuration, seed: int, scratch: Path
) -> Run:
    """Train in a temporary folder, and score the weights at the end of the budget."""
    logging_settings = config.logging.model_copy(update={"save_dir": str(scratch)})
    logger.info("%s, seed %d", configuration.name, seed)
    started = time.monotonic()
    summary = train(
        config.model_copy(update={"logging": logging_settings}), TrainRequest(profile=True)
    )
    seconds = time.monotonic() - started
    module, genes = load_module(Path(summary["last_checkpoint"]))
    module = module.to(budget.device)
    curves = read_curves(Path(summary["run"]) / "metrics.csv")
    cells = held_out(budget.processed, genes, budget.split, budget.test_cells)
    figures = {
        "parameters_total": float(total_parameters(module.model)),
        "parameters_active": float(active_parameters(module.model)),
        "feed_forward_share": feed_forward_share(module.model),
        "train_loss": last_share([value for name, _, value in curves if name == "train/loss"]),
        **validation_terms(Path(summary["run"]) / "metrics.csv"),
        **scores(module, cells, seed),
        "ms_per_step": sum(summary["milliseconds_per_step"].values()),
        "seconds": seconds,
    }
    if budget.device == "cuda":
        torch.cuda.empty_cache()
    kept = {figure.key: figures.get(figure.key, math.nan) for figure in FIGURES}
    return Run(configuration.name, seed, kept, [row for row in curves if row[0] in CURVES])


def read_curves(path: Path) -> list[tuple[str, int, float]]:
    """Read everything that a run logged."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            (row["name"], int(row["step"]), float(row["value"])) for row in csv.DictReader(file)
        ]


def last_share(values: list[float]) -> float:
    """Mean of the last values; NaN without any."""
    few = max(round(LAST_SHARE * len(values)), 1)
    return sum(values[-few:]) / few if values else math.nan


def validation_terms(path: Path) -> dict[str, float]:
    """Return the last validation losses; none where there are no validation cells."""
    last = {name: value for name, _, value in read_curves(path)}
    names = {"val_loss": "loss", "val_expression": "expression", "val_position": "position"}
    return {key: last.get(f"val/{name}", math.nan) for key, name in names.items()}
