"""The pairwise distance loss against `torch.cdist`: time and memory, side by side in one run.

python benchmarks/distance.py --device cpu --cells 4096
python benchmarks/distance.py --device cuda --cells 4096 16384 65536 --json out.json
"""

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from alphastomics.diffusion_model.distance import distance_loss


def cdist_loss(predicted: Tensor, true: Tensor, node_mask: Tensor) -> Tensor:
    """Say the same with two whole distance matrices, kept for the backward pass."""
    cells = predicted.shape[1]
    error = (torch.cdist(predicted, predicted) - torch.cdist(true, true)).square()
    return error.sum() / (cells * (cells - 1))


def peak_memory(step: Callable[[], None], device: str) -> float:
    """Return the MB that a step takes beyond its inputs."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    # A child of its own: the high-water mark of a process never falls.
    reading, writing = os.pipe()
    if os.fork() == 0:
        torch.set_num_threads(1)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        step()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        os.write(writing, str(peak / 2**10 - pages * resource.getpagesize() / 2**20).encode())
        os._exit(0)
    os.wait()
    return float(os.read(reading, 64))


def measure(loss: Callable[..., Tensor], cells: int, device: str, repeats: int) -> dict[str, float]:
    """Return the median time of forward and backward, the peak memory, and the values."""
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(1, cells, 3, generator=generator).to(device)
    predicted = torch.randn(1, cells, 3, generator=generator).to(device).requires_grad_()
    mask = torch.ones(1, cells, dtype=torch.bool, device=device)
    value = torch.zeros(())

    def step() -> None:
        nonlocal value
        predicted.grad = None
        value = loss(predicted, true, mask)
        value.backward()

    memory = peak_memory(step, device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    assert predicted.grad is not None
    return {
        "milliseconds": 1e3 * statistics.median(times),
        "megabytes": memory,
        "loss": float(value.detach()),
        "gradient": float(predicted.grad.norm()),
    }


def main() -> None:
    """Measure both losses at each size and print their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--cells", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for cells in arguments.cells:
        ours = measure(distance_loss, cells, arguments.device, arguments.repeats)
        try:
            theirs = measure(cdist_loss, cells, arguments.device, arguments.repeats)
        except torch.OutOfMemoryError:
            theirs = dict.fromkeys(ours, float("nan"))
        rows.append({"cells": cells, "ours": ours, "cdist": theirs})
        print(
            f"N {cells:>6}: {ours['milliseconds']:8.2f} ms {ours['megabytes']:9.1f} MB | cdist "
            f"{theirs['milliseconds']:8.2f} ms {theirs['megabytes']:9.1f} MB | "
            f"loss {ours['loss']:.6f} / {theirs['loss']:.6f}, "
            f"gradient {ours['gradient']:.6g} / {theirs['gradient']:.6g}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
