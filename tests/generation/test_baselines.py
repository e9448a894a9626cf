"""Baselines of `test`, against what they claim to be, written out."""

import numpy as np
import pyarrow as pa
import pytest

from alphastomics.generation.baselines import SPATIAL_KNN, expression_baselines, position_baselines
from alphastomics.generation.cells import InputCells

GENES, SECTION = 5, 80


def sections(heights: dict[str, float], seed: int, *, common_frame: bool = True) -> InputCells:
    """Sections of one tissue whose genes are smooth functions of the position."""
    rng = np.random.default_rng(seed)
    number = len(heights) * SECTION
    position = rng.uniform(-1, 1, (number, 3))
    position[:, 2] = np.repeat(list(heights.values()), SECTION)
    waves = position @ np.random.default_rng(0).normal(size=(3, GENES))
    expression = np.sin(2 * waves) + 0.1 * rng.normal(size=(number, GENES))
    return InputCells(
        expression=expression.astype(np.float32),
        measured=np.ones((len(heights), GENES), dtype=bool),
        position=position,
        dims=3,
        slice_id=np.repeat(np.arange(len(heights)), SECTION),
        slice_names=list(heights),
        obs_name=pa.array([str(cell) for cell in range(number)]),
        cell_type=None,
        common_frame=common_frame,
    )


@pytest.fixture
def known() -> InputCells:
    return sections({"far": 2.0, "near": 0.1, "farther": 3.0}, seed=1)


@pytest.fixture
def query() -> InputCells:
    return sections({"between": 0.0}, seed=2)


def test_the_closest_slice_lends_its_nearest_cells(query, known):
    predicted = np.asarray(expression_baselines(query, known, 0)["closest slice"](np.arange(9)))
    near = known.rows_of(1)
    for cell, values in enumerate(predicted):
        gaps = np.linalg.norm(known.position[near] - query.position[cell], axis=1)
        assert np.array_equal(values, known.expression[near[gaps.argmin()]])


def test_the_spatial_mean_is_one_of_the_nearest_training_cells(query, known):
    predicted = np.asarray(expression_baselines(query, known, 0)[SPATIAL_KNN](np.arange(9)))
    for cell, values in enumerate(predicted):
        order = np.linalg.norm(known.position - query.position[cell], axis=1).argsort()
        means = np.cumsum(known.expression[order], axis=0) / np.arange(1, len(order) + 1)[:, None]
        assert np.abs(means - values).max(axis=1).min() < 1e-5


def test_without_a_common_frame_no_training_cell_speaks_of_a_position(query, known):
    apart = sections({"far": 2.0, "near": 0.1}, seed=1, common_frame=False)
    assert set(expression_baselines(query, apart, 0)) == {"shuffled", "true expression"}


def test_regressions_see_expression_and_slices_centred_on_themselves(query, known):
    moved = sections({"far": 2.0, "near": 0.1, "farther": 3.0}, seed=1)
    assert moved.position is not None
    moved.position[moved.rows_of(2)] += 100.0
    rows = np.arange(SECTION)
    plain, shifted = (position_baselines(query, cells, 0) for cells in (known, moved))
    assert set(plain) == set(shifted) >= {"ridge", "expression kNN", "ExtraTrees"}
    for name in ("ridge", "expression kNN"):
        np.testing.assert_allclose(plain[name](rows), shifted[name](rows), atol=1e-4)
