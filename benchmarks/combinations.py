"""Train every combination of mode, attention, feed-forward and masking, beside knowing nothing.

    python benchmarks/combinations.py PROCESSED --epochs 15 --json out.json

The trivial predictor says the mean of everything: 0 for standardised expression, and one point for
all positions. A combination has learnt when its validation terms lie well below that.
"""

import argparse
import csv
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from alphastomics.config.file import parse_document
from alphastomics.diffusion_model import train as training
from alphastomics.diffusion_model.distance import distance_loss
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.trainer_module import scale_of_loader
from alphastomics.preprocessing.batch_loader import create_dataloaders

MODES = ("joint", "expr_to_pos", "pos_to_expr")
ATTENTION: dict[str, dict[str, Any]] = {
    "linear": {"use_gated_attention": False},
    "headwise": {"gate_type": "headwise"},
    "elementwise": {"gate_type": "elementwise"},
}
FEED_FORWARD = ("FFN", "MoE")
MASKING = ("off", "on")


def document(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return the settings that all combinations share."""
    return {
        "model": {"d_model": 64, "n_heads": 4, "n_layers": 3},
        "training": {
            "batch_size": arguments.batch_size,
            "max_epochs": arguments.epochs,
            "learning_rate": 1e-3,
            "early_stopping": False,
        },
        "data": {
            "processed_data_dir": str(arguments.processed),
            "loading": {"set_size": arguments.set_size, "num_workers": 2},
        },
        "logging": {"save_dir": folder, "save_every_n_steps": 10**6, "save_top_k": 1},
    }


def trivial(arguments: argparse.Namespace) -> dict[str, float]:
    """Score the mean of everything on the validation cells."""
    _, loader, _ = create_dataloaders(
        arguments.processed, arguments.batch_size, set_size=arguments.set_size, num_workers=0
    )
    scale = scale_of_loader(loader)
    expression, position, weight = 0.0, 0.0, 0
    for batch in loader:
        cells = int(batch.node_mask.sum())
        measured = batch.gene_mask
        expression += cells * float(batch.expression[measured].square().mean())
        inner = batch.positions.double() / scale
        position += cells * float(distance_loss(torch.zeros_like(inner), inner, batch.node_mask))
        weight += cells
    return {"expression": expression / weight, "position": position / weight}


def last_values(metrics: Path) -> dict[str, float]:
    """Return the last validation terms of a run."""
    with metrics.open(newline="") as file:
        return {row["name"]: float(row["value"]) for row in csv.DictReader(file)}


def run(arguments: argparse.Namespace, combination: tuple[str, ...]) -> dict[str, Any]:
    """Train one combination and return its validation terms."""
    mode, attention, feed_forward, masking = combination
    with tempfile.TemporaryDirectory() as folder:
        settings = document(arguments, folder)
        settings["training"]["mode"] = mode
        settings["masking"] = {"enable": masking == "on"}
        settings["TransformerLayer_setting"] = {
            **ATTENTION[attention],
            "use_moe": feed_forward == "MoE",
        }
        summary = training.train(parse_document(settings, "benchmark"), training.TrainRequest())
        values = last_values(Path(summary["run"]) / "metrics.csv")
    return {
        "mode": mode,
        "attention": attention,
        "feed_forward": feed_forward,
        "masking": masking,
        **{name: values[f"val/{name}"] for name in ("loss", "expression", "position")},
    }


def main() -> None:
    """Run all combinations and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("processed", type=Path)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch_size", type=int, default=1024)
    parser.add_argument("--set_size", type=int, default=256)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    assert AlphaSTomicsModule.automatic_optimization
    floor = trivial(arguments)
    print(f"trivial: expression {floor['expression']:.3f}, position {floor['position']:.3f}")
    rows = []
    for combination in itertools.product(arguments.modes, ATTENTION, FEED_FORWARD, MASKING):
        row = run(arguments, combination)
        rows.append(row)
        print(
            " | ".join(combination),
            f"| expression {row['expression']:.3f} | position {row['position']:.3f}",
            flush=True,
        )
        if arguments.json:
            arguments.json.write_text(json.dumps({"trivial": floor, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
