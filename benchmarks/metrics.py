"""Metrics against the loops that they replace, side by side in one run; time and memory by size.

python benchmarks/metrics.py
python benchmarks/metrics.py --cells 50000 --device cpu --json out.json
"""

import argparse
import json
import os
import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import scipy
import torch
from scipy.spatial.distance import cdist
from scipy.stats import spearmanr
from torch import Tensor

from alphastomics.utils.metrics import (
    contact_scores,
    distance_mse,
    distance_spearman,
    expression_mse,
    gene_correlations,
    knn_preservation,
    morans_i,
    procrustes,
    spatial_neighbours,
)

GENES = 500


def tissue(cells: int) -> tuple[Tensor, Tensor]:
    """Return a prediction about as good as a trained model's, and a flat truth in 3D."""
    generator = torch.Generator().manual_seed(0)
    true = torch.rand(cells, 3, generator=generator) * torch.tensor([3000.0, 2000.0, 10.0])
    return true + 600 * torch.randn(cells, 3, generator=generator), true


def spearman_loop(predicted: Tensor, true: Tensor) -> np.ndarray:
    """Go row by row with scipy, as LUNA's metrics do; a cell's distance to itself left out."""
    result = np.empty(len(true))
    for cell, (p, t) in enumerate(zip(predicted.numpy(), true.numpy(), strict=True)):
        rows = (cdist(one[None], all_)[0] for one, all_ in ((p, predicted), (t, true)))
        result[cell] = spearmanr(*(np.delete(row, cell) for row in rows)).statistic
    return result


def seconds(work: Callable[[], object], device: str) -> tuple[float, float]:
    """Return the wall time of one call, and the processor time of all its threads."""
    start, spent = time.perf_counter(), time.process_time()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - spent


def peak_megabytes(work: Callable[[], object], device: str) -> float:
    """Return the memory that a call takes beyond its inputs."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    # A child of its own: the high-water mark of a process never falls.
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        work()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        os.write(writing, str(peak / 2**10 - pages * resource.getpagesize() / 2**20).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return float(os.read(reading, 64))


def against_the_loop(cells: int, repeats: int) -> dict[str, float]:
    """Time both on the CPU; they take turns, so that a busy machine slows both."""
    predicted, true = (side.double() for side in tissue(cells))
    ours, loop = [], []
    expected: list[np.ndarray] = []
    for _ in range(repeats):
        ours += [seconds(lambda: distance_spearman(predicted, true), "cpu") for _ in range(5)]
        loop.append(seconds(lambda: expected.append(spearman_loop(predicted, true)), "cpu"))
    error = float(np.abs(distance_spearman(predicted, true).numpy() - expected[0]).max())
    # The least of each: other programs only ever add to a time.
    (wall, spent), (loop_wall, loop_spent) = (map(min, zip(*times)) for times in (ours, loop))  # noqa: B905
    print(
        f"Spearman, {cells} cells: {wall:.3f} s ({spent:.3f} s of processor), loop of scipy "
        f"{loop_wall:.2f} s ({loop_spent:.2f}): {loop_wall / wall:.1f} x "
        f"({loop_spent / spent:.1f} x on one core); largest difference {error:.1e}"
    )
    return {
        "cells": cells,
        "seconds": wall,
        "processor_seconds": spent,
        "loop_seconds": loop_wall,
        "loop_processor_seconds": loop_spent,
        "largest_difference": error,
    }


def by_metric(cells: int, device: str) -> list[dict[str, float | str]]:
    """Time and memory of each metric for one slice."""
    predicted, true = (side.to(device) for side in tissue(cells))
    expression = torch.randn(cells, GENES, device=device)
    generated = expression + torch.randn(cells, GENES, device=device)
    measured = torch.ones(1, GENES, dtype=torch.bool, device=device)
    graph = spatial_neighbours(true, k=6)
    metrics: dict[str, Callable[[], object]] = {
        "distance_spearman": lambda: distance_spearman(predicted, true),
        "contact_scores (10 %)": lambda: contact_scores(predicted, true, share=0.1),
        "distance_mse": lambda: distance_mse(predicted, true),
        "procrustes": lambda: procrustes(predicted, true, scale=True, reflection=True),
        "knn_preservation (10)": lambda: knn_preservation(predicted, true, k=10),
        f"morans_i ({GENES} genes)": lambda: morans_i(expression, graph),
        f"expression_mse ({GENES})": lambda: expression_mse(generated, expression, measured),
        f"gene_correlations ({GENES})": lambda: gene_correlations(generated, expression, measured),
    }
    rows: list[dict[str, float | str]] = []
    for name, work in metrics.items():
        taken, spent = seconds(work, device)
        memory = peak_megabytes(work, device)
        row = {"metric": name, "cells": cells, "seconds": taken, "processor_seconds": spent}
        rows.append(row | {"megabytes": memory})
        print(
            f"{name:>26}, {cells:>6} cells: {taken:8.3f} s ({spent:8.3f} s of processor) "
            f"{memory:8.1f} MB",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure the speed-up over the loop, then every metric at each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--loop_cells", type=int, default=4000, help="0: leave the loop out")
    parser.add_argument("--cells", type=int, nargs="*", default=[4000, 20000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "device": arguments.device,
        "threads": torch.get_num_threads(),
    }
    if arguments.loop_cells:
        report["spearman"] = against_the_loop(arguments.loop_cells, arguments.repeats)
    report["metrics"] = [row for n in arguments.cells for row in by_metric(n, arguments.device)]
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
