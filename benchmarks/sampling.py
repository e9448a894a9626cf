"""How long it takes to place cells: one set of N cells, from expression to positions.

    python benchmarks/sampling.py --device cuda --cells 4000 16000 65536 262144

The weights are random: the time does not depend on them. `estimate` is one network call from noise;
`sample` goes down in 20 calls. Smoothing over the expression kNN is counted where it is on.
LUNA's figures (G 254, 1000 reverse steps: 13.7 minutes for 4000 cells on 2 CPU cores, 15 s on an
H200) were measured earlier on the same kinds of machine.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.sample import DiffusionSampler

NUM_GENES = 254
LUNA_SECONDS = {("cpu", 4000): 13.7 * 60, ("cuda", 4000): 15.0, ("cuda", 16000): 23.0}
CALLS = {"estimate": 1, "sample": 20}


def make_sampler(device: str, *, rounds: int) -> DiffusionSampler:
    """Build the default network with random weights."""
    document = {"model": {"smoothing_rounds": rounds}, "training": {"mode": "expr_to_pos"}}
    module = AlphaSTomicsModule(document, NUM_GENES).to(device).eval()
    return DiffusionSampler(module.average, module.noise_model)


def seconds(sampler: DiffusionSampler, device: str, num_cells: int, calls: int) -> float:
    """Time one slice, after a first run that pays for what is paid once."""
    generator = torch.Generator().manual_seed(0)
    expression = torch.randn(1, num_cells, NUM_GENES, generator=generator).to(device)
    position = torch.zeros(1, num_cells, 3, device=device)
    mask = torch.ones(1, num_cells, dtype=torch.bool, device=device)
    repeats = 4 if num_cells <= 65_536 else 2
    spent = []
    for _ in range(repeats):
        begun = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            _, placed = sampler.sample(
                expression, position, mask, "expr_to_pos", num_steps=calls, generator=generator
            )
        assert bool(placed.isfinite().all())  # waits for the device, too
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent[1:])


def main() -> None:
    """Time every size, with and without smoothing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cells", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for rounds in (0, 3):
        sampler = make_sampler(arguments.device, rounds=rounds)
        for num_cells in arguments.cells:
            for product, calls in CALLS.items():
                if arguments.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                spent = seconds(sampler, arguments.device, num_cells, calls)
                row = {"cells": num_cells, "smoothing": rounds, "product": product, "calls": calls,
                       "seconds": spent}  # fmt: skip
                if arguments.device == "cuda":
                    row["gigabytes"] = torch.cuda.max_memory_allocated() / 1e9
                luna = LUNA_SECONDS.get((arguments.device, num_cells))
                row["times_luna"] = None if luna is None else luna / spent
                rows.append(row)
                print(json.dumps(row), flush=True)
    if arguments.json:
        content = {"torch": torch.__version__, "rows": rows}
        arguments.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
