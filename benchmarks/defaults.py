"""Defaults on real slices: nothing set, every task, beside every baseline.

    python benchmarks/defaults.py DATA --seeds 0 1 2 --jobs 1 --json out.json

DATA is a folder with the slices as h5ad files, anywhere below it. Each line of SETS names training
slices, test slices and what the user would say (a common frame, 3D). A set with one slice hides a
random fifth of its cells. Every (set, seed) is a process of its own; rows are shuffled first.

Regressors take as long as the training and no GPU: `--part model` leaves them out (the verdict's
too, which change no model), `--part baselines` trains the model for one update and keeps the
baselines alone. `--hidden` hides a fifth of each training slice and scores new tissue beside it,
with every figure of realism. `--anchors` adds what `benchmarks/anchors.py` measures, by the same
trained models. `--set position_head_updates=12000` sets by hand what is to be compared with the
defaults; `--part positions` with it trains what estimates of positions come from, and scores these
alone.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import torch
import yaml

from alphastomics import AlphaSTomics, __version__, fit
from alphastomics.evaluation.methods import MODEL, MODEL_SAMPLE
from alphastomics.generation import baselines
from alphastomics.generation.baselines import TREE_CELLS
from alphastomics.generation.evaluate import evaluate
from alphastomics.generation.predict import predict_cells
from alphastomics.generation.training_cells import training_cells
from alphastomics.utils.metrics import position_scores

FEWEST_TREE_CELLS = 50
anndata.settings.allow_write_nullable_strings = True
SETS: dict[str, dict[str, Any]] = {
    "embryo2 -> embryo1": {
        "train": ["embryo2_z2", "embryo2_z5"],
        "test": ["embryo1_z2", "embryo1_z5"],
    },
    "embryo1 -> embryo2": {
        "train": ["embryo1_z2", "embryo1_z5"],
        "test": ["embryo2_z2", "embryo2_z5"],
    },
    "embryos, a fifth hidden": {
        "train": ["embryo1_z2", "embryo1_z5", "embryo2_z2", "embryo2_z5"],
        "test": [],
    },
    "Moffitt -0.09 -> -0.29": {"train": ["animal1_bregma-0.09"], "test": ["animal1_bregma-0.29"]},
    "slab0 + slab1 -> slab2": {"train": ["slab0", "slab1"], "test": ["slab2"]},
    "serial 0.04 + 0.14 -> 0.09": {
        "train": ["section_0.04", "section_0.14"],
        "test": ["section_0.09"],
        "common_frame": True,
        "position": "spatial3d",
    },
    "osmFISH, a fifth hidden": {"train": ["ssctx"], "test": []},
    "BY3, a fifth hidden": {"train": ["BY3"], "test": []},
    "fly, a fifth hidden": {"train": ["embryo_stage5"], "test": []},
}
SHOWN = {
    "expr_to_pos": (
        "spearman_mean",
        "contact_precision_10pct",
        "knn_preservation",
        "procrustes",
        "std_error_spearman",
        "std_coverage",
        "std_coverage_expected",
    ),
    "pos_to_expr": ("pearson_gene_mean", "expression_mse"),
    "joint": ("auc_cells",),
}


def read_slice(folder: Path, name: str, seed: int) -> anndata.AnnData:
    """Read one slice, its rows in an order of ours."""
    found = sorted(folder.rglob(f"{name}.h5ad"))
    if not found:
        raise SystemExit(f"{folder}: no {name}.h5ad below it")
    data = anndata.read_h5ad(found[0])
    data.obs["slice_id"] = name
    return data[np.random.default_rng(seed).permutation(data.n_obs)].copy()


def slices_of(
    folder: Path, chosen: dict[str, Any], seed: int, *, hidden: bool
) -> tuple[list[Any], list[Any]]:
    """Return training and test slices; of a single slice, or if asked, some cells are hidden."""
    train = [read_slice(folder, name, seed) for name in chosen["train"]]
    test = [] if hidden else [read_slice(folder, name, seed + 1) for name in chosen["test"]]
    for data in [*train, *test]:
        data.obsm["spatial"] = np.asarray(data.obsm[chosen.get("position", "spatial")])
    if not test:
        test = [data[: data.n_obs // 5].copy() for data in train]
        train = [data[data.n_obs // 5 :].copy() for data in train]
    return train, test


def run_one(
    folder: Path,
    name: str,
    seed: int,
    part: str,
    by_hand: dict[str, Any],
    *,
    hidden: bool,
    anchors: bool,
) -> dict[str, Any]:
    """Train with nothing set, or some settings, and score all tasks on the test slices."""
    chosen = SETS[name]
    train, test = slices_of(folder, chosen, seed, hidden=hidden)
    settings: dict[str, Any] = {"common_frame": True} if chosen.get("common_frame") else {}
    settings |= by_hand
    if part == "baselines":
        settings |= {"max_epochs": 1, "position_head_updates": 1}
    if part == "positions":
        return positions_alone(train, test, seed, settings)
    tree_cells = TREE_CELLS
    if part == "model":
        tree_cells = fit.VERDICT_TREE_CELLS = baselines.REGRESSION_CELLS = FEWEST_TREE_CELLS
    model = AlphaSTomics(train, seed=seed, **settings)
    begun = time.perf_counter()
    model.train()
    result: dict[str, Any] = {"seconds": time.perf_counter() - begun, "slices": {}}
    trained = model._trained()
    result["verdict"] = trained.record.get("verdict", {}).get("sentences", [])
    known = training_cells(trained.module, trained.genes)
    for data in test:
        cells = model._cells(data, model.config)
        scores = evaluate(trained.module, cells, known, model.config.sampling, seed, tree_cells)
        result["slices"][str(data.obs["slice_id"].iloc[0])] = {
            mode: {
                method: {
                    key: value
                    for key, value in values.items()
                    if key in SHOWN[mode] or (hidden and mode == "joint")
                }
                for method, values in methods.items()
                if part == "all" or is_of(part, method)
            }
            for mode, methods in scores.items()
        }
    if anchors and chosen["test"]:
        from benchmarks.anchors import scores_with_anchors  # which takes the sets from here

        result["anchors"] = scores_with_anchors(model, train, test, seed)
    return result


def positions_alone(
    train: list[Any], test: list[Any], seed: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Train the position head, hardly anything else, and score the estimate of positions."""
    begun = time.perf_counter()
    few = {"expression": {"updates": 20}}
    model = AlphaSTomics(train, few, seed=seed, **(settings | {"max_epochs": 1})).train()
    result: dict[str, Any] = {"seconds": time.perf_counter() - begun, "verdict": [], "slices": {}}
    for data in test:
        cells = model._cells(data, model.config)
        sampling = model.config.sampling.model_copy(update={"estimator": "mean", "num_steps": 1})
        module = model._trained().module
        position = predict_cells(module, cells, "expr_to_pos", sampling, seed).generated.position
        assert cells.position is not None
        pair = (part[:, : cells.dims].astype(np.float32) for part in (position, cells.position))
        scores = position_scores(*pair)
        shown = {key: scores[key] for key in SHOWN["expr_to_pos"] if key in scores}
        result["slices"][str(data.obs["slice_id"].iloc[0])] = {"expr_to_pos": {MODEL: shown}}
    return result


def is_of(part: str, method: str) -> bool:
    """Say whether a method belongs to what was asked for."""
    if part == "model":
        return method not in (*baselines.REGRESSORS, baselines.SMOOTHED_TREES)
    return method not in (MODEL, MODEL_SAMPLE)


def run_all(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run every set and seed, some side by side."""
    waiting = [(name, seed) for seed in arguments.seeds for name in arguments.sets]
    running: list[tuple[str, int, Path, subprocess.Popen[bytes]]] = []
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as place:
        while waiting or running:
            while waiting and len(running) < arguments.jobs:
                name, seed = waiting.pop(0)
                target = Path(place) / f"{len(results)}-{len(waiting)}.json"
                command = [sys.executable, __file__, str(arguments.data), "--one", name]
                command += ["--seeds", str(seed), "--json", str(target), "--part", arguments.part]
                command += ["--hidden"] if arguments.hidden else []
                command += ["--anchors"] if arguments.anchors else []
                command += ["--set", *arguments.set] if arguments.set else []
                running.append((name, seed, target, subprocess.Popen(command)))
            for item in [item for item in running if item[3].poll() is not None]:
                running.remove(item)
                name, seed, target, process = item
                if process.returncode == 0:
                    results.setdefault(name, {})[str(seed)] = json.loads(target.read_text())
                    report_one(name, seed, results[name][str(seed)])
                    save(arguments, results)
                else:
                    print(f"{name}, seed {seed}: failed ({process.returncode})", flush=True)
            time.sleep(0.2)
    return results


def report_one(name: str, seed: int, result: dict[str, Any]) -> None:
    """Print what a run found."""
    print(f"== {name}, seed {seed}: {result['seconds']:.0f} s", *result["verdict"], sep="\n   ")
    for slice_name, modes in result["slices"].items():
        for mode, methods in modes.items():
            for method, values in methods.items():
                names = len(values) > len(SHOWN[mode])
                figures = " ".join(
                    f"{key} {value:.4f}" if names else f"{value:.4f}"
                    for key, value in values.items()
                )
                print(f"   {slice_name:<22}{mode:<12}{method:<24}{figures}", flush=True)


def save(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write what is known so far."""
    if arguments.json:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        content = {
            "versions": {
                "alphastomics": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "device": device,
            "jobs": arguments.jobs,
            "set": arguments.set,
            "results": results,
        }
        arguments.json.write_text(json.dumps(content, indent=1))


def table(results: dict[str, Any]) -> str:
    """Mean and deviation over seeds of every method's first figure."""
    lines = [
        "| set | slice | task | method | mean | std | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, seeds in results.items():
        first = next(iter(seeds.values()))
        for slice_name, modes in first["slices"].items():
            for mode, methods in modes.items():
                key = SHOWN[mode][0]
                for method in methods:
                    found = [
                        run["slices"][slice_name][mode][method][key]
                        for run in seeds.values()
                        if key in run["slices"][slice_name][mode].get(method, {})
                    ]
                    if found:
                        lines.append(
                            f"| {name} | {slice_name} | {mode} | {method} | {np.mean(found):.4f} | "
                            f"{np.std(found):.4f} | {len(found)} |"
                        )
    return "\n".join(lines)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--part", choices=("all", "model", "baselines", "positions"), default="all")
    parser.add_argument("--hidden", action="store_true", help="hide a fifth of training slices")
    parser.add_argument("--anchors", action="store_true", help="score with anchors, too")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="set by hand")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.one:
        by_hand = dict(word.split("=", 1) for word in arguments.set)
        settings = {key: yaml.safe_load(value) for key, value in by_hand.items()}
        chosen = arguments.data, arguments.one, arguments.seeds[0], arguments.part, settings
        result = run_one(*chosen, hidden=arguments.hidden, anchors=arguments.anchors)
        arguments.json.write_text(json.dumps(result))
        return
    print(table(run_all(arguments)))


if __name__ == "__main__":
    main()
