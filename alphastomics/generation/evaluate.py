"""Scores of a checkpoint: cells with known truth enter; every metric, beside the baselines, leaves.

Each slice is scored by itself, and slices are averaged by their number of cells. Baselines that
need other slices are there when training cells are given.
"""

import logging
import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from alphastomics.config import Mode, SamplingConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.errors import InputError
from alphastomics.evaluation.calibration import (
    LEAST_SAMPLES,
    Envelope,
    calibration,
    envelope,
)
from alphastomics.evaluation.methods import ASSIGNED, MODEL, MODEL_SAMPLE, WITHOUT_ANCHORS
from alphastomics.evaluation.metric import NEIGHBOURS
from alphastomics.evaluation.metrics_of_tissue import CALIBRATION_METRICS
from alphastomics.evaluation.position import aligned
from alphastomics.evaluation.registry import (
    expression_scores,
    position_scores,
    type_scores,
    values_of,
)
from alphastomics.generation.ahead import Ahead
from alphastomics.generation.anchors import without_std
from alphastomics.generation.baselines import (
    TREE_CELLS,
    Predictor,
    expression_baselines,
    position_baselines,
)
from alphastomics.generation.cells import (
    InputCells,
    centred,
    require_all_positions,
    with_enough_cells,
)
from alphastomics.generation.estimators import MeanAndSample, mean_and_sample
from alphastomics.generation.evaluate_anchored import (
    anchored_positions,
    free_rows,
    interval_scores,
    known_by_anchors,
    radius_scores,
    require_free_cells,
    shape_scores,
)
from alphastomics.generation.evaluate_joint import joint_scores
from alphastomics.generation.expected_time import say_expected_time
from alphastomics.generation.frame import Reference
from alphastomics.generation.generate import Generated, generate
from alphastomics.generation.panel_head import refitted
from alphastomics.generation.predict import require_anchored
from alphastomics.preprocessing.folder import DataFolder
from alphastomics.tasks import EXPR_TO_POS, JOINT, POS_TO_EXPR, TASKS, Task, tasks_of

logger = logging.getLogger(__name__)

# A slice of which more cells than this were trained on is no test.
SEEN_SHARE = 0.5


class ScoredTask(NamedTuple):
    """What was generated in a task, and {method: {metric: value}}."""

    generated: Generated
    table: dict[str, dict[str, float]]


def evaluate(
    module: AlphaSTomicsModule,
    cells: InputCells,
    known: InputCells | None,
    settings: SamplingConfig,
    seed: int,
    tree_cells: int = TREE_CELLS,
    *,
    what: str = "the input",
    modes: Collection[Mode] | None = None,
    kept: dict[Mode, Generated] | None = None,
    baselines: Ahead[dict[str, Predictor]] | None = None,
    says_time: bool = False,
    with_slow: bool = True,
    section: Reference | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Return {mode: {method: {metric: value}}} for the modes that can be scored against truth.

    Parameters
    ----------
    module, settings, seed
        The trained model, on the device to use, and how to sample.
    cells, known
        Cells with known truth, and training cells for the baselines.
    what, modes
        What the scored cells are called; the tasks to score, None for all that the model can.
    kept
        Filled with what was generated, where every slice was scored: the report shows it.
    tree_cells, baselines
        Training cells that slow baselines are fitted to, at most; those that were begun before.
    says_time, with_slow
        Log what will be done and about how long it takes; compute the slow metrics, too.
    section
        Another section, whose cells are anchors. Baselines see anchors, and others are scored.
    """
    num_slices = len(cells.slice_names)
    cells = scorable(cells, what)
    tasks = requested_tasks(module, modes)
    warn_if_trained_on(cells, known)
    require_free_cells(cells)
    cells, known = centred(cells, known)
    by_anchors = known_by_anchors(cells, section)
    if says_time:
        say_expected_time(module, cells, known, settings, tasks)
    scores: dict[str, dict[str, dict[str, float]]] = {}
    for task in tasks:
        if task is EXPR_TO_POS:
            fit = partial(position_baselines, cells, by_anchors or known, seed, tree_cells)
            others = baselines.result if baselines else fit
            score = partial(score_anchored, section) if by_anchors else score_positions
            scored_task = score(refitted(module, cells, known, seed), cells, settings, seed, others)
        elif task is POS_TO_EXPR:
            near = known if cells.anchors is None else by_anchors  # of the very slice
            scored_task = score_expression(module, cells, near, settings, seed)
        else:
            scored_task = score_tissue(module, cells, known, settings, seed, with_slow=with_slow)
        scores[task.name] = without_undefined(scored_task.table)
        if kept is not None and len(cells.slice_names) == num_slices:
            kept[task.name] = scored_task.generated
    return scores


def scorable(cells: InputCells, what: str) -> InputCells:
    """Return the slices that can be scored; refuse cells without coordinates, or too few."""
    require_all_positions(cells, what)
    return with_enough_cells(cells, NEIGHBOURS + 1, what)


def position_baselines_ahead(
    cells: InputCells, known: InputCells, seed: int, tree_cells: int
) -> Ahead[dict[str, Predictor]]:
    """Begin to fit the baselines of positions: they do not need the model."""

    def fit() -> dict[str, Predictor]:
        scored_cells = scorable(cells, "the held-out cells")
        return position_baselines(*centred(scored_cells, known), seed, tree_cells)

    return Ahead(fit)


def requested_tasks(
    module: AlphaSTomicsModule, modes: Collection[Mode] | None = None
) -> tuple[Task, ...]:
    """Return the tasks to score, in the order of the tables; refuse one that cannot be done."""
    able = tasks_of(module.config.training.mode)
    for mode in modes or ():
        if TASKS[mode] not in able:
            names = ", ".join(task.name for task in able)
            raise InputError(f"--modes {mode}: the checkpoint was trained for {names} alone")
    return tuple(
        task for task in TASKS.values() if task in able and (modes is None or task.name in modes)
    )


def score_positions(
    module: AlphaSTomicsModule,
    cells: InputCells,
    settings: SamplingConfig,
    seed: int,
    baselines: Callable[[], dict[str, Predictor]],
) -> ScoredTask:
    """Predict positions from expression, and score them beside the baselines."""
    generated = mean_and_sample(module, cells, EXPR_TO_POS.name, settings, seed)
    methods = {
        MODEL: generated.estimate.position.__getitem__,
        MODEL_SAMPLE: generated.sample.position.__getitem__,
        **baselines(),
    }
    table = scored(cells, methods, position_scores_of)
    table[MODEL] |= over_slices(cells, lambda rows: position_calibration(cells, rows, generated))
    return ScoredTask(generated.by(settings.estimator), table)


def score_anchored(
    section: Reference | None,
    module: AlphaSTomicsModule,
    cells: InputCells,
    settings: SamplingConfig,
    seed: int,
    baselines: Callable[[], dict[str, Predictor]],
) -> ScoredTask:
    """Score positions by anchors, assigned ones and those without, beside the baselines."""
    mode = EXPR_TO_POS.name
    require_anchored(module, cells, section)
    estimate = generate(module, cells, mode, without_std(settings), seed, purpose="score")
    anchored = anchored_positions(module, cells, section, estimate, settings, seed)
    methods = {
        MODEL: anchored.mean.position.__getitem__,
        ASSIGNED: anchored.assigned.position.__getitem__,
        WITHOUT_ANCHORS: estimate.position.__getitem__,
        **baselines(),
    }
    table = scored(cells, methods, partial(position_scores_of, with_shape=True))
    for name, generated in ((MODEL, anchored.mean), (ASSIGNED, anchored.assigned)):
        score = partial(radius_scores, generated=generated, other_frame=section is not None)
        table[name] |= over_slices(cells, partial(score, cells))
    return ScoredTask(anchored.shown, table)


def score_expression(
    module: AlphaSTomicsModule,
    cells: InputCells,
    known: InputCells | None,
    settings: SamplingConfig,
    seed: int,
) -> ScoredTask:
    """Predict expression at positions, and score it beside the baselines."""
    generated = mean_and_sample(module, cells, POS_TO_EXPR.name, settings, seed, known)
    methods = {
        MODEL: generated.estimate.expression.__getitem__,
        MODEL_SAMPLE: generated.sample.expression.__getitem__,
        **expression_baselines(cells, known, seed),
    }
    table = scored(cells, methods, partial(value_scores, known=known, seed=seed))
    table[MODEL] |= over_slices(cells, lambda rows: value_calibration(cells, rows, generated))
    estimate = generated.estimate
    table[MODEL] |= over_slices(cells, lambda rows: interval_scores(cells, rows, estimate))
    return ScoredTask(generated.by(settings.estimator), table)


def score_tissue(
    module: AlphaSTomicsModule,
    cells: InputCells,
    known: InputCells | None,
    settings: SamplingConfig,
    seed: int,
    *,
    with_slow: bool,
) -> ScoredTask:
    """Generate new tissue, and score it beside real and shuffled tissue."""
    new = generate(module, cells, JOINT.name, settings, seed, purpose="score")
    return ScoredTask(new, joint_scores(new, cells, known, seed, with_slow=with_slow))


def warn_if_trained_on(cells: InputCells, known: InputCells | None) -> None:
    """Say which slices the model has seen in training, cell by cell."""
    if known is None or known.position is None or cells.position is None:
        return
    for number, name in enumerate(cells.slice_names):
        if name not in known.slice_names:
            continue
        there = known.position[known.rows_of(known.slice_names.index(name))].astype(np.float32)
        here = cells.position[cells.rows_of(number)].astype(np.float32)
        trained = {row.tobytes() for row in there}
        share = np.mean([row.tobytes() in trained for row in here])
        if share > SEEN_SHARE:
            logger.warning(
                "slice %s: %.0f %% of its cells were trained on: the scores say what the model "
                "remembers, not how it does on new tissue",
                name,
                100 * share,
            )


def require_testable(folder: str) -> None:
    """Refuse to train and then test on a folder whose test split cannot be scored."""
    slices = DataFolder(folder).metadata().slices
    counts = {record.name: record.cells_per_split["test"] for record in slices}
    name, cells = max(counts.items(), key=lambda item: item[1])
    if not any(counts.values()):
        raise InputError(
            f"--test_after_train: the test split of {folder} is empty; preprocess with "
            "--train_ratio and --val_ratio that add up to less than 1, or leave the flag out"
        )
    if cells <= NEIGHBOURS:
        raise InputError(
            f"--test_after_train: slice {name} of {folder} has {cells} test cell(s), no other has "
            f"more; the scores need more than {NEIGHBOURS} a slice: leave the flag out, or "
            "preprocess with more"
        )


def without_undefined(scores: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Leave out what has no value: JSON knows no NaN and no infinity."""
    return {
        method: {name: value for name, value in values.items() if math.isfinite(value)}
        for method, values in scores.items()
    }


def scored(
    cells: InputCells,
    methods: dict[str, Predictor],
    score: Callable[[InputCells, np.ndarray, Any], dict[str, float]],
) -> dict[str, dict[str, float]]:
    """Score every method on every slice."""
    return {
        name: over_slices(cells, lambda rows: score(cells, rows, method(rows)))  # noqa: B023 - used at once
        for name, method in methods.items()
    }


def over_slices(
    cells: InputCells, score: Callable[[np.ndarray], dict[str, float]]
) -> dict[str, float]:
    """Average the scores of slices by their number of cells; anchors do not count."""
    totals: dict[str, float] = {}
    parts = [free_rows(cells, number) for number in range(len(cells.slice_names))]
    number = sum(map(len, parts))
    for rows in parts:
        for name, value in score(rows).items():
            totals[name] = totals.get(name, 0.0) + value * len(rows) / number
    return totals


def position_scores_of(
    cells: InputCells, rows: np.ndarray, predicted: Any, *, with_shape: bool = False
) -> dict[str, float]:
    """Score predicted positions of one slice, in the dimensions that it has."""
    assert cells.position is not None
    labels = None if cells.cell_type is None else cells.cell_type[rows]
    position = np.asarray(predicted, dtype=np.float32)[:, : cells.dims]
    true = cells.position[rows, : cells.dims]
    scores = position_scores(position, true, labels)
    return scores | (shape_scores(position, true) if with_shape else {})


def value_scores(
    cells: InputCells, rows: np.ndarray, predicted: Any, *, known: InputCells | None, seed: int
) -> dict[str, float]:
    """Score predicted expression of one slice, and its clusters where cell types are known."""
    assert cells.position is not None
    measured = cells.measured[cells.slice_id[rows[0]]]
    values = np.asarray(predicted, dtype=np.float32)
    scores = expression_scores(
        torch.as_tensor(values),
        torch.as_tensor(cells.expression[rows]),
        torch.as_tensor(measured),
        torch.as_tensor(cells.position[rows, : cells.dims]),
    )
    if cells.cell_type is None:
        return scores
    typed = cells if known is None or known.cell_type is None else known
    assert typed.cell_type is not None
    genes = measured & typed.measured.all(0)
    real = (typed.expression[:, genes], typed.cell_type.astype(str)) if genes.any() else None
    # Genes that were not measured have no truth: a method could not be right about them.
    shown = values[:, genes if genes.any() else measured]
    return scores | type_scores(shown, cells.cell_type[rows].astype(str), real, seed=seed)


def position_calibration(
    cells: InputCells, rows: np.ndarray, generated: MeanAndSample
) -> dict[str, float]:
    """Compare the std that `sample` writes with the error, in the frame of the truth."""
    if len(generated.samples) < LEAST_SAMPLES:
        return {}
    assert cells.position is not None
    true = cells.position[rows, : cells.dims]
    rigid = {"scale": False, "reflection": True}
    estimate = aligned(generated.estimate.position[rows, : cells.dims], true, **rigid)
    samples = [
        aligned(sample[rows, : cells.dims], estimate, **rigid) for sample in generated.samples
    ]
    written = generated.estimate.position_std[rows, : cells.dims]
    sampled = envelope(torch.stack(samples).numpy())._replace(deviation=written)
    return values_of(CALIBRATION_METRICS, calibration(estimate.numpy(), true, sampled))


def value_calibration(
    cells: InputCells, rows: np.ndarray, generated: MeanAndSample
) -> dict[str, float]:
    """Compare the std of generated expression with its error, over the measured genes."""
    if generated.envelope.num_samples < LEAST_SAMPLES:
        return {}
    genes = np.flatnonzero(cells.measured[cells.slice_id[rows[0]]])
    low, high, deviation = (part[np.ix_(rows, genes)] for part in generated.envelope[:3])
    sampled = Envelope(low, high, deviation, generated.envelope.num_samples)
    part = np.ix_(rows, genes)
    return values_of(
        CALIBRATION_METRICS,
        calibration(generated.estimate.expression[part], cells.expression[part], sampled),
    )
