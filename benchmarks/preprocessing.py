"""Preprocessing beside the plain scanpy script: time, peak memory, and how memory grows.

    python benchmarks/preprocessing.py [--cells 200000] [--genes 500] [--growth FEW MANY] [--json F]

Both read the same h5ad slices and write the same Parquet columns, each in a process of its own; the
peak is the largest resident size of that process (and of the child that guards ours).
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

SLICE_CELLS = 50_000
DENSITY = 0.2
SEED = 0


def write_slices(folder: Path, cells: int, genes: int) -> None:
    """Write counts of about 20 % density in slices of 50,000 cells."""
    import anndata
    from scipy.sparse import csr_matrix

    rng = np.random.default_rng(SEED)
    folder.mkdir(parents=True)
    for number, start in enumerate(range(0, cells, SLICE_CELLS)):
        size = min(SLICE_CELLS, cells - start)
        filled = rng.binomial(genes, DENSITY, size)
        indices = rng.random((size, genes)).argpartition(genes // 2, axis=1).astype(np.int32)
        chosen = np.arange(genes) < filled[:, None]
        pointers = np.concatenate([[0], np.cumsum(filled)])
        counts = rng.geometric(0.4, int(pointers[-1])).astype(np.float32)
        matrix = csr_matrix((counts, indices[chosen], pointers), shape=(size, genes))
        matrix.sort_indices()
        data = anndata.AnnData(matrix)
        data.obs_names = np.char.add(f"{number}_", np.arange(size).astype(str))
        data.var_names = [f"g{i}" for i in range(genes)]
        data.obsm["spatial"] = rng.normal(0, 1000, (size, 2))
        data.write_h5ad(folder / f"slice{number:03d}.h5ad")


def by_scanpy(source: Path, target: Path) -> None:
    """Do it as a plain script does: read all, normalise, log1p, scale, concatenate, write."""
    import anndata
    import pyarrow as pa
    import pyarrow.parquet as pq
    import scanpy

    slices = []
    for number, path in enumerate(sorted(source.glob("*.h5ad"))):
        data = anndata.read_h5ad(path)
        scanpy.pp.normalize_total(data, target_sum=1e4)
        scanpy.pp.log1p(data)
        data.X = data.X.toarray()
        scanpy.pp.scale(data)
        plane = data.obsm["spatial"]
        height = np.full((len(plane), 1), number * 10.0)
        data.obsm["position"] = np.concatenate([plane, height], axis=1)
        data.obs["slice_id"] = number
        slices.append(data)
    data = anndata.concat(slices)
    order = np.random.default_rng(SEED).permutation(data.n_obs)
    target.mkdir(parents=True)
    cuts = (np.array([0.8, 0.9]) * len(order)).astype(int)
    for name, rows in zip(("train", "validation", "test"), np.split(order, cuts), strict=True):
        part = data[rows]
        vectors = {
            "expression": np.asarray(part.X, dtype=np.float32),
            "position": part.obsm["position"].astype(np.float32),
        }
        columns = {
            key: pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
            for key, values in vectors.items()
        }
        columns["slice_id"] = pa.array(part.obs["slice_id"].to_numpy())
        pq.write_table(pa.table(columns), target / f"{name}.parquet", compression="none")


def by_alphastomics(source: Path, target: Path) -> None:
    """Do it with `preprocess` and its defaults."""
    from alphastomics.config import PreprocessingConfig
    from alphastomics.preprocessing.commands import preprocess

    preprocess(
        PreprocessingConfig(),
        input_dir=source,
        output_dir=target,
        gene_list_file=None,
        seed=SEED,
        overwrite=False,
        scheduler=None,
    )


WAYS = {"scanpy": by_scanpy, "alphastomics": by_alphastomics}


def measured(way: str, source: Path, target: Path) -> dict[str, float]:
    """Run one way in a process of its own; return its seconds and its peak in MB."""
    command = [sys.executable, __file__, "--one", way, str(source), str(target)]
    started = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return {"seconds": seconds, **json.loads(done.stdout.splitlines()[-1])}


def one(way: str, source: Path, target: Path) -> None:
    """Run one way in this process and say its peak."""
    WAYS[way](source, target)
    peak = peak_mb("self")
    if way == "alphastomics":
        from alphastomics.preprocessing.subprocess_reader import READER

        peak += peak_mb(str(READER.pid))
    print(json.dumps({"peak_mb": peak}))


def peak_mb(process: str) -> float:
    """Return the largest resident size of a process so far, from /proc.

    Not from getrusage: that one inherits the size of the process that started this one.
    """
    status = Path(f"/proc/{process}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def main() -> None:
    """Measure, print, and write JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=200_000)
    parser.add_argument("--genes", type=int, default=500)
    parser.add_argument("--growth", type=int, nargs=2, default=[100_000, 800_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3)
    arguments = parser.parse_args()
    if arguments.one:
        way, source, target = arguments.one
        one(way, Path(source), Path(target))
        return
    with tempfile.TemporaryDirectory() as scratch:
        result = compare(arguments, Path(scratch))
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


def compare(arguments: argparse.Namespace, scratch: Path) -> dict[str, object]:
    """Measure both ways in turn, so that a busy machine slows both equally; take the medians."""
    write_slices(scratch / "in", arguments.cells, arguments.genes)
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way in WAYS:
            runs[way].append(measured(way, scratch / "in", scratch / "out"))
    medians = {
        way: {key: float(np.median([run[key] for run in found])) for key in found[0]}
        for way, found in runs.items()
    }
    shutil.rmtree(scratch / "in")
    peaks = {}
    for cells in arguments.growth:
        write_slices(scratch / "in", cells, arguments.genes)
        peaks[cells] = measured("alphastomics", scratch / "in", scratch / "out")
        shutil.rmtree(scratch / "in")
    few, many = (peaks[cells]["peak_mb"] for cells in arguments.growth)
    ours, theirs = medians["alphastomics"], medians["scanpy"]
    return {
        "cells": arguments.cells,
        "genes": arguments.genes,
        "medians": medians,
        "speed_over_scanpy": theirs["seconds"] / ours["seconds"],
        "memory_over_scanpy": ours["peak_mb"] / theirs["peak_mb"],
        "growth": peaks,
        "memory_growth": many / few,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("anndata", "scanpy", "pyarrow", "numpy")},
    }


if __name__ == "__main__":
    main()
