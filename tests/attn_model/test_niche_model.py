"""What makes new tissue, by itself: neighbours, noise, and the way down."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from alphastomics.attn_model import niche_model
from alphastomics.attn_model.niche_model import (
    AROUND,
    NEAR,
    STEPS,
    NicheModel,
    cleaned,
    noised,
    surroundings,
)


@pytest.fixture
def model() -> NicheModel:
    torch.manual_seed(0)
    model = NicheModel(4)
    for part in (model.latents, model.positions):
        torch.nn.init.normal_(part.out.weight, std=0.02)
    return model


def test_neighbours_are_those_of_scikit_learn_without_the_cell_itself():
    position = torch.randn(100, 3)
    neighbours, distance = surroundings(position)
    known = NearestNeighbors(n_neighbors=NEAR + AROUND + 1).fit(position.numpy())
    expected_distance, expected = known.kneighbors(position.numpy())
    np.testing.assert_array_equal(neighbours.numpy(), expected[:, 1:])
    np.testing.assert_allclose(distance[:, 0], np.log(expected_distance[:, NEAR]), rtol=1e-5)


def test_neighbours_among_some_cells_leave_a_cell_itself_out_where_it_is_one():
    position = torch.arange(80.0)[:, None] * torch.tensor([[1.0, 0, 0]])
    some = torch.arange(0, 80, 2)
    is_among = torch.zeros(80, dtype=torch.bool)
    is_among[some] = True
    neighbours, _ = surroundings(position, position[some], is_among=is_among)
    assert set(some[neighbours[10, :2]].tolist()) == {8, 12}
    assert set(some[neighbours[11, :2]].tolist()) == {10, 12}


@pytest.mark.parametrize("number", [1, 2, 5])
def test_few_cells_are_neighbours_more_than_once(number: int):
    neighbours, distance = surroundings(torch.randn(number, 3))
    assert neighbours.shape == (number, NEAR + AROUND)
    assert torch.isfinite(distance).all()
    if number > 1:
        assert (neighbours != torch.arange(number)[:, None]).all()


def test_what_noise_takes_comes_back():
    clean, noise, time = torch.randn(20, 4), torch.randn(20, 4), torch.rand(20, 1)
    noisy, lacking = noised(clean, noise, time)
    torch.testing.assert_close(cleaned(noisy, lacking, time), clean)


def test_the_way_down_from_noise_keeps_a_standard_normal_and_finds_a_point():
    model = NicheModel(4)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    # Nothing lacks where values are standard normal: they stay.
    same = model._sampled((50, 4), lambda noisy, _: torch.zeros_like(noisy), generator)
    torch.testing.assert_close(same, start)
    target = torch.tensor([1.0, -2.0, 0.5, 0.0])

    def towards(noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        angle = time * torch.pi / 2
        return (target - angle.cos() * noisy) / angle.sin()

    reached = model._sampled((50, 4), towards, generator)
    torch.testing.assert_close(reached, target.expand(50, 4), atol=0.05, rtol=0)


def test_a_sample_does_not_depend_on_how_many_cells_are_denoised_at_a_time(model, monkeypatch):
    position = torch.randn(70, 3)
    steps: list[int] = []
    whole = model.sample_latents(position, 1, torch.Generator().manual_seed(1), steps.append)
    assert steps == list(range(STEPS))
    monkeypatch.setattr(niche_model, "CELLS_AT_ONCE", 16)
    parts = model.sample_latents(position, 1, torch.Generator().manual_seed(1))
    torch.testing.assert_close(whole, parts)


def test_latents_follow_neighbours_positions_and_the_tissue(model):
    position, seed = torch.randn(70, 3), 1
    of_seed = lambda: torch.Generator().manual_seed(seed)  # noqa: E731
    first = model.sample_latents(position, 0, of_seed())
    assert (first != model.sample_latents(position, 1, of_seed())).any()
    assert (first != model.sample_latents(position + 0.5, 0, of_seed())).any()
    # Other noise of one cell reaches its neighbours.
    closer = position.clone()
    closer[0] = position[1] + 0.01
    assert (first[1:] != model.sample_latents(closer, 0, of_seed())[1:]).any()
    assert model.sample_positions(30, 0, of_seed()).shape == (30, 3)


def test_without_anything_given_a_latent_is_denoised_by_itself(model):
    noisy, time = torch.randn(5, 4), torch.full((5, 1), 0.5)
    alone = model.denoise_alone(noisy, time)
    changed = noisy.clone()
    changed[1:] = 0
    torch.testing.assert_close(model.denoise_alone(changed, time)[0], alone[0])
