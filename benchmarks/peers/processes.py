"""Methods of a task enter; each runs in a process of its own, and rows of scores leave.

A row says what a method scored on a set, its seconds and the largest memory of its process. Rows
are kept in a JSON file, which several calls may fill: from several environments, or seed by seed.
"""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

Row = dict[str, Any]
POLL_SECONDS = 0.2
MB_PER_GB = 1024


class Method(NamedTuple):
    """A method: what it is called with, and the package that it needs.

    `run` takes what `read` of the task returns, and a seed.
    """

    run: Callable[[Any, int], Any]
    package: str | None = None
    module: str | None = None

    def is_installed(self) -> bool:
        """Say whether the package that the method needs can be imported."""
        return self.module is None or importlib.util.find_spec(self.module) is not None


class Task(NamedTuple):
    """A task: its methods, its sets, how a set is read, and how a prediction is scored."""

    module: str
    methods: dict[str, Method]
    sets: list[str]
    read: Callable[[Path, str, int], Any]
    score: Callable[[Any, Any, int], Row]
    shown: tuple[str, ...]


def measure(task: Task, folder: Path, name: str, method: str, seed: int) -> Row:
    """Run one method on one set in this process: only the method itself is timed."""
    problem = task.read(folder, name, seed)
    Path("/proc/self/clear_refs").write_text("5", "utf-8")  # the peak is counted from here
    begun, processor = time.perf_counter(), time.process_time()
    prediction = task.methods[method].run(problem, seed)
    used = {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - processor}
    used["peak_mb"] = memory_mb("self", "VmHWM")
    return {"scores": task.score(problem, prediction, seed), **used}


def memory_mb(process: str, field: str) -> float:
    """Return the resident size of a process, now (VmRSS) or at its largest (VmHWM)."""
    lines = Path(f"/proc/{process}/status").read_text("utf-8").splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), 0.0)


def run_process(command: list[str], limit: float, memory_gb: float) -> str | None:
    """Run a command to its end; return why it failed, or None."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        end = time.monotonic() + limit
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            too_long = time.monotonic() > end
            if too_long or memory_mb(str(process.pid), "VmRSS") > memory_gb * MB_PER_GB:
                process.kill()
                process.wait()
                return f"more than {limit / 60:g} minutes" if too_long else f"over {memory_gb:g} GB"
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    if process.returncode:
        return lines[-1][:200] if lines else f"exit status {process.returncode}"
    return None


def key_of(row: Row) -> tuple[str, str, str, int]:
    """Return what a row is about."""
    return row["task"], row["set"], row["method"], row["seed"]


def run_all(task: Task, arguments: argparse.Namespace) -> list[Row]:
    """Run every method on every set and seed, one after the other; keep the rows as they come."""
    rows: dict[Any, Row] = {}
    if arguments.json and arguments.json.exists():
        rows = {key_of(row): row for row in json.loads(arguments.json.read_text("utf-8"))}
    for method, seed, name in (
        (method, seed, name)
        for method in arguments.methods
        for seed in arguments.seeds
        for name in arguments.sets
    ):
        chosen = task.methods[method]
        if not chosen.is_installed():
            print(f"{method}: left out, {chosen.package} is not installed", flush=True)
            continue
        row: Row = {"task": task.module, "set": name, "method": method, "seed": seed}
        if key_of(row) in rows and not arguments.again:
            continue
        row |= run_one(task, arguments, name, method, seed)
        row |= {"versions": versions_of(chosen), "date": date.today().isoformat()}
        rows[key_of(row)] = row
        print(described(row, task.shown), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(list(rows.values()), indent=1), "utf-8")
    return [row for row in rows.values() if row["task"] == task.module]


def run_one(task: Task, arguments: argparse.Namespace, name: str, method: str, seed: int) -> Row:
    """Run one method on one set in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "row.json"
        command = [sys.executable, "-m", f"benchmarks.peers.{task.module}", str(arguments.data)]
        command += ["--one", name, method, str(seed), "--json", str(target)]
        failed = run_process(command, arguments.limit, arguments.memory)
        return {"failed": failed} if failed else json.loads(target.read_text("utf-8"))


def versions_of(method: Method) -> dict[str, str]:
    """Return the versions that a row was made with."""
    names = ["torch", "numpy", "scikit-learn", *([method.package] if method.package else [])]
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def described(row: Row, shown: tuple[str, ...]) -> str:
    """Say what a row found."""
    start = f"{row['set']:<28}{row['method']:<28}seed {row['seed']}: "
    if "failed" in row:
        return f"{start}failed: {row['failed']}"
    scores = []
    for name, values in row["scores"].items():
        figures = " ".join(f"{values[key]:.4f}" for key in shown if key in values)
        scores.append(f"{name} {figures}")
    used = (
        f"{row['seconds']:.0f} s ({row['cpu_seconds']:.0f} of processor), {row['peak_mb']:.0f} MB"
    )
    return f"{start}{'; '.join(scores)}; {used}"


def table(rows: list[Row], shown: tuple[str, ...]) -> str:
    """Return the means over seeds, one line per set, test slice and method."""
    lines = [f"| set | test | method | {' | '.join(shown)} | seconds | GB | seeds |"]
    lines += ["|---" * (6 + len(shown)) + "|"]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["set"], row["method"]), []).append(row)
    for (name, method), group in groups.items():
        done = [row for row in group if "failed" not in row]
        if not done:
            empty = " | " * (len(shown) + 2)
            lines.append(f"| {name} | | {method} | {group[0]['failed']}{empty} | {len(group)} |")
            continue
        cost = f"{mean_of(done, 'seconds'):.0f} | {mean_of(done, 'peak_mb') / MB_PER_GB:.1f}"
        for test in done[0]["scores"]:
            scores = [row["scores"][test] for row in done]
            figures = " | ".join(f"{mean_of(scores, key):.3f}" for key in shown)
            lines.append(f"| {name} | {test} | {method} | {figures} | {cost} | {len(done)} |")
    return "\n".join(lines)


def mean_of(rows: list[Row], key: str) -> float:
    """Return the mean of a figure over rows that have it; NaN where none has."""
    return float(np.mean([row[key] for row in rows if key in row] or [np.nan]))


def main(task: Task, description: str) -> None:
    """Run what was asked for; the command line of every task."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("data", type=Path, help="folder with the slices as h5ad files")
    parser.add_argument("--methods", nargs="+", default=list(task.methods), choices=task.methods)
    parser.add_argument("--sets", nargs="+", default=task.sets)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--limit", type=float, default=3600, help="seconds a method may take")
    parser.add_argument("--memory", type=float, default=16, help="GB a method may take")
    parser.add_argument("--again", action="store_true", help="run rows that are in the file again")
    parser.add_argument("--json", type=Path, help="rows are read from here, and added")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.one:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
        name, method, seed = arguments.one
        row = measure(task, arguments.data, name, method, int(seed))
        arguments.json.write_text(json.dumps(row), "utf-8")
        return
    print(table(run_all(task, arguments), task.shown))
