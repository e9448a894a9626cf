"""Check the wheel on every Python here, with the newest libraries that each allows.

    python benchmarks/python_matrix.py [PYTHON ...] [--largest_download 300] [--torch 2.14.1]

Builds the wheel, installs it into a new environment of each Python (those of pyenv and of the PATH,
where none is named), runs the analysis on a small tissue and a part of the tests there, and prints
a row of docs/python-versions.md for each. Where torch and its libraries are a larger download than
allowed, everything that needs torch is left out, and the row says so. --torch pins a version, which
may be a smaller download than the newest; all other libraries stay the newest ones.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NEWEST = ("scanpy", "zarr", "numcodecs>=0.16.6")
TESTING = ("pytest", "pytest-timeout", "beartype", "hypothesis")
SHOWN = ("torch", "lightning", "anndata", "pandas", "numpy", "scanpy", "zarr")
# What torch brings, and what cannot be imported without it.
TORCH = re.compile(r"torch|triton|nvidia-|cuda-|lightning|pytorch-lightning|torchmetrics")
DATA_TESTS = (
    "tests/test_simulate.py",
    "tests/test_config.py",
    *(
        f"tests/preprocessing/test_{name}.py"
        for name in ("formats", "bad_formats", "usual_keys", "preprocess", "query_fit", "counts")
    ),
    "tests/pl/test_bad_input.py",
)
MODEL_TESTS = ("tests/pl", "tests/api/test_api.py", "tests/test_extract_h5ad.py")
DATA_SMOKE = """
from alphastomics.main import main
for line in (
    "simulate --output_dir slices --cells 60 --slices 2 --genes 24",
    "preprocess --input_dir slices --output_dir processed --cell_type_key cell_type",
):
    assert main(line.split()) == 0, line
import anndata, alphastomics.pl as pl
cells = anndata.read_h5ad("slices/slice_0.h5ad")
pl.tissue(cells, "cell_type")
pl.genes(cells, list(cells.var_names[:2]))
"""
MODEL_SMOKE = """
main("train --data_dir processed --exp_name mine --epochs 1".split())
line = "sample --checkpoint outputs/mine --input_data slices/slice_0.h5ad --output predicted.h5ad"
assert main([*line.split(), "--sample_mode", "expr_to_pos"]) == 0
assert main("sample --checkpoint outputs/mine --num_cells 50 --output new.h5ad".split()) == 0
predicted = anndata.read_h5ad("predicted.h5ad")
pl.positions(predicted, "cell_type")
pl.uncertainty(predicted)
pl.tissue(anndata.read_h5ad("new.h5ad"))
"""


def pythons() -> list[Path]:
    """Find one interpreter of every Python that the package allows, the oldest first."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    folders += sorted((Path.home() / ".pyenv" / "versions").glob("*/bin"))
    versions: dict[tuple[int, int], Path] = {}
    for folder in folders:
        for path in folder.glob("python3.*"):
            match = re.fullmatch(r"python3\.(\d+)", path.name)
            # A shim of pyenv runs only the version that is chosen.
            if match and int(match[1]) >= 11 and "shims" not in path.parts:
                versions.setdefault((3, int(match[1])), path)
    return [versions[key] for key in sorted(versions)]


def run(*words: object, cwd: Path | None = None, **environment: str) -> str:
    """Run a program and return what it printed; the end of that is the error."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**os.environ, "MPLBACKEND": "agg", "PYTHONPATH": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-3000:])
    return done.stdout


def resolution(python: Path, wheel: Path, torch: str | None) -> list[dict[str, Any]]:
    """Ask pip which files it would install for the wheel and the newest libraries."""
    words = ("-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-")
    pinned = () if torch is None else (f"torch=={torch}",)
    report = run(python, *words, wheel, *NEWEST, *TESTING, *pinned)
    return list(json.loads(report)["install"])


def megabytes(files: list[dict[str, Any]]) -> float:
    """Add up what would have to be downloaded; files of this machine cost nothing."""
    total = 0
    for file in files:
        url = file["download_info"]["url"]
        if url.startswith("https:"):
            request = urllib.request.Request(url, method="HEAD")
            with urllib.request.urlopen(request, timeout=60) as answer:
                total += int(answer.headers["Content-Length"])
    return total / 1e6


def check(python: Path, wheel: Path, folder: Path, largest: float, torch: str | None) -> str:
    """Install and test on one Python; return its row of the table."""
    run(python, "-m", "venv", folder)
    own = folder / "bin" / "python"
    run(own, "-m", "pip", "install", "--quiet", "--upgrade", "pip")
    files = resolution(own, wheel, torch)
    of_torch = [file for file in files if TORCH.match(file["metadata"]["name"].lower())]
    size = megabytes(of_torch)
    with_torch = size <= largest
    chosen = files if with_torch else [file for file in files if file not in of_torch]
    urls = [file["download_info"]["url"] for file in chosen]
    run(own, "-m", "pip", "install", "--quiet", "--no-deps", *urls)
    work = folder / "work"
    work.mkdir()
    run(own, "-c", DATA_SMOKE + MODEL_SMOKE * with_torch, cwd=work)
    # The tests without the package beside them: what is tested is the wheel.
    shutil.copytree(ROOT / "tests", folder / "checkout" / "tests")
    for name in ("pyproject.toml", "config.yaml"):
        shutil.copy(ROOT / name, folder / "checkout" / name)
    tests = (*DATA_TESTS, *MODEL_TESTS * with_torch)
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    summary = run(own, *words, cwd=folder / "checkout").strip().splitlines()[-1]
    versions = {file["metadata"]["name"].lower(): file["metadata"]["version"] for file in chosen}
    says = "everything" if with_torch else f"without torch ({size:.0f} MB)"
    name = run(own, "-c", "import platform; print(platform.python_version())").strip()
    cells = [name, *(versions.get(library, "not installed") for library in SHOWN), says, summary]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Read the command line, build the wheel, check every Python."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("python", nargs="*", type=Path, help="interpreters; all that are found")
    parser.add_argument("--largest_download", type=float, default=300, help="MB for torch")
    parser.add_argument("--torch", help="version of torch; the newest that pip finds")
    arguments = parser.parse_args()
    largest = arguments.largest_download
    print(f"| Python | {' | '.join(SHOWN)} | what was run | tests |")
    print(f"|{'---|' * (len(SHOWN) + 3)}")
    failed = False
    with tempfile.TemporaryDirectory(prefix="alphastomics-pythons-") as scratch:
        dist = Path(scratch) / "dist"
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", dist, ROOT)
        (wheel,) = dist.glob("*.whl")
        for number, python in enumerate(arguments.python or pythons()):
            try:
                row = check(python, wheel, Path(scratch) / str(number), largest, arguments.torch)
            except RuntimeError as error:
                failed = True
                row = f"{python}: {error}"
            print(row, flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
