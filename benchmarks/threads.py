"""How threads should wait: the demo's training, alone and beside itself, by turns of the wait.

    python benchmarks/threads.py --spins 0 300 1000 10000

Idle threads that sleep must be woken for every small operation; threads that spin take the cores
from whoever has work. Each row is one process of two threads alone, then two of them at once.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from alphastomics.cli.demo import SPLIT, TISSUE
from alphastomics.config import PreprocessingConfig
from alphastomics.preprocessing.commands import preprocess
from alphastomics.simulate import write_tissue

TRAIN = """
import json, sys
from alphastomics.config.file import parse_document
from alphastomics.diffusion_model.train import TrainRequest
from alphastomics.fit import fit
fit(parse_document(json.loads(sys.argv[1]), "benchmark"), TrainRequest(overwrite=True))
"""


def make_data(folder: Path) -> None:
    """Simulate and preprocess the demo's tissue."""
    write_tissue(TISSUE, 1, folder / "slices", overwrite=False)
    preprocess(
        PreprocessingConfig(**SPLIT), input_dir=folder / "slices",
        output_dir=folder / "processed", gene_list_file=None, seed=1, overwrite=False,
        scheduler=None,
    )  # fmt: skip


def seconds(folder: Path, epochs: int, spins: int | None, processes: int) -> float:
    """Train in some processes at once; None spins is one thread each."""
    document = {
        "training": {"max_epochs": epochs},
        "data": {"processed_data_dir": str(folder / "processed")},
    }
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONWARNINGS": "ignore"}
    environment |= {"OMP_NUM_THREADS": "1"} if spins is None else {"GOMP_SPINCOUNT": str(spins)}
    begun = time.perf_counter()
    running = []
    for number in range(processes):
        document["logging"] = {"save_dir": str(folder / f"run{number}"), "exp_name": "run"}
        command = [sys.executable, "-c", TRAIN, json.dumps(document)]
        running.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
    assert not any(process.wait() for process in running)
    return time.perf_counter() - begun


def main() -> None:
    """Print a row for each wait."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--spins", type=int, nargs="+", default=[0, 300, 1000])
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_data(Path(name))
        print("wait, alone (s), two at once (s)")
        for spins in (None, *arguments.spins):
            row = [seconds(Path(name), arguments.epochs, spins, count) for count in (1, 2)]
            label = "one thread" if spins is None else f"{spins} spins"
            print(label, *(f"{value:.1f}" for value in row), sep=", ", flush=True)


if __name__ == "__main__":
    main()
