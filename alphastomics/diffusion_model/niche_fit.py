"""Fits what makes new tissue: latents and positions of cells enter, fitted denoisers leave.

Each update sees cells of all slices by themselves. The noisy latents of a cell's neighbours are not
drawn one by one: the mean of K of them is normal, too, with a K-th of the variance.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from alphastomics.attn_model.niche_model import (
    AROUND,
    NEAR,
    NicheModel,
    noised,
    surroundings,
    waves,
)
from alphastomics.diffusion_model.small_fit import minimise
from alphastomics.io.progress import Advance

BATCH, WEIGHT_DECAY = 1_024, 1e-4
# Of the updates of the autoencoder, as many for each of the two denoisers.
DENOISERS = 2 * 2
# A user asks for as many cells as he likes: neighbours are also looked for among a part of them.
DENSITIES = (1.0, 0.25, 0.0625)
# Cells whose latent is denoised by itself.
ALONE_SHARE = 0.2


class NicheCells(NamedTuple):
    """What is fitted: latents with their std, positions in the common frame, and tissues.

    Of each density (D, N, .): mean and std of the mean latent of neighbours, near ones and those
    around them, and how far they are.
    """

    latent: Float[Tensor, "N L"]
    std: Float[Tensor, "N L"]
    position: Float[Tensor, "N 3"]
    tissue: Int[Tensor, " N"]
    near: Float[Tensor, "D N L"]
    near_std: Float[Tensor, "D N L"]
    around: Float[Tensor, "D N L"]
    around_std: Float[Tensor, "D N L"]
    distance: Float[Tensor, "D N 1"]


def fit_niches(model: NicheModel, cells: NicheCells, updates: int, advance: Advance) -> None:
    """Fit both denoisers, each with so many updates."""
    fit_latents(model, cells, updates, advance)
    fit_positions(model, cells, updates, advance)


def niche_cells(
    latent: Float[Tensor, "N L"],
    std: Float[Tensor, "N L"],
    position: Float[Tensor, "N 3"],
    tissue: Int[Tensor, " N"],
    slice_id: Int[Tensor, " N"],
    seed: int,
) -> NicheCells:
    """Look at the neighbours of all cells, in their slices."""
    means = [torch.zeros(len(DENSITIES), *latent.shape) for _ in range(4)]
    distance = torch.zeros(len(DENSITIES), len(latent), 1)
    generator = torch.Generator().manual_seed(seed)
    mean, variance, at = latent.cpu(), std.cpu().square(), position.cpu()
    for number in torch.unique(slice_id):
        rows = torch.nonzero(slice_id == number)[:, 0]
        order = rows[torch.randperm(len(rows), generator=generator)]
        for level, density in enumerate(DENSITIES):
            # Too few to have neighbours of their own: more of them.
            most = min(max(round(density * len(rows)), 2 * (NEAR + AROUND)), len(rows))
            others = order[:most]
            near, far = surroundings(at[rows], at[others], is_among=torch.isin(rows, others))
            distance[level, rows] = far
            for part, columns in ((0, near[:, :NEAR]), (2, near[:, NEAR:])):
                chosen = others[columns]
                means[part][level, rows] = mean[chosen].mean(1)
                of_mean = variance[chosen].mean(1) / columns.shape[1]
                means[part + 1][level, rows] = of_mean.sqrt()
    beside = (part.to(latent.device) for part in (*means, distance))
    return NicheCells(latent, std, position, tissue, *beside)


def fit_latents(model: NicheModel, cells: NicheCells, updates: int, advance: Advance) -> None:
    """Learn to denoise the latent of a cell by its neighbours' and its position, at all times."""
    device, (number, width) = cells.latent.device, cells.latent.shape
    # The densest counts for half.
    chances = torch.tensor([0.5, *[0.5 / (len(DENSITIES) - 1)] * (len(DENSITIES) - 1)])
    limits = chances.cumsum(0)[:-1].to(device)

    def loss() -> Tensor:
        rows = torch.randint(number, (BATCH,), device=device)
        level = torch.bucketize(torch.rand(BATCH, device=device), limits)
        normal = torch.randn(6, BATCH, width, device=device)
        time = torch.rand(BATCH, 1, device=device)
        noisy, lacking = noised(cells.latent[rows] + cells.std[rows] * normal[0], normal[1], time)
        near, _ = noised(
            cells.near[level, rows] + cells.near_std[level, rows] * normal[2],
            normal[3] * NEAR**-0.5,
            time,
        )
        around, _ = noised(
            cells.around[level, rows] + cells.around_std[level, rows] * normal[4],
            normal[5] * AROUND**-0.5,
            time,
        )
        given = model.given(
            near, around, cells.distance[level, rows], cells.position[rows], cells.tissue[rows]
        )
        given = given * (torch.rand(BATCH, 1, device=device) >= ALONE_SHARE)
        return (model.latents(noisy, time, given) - lacking).square().mean()

    parameters = list(model.latents.parameters())
    minimise(loss, parameters, updates, advance, weight_decay=WEIGHT_DECAY)


def fit_positions(model: NicheModel, cells: NicheCells, updates: int, advance: Advance) -> None:
    """Learn where a tissue has cells."""
    device = cells.position.device

    def loss() -> Tensor:
        rows = torch.randint(len(cells.position), (BATCH,), device=device)
        time = torch.rand(BATCH, 1, device=device)
        noisy, lacking = noised(cells.position[rows], torch.randn(BATCH, 3, device=device), time)
        given = model.tissue_code(cells.tissue[rows])
        return (model.positions(waves(noisy), time, given) - lacking).square().mean()

    parameters = list(model.positions.parameters())
    minimise(loss, parameters, updates, advance, weight_decay=WEIGHT_DECAY)
