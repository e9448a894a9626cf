"""The main job on a synthetic tissue: a folder and a seed enter, every step's output leaves."""

import logging
from pathlib import Path
from typing import Any

from alphastomics.config import Config, PreprocessingConfig, SimulationConfig
from alphastomics.config.file import parse_document
from alphastomics.simulate import write_tissue
from alphastomics.tasks import TASKS

logger = logging.getLogger(__name__)

TISSUE = SimulationConfig(cells=1200, slices=6, genes=120)
# Five slices to train on, one to test: a whole tissue that nobody has seen.
SPLIT: dict[str, Any] = {"split_by": "slice", "train_ratio": 0.84, "val_ratio": 0.0}


def settings_of(folder: Path, seed: int) -> Config:
    """Return the defaults, with the demo's folders: nothing is tuned for it."""
    document: dict[str, Any] = {
        "seed": {"global_seed": seed},
        "data": {"processed_data_dir": str(folder / "processed")},
        "logging": {"save_dir": str(folder), "exp_name": "run"},
    }
    return parse_document(document, "demo")


def run_demo(folder: Path, seed: int) -> str:
    """Simulate, preprocess, train, sample in three modes, score, report; say where things are."""
    from alphastomics.diffusion_model.train import TrainRequest
    from alphastomics.fit import fit
    from alphastomics.generation.commands import sample, test
    from alphastomics.preprocessing.commands import preprocess
    from alphastomics.report.commands import ReportRequest, only_scores, write_report

    config = settings_of(folder, seed)
    logger.info("demo 1/6: simulate %d slices of %d cells", TISSUE.slices, TISSUE.cells)
    write_tissue(TISSUE, seed, folder / "slices", overwrite=False)
    logger.info("demo 2/6: preprocess")
    preprocess(
        PreprocessingConfig(cell_type_key="cell_type", **SPLIT),
        input_dir=folder / "slices",
        output_dir=folder / "processed",
        gene_list_file=None,
        seed=seed,
        overwrite=False,
        scheduler=None,
    )
    logger.info("demo 3/6: train")
    # A demo that was interrupted goes on where it stopped.
    trained = fit(config, TrainRequest(resume="last"))
    checkpoint = Path(trained["best_checkpoint"])
    for mode in TASKS:
        logger.info("demo 4/6: sample %s", mode)
        sampling = config.sampling.model_copy(update={"mode": mode})
        sample(
            config.model_copy(update={"sampling": sampling}),
            checkpoint=checkpoint,
            input_data=folder / "processed",
            output=folder / f"{mode}.h5ad",
            split="test",
            overwrite=True,
        )
    logger.info("demo 5/6: score, beside the baselines")
    scores = test(
        config,
        checkpoint=checkpoint,
        input_data=folder / "processed",
        split="test",
        output=folder / "scores.json",
    )
    logger.info("demo 6/6: report")
    request = ReportRequest(folder / "processed", "test", scores=only_scores(scores))
    write_report(config, checkpoint=checkpoint, request=request, target=folder / "report.html")
    return demo_summary(folder, checkpoint, scores, trained["verdict"]["sentences"])


def demo_summary(folder: Path, checkpoint: Path, scores: dict[str, Any], verdict: list[str]) -> str:
    """Return the verdict, the scores as a table, and where everything is."""
    from alphastomics.evaluation.table import score_table

    lines = ["what the training held out says:", *(f"  {line}" for line in verdict), ""]
    shown: dict[str, Any] = {
        task.name: {
            method: {name: values[name] for name in task.metrics if name in values}
            for method, values in scores[task.name].items()
        }
        for task in TASKS.values()
        if task.is_conditional
    }
    lines.append(score_table(shown))
    outputs = {
        "slices": folder / "slices",
        "processed": folder / "processed",
        "checkpoint": checkpoint,
        "generated cells": folder / "expr_to_pos.h5ad",
        "scores": folder / "scores.json",
        "report, for a browser": folder / "report.html",
    }
    return "\n".join([*lines, *(f"{name}: {path}" for name, path in outputs.items())])
