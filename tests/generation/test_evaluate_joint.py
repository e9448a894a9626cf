"""Scores of new tissue: real tissue in its stead scores as real, and slices are averaged."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from alphastomics.generation.cells import InputCells, some_cells
from alphastomics.generation.evaluate_joint import joint_scores
from alphastomics.generation.generate import Generated

GENES = 12


def striped(seed: int, sizes: tuple[int, ...]) -> InputCells:
    """Slices of a long tissue: counts of two programs that alternate along x, scaled by gene."""
    rng = np.random.default_rng(seed)
    count = sum(sizes)
    position = np.c_[rng.uniform(size=(count, 2)) * [400.0, 150.0], np.zeros(count)]
    program = (position[:, 0] // 100 % 2).astype(int)
    rate = np.where(np.arange(GENES) % 2 == program[:, None], 4.0, 0.4)
    values = np.log1p(rng.poisson(rate * rng.gamma(4, 0.25, size=(count, 1))))
    values = (values - values.mean(0)) / values.std(0)
    return InputCells(
        expression=values.astype(np.float32),
        position=position,
        cell_type=np.array(["even", "odd"])[program],
        slice_id=np.repeat(np.arange(len(sizes)), sizes),
        obs_name=pa.array([f"cell {n}" for n in range(count)]),
        measured=np.ones((len(sizes), GENES), dtype=bool),
        dims=2,
        slice_names=[f"slice {n}" for n in range(len(sizes))],
    )


def as_generated(cells: InputCells) -> Generated:
    expression, position = cells.expression, cells.position
    return Generated(expression, np.zeros_like(expression), position, np.zeros_like(position))


def test_real_tissue_in_the_stead_of_the_model_scores_as_the_references_do():
    cells, known, new = (striped(seed, (1200,)) for seed in range(3))
    scores = joint_scores(as_generated(new), cells, known, 0)
    model, real = scores["alphastomics"], scores["real, same slice"]
    shuffled, genes = scores["shuffled"], scores["genes shuffled"]
    for name, error in {
        "auc_cells": 0.06, "auc_cells_linear": 0.06, "auc_niches": 0.12, "correlation_r": 0.05,
        "correlation_slope": 0.15, "zero_share_error": 0.04, "wasserstein_mean": 0.06,
        "type_neighbour_distance": 0.1, "type_share_distance": 0.06, "moran_mae": 0.06,
        "spacing_distance": 0.06, "outline_overlap": 0.08,
    }.items():  # fmt: skip
        assert model[name] == pytest.approx(real[name], abs=error), name
    assert shuffled["auc_niches"] > 0.8
    assert shuffled["auc_cells"] == pytest.approx(real["auc_cells"])
    assert real["correlation_r"] > 0.9
    assert abs(genes["correlation_slope"]) < 0.1
    assert real["outline_overlap"] > 0.8


def test_a_wrong_density_and_a_wrong_shape_are_seen():
    cells, known, new = (striped(seed, (1200,)) for seed in range(3))
    wide = as_generated(new)
    wide.position[:, 1] *= 3
    scores = joint_scores(wide, cells, known, 0)
    model, real = scores["alphastomics"], scores["real, same slice"]
    assert model["spacing_distance"] > 3 * real["spacing_distance"]
    assert model["outline_overlap"] < 0.7 * real["outline_overlap"]
    assert model["auc_cells"] == pytest.approx(real["auc_cells"], abs=0.1)


def test_a_slice_without_a_metric_does_not_count_in_its_mean():
    both, known, new = striped(0, (300, 200)), striped(1, (300, 200)), striped(2, (300, 200))
    dense = both.expression.copy()
    second = both.rows_of(1)
    dense[second] += np.random.default_rng(0).normal(scale=0.5, size=dense[second].shape)
    first = some_cells(both, both.rows_of(0))
    cells = replace(both, expression=dense)
    first_new = as_generated(some_cells(new, new.rows_of(0)))
    alone = joint_scores(first_new, first, known, 0, with_slow=False)
    pair = joint_scores(as_generated(new), cells, known, 0, with_slow=False)
    # No gene of the second slice has its smallest value twice: none is ever zero there.
    for name in ("alphastomics", "real, same slice"):
        assert pair[name]["zero_share_error"] == pytest.approx(alone[name]["zero_share_error"])
        assert pair[name]["auc_cells"] != alone[name]["auc_cells"]


def test_slow_metrics_can_be_left_out():
    cells, known, new = (striped(seed, (200,)) for seed in range(3))
    scores = joint_scores(as_generated(new), cells, known, 0, with_slow=False)
    assert all("auc_niches" not in values for values in scores.values())
    assert all("auc_cells" in values for values in scores.values())
