"""How much faster two CPU ranks train than one: cells per second of both, side by side.

    PYTHONPATH=. python3 benchmarks/ranks.py [--cells 8000] [--repeats 3]

A synthetic tissue is preprocessed once. Each run is `alphastomics train` under torchrun with one
thread a rank and the same cells in a rank's step, so that two ranks see twice the cells in a step.
Efficiency is the speed of two ranks over twice that of one.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from alphastomics.config import SimulationConfig
from alphastomics.main import main as alphastomics
from alphastomics.simulate import write_tissue

SLICES, GENES = 4, 254
LAST_LINE = re.compile(r"train: ([\d,]+) cells in ([\d.]+) s")


def speed(folder: Path, ranks: int, epochs: int) -> float:
    """Train with so many ranks; return cells per second of all of them."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks]
    words += ["-m", "alphastomics", "train", "--data_dir", folder / "processed", "--gpus", 0]
    words += ["--epochs", epochs, "--batch_size", 1024, "--set_size", 512, "--strategy", "ddp"]
    words += ["--d_model", 96, "--n_heads", 3, "--n_layers", 2]
    words += ["--output_dir", folder, "--exp_name", f"ranks{ranks}", "--overwrite"]
    run = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    cells, seconds = LAST_LINE.findall(run.stdout + run.stderr)[-1]
    return int(cells.replace(",", "")) / float(seconds)


def main() -> None:
    """Measure both, again and again, in turn."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", type=int, default=8_000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        size = SimulationConfig(cells=arguments.cells // SLICES, slices=SLICES, genes=GENES)
        write_tissue(size, 0, folder / "slices", overwrite=True)
        words = ["--input_dir", folder / "slices", "--output_dir", folder / "processed"]
        assert alphastomics(["preprocess", *map(str, words), "--layout", "slice"]) == 0
        ratios = []
        for _ in range(arguments.repeats):
            one, two = (speed(folder, ranks, arguments.epochs) for ranks in (1, 2))
            ratios.append(two / (2 * one))
            print(f"1 rank {one:,.0f} cells/s, 2 ranks {two:,.0f}: {ratios[-1]:.2f}", flush=True)
    print(f"torch {torch.__version__}: efficiency {statistics.median(ratios):.2f} (median)")


if __name__ == "__main__":
    main()
