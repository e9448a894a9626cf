"""Virtual sections: trained on sections 0.04 and 0.14 of one animal, compared with 0.09 between.

    python benchmarks/virtual_section.py DATA --seeds 0 1 2 --json out.json

DATA is a folder with the aligned sections as h5ad files, anywhere below it. Two questions: what the
posterior mean of expression at the true positions of 0.09 is worth beside means of the nearest
cells of both neighbours; and how much a section with positions of its own is like the true one,
beside the nearest measured section.
"""

import argparse
import json
import platform
import shutil
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alphastomics import __version__
from alphastomics.config import Config
from alphastomics.config.auto import with_settings
from alphastomics.config.file import parse_document
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.train import TrainRequest, train
from alphastomics.evaluation.baselines import spatial_knn_mean
from alphastomics.evaluation.clusters import TypedCells
from alphastomics.evaluation.expression import gene_correlations
from alphastomics.evaluation.outline import occupied, spacings
from alphastomics.evaluation.registry import tissue_scores
from alphastomics.evaluation.tissue import Tissue, type_neighbour_distance, type_share_distance
from alphastomics.fit import plan_for
from alphastomics.generation.cells import InputCells, in_unit, unit_of
from alphastomics.generation.commands import load_for_use
from alphastomics.generation.sources import read_cells
from alphastomics.generation.training_cells import predict_from_context, training_cells
from alphastomics.generation.virtual_sections import Sections, sample_sections
from alphastomics.main import main as alphastomics

BELOW, BETWEEN, ABOVE = "section_0.04", "section_0.09", "section_0.14"
SPACING = 100  # µm from the one below to the one above
NEIGHBOURS = (5, 10, 20, 50, 100, 200, 400)
DENSITY_BOX = 100.0  # µm
FEW = {"training.max_epochs": 1, "training.position_head_updates": 1}
SHOWN = (
    "type_share_distance",
    "type_neighbour_distance",
    "moran_correlation",
    "moran_error",
    "wasserstein_mean",
    "correlation_slope",
    "auc_cells",
    "auc_niches",
)


def trained(folder: Path, scratch: Path, seed: int) -> tuple[AlphaSTomicsModule, list[str], Config]:
    """Fit what a virtual section needs, as `train` fits it; the network itself is not needed."""
    slices = scratch / "slices"
    slices.mkdir()
    for name in (BELOW, ABOVE):
        shutil.copy(next(folder.rglob(f"{name}.h5ad")), slices)
    words = ["--input_dir", slices, "--output_dir", scratch / "processed", "--common_frame"]
    words += [
        "--z_spacing",
        SPACING,
        "--cell_type_key",
        "cell_type",
        "--train_ratio",
        1,
        "--val_ratio",
        0,
        "--seed",
        seed,
    ]
    assert alphastomics(["preprocess", *map(str, words)]) == 0
    document = {
        "data": {
            "processed_data_dir": str(scratch / "processed"),
            "preprocessing": {"cell_type_key": "cell_type", "common_frame": True},
        },
        "logging": {"save_dir": str(scratch), "exp_name": "run"},
        "seed": {"global_seed": seed},
    }
    config = with_settings(plan_for(parse_document(document, "benchmark")).config, FEW)
    train(config, TrainRequest(overwrite=True), has_validation=False)
    return *load_for_use(scratch / "run/checkpoints/last.ckpt"), config


def in_plane(position: np.ndarray, z: float) -> np.ndarray:
    """Put planar positions at a z."""
    return np.column_stack([position[:, :2], np.full(len(position), z)])


def r_by_gene(predicted: np.ndarray, truth: InputCells) -> float:
    """Pearson r over cells, mean over genes."""
    measured = torch.from_numpy(truth.measured[truth.slice_id])
    r = gene_correlations(predicted, truth.expression, measured)
    return float(np.nanmean(r.numpy()))


def frame_overlap(section: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Intersection over union of two outlines, and r of their cells by box, in one frame."""
    middle = other.mean(0)
    edge = 3 * float(np.median(spacings(other)))
    half = int(np.ceil(2 * np.abs(other - middle).max() / edge))
    a, b = (occupied(part - middle, edge, half) for part in (section, other))
    low, high = other.min(0), other.max(0)
    edges = [
        np.arange(start, stop + DENSITY_BOX, DENSITY_BOX)
        for start, stop in zip(low, high, strict=True)
    ]
    counts = [np.histogramdd(part, edges)[0].ravel() for part in (section, other)]
    used = (counts[0] + counts[1]) > 0
    return float((a & b).sum() / (a | b).sum()), float(
        np.corrcoef(*(part[used] for part in counts))[0, 1]
    )


def compared(
    position: np.ndarray,
    expression: np.ndarray,
    types: np.ndarray | None,
    truth: InputCells,
    typed: TypedCells,
    seed: int,
) -> dict[str, float]:
    """Compare a section with the true one: tissue, types by name, outline and density."""
    assert truth.position is not None
    assert truth.cell_type is not None
    real = Tissue(truth.expression, truth.position[:, :2])
    scores = tissue_scores(Tissue(expression, position[:, :2]), real, typed, seed=seed)
    result = {name: scores[name] for name in SHOWN if name in scores}
    overlap, density = frame_overlap(position[:, :2], real.position)
    result |= {"cells": len(position), "outline_in_frame": overlap, "density_r": density}
    if types is not None:
        names, codes = np.unique(
            np.concatenate([types, truth.cell_type]).astype(str), return_inverse=True
        )
        ours, theirs = np.split(codes, [len(types)])
        result["named_type_share_distance"] = type_share_distance(
            ours, theirs, num_types=len(names)
        )
        result["named_type_neighbour_distance"] = type_neighbour_distance(
            (ours, position[:, :2]), (theirs, real.position), num_types=len(names)
        )
    return result


def section_scores(
    sections: Sections, known: InputCells, truth: InputCells, seed: int
) -> dict[str, dict[str, float]]:
    """Compare a virtual section, and the nearest measured ones, with the true one."""
    unit, typed = unit_of(truth, 0), TypedCells(known.expression, known.cell_type, k=10, seed=seed)
    cells, sample = sections.cells, sections.sample
    new = replace(cells, expression=sample.expression, scaling=sample.scaling)
    rows = np.arange(len(cells.names))
    result = {
        "virtual": compared(
            cells.position, in_unit(new, rows, unit), sample.cell_type, truth, typed, seed
        )
    }
    for number, name in enumerate(known.slice_names):
        rows = known.rows_of(number)
        result[name] = compared(
            known.position[rows],
            in_unit(known, rows, unit),
            known.cell_type[rows],
            truth,
            typed,
            seed,
        )
    return result


def run_one(folder: Path, seed: int) -> dict[str, Any]:
    """Train on two sections with nothing set but their frame; compare with the one between."""
    with tempfile.TemporaryDirectory() as scratch:
        begun = time.perf_counter()
        module, genes, config = trained(folder, Path(scratch), seed)
        result: dict[str, Any] = {"train_seconds": time.perf_counter() - begun}
        known = training_cells(module, genes, split=None)
        truth = read_cells(next(folder.rglob(f"{BETWEEN}.h5ad")), module, genes, config, "")
    assert known is not None
    assert known.position is not None
    assert truth.position is not None
    z = float(np.unique(known.position[:, 2]).mean())
    truth = replace(truth, position=in_plane(truth.position, z), common_frame=True)
    expected = predict_from_context(module, truth, known, seed, config.sampling.radius_level)
    result["r"] = {"posterior mean": r_by_gene(expected.expression, truth)}
    measured = known.measured[known.slice_id]
    for k in NEIGHBOURS:
        mean = spatial_knn_mean(truth.position, known.position, known.expression, measured, k=k)
        result["r"][f"mean of {k}"] = r_by_gene(mean.numpy(), truth)
    begun = time.perf_counter()
    sections = sample_sections(module, known, [z], None, config.sampling, seed)
    result["sample_seconds"] = time.perf_counter() - begun
    result["sections"] = section_scores(sections, known, truth, seed)
    return result


def main() -> None:
    """Measure each seed, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    record: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "alphastomics": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "seeds": {},
    }
    for seed in asked.seeds:
        record["seeds"][seed] = run_one(asked.folder, seed)
        print(seed, json.dumps(record["seeds"][seed], indent=1), flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
