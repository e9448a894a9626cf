"""The fit of what makes new tissue: what it learns of a tissue that is known by construction."""

import pytest
import torch

from alphastomics.attn_model.niche_model import AROUND, NEAR, NicheModel, surroundings
from alphastomics.diffusion_model.niche_fit import DENSITIES, fit_niches, niche_cells


def striped(number: int = 600) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions in a ring, and latents: one follows the angle's stripes, one is noise."""
    generator = torch.Generator().manual_seed(0)
    angle = torch.rand(number, generator=generator) * 2 * torch.pi
    radius = 1 + 0.3 * torch.rand(number, generator=generator)
    position = torch.stack([radius * angle.cos(), radius * angle.sin(), 0 * angle], -1)
    latent = torch.stack([(3 * angle).sin().sign(), torch.randn(number, generator=generator)], -1)
    return position, latent


def test_means_of_neighbours_are_those_of_the_cells_of_the_slice():
    position, latent = striped(200)
    slice_id = torch.arange(200) % 2
    cells = niche_cells(latent, 0.1 * torch.ones(200, 2), position, slice_id, slice_id, seed=0)
    assert cells.near.shape == (len(DENSITIES), 200, 2)
    rows = torch.nonzero(slice_id == 1)[:, 0]
    near, distance = surroundings(position[rows])
    chosen = rows[near]
    torch.testing.assert_close(cells.near[0, rows], latent[chosen[:, :NEAR]].mean(1))
    torch.testing.assert_close(cells.around[0, rows], latent[chosen[:, NEAR:]].mean(1))
    torch.testing.assert_close(cells.distance[0, rows], distance)
    # Of a mean of K the variance is a K-th.
    torch.testing.assert_close(cells.near_std, torch.full_like(cells.near_std, 0.1 / NEAR**0.5))
    torch.testing.assert_close(cells.around_std[0], torch.full((200, 2), 0.1 / AROUND**0.5))
    # Of fewer cells, neighbours are farther away.
    assert (cells.distance[-1] >= cells.distance[0]).float().mean() > 0.99


@pytest.fixture(scope="module")
def fitted() -> NicheModel:
    torch.manual_seed(0)
    model = NicheModel(2)
    model.requires_grad_(True)
    position, latent = striped()
    tissue = torch.zeros(600, dtype=torch.long)
    cells = niche_cells(latent, torch.full((600, 2), 0.05), position, tissue, tissue, seed=0)
    fit_niches(model, cells, 800, lambda _: None)
    return model.requires_grad_(False)


def test_new_positions_lie_where_the_tissue_has_cells(fitted):
    position = fitted.sample_positions(500, 0, torch.Generator().manual_seed(3))
    radius = position[:, :2].norm(dim=1)
    assert ((radius > 0.9) & (radius < 1.4)).float().mean() > 0.9
    assert position[:, 2].abs().max() < 0.1


@pytest.mark.parametrize("number", [150, 600])
def test_new_latents_fit_positions_and_neighbours_at_any_density(fitted, number: int):
    position, truth = striped(number)
    new = fitted.sample_latents(position, 0, torch.Generator().manual_seed(4))
    assert torch.corrcoef(torch.stack([new[:, 0], truth[:, 0]]))[0, 1] > 0.8
    # What differs between neighbours still does.
    assert abs(float(new[:, 1].std()) - 1) < 0.2
    near, _ = surroundings(position)
    striped_pairs, noisy_pairs = (
        float(torch.corrcoef(torch.stack([new[:, part], new[near[:, 0], part]]))[0, 1])
        for part in (0, 1)
    )
    assert striped_pairs > 0.6
    assert abs(noisy_pairs) < striped_pairs / 2
