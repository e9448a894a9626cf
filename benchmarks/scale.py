"""Preprocessing and loading at growing size: time per cell, peak memory, bytes on disk.

    python benchmarks/scale.py [--cells 50000 200000 1000000] [--genes 60] [--json F]
    python benchmarks/scale.py --cells 1000000 10000000 --folder /large/disk
    python benchmarks/scale.py --cells 20000 80000 --genes 20000 --filled 0.05 --storage sparse

The tissue is simulated slice by slice, 50,000 cells each, so that it never lies in memory; with
`--filled` it is random counts in that share of the entries, for gene lists of any length. Each of
simulate, preprocess and one epoch of the streaming loader is a process of its own; its peak is its
largest resident size, and that of preprocess includes the child that guards it. Processor time is
given beside the clock, since others may use the machine. A size that the disk cannot hold is left
out, and the script says so.
"""

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

SLICE_CELLS = 50_000
SLICE_ENTRIES = 25_000_000  # of random counts: a slice in memory takes some 500 MB
BATCH = 1024
SEED = 0
# Stage -> what it imports: before the clock starts, since that takes as long for one cell.
STAGES = {
    "simulate": ("alphastomics.simulate", "anndata"),
    "preprocess": ("alphastomics.preprocessing.commands",),
    "load": ("alphastomics.preprocessing.batch_loader",),
}
# Counts in h5ad, stage 1's slices, the shards, and as much again for what preprocess has in hand.
BYTES_A_GENE = 20
SPARE_SHARE = 0.1  # of the disk, left to others


def simulate(folder: Path, cells: int, options: argparse.Namespace) -> int:
    """Write slices of a tissue, one in memory at a time; return the cells."""
    if options.filled is not None:
        return write_random(folder / "slices", cells, options.genes, options.filled)
    from alphastomics.config import SimulationConfig
    from alphastomics.simulate import write_tissue

    per_slice = min(SLICE_CELLS, cells)
    settings = SimulationConfig(cells=per_slice, slices=-(-cells // per_slice), genes=options.genes)
    write_tissue(settings, SEED, folder / "slices", overwrite=False)
    return settings.cells * settings.slices


def write_random(folder: Path, cells: int, genes: int, filled: float) -> int:
    """Write random counts, slice by slice; gaps between entries are geometric."""
    import anndata
    import numpy as np
    from scipy.sparse import csr_matrix

    rng = np.random.default_rng(SEED)
    folder.mkdir()
    per_slice = min(SLICE_CELLS, max(int(SLICE_ENTRIES / (genes * filled)), 1))
    for number, start in enumerate(range(0, cells, per_slice)):
        size = min(per_slice, cells - start)
        gaps = rng.geometric(filled, int(1.1 * size * genes * filled) + 1000)
        places = np.cumsum(gaps) - 1
        places = places[places < size * genes]
        rows, columns = np.divmod(places, genes)
        pointers = np.searchsorted(rows, np.arange(size + 1))
        counts = rng.geometric(0.4, len(places)).astype(np.float32)
        data = anndata.AnnData(csr_matrix((counts, columns, pointers), shape=(size, genes)))
        data.obs_names = np.arange(start, start + size).astype(str)
        data.var_names = [f"g{gene}" for gene in range(genes)]
        data.obsm["spatial"] = rng.normal(0, 1000, (size, 2))
        data.write_h5ad(folder / f"slice{number:05d}.h5ad", compression="gzip")
    return cells


def preprocess(folder: Path, cells: int, options: argparse.Namespace) -> int:
    """Turn the slices into shards, with the defaults; return the cells."""
    from alphastomics.config import PreprocessingConfig
    from alphastomics.preprocessing import commands

    commands.preprocess(
        PreprocessingConfig(storage=options.storage),
        input_dir=folder / "slices",
        output_dir=folder / "processed",
        gene_list_file=None,
        seed=SEED,
        overwrite=False,
        scheduler=None,
    )
    return cells


def load(folder: Path, _cells: int, _options: argparse.Namespace) -> int:
    """Stream the training cells once, in the caller's thread; return their number.

    Checksums, which are compared in the first epoch only, are left out.
    """
    from alphastomics.preprocessing.batch_loader import create_dataloaders

    loader, *_ = create_dataloaders(
        folder / "processed", BATCH, streaming=True, num_workers=0, verify_checksums=False
    )
    seen = sum(int(batch.node_mask.sum()) for batch in loader)
    assert seen == loader.num_cells, "every training cell is seen once"
    return seen


def peak_mb(process: str) -> float:
    """Return the largest resident size of a process so far, from /proc."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def run_stage(stage: str, folder: Path, cells: int, options: argparse.Namespace) -> None:
    """Run one stage in this process; say its seconds (start of Python apart) and its peak."""
    act = {"simulate": simulate, "preprocess": preprocess, "load": load}[stage]
    for name in STAGES[stage]:
        importlib.import_module(name)
    before, started = os.times(), time.perf_counter()
    handled = act(folder, cells, options)
    seconds, after = time.perf_counter() - started, os.times()
    peak = peak_mb("self")
    if stage == "preprocess":
        from alphastomics.preprocessing.subprocess_reader import READER

        peak += peak_mb(str(READER.pid))
    processor = after.user + after.system - before.user - before.system
    found = {
        "cells": handled,
        "seconds": seconds,
        "us_per_cell": 1e6 * seconds / handled,
        "processor_us_per_cell": 1e6 * processor / handled,
        "peak_mb": peak,
    }
    print(json.dumps(found))


def measured(stage: str, folder: Path, cells: int, options: argparse.Namespace) -> dict[str, float]:
    """Run one stage in a process of its own."""
    command = [sys.executable, __file__, "--one", stage, str(folder), str(cells)]
    command += ["--genes", str(options.genes), "--storage", options.storage]
    command += [] if options.filled is None else ["--filled", str(options.filled)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def bytes_in(folder: Path) -> int:
    """Count the bytes of the files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def one_size(scratch: Path, cells: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """Measure all stages at one size; None, in words, where the disk is too small."""
    disk = shutil.disk_usage(scratch)
    share = options.filled if options.filled and options.storage == "sparse" else 1.0
    needed = cells * (options.genes * share + 10) * BYTES_A_GENE
    if needed > disk.free - SPARE_SHARE * disk.total:
        print(f"{cells:,} cells: left out, they may need {needed / 1e9:.0f} GB of disk", flush=True)
        return None
    folder = scratch / str(cells)
    folder.mkdir()
    found: dict[str, Any] = {"cells": cells}
    for stage in STAGES:
        found[stage] = measured(stage, folder, cells, options)
        print(f"{cells:,} cells: {stage} {described(found[stage])}", flush=True)
    found["bytes_per_cell"] = {
        "h5ad": bytes_in(folder / "slices") / cells,
        "intermediate": bytes_in(folder / "processed" / "_intermediate_slices") / cells,
        "shards": bytes_in(folder / "processed" / "data") / cells,
    }
    shutil.rmtree(folder)
    return found


def described(stage: dict[str, float]) -> str:
    """Say the figures of a stage."""
    return (
        f"{stage['seconds']:.1f} s, {stage['us_per_cell']:.1f} us a cell "
        f"({stage['processor_us_per_cell']:.1f} of processor), peak {stage['peak_mb']:.0f} MB"
    )


def growth(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Compare the largest size with the smallest: 1 is flat."""
    first, last = rows[0], rows[-1]
    return {
        stage: {
            key: last[stage][key] / first[stage][key]
            for key in ("us_per_cell", "processor_us_per_cell", "peak_mb")
        }
        for stage in STAGES
    }


def main() -> None:
    """Measure, print, and write JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, nargs="+", default=[50_000, 200_000, 1_000_000])
    parser.add_argument("--genes", type=int, default=60)
    parser.add_argument("--folder", type=Path, help="where to put the files, for the while")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--filled", type=float, help="random counts in this share of the entries")
    parser.add_argument("--storage", choices=("dense", "sparse"), default="dense")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        stage, folder, cells = arguments.one
        run_stage(stage, Path(folder), int(cells), arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        sizes = sorted(arguments.cells)
        tried = [one_size(Path(scratch), cells, arguments) for cells in sizes]
    rows = [row for row in tried if row is not None]
    result = {
        "genes": arguments.genes,
        "filled": arguments.filled,
        "storage": arguments.storage,
        "rows": rows,
        "largest_over_smallest": growth(rows) if rows else {},
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("anndata", "pyarrow", "numpy", "torch")},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
