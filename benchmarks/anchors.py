"""Anchors on real slices: scores and coverage by the share of cells whose position is known.

    python benchmarks/anchors.py DATA [--sets NAME ...] [--seeds 0 1 2] [--jobs 1] [--json out.json]

DATA and sets are those of `defaults.py`; every (set, seed) is a process of its own. A model is
trained with nothing set, and test slices are predicted without anchors, with anchors, assigned, and
by a k-NN on smoothed expression over the anchors alone; scores are of the cells that are no
anchors. Then another section gives the anchors: the other test slice where there is one, and the
first training slice. Expression at positions is scored with 10, 50 and 80 % of the slice known,
beside the spatial k-NN mean with its best k. `--brief` trains the diffusion network for one epoch
and the count model for 20 updates: samples without anchors are then left out; all else comes from
the position head, the anchors and the known cells.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from sklearn.decomposition import PCA
from sklearn.neighbors import KNeighborsRegressor

from alphastomics import AlphaSTomics, __version__
from alphastomics.attn_model.neighbourhood import smoothed_set
from alphastomics.evaluation.baselines import spatial_knn_mean
from alphastomics.evaluation.outline import outline_overlap
from alphastomics.evaluation.position import aligned
from alphastomics.generation.anchors import with_anchors
from alphastomics.generation.cells import InputCells, some_cells
from alphastomics.generation.frame import Reference
from alphastomics.generation.generate import Generated
from alphastomics.generation.known_positions import known_in_slice
from alphastomics.generation.predict import predict_cells, put_onto
from alphastomics.generation.radii import CURVE_LEVELS
from alphastomics.generation.section import beside_section, predict_beside_section
from alphastomics.utils.metrics import expression_scores, position_scores
from benchmarks.defaults import SETS, slices_of

SHARES = (0.01, 0.05, 0.2, 0.5)
# The share at which samples are scored, too.
SAMPLED = 0.05
KNOWN = (0.1, 0.5, 0.8)
PARTS = ("positions", "section", "expression")
LEVELS = (0.5, 0.8, 0.9, 0.95)
SHOWN = ("spearman_mean", "contact_precision_10pct", "knn_preservation")


def scores_of(position: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Score positions in the frame of the truth, by distances and by outline."""
    found = position_scores(position.astype(np.float32), true.astype(np.float32))
    result = {name: found[name] for name in SHOWN}
    return result | {"outline": float(outline_overlap(position[:, :2], true[:, :2]))}


def knn_of_anchors(cells: InputCells, known: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Predict by the anchors nearest in smoothed expression, of 10."""
    values = torch.from_numpy(cells.expression)
    smoothed = smoothed_set(values, rounds=3, neighbours=15, components=30).numpy()
    near = PCA(30 if values.shape[1] >= 30 else None, random_state=0)
    features = near.fit_transform(smoothed[:, -values.shape[1] :])
    model = KNeighborsRegressor(min(10, int(known.sum())), weights="distance")
    return model.fit(features[known], true[known]).predict(features)


def by_anchors(
    model: AlphaSTomics, cells: InputCells, estimate: Generated, share: float, seed: int
) -> dict[str, dict[str, float]]:
    """Score one slice with a share of anchors, from the model's estimate."""
    assert cells.position is not None
    true = cells.position.astype(np.float64)
    order = np.random.default_rng(seed).permutation(len(true))
    known = np.isin(np.arange(len(true)), order[: round(share * len(true))])
    query = replace(cells, anchors=np.where(known[:, None], true, np.nan))
    dims, rest = cells.dims, ~known

    def anchored(**settings: Any) -> Generated:
        chosen = model.config.sampling.model_copy(update=settings)
        return with_anchors(query, estimate, chosen, seed, reflection=True)

    found = anchored()
    result = {"mean": scores_of(found.position[rest, :dims], true[rest, :dims])}
    if share == SAMPLED:
        sample = anchored(estimator="sample").position
        result["sample"] = scores_of(sample[rest, :dims], true[rest, :dims])
    error = np.linalg.norm(found.position - true, axis=1)
    result["mean"] |= covered(found, error, rest)
    put = put_onto(query, found, None, seed)
    result["assigned"] = scores_of(put.position[rest, :dims], true[rest, :dims])
    near = knn_of_anchors(cells, known, true)
    result["k-NN of anchors"] = scores_of(near[rest, :dims], true[rest, :dims])
    return result


def covered(generated: Generated, error: np.ndarray, rest: np.ndarray) -> dict[str, float]:
    """Return the share of cells within their radii, by level, and the rank correlation of both."""
    radii = generated.radii
    if radii is None:  # the section gave the frame alone
        return {}
    assert radii.curve is not None
    held = {
        f"covered {level}": float((error <= radii.curve[CURVE_LEVELS.index(level)])[rest].mean())
        for level in LEVELS
    }
    return held | {"rank": float(spearmanr(error[rest], radii.radius[rest]).statistic)}


def by_section(
    model: AlphaSTomics, cells: InputCells, section: InputCells, seed: int
) -> dict[str, dict[str, float]]:
    """Score one slice in the frame of another section, whose cells are the anchors."""
    assert cells.position is not None
    assert section.position is not None
    true, dims = cells.position.astype(np.float64), cells.dims
    everything = np.ones(len(true), dtype=bool)
    reference = Reference(Path(section.slice_names[0]), section)
    module, settings = model._trained().module, model.config.sampling
    found = predict_beside_section(module, cells, reference, settings, seed)[1]
    moved = aligned(found.position[:, :dims], true[:, :dims], scale=False, reflection=True)
    error = np.linalg.norm(moved.numpy() - true[:, :dims], axis=1)
    put = put_onto(cells, found, reference, seed)
    both = beside_section(cells, section)
    known = np.arange(len(both.names)) >= len(true)
    near = knn_of_anchors(both, known, np.concatenate([true, section.position]))[: len(true)]
    return {
        "mean": scores_of(found.position[:, :dims], true[:, :dims])
        | covered(found, error, everything),
        "assigned": scores_of(put.position[:, :dims], true[:, :dims]),
        "k-NN of section": scores_of(near[:, :dims], true[:, :dims]),
    }


def expression_by_known(
    model: AlphaSTomics, cells: InputCells, share: float, seed: int
) -> dict[str, float]:
    """Predict expression with a share of the slice known, beside the best-k mean."""
    trained = model._trained()
    assert cells.position is not None
    order = np.random.default_rng(seed).permutation(len(cells.position))
    number = round(share * len(order))
    known, asked = (some_cells(cells, np.sort(rows)) for rows in (order[:number], order[number:]))
    found = predict_cells(
        trained.module, asked, "pos_to_expr", model.config.sampling, seed,
        known=known_in_slice(asked, known, "known"),
    ).generated  # fmt: skip
    assert asked.position is not None
    at = torch.as_tensor(asked.position[:, : cells.dims])
    true, measured = torch.as_tensor(asked.expression), torch.as_tensor(cells.measured[0])

    def r(values: Any) -> float:
        predicted = torch.as_tensor(np.asarray(values, dtype=np.float32))
        return expression_scores(predicted, true, measured, at)["pearson_gene_mean"]

    means = {
        k: r(
            spatial_knn_mean(asked.position, known.position, known.expression, cells.measured, k=k)
        )
        for k in (5, 10, 20, 50, 100)
    }
    intervals = found.intervals
    assert intervals is not None
    inside = (intervals.low <= asked.expression) & (asked.expression <= intervals.high)
    return {
        "alphastomics": r(found.expression),
        "best-k mean": max(means.values()),
        f"covered {intervals.level}": float(inside[:, cells.measured[0]].mean()),
    }


def run(folder: Path, name: str, seed: int, parts: Sequence[str], *, brief: bool) -> dict[str, Any]:
    """Train, and score every test slice by all shares."""
    chosen = SETS[name]
    train, test = slices_of(folder, chosen, seed, hidden=False)
    settings: dict[str, Any] = {"common_frame": True} if chosen.get("common_frame") else {}
    settings |= {"max_epochs": 1} if brief else {}
    few = {"expression": {"updates": 20}} if brief else None
    model = AlphaSTomics(train, few, seed=seed, **settings).train()
    alone = ("mean",) if brief else ("mean", "sample")
    return scores_with_anchors(model, train, test, seed, alone, parts)


def scores_with_anchors(
    model: AlphaSTomics,
    train: list[Any],
    test: list[Any],
    seed: int,
    estimators: tuple[str, ...] = ("mean", "sample"),
    parts: Sequence[str] = PARTS,
) -> dict[str, Any]:
    """Score every test slice of a trained model by all shares."""
    result: dict[str, Any] = {}
    for number, data in enumerate(test):
        cells = model._cells(data, model.config)
        slice_name = str(data.obs["slice_id"].iloc[0])
        assert cells.position is not None
        predicted = {
            estimator: predict_cells(
                model._trained().module, cells, "expr_to_pos",
                model.config.sampling.model_copy(update={"estimator": estimator}), seed,
            ).generated
            for estimator in estimators
        }  # fmt: skip
        true = cells.position[:, : cells.dims]
        alone = {
            name: scores_of(part.position[:, : cells.dims], true)
            for name, part in predicted.items()
        }
        shares = {
            share: by_anchors(model, cells, predicted["mean"], share, seed) for share in SHARES
        }
        shown = KNOWN if "expression" in parts else ()
        known = {share: expression_by_known(model, cells, share, seed) for share in shown}
        others = [*(test[1 - number :][:1] if len(test) == 2 else []), train[0]]
        others = others if "section" in parts else []
        sections = [model._cells(other, model.config) for other in others]
        result[slice_name] = {
            "positions": {0: alone, **shares},
            "section": {
                section.slice_names[0]: by_section(model, cells, section, seed)
                for section in sections
            },
            "expression": known,
        }
        show(slice_name, result[slice_name])
    return result


def show(name: str, result: dict[str, Any]) -> None:
    """Print the scores of a slice."""
    for share, methods in result["positions"].items():
        for method, scores in methods.items():
            values = ", ".join(f"{key} {value:.3f}" for key, value in scores.items())
            print(f"{name}, {100 * share:g} % anchors, {method}: {values}", flush=True)
    for section, methods in result["section"].items():
        for method, scores in methods.items():
            values = ", ".join(f"{key} {value:.3f}" for key, value in scores.items())
            print(f"{name}, section {section}, {method}: {values}", flush=True)
    for share, scores in result["expression"].items():
        values = ", ".join(f"{key} {value:.3f}" for key, value in scores.items())
        print(f"{name}, {100 * share:g} % known: r by gene {values}", flush=True)


def run_all(asked: argparse.Namespace) -> None:
    """Run every set and seed, some side by side; JSON is written after each."""
    waiting = [(name, seed) for seed in asked.seeds for name in asked.sets]
    running: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
    results: dict[str, Any] = {"version": __version__, "torch": torch.__version__, "runs": {}}
    with tempfile.TemporaryDirectory() as place:
        while waiting or running:
            while waiting and len(running) < asked.jobs:
                name, seed = waiting.pop(0)
                target = Path(place) / f"{len(waiting)}.json"
                command = [sys.executable, __file__, str(asked.data), "--one", name]
                command += ["--seeds", str(seed), "--json", str(target)]
                command += ["--parts", *asked.parts, *(["--brief"] if asked.brief else [])]
                running.append((f"{name}, seed {seed}", target, subprocess.Popen(command)))
            for item in [item for item in running if item[2].poll() is not None]:
                running.remove(item)
                run_name, target, process = item
                if process.returncode:
                    print(f"{run_name}: failed ({process.returncode})", flush=True)
                    continue
                results["runs"][run_name] = json.loads(target.read_text())
                if asked.json:
                    asked.json.write_text(json.dumps(results, indent=1))
            time.sleep(0.2)


def main() -> None:
    """Run the sets that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    tested = [name for name in SETS if SETS[name]["test"]]
    parser.add_argument("--sets", nargs="+", default=tested, choices=tested)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--brief", action="store_true", help="one epoch of the diffusion network")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        found = run(asked.data, asked.one, asked.seeds[0], asked.parts, brief=asked.brief)
        asked.json.write_text(json.dumps(found))
        return
    run_all(asked)


if __name__ == "__main__":
    main()
