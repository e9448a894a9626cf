"""A whole run: settings enter; a model, and a verdict of how good it is, leave.

Plan, print the plan; train without what is held out, judge the model by it and find out how long to
train; where data are few, train once more on everything. Each part is a run folder of its own and
resumes by itself: RUN/holdout/ beside what RUN holds.
"""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from alphastomics.config import Config, Mode
from alphastomics.config.auto import resolve_config, set_values, with_settings
from alphastomics.config.file import parse_document, read_document
from alphastomics.config.plan import Device, TrainingPlan
from alphastomics.diffusion_model.hub_model import RECORD_FILE, record_beside
from alphastomics.diffusion_model.run_folder import RunFolder, read_record
from alphastomics.diffusion_model.strategy import choose_devices, say_without_gpu
from alphastomics.diffusion_model.train import TrainRequest, check_data, train
from alphastomics.errors import InputError
from alphastomics.evaluation.verdict import verdicts
from alphastomics.generation.ahead import Ahead
from alphastomics.generation.baselines import Predictor
from alphastomics.generation.cells import InputCells, read_processed, some_cells
from alphastomics.generation.commands import load_for_use
from alphastomics.generation.evaluate import evaluate, position_baselines_ahead
from alphastomics.generation.generate import Generated
from alphastomics.generation.left_out import errors_of
from alphastomics.io.files import write_text
from alphastomics.preprocessing.folder import DataFolder
from alphastomics.preprocessing.holdout import Holdout
from alphastomics.preprocessing.resume import write_marker
from alphastomics.preprocessing.schema import Metadata
from alphastomics.tasks import EXPR_TO_POS, tasks_of

logger = logging.getLogger(__name__)

LEAST_TRAINING_CELLS = 10
LONGEST_NAME = 255  # of a file or folder, in bytes
HOLDOUT_RUN, PLAN_FILE = "holdout", "plan.json"
# Cells that judge a model, of each slice and in all: more change the scores by less than a seed.
JUDGED_CELLS, MOST_JUDGED = 2_000, 6_000
LEAST_JUDGED = 30
# Training cells of the slowest baselines: with all, they would take longer than the training.
VERDICT_TREE_CELLS = 3_000
TOO_FEW = "too few cells were held out to judge the model: test it on cells with known positions"
# A training that was best before the first share of its length is cut there, but never before the
# second: what is best for held-out cells so early samples at chance.
CUT_SHARE, LEAST_SHARE = 0.7, 0.5


def fit(config: Config, request: TrainRequest) -> dict[str, Any]:
    """Plan a run, make it, and judge it; return its summary, empty on all ranks but the first."""
    metadata = DataFolder(config.data.processed_data_dir).metadata()
    folder = RunFolder(Path(config.logging.save_dir) / config.logging.exp_name)
    if len(os.fsencode(config.logging.exp_name)) > LONGEST_NAME:
        raise InputError(
            f"--exp_name (logging.exp_name): longer than {LONGEST_NAME} bytes, the longest name of "
            "a folder; choose a shorter one"
        )
    cells = metadata.splits["train"].cells
    if cells < LEAST_TRAINING_CELLS:
        raise InputError(
            f"{config.data.processed_data_dir}: {cells} training cell(s), at least "
            f"{LEAST_TRAINING_CELLS} are needed: preprocess more cells, or with a larger "
            "--train_ratio"
        )
    plan = make_plan(config, metadata, folder, resume=request.resume is not None)
    check_data(plan.config, metadata)
    results: dict[str, Any] = {"plan": described(plan)}
    if plan.holdout is None:
        summary = train(plan.config, request, plan=plan.lines())
    else:
        judged = held_out_run(plan, metadata, request, folder)
        summary, results["verdict"] = judged["summary"], judged["verdict"]
        if plan.refit:
            summary = train_on_everything(plan, judged["epochs"], request)
    if not summary:
        return {}
    for name, content in results.items():
        write_text(folder.path / f"{name}.json", json.dumps(content, indent=2) + "\n")
    # The exported model says how it was trained and judged wherever it is taken.
    record = record_beside(Path(summary["best_checkpoint"]))
    write_marker(folder.path / "export" / RECORD_FILE, record)
    for line in results.get("verdict", {}).get("sentences", []):
        logger.info("%s", line)
    return {**summary, **results}


def train_on_everything(plan: TrainingPlan, epochs: int, request: TrainRequest) -> dict[str, Any]:
    """Train again, on what was held out too, for as long as held-out cells gained by it."""
    planned = plan.config.training.max_epochs
    why = f": of {planned} planned, more were no better on held-out cells"
    logger.info("training on everything for %d epochs%s", epochs, why if epochs < planned else "")
    final = with_settings(plan.config, {"training.max_epochs": epochs})
    return train(final, request, has_validation=False)


def plan_for(config: Config) -> TrainingPlan:
    """Return what `train` would do with these settings and data."""
    metadata = DataFolder(config.data.processed_data_dir).metadata()
    return resolve_config(config, metadata, this_device(config))


def make_plan(
    config: Config, metadata: Metadata, folder: RunFolder, *, resume: bool
) -> TrainingPlan:
    """Resolve the settings; a resumed run keeps those that it began with."""
    begun = next(
        (
            path
            for path in (folder.path / HOLDOUT_RUN / "config.yaml", folder.path / "config.yaml")
            if resume and path.is_file()
        ),
        None,
    )
    plan = resolve_config(config, metadata, this_device(config))
    if begun is None:
        return plan
    before = dict(set_values(parse_document(read_document(begun), str(begun))))
    own = {choice.key: before[choice.key] for choice in plan.choices if choice.key in before}
    choices = (choice._replace(value=own.get(choice.key, choice.value)) for choice in plan.choices)
    return replace(plan, config=with_settings(plan.config, own), choices=tuple(choices))


def this_device(config: Config) -> Device:
    """Say what a run will run on."""
    say_without_gpu(config.distributed)
    devices = choose_devices(config.distributed)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if devices.accelerator == "gpu":
        return Device("gpu", torch.cuda.get_device_name(0), devices.number, cores or 1)
    name = f"{cores} CPU cores (a GPU would train a larger network in about a minute)"
    return Device("cpu", name, devices.number, min(cores or 1, torch.get_num_threads()))


def described(plan: TrainingPlan) -> dict[str, Any]:
    """Return a plan as plain values."""
    return {
        "outline": plan.outline(),
        "device": plan.device.name,
        "dissociated_cells": plan.dissociated,
        "updates": plan.updates,
        "expected_seconds": round(plan.seconds),
        "held_out": None if plan.holdout is None else plan.holdout.describe(),
        "settings": {
            choice.key: {"value": choice.value, "reason": choice.reason} for choice in plan.choices
        },
    }


def held_out_run(
    plan: TrainingPlan, metadata: Metadata, request: TrainRequest, folder: RunFolder
) -> dict[str, Any]:
    """Train without what is held out, and judge the model by it, or read what was found before."""
    assert plan.holdout is not None
    if plan.refit:
        names = {"logging.save_dir": str(folder.path), "logging.exp_name": HOLDOUT_RUN}
        config, path = with_settings(plan.config, names), folder.path / HOLDOUT_RUN
    else:
        config, path = plan.config, folder.path
    done = path / "judged.json"
    if request.resume is not None and done.is_file():
        return read_record(done, "remove it, and the model is judged again")
    inner = request
    if request.resume is None:  # another run is refused before any work is done
        folder.require_free(None, resume=False, overwrite=request.overwrite)
        inner = request._replace(overwrite=True)
    jury = baselines = None
    # Beside a GPU there are cores to spare; baselines need the cells alone, if these are few.
    predicts_positions = EXPR_TO_POS in tasks_of(config.training.mode)
    if plan.refit and plan.device.kind == "gpu" and predicts_positions:
        jury = read_jury(config, metadata, plan.holdout)
    if jury is not None:
        seed = config.seed.global_seed
        baselines = position_baselines_ahead(jury.cells, jury.known, seed, VERDICT_TREE_CELLS)
    summary = train(config, inner, holdout=plan.holdout, plan=plan.lines())
    jury = read_jury(config, metadata, plan.holdout) if jury is None else jury
    epochs = chosen_epochs(summary, plan.config.training.max_epochs)
    scores: dict[str, Any] = {}
    kept: dict[Mode, Generated] = {}
    if jury is not None:
        scores = judge(config, jury, Path(summary["best_checkpoint"]), baselines, kept)
    sentences = [verdict.sentence for verdict in verdicts(scores)] or [TOO_FEW]
    verdict = {
        "held_out": plan.holdout.describe(),
        "sentences": sentences,
        "tasks": [verdict._asdict() for verdict in verdicts(scores)],
        "scores": scores,
        "position_errors": position_errors(jury, kept, plan.holdout),
    }
    judged = {"epochs": epochs, "summary": summary, "verdict": verdict}
    write_marker(done, judged)
    return judged


def chosen_epochs(summary: dict[str, Any], planned: int) -> int:
    """Return how long to train: as long as held-out cells gained by it."""
    best, steps = summary["best_step"], max(summary["steps"], 1)
    if best is None or best >= CUT_SHARE * steps:
        return planned
    return max(round(planned * max(best / steps, LEAST_SHARE)), 1)


class Jury(NamedTuple):
    """Cells that judge a model, and those it knows."""

    cells: InputCells
    known: InputCells


def read_jury(config: Config, metadata: Metadata, holdout: Holdout) -> Jury | None:
    """Read the training cells; None where too few are held out to judge a model."""
    folder = Path(config.data.processed_data_dir)
    cells = read_processed(folder, metadata.genes, "train")
    assert cells.position is not None
    names = [record.name for record in metadata.slices]
    numbers = np.array([names.index(name) for name in cells.slice_names])
    held = holdout.mask(numbers[cells.slice_id], cells.position)
    judged = judged_rows(cells, held, config.seed.global_seed)
    if not len(judged):
        return None
    return Jury(some_cells(cells, judged), some_cells(cells, np.flatnonzero(~held)))


def position_errors(
    jury: Jury | None, kept: dict[Mode, Generated], holdout: Holdout
) -> dict[str, Any] | None:
    """Return how far off positions of whole slices are: None where none were held out."""
    if jury is None or not holdout.is_of_slices or EXPR_TO_POS.name not in kept:
        return None
    errors = errors_of(jury.cells, kept[EXPR_TO_POS.name], holdout.describe())
    return None if errors is None else errors.model_dump()


def judge(
    config: Config,
    jury: Jury,
    checkpoint: Path,
    baselines: Ahead[dict[str, Predictor]] | None,
    kept: dict[Mode, Generated],
) -> dict[str, dict[str, dict[str, float]]]:
    """Score a model on what was held out, beside the baselines, all fitted to the rest."""
    module, _ = load_for_use(checkpoint)
    quick = {"num_steps": 10, "num_samples": 2, "estimator": "mean"}
    settings = config.sampling.model_copy(update=quick)
    return evaluate(
        module,
        jury.cells,
        jury.known,
        settings,
        config.seed.global_seed,
        VERDICT_TREE_CELLS,
        baselines=baselines,
        kept=kept,
        with_slow=False,
    )


def judged_rows(cells: InputCells, held: np.ndarray, seed: int) -> np.ndarray:
    """Choose held-out cells to score: some of each slice, until there are enough."""
    rng = np.random.default_rng(seed)
    chosen: list[np.ndarray] = []
    for number in range(len(cells.slice_names)):
        rows = cells.rows_of(number)
        rows = rng.permutation(rows[held[rows]])[:JUDGED_CELLS]
        if len(rows) >= LEAST_JUDGED and sum(map(len, chosen)) < MOST_JUDGED:
            chosen.append(np.sort(rows))
    return np.concatenate(chosen) if chosen else np.empty(0, np.int64)
