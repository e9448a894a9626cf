"""The loader beside plain pyarrow and HF datasets, and sparse beside dense storage.

    python benchmarks/loader.py [--cells 200000] [--genes 500] [--wide_genes 20000] [--json F]

One process each; rates are cells per second over a whole epoch, the median of several rounds in
which the ways take turns, files warm in the page cache.
"""

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from alphastomics.config import PreprocessingConfig
from alphastomics.preprocessing.batch_loader import create_dataloaders
from alphastomics.preprocessing.commands import preprocess

BATCH = 1024


def make(folder: Path, cells: int, genes: int, density: float, storage: str) -> Path:
    """Simulate one slice file and preprocess it into training cells."""
    import anndata
    from scipy.sparse import random as random_matrix

    source = folder / f"in-{genes}"
    if not source.exists():
        source.mkdir(parents=True)
        rng = np.random.default_rng(0)
        for number in range(4):
            size = cells // 4
            matrix = random_matrix(size, genes, density, "csr", np.float32, rng)
            matrix.data = np.ceil(matrix.data * 10)
            data = anndata.AnnData(matrix)
            data.obs_names = np.arange(size).astype(str)
            data.var_names = [f"g{i}" for i in range(genes)]
            data.obsm["spatial"] = rng.normal(0, 1000, (size, 2))
            data.write_h5ad(source / f"s{number}.h5ad")
    preprocess(
        PreprocessingConfig(storage=storage, train_ratio=1.0, val_ratio=0.0),
        input_dir=source,
        output_dir=folder / f"{storage}-{genes}",
        gene_list_file=None,
        seed=0,
        overwrite=False,
        scheduler=None,
    )
    return folder / f"{storage}-{genes}"


def shards(folder: Path) -> list[Path]:
    """List the shards of the training split."""
    return sorted((folder / "data").glob("train*.parquet"))


def with_pyarrow(folder: Path) -> int:
    """Read the same files with plain pyarrow into numpy, a row group at a time."""
    seen = 0
    for path in shards(folder):
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            columns = ["expression", "position", "slice_id", "cell_id"]
            table = file.read_row_group(group, columns=columns, use_threads=False)
            values = table["expression"].combine_chunks().flatten().to_numpy()
            seen += len(values.reshape(table.num_rows, -1))
            table["position"].combine_chunks().flatten().to_numpy().reshape(-1, 3)
            table["slice_id"].to_numpy()
    return seen


def with_datasets(folder: Path, limit: int) -> int:
    """Stream the same files with HF datasets and a shuffle buffer, as torch batches."""
    import datasets

    files = [str(path) for path in shards(folder)]
    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    seen = 0
    for batch in stream.shuffle(seed=0, buffer_size=10_000).with_format("torch").batch(BATCH):
        seen += len(batch["expression"])
        if seen >= limit:
            break
    return seen


def with_loader(folder: Path, num_workers: int) -> Callable[[], int]:
    """Stream with our loader; checksums of files are compared in the first epoch."""
    loader = create_dataloaders(folder, BATCH, streaming=True, num_workers=num_workers)[0]
    return lambda: sum(int(batch.node_mask.sum()) for batch in loader)


def rate(act: Callable[[], int]) -> float:
    """Return cells per second."""
    started = time.perf_counter()
    return act() / (time.perf_counter() - started)


def rates(ways: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Let the ways take turns; the first round, which warms and checks files, is kept apart."""
    first = {f"{name}_first_epoch": rate(act) for name, act in ways.items()}
    found = [{name: rate(act) for name, act in ways.items()} for _ in range(rounds)]
    return first | {name: float(np.median([one[name] for one in found])) for name in ways}


def main() -> None:
    """Measure, print, and write JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=200_000)
    parser.add_argument("--genes", type=int, default=500)
    parser.add_argument("--wide_cells", type=int, default=20_000)
    parser.add_argument("--wide_genes", type=int, default=20_000)
    parser.add_argument("--hf_cells", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        result = compare(arguments, Path(scratch))
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


def compare(arguments: argparse.Namespace, scratch: Path) -> dict[str, object]:
    """Measure all ways on the same files."""
    narrow = make(scratch, arguments.cells, arguments.genes, 0.2, "dense")
    found = rates(
        {
            "pyarrow": lambda: with_pyarrow(narrow),
            "loader_0_workers": with_loader(narrow, 0),
            "loader_2_workers": with_loader(narrow, 2),
        },
        arguments.rounds,
    )
    found["hf_datasets"] = rate(lambda: with_datasets(narrow, arguments.hf_cells))
    wide = {
        storage: make(scratch, arguments.wide_cells, arguments.wide_genes, 0.1, storage)
        for storage in ("dense", "sparse")
    }
    wide_rates = rates(
        {
            f"{storage}_{workers}_workers": with_loader(folder, workers)
            for storage, folder in wide.items()
            for workers in (0, 2)
        },
        arguments.rounds,
    )
    sizes = {name: sum(path.stat().st_size for path in shards(wide[name])) for name in wide}
    return {
        "cells": arguments.cells,
        "genes": arguments.genes,
        "cells_per_second": found,
        "over_pyarrow": found["loader_0_workers"] / found["pyarrow"],
        "over_pyarrow_2_workers": found["loader_2_workers"] / found["pyarrow"],
        "over_hf_datasets": found["loader_0_workers"] / found["hf_datasets"],
        "first_epoch_over_pyarrow_2_workers": (
            found["loader_2_workers_first_epoch"] / found["pyarrow"]
        ),
        "wide": {"cells": arguments.wide_cells, "genes": arguments.wide_genes, **wide_rates},
        "sparse_over_dense": wide_rates["sparse_0_workers"] / wide_rates["dense_0_workers"],
        "sparse_over_dense_2_workers": (
            wide_rates["sparse_2_workers"] / wide_rates["dense_2_workers"]
        ),
        "sparse_size_over_dense": sizes["sparse"] / sizes["dense"],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("pyarrow", "numpy", "torch", "datasets")},
    }


if __name__ == "__main__":
    main()
