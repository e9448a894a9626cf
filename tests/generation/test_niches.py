"""Which cells are sampled in a known tissue: names and positions enter, the common frame leaves."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from alphastomics import AlphaSTomics
from alphastomics.attn_model.count_model import STYLES
from alphastomics.config import SamplingConfig
from alphastomics.generation.cells import BARE_POSITIONS, Blank, InputCells, blank_cells, centred
from alphastomics.generation.generate import Generated, as_tissue, generate
from alphastomics.generation.niches import frame_of_slice, style_of
from tests.test_generated_counts import QUICK, two_programs

SAMPLE = SamplingConfig(estimator="sample", num_steps=2)


@pytest.fixture(scope="module")
def model() -> AlphaSTomics:
    data = two_programs()
    data.obs["cell_type"] = np.where(data.obsm["spatial"][:, 0] > 50, "right", "left")
    data.obsm["spatial"] = data.obsm["spatial"] + 1000
    settings = {**QUICK, "data": {"preprocessing": {"cell_type_key": "cell_type"}}}
    return AlphaSTomics(data, settings, seed=0).train()


def query(model: AlphaSTomics, *, name: str = "one", shift: float = 1000.0) -> InputCells:
    data = two_programs(seed=5)
    data.obs["slice_id"] = name
    data.obsm["spatial"] = data.obsm["spatial"] + shift
    return model._cells(data, model.config)


def frame(model: AlphaSTomics, cells: InputCells):
    module = model._trained().module
    return frame_of_slice(module, module.average.count_model.niches, cells, 0)


def test_positions_of_a_training_slice_come_into_the_frame_of_the_fit(model):
    known = frame(model, query(model))
    assert known is not None
    assert known.tissue == 0
    assert known.position.mean(0).abs().max() < 0.2
    assert 0.8 < float(known.position[:, :2].std()) < 1.2
    # Scores move all cells to an origin of their own.
    moved, _ = centred(query(model), None)
    torch.testing.assert_close(frame(model, moved).position, known.position, atol=1e-4, rtol=0)


def test_bare_positions_are_those_of_the_only_slice_and_others_are_nobodys(model):
    assert frame(model, query(model, name=BARE_POSITIONS)).tissue == 0
    assert frame(model, query(model, name="another")) is None


def test_positions_far_from_the_known_tissue_are_left_to_the_network_and_said(model, caplog):
    with caplog.at_level("WARNING"):
        assert frame(model, query(model, shift=1e9)) is None
    assert "same coordinates" in caplog.text


def test_slices_beyond_the_known_styles_have_no_frame(model):
    module = model._trained().module
    names = module.style_names
    try:
        module.style_names = [f"s{number}" for number in range(STYLES)] + ["one"]
        assert frame(model, query(model)) is None
        assert style_of(module, "one", 0) == 0
    finally:
        module.style_names = names


def test_expression_sampled_at_known_positions_follows_the_tissue(model):
    cells = query(model)
    made = generate(model._trained().module, cells, "pos_to_expr", SAMPLE, seed=0)
    left = cells.position[:, 0] < 1050
    columns = np.isin(model._trained().genes, [f"g{number}" for number in range(8)])
    assert made.counts[left][:, columns].mean() > 3 * made.counts[~left][:, columns].mean()
    # In the unit of the given cells, which are standardised by themselves.
    assert abs(made.expression[:, :16].mean()) < 0.5
    other = generate(
        model._trained().module, replace(cells, slice_names=["another"]), "pos_to_expr", SAMPLE, 0
    )
    assert np.isfinite(other.expression).all()


def test_new_cells_have_types_that_fit_their_expression(model):
    new = model.generate(300, seed=1)
    assert set(new.obs["cell_type"]) == {"left", "right"}
    left, right = (
        np.asarray(new[:, [f"g{number}" for number in numbers]].X).sum(1)
        for numbers in (range(8), range(8, 16))
    )
    of_left = left > right
    assert (of_left == (new.obs["cell_type"] == "left")).mean() > 0.9


def test_types_come_back_with_a_saved_model(model, tmp_path):
    model.save(tmp_path / "model")
    again = AlphaSTomics.load(tmp_path / "model")
    assert again._trained().module.type_names == ["left", "right"]
    assert list(again.generate(20, seed=2).obs["cell_type"]) == list(
        model.generate(20, seed=2).obs["cell_type"]
    )


def test_planar_tissue_in_the_plane_of_x_and_y_keeps_its_orientation():
    random = np.random.default_rng(0)
    position = random.normal(size=(200, 3)) * [1.0, 3.0, 0.01]
    cells, zeros = blank_cells(Blank(200), 3, dims=3), np.zeros((200, 3), np.float32)
    generated = Generated(zeros, zeros, position.astype(np.float32), zeros)
    filled = as_tissue(cells, generated, planar=True)[0]
    expected = position - position.mean(0)
    np.testing.assert_allclose(filled.position[:, :2], expected[:, :2], atol=1e-5)
    assert not filled.position[:, 2].any()
