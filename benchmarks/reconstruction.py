"""The public benchmark: train on some slices, place the cells of others, score beside the peers.

    python benchmarks/reconstruction.py DATA --seeds 0 1 2 --json out.json

DATA is a folder with the slices as h5ad files, anywhere below it. Without --train and --test it is
embryo2 (two planes) to embryo1 (two planes). Every slice is placed whole, scored in its own plane
at its true aspect ratio, mirror images allowed; rows are shuffled first, so that no score can come
from the order of the file.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import torch

from alphastomics import AlphaSTomics
from alphastomics.config_file import read_document
from alphastomics.evaluation.scores import position_scores

# pandas 3 reads names as nullable strings, which anndata writes only when told to.
anndata.settings.allow_write_nullable_strings = True
PUBLIC = (["embryo2_z2", "embryo2_z5"], ["embryo1_z2", "embryo1_z5"])
SHOWN = ("spearman_mean", "spearman_median", "contact_precision_10pct", "knn_preservation",
         "procrustes")  # fmt: skip
# LUNA's own model, noise and loss, 1000 steps, its best epoch, mean of 2 seeds (measured earlier on
# the same slices).
PEERS = {
    "embryo1_z2": {"LUNA": (0.288, 0.355, 0.248, 0.0100, 0.742)},
    "embryo1_z5": {"LUNA": (0.300, 0.385, 0.262, 0.0139, 0.726)},
}
STEPS = (1, 2, 5, 10, 20, 50, 200)


def read_slice(folder: Path, name: str, seed: int) -> anndata.AnnData:
    """Read one slice, its rows in an order of ours."""
    found = sorted(folder.rglob(f"{name}.h5ad"))
    if not found:
        raise SystemExit(f"{folder}: no {name}.h5ad below it; --train and --test name others")
    data = anndata.read_h5ad(found[0])
    return data[np.random.default_rng(seed).permutation(data.n_obs)].copy()


def score(model: AlphaSTomics, data: anndata.AnnData, **sampling: Any) -> dict[str, float]:
    """Place a slice's cells from their expression alone, and score the places."""
    true = np.asarray(data.obsm["spatial"], np.float32)
    begun = time.perf_counter()
    placed = model.predict_positions(data, **sampling)
    spent = time.perf_counter() - begun
    found = np.asarray(placed, np.float32)[:, : true.shape[1]]
    return {**position_scores(found, true, None), "seconds": spent}


def coverage(model: AlphaSTomics, data: anndata.AnnData, seed: int) -> dict[str, float]:
    """Compare the true error of the estimate with the spread that the draws state.

    A cell is covered when the truth, laid onto the estimate, is nearer than twice its spread.
    """
    true = np.asarray(data.obsm["spatial"], np.float64)
    placed = np.asarray(model.predict_positions(data, seed=seed, num_steps=20, num_samples=8))
    spread = np.linalg.norm(np.asarray(data.obsm["spatial_std"], np.float64), axis=1)
    placed = placed[:, : true.shape[1]] - placed[:, : true.shape[1]].mean(0)
    centred = true - true.mean(0)
    left, _, right = np.linalg.svd(centred.T @ placed)
    error = np.linalg.norm(centred @ left @ right - placed, axis=1)
    order = np.argsort(np.argsort(spread)), np.argsort(np.argsort(error))
    return {
        "rms_error": float(np.sqrt((error**2).mean())),
        "rms_spread": float(np.sqrt((spread**2).mean())),
        "covered_by_two_spreads": float((error < 2 * spread).mean()),
        "rank_correlation_of_spread_and_error": float(np.corrcoef(*order)[0, 1]),
    }


def run_seed(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train once, place every test slice."""
    settings = read_document(arguments.preset)
    slices = [read_slice(arguments.data, name, seed) for name in arguments.train]
    keywords: dict[str, Any] = dict(arguments.set)
    model = AlphaSTomics(slices, settings, global_seed=seed, **keywords)
    begun = time.perf_counter()
    model.train(arguments.epochs)
    result: dict[str, Any] = {"train_seconds": time.perf_counter() - begun, "slices": {}}
    for name in arguments.test:
        data = read_slice(arguments.data, name, seed + 1)
        products = {
            "estimate": score(model, data, seed=seed, num_steps=1, num_samples=8),
            "sample": score(model, data, seed=seed, product="sample", num_steps=20, num_samples=1),
        }
        if arguments.steps:
            for steps in STEPS:
                products[f"sample, {steps} steps"] = score(
                    model, data, seed=seed, product="sample", num_steps=steps, num_samples=1
                )
                products[f"mean of 8 samples, {steps} steps"] = mean_of_samples(
                    model, data, seed, steps
                )
            result.setdefault("calibration", {})[name] = coverage(model, data, seed)
        result["slices"][name] = products
    return result


def mean_of_samples(
    model: AlphaSTomics, data: anndata.AnnData, seed: int, steps: int
) -> dict[str, float]:
    """Average eight draws, each turned onto the first: the posterior mean the long way round."""
    true = np.asarray(data.obsm["spatial"], np.float32)
    draws = []
    for number in range(8):
        draw = model.predict_positions(
            data, seed=1000 * seed + number, product="sample", num_steps=steps, num_samples=1
        )
        draw = np.asarray(draw, np.float64)
        draw -= draw.mean(0)
        if draws:
            left, _, right = np.linalg.svd(draw.T @ draws[0])
            draw = draw @ left @ right
        draws.append(draw)
    found = np.mean(draws, 0).astype(np.float32)[:, : true.shape[1]]
    return position_scores(found, true, None)


def table(runs: dict[int, dict[str, Any]], test: list[str]) -> str:
    """Mean and deviation over seeds, beside the peers."""
    lines = ["| slice | method | Spearman mean | median | contact 10 % | 10-NN | Procrustes |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for name in test:
        for peer, figures in PEERS.get(name, {}).items():
            lines.append(f"| {name} | {peer} | " + " | ".join(f"{v:.4g}" for v in figures) + " |")
        for product in next(iter(runs.values()))["slices"][name]:
            found = np.array(
                [[run["slices"][name][product][key] for key in SHOWN] for run in runs.values()]
            )
            cells = [f"{m:.4f} ± {s:.4f}" for m, s in zip(found.mean(0), found.std(0), strict=True)]
            lines.append(f"| {name} | {product} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--preset", type=Path, default=Path("configs/reconstruct.yaml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--train", nargs="+", default=PUBLIC[0])
    parser.add_argument("--test", nargs="+", default=PUBLIC[1])
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--steps", action="store_true", help="also score 1 to 200 network calls")
    parser.add_argument("--set", nargs="*", default=[], help="settings, as key=value")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    pairs = [pair.partition("=")[::2] for pair in arguments.set]
    arguments.set = {key: json.loads(value) for key, value in pairs}
    return arguments


def main() -> None:
    """Run every seed and print the table."""
    arguments = parse()
    runs = {seed: run_seed(arguments, seed) for seed in arguments.seeds}
    print(table(runs, arguments.test))
    seconds = np.mean([run["train_seconds"] for run in runs.values()])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"training: {seconds:.0f} s a seed on {device}, torch {torch.__version__}")
    if arguments.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        content = {"settings": arguments.set, "device": device, **versions, "runs": runs}
        arguments.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
