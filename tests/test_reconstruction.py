"""Defaults that work: trained with nothing set on slices in random poses, every baseline is beaten.

The slices share no frame: each is rotated, mirrored and shifted by itself, as real ones are. One of
them is held out.
"""

from typing import Any

import pytest

from alphastomics import AlphaSTomics
from alphastomics.config import SimulationConfig
from alphastomics.generation.baselines import REGRESSORS, SMOOTHED_TREES
from alphastomics.generation.evaluate import OUR_DRAW, OURS, evaluate
from alphastomics.generation.training_cells import training_cells
from alphastomics.simulate import simulate

TISSUE, HELD_OUT = SimulationConfig(cells=350, slices=4, genes=60), 2
Scores = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def model() -> AlphaSTomics:
    """A model trained with nothing set."""
    slices = list(simulate(TISSUE, 7))
    return AlphaSTomics([data for n, data in enumerate(slices) if n != HELD_OUT]).train()


@pytest.fixture(scope="module")
def scores(model: AlphaSTomics) -> dict[str, Scores]:
    """Scores on the slice that was held out, beside the baselines fitted to the training slices."""
    module, genes = model._trained().module, model._trained().genes
    cells = model._cells(list(simulate(TISSUE, 7))[HELD_OUT], model.config)
    known = training_cells(module, genes)
    assert known is not None
    few = model.config.sampling.model_copy(update={"num_steps": 10, "num_samples": 2})
    return evaluate(module, cells, known, few, seed=0)


@pytest.mark.parametrize("baseline", [*REGRESSORS, SMOOTHED_TREES])
def test_by_default_an_unseen_slice_is_placed_better_than_by_a_baseline(
    scores: dict[str, Scores], baseline: str
) -> None:
    placing = scores["expr_to_pos"]
    assert placing[OURS]["spearman_mean"] > placing[baseline]["spearman_mean"]


def test_a_sample_does_not_fall_to_chance(scores: dict[str, Scores]) -> None:
    placing = scores["expr_to_pos"]
    estimate, sample = (placing[name]["spearman_mean"] for name in (OURS, OUR_DRAW))
    assert abs(placing["shuffled"]["spearman_mean"]) < 0.05
    assert sample > 0.6 * estimate


def test_the_training_judges_itself_by_what_it_held_out(model: AlphaSTomics) -> None:
    verdict: dict[str, Any] = model._trained().record["verdict"]
    assert verdict["held_out"].startswith("slice ")
    # Two slices are left to train on: few, but not too few to be as good as any baseline.
    grades = {task["task"]: task["grade"] for task in verdict["tasks"]}
    assert grades["expr_to_pos"] in ("good", "level")
    assert model.evaluate() == verdict["scores"]
