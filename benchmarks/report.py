"""The report's page: how long it takes to build, how large it is, and how soon a browser shows it.

`python benchmarks/report.py [--points 100000 200000] [--genes 500]`. No network is run: the cells
are made up, and everything that a page can hold is there. With Chromium and playwright it also says
how long the page takes to open, to draw 2 x N points and to change their colours (in software: on a
machine with a GPU it is faster).
"""

import argparse
import platform
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path as FilePath

import numpy as np
import pyarrow as pa

from alphastomics.generation.cells import InputCells
from alphastomics.report.findings import (
    Curve,
    Findings,
    Inside,
    NewTissue,
    Path,
    PredictedPositions,
)
from alphastomics.report.page import render
from alphastomics.report.prepare import MOST_POINTS, page_data

FLAGS = ["--no-sandbox", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
MOST_SECONDS = 300


def made_up(points: int, genes: int) -> Findings:
    """Cells of one slice with sparse counts, and everything that could be found about them."""
    random = np.random.default_rng(0)
    position = random.normal(size=(points, 3)).astype(np.float32) * 1000
    position[:, 2] = 0
    waves = np.sin(position[:, :1] / np.linspace(200, 2000, genes)).astype(np.float32)
    expression = random.poisson(np.exp(waves - 1)).astype(np.float32)
    types = np.array([f"type {number}" for number in range(24)], dtype=object)
    cells = InputCells(
        expression=expression,
        measured=np.ones((1, genes), dtype=bool),
        position=position,
        dims=2,
        slice_id=np.zeros(points, dtype=np.int64),
        slice_names=["slice"],
        obs_name=pa.array([str(number) for number in range(points)]),
        cell_type=types[random.integers(0, 24, points)],
    )
    std = random.uniform(20, 80, points).astype(np.float32)
    shift = random.normal(size=(points, 3)).astype(np.float32) * std[:, None]
    shift[:, 2] = 0
    rows = np.arange(3000)
    noise = random.normal(size=(30, 3000, 3)).astype(np.float32)
    return Findings(
        "benchmark",
        [("Cells", str(points))],
        cells,
        [f"gene {number}" for number in range(genes)],
        PredictedPositions(position + shift, np.linalg.norm(shift, axis=1), std),
        np.exp(waves - 1),
        NewTissue(position + shift, expression, np.arange(points)),
        Path(rows, np.linspace(1, 1 / 30, 30), noise * 1000, noise * 500),
        Inside(
            rows,
            np.array([0.1, 0.5, 0.9]),
            random.dirichlet(np.ones(8), (3, 6)),
            random.dirichlet(np.ones(25), (3, 6)),
            random.uniform(0.5, 2, (6, 3000)).astype(np.float32),
        ),
        {"expr_to_pos": {"alphastomics": {"spearman_mean": 0.5}}},
        {"train/loss": Curve(np.arange(1000.0), np.ones(1000))},
    )


def browser_seconds(path: FilePath) -> dict[str, float]:
    """Open the page, look at the first tissues, and choose a gene."""
    from playwright.sync_api import sync_playwright

    found = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": 1366, "height": 820})
        page.set_default_timeout(MOST_SECONDS * 1000)
        start = time.perf_counter()
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-state=ready]")
        found["open"] = time.perf_counter() - start
        start = time.perf_counter()
        page.eval_on_selector("#positions", "e => e.scrollIntoView()")
        page.wait_for_selector("#positions .plot[data-state=drawn]")
        found["draw"] = time.perf_counter() - start
        start = time.perf_counter()
        page.select_option("#positions select.colour", index=5)
        page.wait_for_function(
            "document.querySelector('#positions .plot').dataset.colour.startsWith('gene')"
        )
        found["recolour"] = time.perf_counter() - start
        browser.close()
    return found


def main() -> None:
    """Print one row a size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, nargs="+", default=[100_000, 200_000])
    parser.add_argument("--genes", type=int, default=500)
    arguments = parser.parse_args()
    versions = ", ".join(f"{name} {version(name)}" for name in ("plotly", "numpy"))
    print(f"Python {platform.python_version()}, {versions}")
    print("| points | genes on the page | data | page | file | open | draw | recolour |")
    print("|---|---|---|---|---|---|---|---|")
    for points in arguments.points:
        findings = made_up(points, arguments.genes)
        # Processor time of all threads: other programs may be at work.
        start = time.process_time()
        data = page_data(findings, 1, [], MOST_POINTS)
        middle = time.process_time()
        text = render(data)
        end = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            path = FilePath(folder) / "page.html"
            path.write_text(text, encoding="utf-8")
            seen = browser_seconds(path) if shutil.which("chromium") else {}
            size = path.stat().st_size / 1e6
        times = " | ".join(
            f"{seen[name]:.1f} s" if name in seen else "-" for name in ("open", "draw", "recolour")
        )
        print(
            f"| {points:,} | {len(data['genes'])} of {arguments.genes} | {middle - start:.1f} s | "
            f"{end - middle:.1f} s | {size:.1f} MB | {times} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
