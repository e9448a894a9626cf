"""Peak memory, time and size where a small input could ask for much, of one or two versions.

    python benchmarks/reliability.py [--only NAME ...] [--against CHECKOUT] [--cells N] [--json F]

Every command runs in a process of its own; its peak is the largest resident size of that process.
`--against` measures another checkout of the repository beside this one.
"""

import argparse
import io
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
CONFIG = """
model: {d_model: 16, n_heads: 2, n_layers: 1}
training: {batch_size: 64, max_epochs: 1}
data: {processed_data_dir: PROCESSED, loading: {num_workers: 0}}
sampling: {num_steps: 2}
distributed: {devices: 0}
"""
STAGE = re.compile(r"(stage \d[^:]*|sample[^:]*): .* in ([\d.]+) s")
MOST_BYTES = 16 << 30  # of address space: a version that does not bound itself ends there
LISTS = 4_500_000
HOSTILE_NETWORK = {"n_layers": 400, "d_model": 8192}


def run(checkout: Path, *arguments: object, code: str | None = None) -> dict[str, Any]:
    """Run one command of a checkout; return its status, seconds and peak memory."""
    command = ["-c", code] if code else ["-m", "alphastomics"]
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "2"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=checkout,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES)),
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    lines = [line for line in said.splitlines() if line.startswith("alphastomics: ")]
    return {
        "status": os.waitstatus_to_exitcode(status),
        "seconds": round(time.monotonic() - started, 1),
        "peak_gb": round(usage.ru_maxrss / 1e6, 2),
        "said": lines[-1][:120] if lines else "",
        "stages": {name: float(seconds) for name, seconds in STAGE.findall(said)},
    }


def required(checkout: Path, *arguments: object) -> dict[str, Any]:
    """Run a command that has to succeed."""
    found = run(checkout, *arguments)
    if found["status"]:
        raise SystemExit(f"{arguments[0]}: {found['said']}")
    return found


def small_model(checkout: Path, folder: Path, genes: int) -> Path:
    """Simulate, preprocess and train a small network; return its run."""
    slices, processed = folder / "slices", folder / "processed"
    size = ("--cells", 200, "--slices", 2, "--genes", genes)
    required(checkout, "simulate", "--output_dir", slices, *size)
    required(checkout, "preprocess", "--input_dir", slices, "--output_dir", processed)
    config = folder / "config.yaml"
    config.write_text(CONFIG.replace("PROCESSED", str(processed)))
    required(checkout, "train", "--config", config, "--output_dir", folder / "outputs")
    return folder / "outputs/alphastomics"


def write_hostile_checkpoint(path: Path, kind: int) -> None:
    """Write some 28 MB whose pickle is nothing but small objects: lists, and random strings."""
    import torch

    rng = np.random.default_rng(0)
    texts = rng.integers(97, 123, (LISTS if kind == zipfile.ZIP_DEFLATED else 1, 8), np.uint8)
    lists = 10 * LISTS if kind == zipfile.ZIP_DEFLATED else 28_000_000
    prefix = np.tile(np.frombuffer(b"X\x08\0\0\0", np.uint8), (len(texts), 1))
    sound = io.BytesIO()
    torch.save([], sound)
    with zipfile.ZipFile(sound) as source, zipfile.ZipFile(path, "w", kind) as archive:
        for member in source.namelist():
            if not member.endswith("data.pkl"):
                archive.writestr(member, source.read(member), zipfile.ZIP_STORED)
                continue
            with archive.open(member, "w", force_zip64=True) as file:
                file.write(b"\x80\x02](")
                file.write(np.concatenate([prefix, texts], axis=1).tobytes())
                file.write(b"]" * lists)
                file.write(b"e.")


def checkpoints(checkout: Path, folder: Path, _cells: int) -> dict[str, Any]:
    """Refuse checkpoints whose pickle is compressed or all opcodes, and an export of 400 layers."""
    model = small_model(checkout, folder, 50)
    rows: dict[str, Any] = {}
    for name, kind in (("deflated", zipfile.ZIP_DEFLATED), ("stored", zipfile.ZIP_STORED)):
        path = folder / f"{name}.ckpt"
        write_hostile_checkpoint(path, kind)
        given = ("--input_data", folder / "slices/slice_0.h5ad", "--output", folder / "o.h5ad")
        found = run(checkout, "extract", "--checkpoint", path, *given)
        rows[f"checkpoint, {name} pickle"] = {**found, "mb": round(path.stat().st_size / 1e6, 1)}
    rows["export of 400 layers"] = run(checkout, model / "export", code=HOSTILE_EXPORT)
    rows["the same command, sound"] = required(checkout, "extract", "--checkpoint",
        model / "checkpoints/last.ckpt", *given)  # fmt: skip
    return rows


HOSTILE_EXPORT = f"""
import json, shutil, sys
from pathlib import Path
from alphastomics.diffusion_model import checkpoint
folder = Path(sys.argv[1])
metadata = json.loads((folder / "config.json").read_text())
metadata["config"]["model"].update({HOSTILE_NETWORK})
if metadata.pop(checkpoint.CHECKSUM_KEY, None):
    metadata[checkpoint.CHECKSUM_KEY] = checkpoint.digest(metadata)
(folder / "config.json").write_text(json.dumps(metadata))
try:
    checkpoint.load_module(folder)
except Exception as error:
    sys.exit(f"alphastomics: {{type(error).__name__}} {{error}}")
"""


def samples(checkout: Path, folder: Path, cells: int) -> dict[str, Any]:
    """Place cells of 1,000 genes with more and more samples."""
    model = small_model(checkout, folder, 1000)
    required(checkout, "simulate", "--output_dir", folder / "query", "--cells", cells,
             "--slices", 1, "--genes", 1000)  # fmt: skip
    rows = {}
    for number in (1, 4, 16):
        rows[f"{cells:,} cells, {number} samples"] = required(
            checkout, "sample", "--checkpoint", model / "checkpoints/last.ckpt",
            "--input_data", folder / "query/slice_0.h5ad", "--sample_mode", "expr_to_pos",
            "--num_samples", number, "--num_steps", 2, "--output", folder / f"{number}.h5ad",
        )  # fmt: skip
    return rows


def write_cells(path: Path, cells: int, genes: int, slices: int) -> None:
    """Write sparse counts, with the slices in one file."""
    import anndata
    from scipy.sparse import random as random_counts

    rng = np.random.default_rng(0)
    counts = random_counts(cells, genes, 1e-3, format="csr", dtype=np.float32, rng=rng)
    counts.data = np.ceil(counts.data * 5)
    data = anndata.AnnData(counts.tocsr())
    data.obs_names = [f"{path.stem}_{row}" for row in range(cells)]
    data.var_names = [f"g{number}" for number in range(genes)]
    if slices > 1:
        data.obs["slice_id"] = [f"s{row % slices:04d}" for row in range(cells)]
    data.obsm["spatial"] = rng.normal(0, 100, (cells, 2))
    path.parent.mkdir(parents=True, exist_ok=True)
    data.write_h5ad(path)


def slices_in_one_file(checkout: Path, folder: Path, _cells: int) -> dict[str, Any]:
    """Preprocess 2,000 slices of 20,000 genes, 50 cells each."""
    path = folder / "in/all.h5ad"
    write_cells(path, 100_000, 20_000, 2000)
    found = required(checkout, "preprocess", "--input_dir", path.parent, "--output_dir",
                     folder / "out", "--storage", "sparse")  # fmt: skip
    sizes = {
        name: round((folder / "out" / name).stat().st_size / 1e6, 1)
        for name in ("scaling.npz", "_intermediate_slices/statistics.npz")
    }
    return {
        "2,000 slices x 20,000 genes": {
            **found, "input_mb": round(path.stat().st_size / 1e6, 1), "output_mb": sizes
        }
    }  # fmt: skip


def files_by_slice(checkout: Path, folder: Path, _cells: int) -> dict[str, Any]:
    """Preprocess 100 and 400 files into layout `slice`."""
    rows = {}
    for number in (100, 400):
        source = folder / f"in{number}"
        for index in range(number):
            write_cells(source / f"s{index:04d}.h5ad", 100, 50, 1)
        rows[f"{number} files, layout slice"] = required(
            checkout, "preprocess", "--input_dir", source, "--output_dir",
            folder / f"out{number}", "--layout", "slice",
        )  # fmt: skip
    return rows


READING = """
import sys, time
from alphastomics.preprocessing.batch_loader import create_dataloaders
for streaming in (False, True):
    loader, _, _ = create_dataloaders(
        sys.argv[1], batch_size=500, streaming=streaming, num_workers=0, set_size=50,
        set_draw="slice",
    )
    for epoch in (1, 2):
        begun = time.perf_counter()
        cells = sum(int(batch.node_mask.sum()) for batch in loader)
        seconds = time.perf_counter() - begun
        name = "streaming" if streaming else "in memory"
        print(f"stage 0, {name} epoch {epoch}: {cells} cells in {seconds:.2f} s", file=sys.stderr)
"""


def reading_slices(checkout: Path, folder: Path, _cells: int) -> dict[str, Any]:
    """Read 2,000 slices of 50 cells in layout `slice`, in memory and streaming, twice each."""
    write_cells(folder / "in/all.h5ad", 100_000, 100, 2000)
    required(checkout, "preprocess", "--input_dir", folder / "in", "--output_dir", folder / "out",
             "--layout", "slice")  # fmt: skip
    return {"2,000 slices, reading": run(checkout, folder / "out", code=READING)}


CASES = {
    "checkpoints": checkpoints,
    "samples": samples,
    "slices": slices_in_one_file,
    "files": files_by_slice,
    "reading": reading_slices,
}


def main() -> None:
    """Measure what was asked for, and print one line per command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--against", type=Path)
    parser.add_argument("--cells", type=int, default=50_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    libraries = ("torch", "anndata", "pyarrow", "numpy")
    print(platform.platform(), {name: version(name) for name in libraries})
    results: dict[str, Any] = {}
    for checkout in [ROOT, *([arguments.against.resolve()] if arguments.against else [])]:
        for name in arguments.only:
            with tempfile.TemporaryDirectory() as folder:
                rows = CASES[name](checkout, Path(folder), arguments.cells)
            for row, values in rows.items():
                print(f"{checkout.name} {row}: {values}", flush=True)
            results.setdefault(checkout.name, {}).update(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
