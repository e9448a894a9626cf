"""Defaults that work: trained with nothing set on slices in random poses, every baseline is beaten.

The slices share no frame: each is rotated, mirrored and shifted by itself, as real ones are. One of
them is held out.
"""

from typing import Any

import numpy as np
import pytest
from anndata import AnnData
from scipy.stats import spearmanr

from alphastomics import AlphaSTomics
from alphastomics.config import SimulationConfig
from alphastomics.evaluation.methods import MODEL, MODEL_SAMPLE
from alphastomics.evaluation.position import aligned
from alphastomics.generation.baselines import REGRESSORS, SMOOTHED_TREES
from alphastomics.simulate import simulate

TISSUE, HELD_OUT = SimulationConfig(cells=350, slices=4, genes=60), 2
# Poses that differ as much as three can: without a common frame, centred slices say little.
SEED = 6
MARGIN = 0.05
Scores = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def slices() -> list[AnnData]:
    return list(simulate(TISSUE, SEED))


@pytest.fixture(scope="module")
def model(whole_position_head: None, slices: list[AnnData]) -> AlphaSTomics:
    """A model trained with nothing set."""
    return AlphaSTomics([data for n, data in enumerate(slices) if n != HELD_OUT]).train()


@pytest.fixture(scope="module")
def placing(model: AlphaSTomics, slices: list[AnnData]) -> Scores:
    """Scores on the slice that was held out, beside the baselines fitted to the training slices."""
    scores: Scores = model.evaluate(slices[HELD_OUT], num_steps=10, num_samples=2)["expr_to_pos"]
    return scores


@pytest.mark.parametrize("baseline", [*REGRESSORS, SMOOTHED_TREES])
def test_by_default_an_unseen_slice_is_predicted_better_than_by_a_baseline(
    placing: Scores, baseline: str
) -> None:
    assert placing[MODEL]["spearman_mean"] > placing[baseline]["spearman_mean"] + MARGIN


def test_a_sample_does_not_fall_to_chance(placing: Scores) -> None:
    estimate, sample = (placing[name]["spearman_mean"] for name in (MODEL, MODEL_SAMPLE))
    assert abs(placing["shuffled"]["spearman_mean"]) < 0.05
    assert sample > 0.6 * estimate


def test_the_training_judges_itself_by_what_it_held_out(model: AlphaSTomics) -> None:
    verdict: dict[str, Any] = model._trained().record["verdict"]
    assert verdict["held_out"].startswith("slice ")
    grades = {task["task"]: task["grade"] for task in verdict["tasks"]}
    assert grades["expr_to_pos"] != "at chance"
    scores = verdict["scores"]["expr_to_pos"]["alphastomics"]
    table = model.evaluate()["expr_to_pos"]["alphastomics"]
    assert table["spearman_mean"] == scores["spearman_mean"]


def test_radii_by_the_held_out_slice_hold_on_another_one(
    model: AlphaSTomics, slices: list[AnnData]
) -> None:
    data = slices[HELD_OUT].copy()
    true = np.asarray(data.obsm["spatial"], dtype=np.float64)
    position = aligned(model.predict_positions(data), true, scale=False, reflection=True).numpy()
    inside = np.linalg.norm(position - true, axis=1) <= data.obs["position_radius_90"]
    # One slice judged the model, and this is another one.
    assert inside.mean() == pytest.approx(0.9, abs=0.08)
    record = data.uns["alphastomics"]["expr_to_pos"]
    assert record["radius_calibrated_by"].startswith("held out: slice ")
    assert not record["spatial_std_calibrated"]
    error = np.linalg.norm(position - true, axis=1)
    assert spearmanr(error, data.obs["position_radius_90"]).statistic > 0.1
