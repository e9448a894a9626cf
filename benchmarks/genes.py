"""What many genes cost: an update and each kind of sample, with 500 and with 20,000 genes.

    PYTHONPATH=. python3 benchmarks/genes.py [--genes 500 20000] [--cells 4000] [--json out.json]

For each number of genes a synthetic tissue is made and preprocessed, and settings are those that
`train` would choose. An update is the bare step on batches that are already on the device. Samples
are of one slice, by a model of a few updates: how good it is does not change its speed.
"""

import argparse
import json
import logging
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from alphastomics.config import Config, SimulationConfig
from alphastomics.config.auto import with_settings
from alphastomics.config.file import parse_document
from alphastomics.diffusion_model.train import TrainRequest, train
from alphastomics.fit import plan_for
from alphastomics.generation.cells import read_processed
from alphastomics.generation.commands import load_for_use
from alphastomics.generation.generate import generate
from alphastomics.main import main as alphastomics
from alphastomics.simulate import write_tissue
from alphastomics.tasks import TASKS
from benchmarks.run_speed import Bare, wait

SLICES = 2
FEW = {
    "training.max_epochs": 1,
    "training.position_head_updates": 5,
    "expression.updates": 5,
}


def planned(folder: Path, cells: int, genes: int) -> Config:
    """Make a tissue, preprocess it, and return the settings that `train` would choose."""
    size = SimulationConfig(cells=cells // SLICES, slices=SLICES, genes=genes)
    write_tissue(size, 0, folder / "slices", overwrite=True)
    words = ["--input_dir", folder / "slices", "--output_dir", folder / "processed"]
    assert alphastomics(["preprocess", *map(str, words)]) == 0
    document = {
        "data": {"processed_data_dir": str(folder / "processed")},
        "logging": {"save_dir": str(folder), "exp_name": "run"},
    }
    return plan_for(parse_document(document, "benchmark")).config


def measure(config: Config, samples: int) -> dict[str, float]:
    """Return milliseconds of an update, its cells, and seconds of each kind of sample."""
    bare = Bare(config).rate()
    result = {"update ms": bare["bare_ms"], "cells of an update": config.training.batch_size}
    result["update us a cell"] = 1e6 / bare["bare_cells_per_s"]
    train(with_settings(config, FEW), TrainRequest(overwrite=True), has_validation=False)
    made = Path(config.logging.save_dir) / config.logging.exp_name / "checkpoints/last.ckpt"
    module, genes = load_for_use(made)
    cells = read_processed(Path(config.data.processed_data_dir), genes, "train")
    for task in TASKS:
        seconds = []
        for seed in range(samples + 1):  # the first one is slower
            start = time.perf_counter()
            generate(module, cells, task, config.sampling, seed)
            wait()
            seconds.append(time.perf_counter() - start)
        result[f"{task} s"] = sorted(seconds[1:])[samples // 2]
    return result


def main() -> None:
    """Measure each number of genes, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--genes", type=int, nargs="+", default=[500, 20_000])
    parser.add_argument("--cells", type=int, default=4_000)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    logging.getLogger("alphastomics").setLevel(logging.WARNING)
    record: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "cells": asked.cells,
        "genes": {},
    }
    for genes in asked.genes:
        with tempfile.TemporaryDirectory() as folder:
            record["genes"][genes] = measure(
                planned(Path(folder), asked.cells, genes), asked.samples
            )
        print(genes, {k: round(v, 3) for k, v in record["genes"][genes].items()}, flush=True)
    few, many = (record["genes"][genes] for genes in (asked.genes[0], asked.genes[-1]))
    print("ratio", {name: round(many[name] / few[name], 2) for name in few})
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
