"""New tissue: positions of cells first, then latents of expression that fit their neighbours'.

Two small denoisers, both of one cell at a time. That of positions knows the tissue alone: its
outline, its cavities, how dense it is where. That of latents sees, beside the noisy latent of a
cell, the mean noisy latent of its nearest neighbours and of those around them, how far they are,
where the cell lies in the tissue, and which tissue it is: cells that are denoised side by side come
out as neighbours are. Without any of this it denoises the latent of a cell by itself.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from alphastomics.attn_model.layers import zero_linear

WIDTH, BLOCKS, FREQUENCIES = 128, 2, 16
# Tissues that are separated; more of them share what is known of some.
TISSUES = 8
# Cells that are near, and those around them.
NEAR, AROUND = 8, 24
# Waves of a coordinate; positions have unit variance.
POSITION_WAVES = 6
# Steps of a sample, and cells that are denoised at a time.
STEPS, CELLS_AT_ONCE = 50, 16_384
STEP_ANGLE = math.pi / 2 / STEPS

# Noisy values and a time enter; what the linear prediction of the clean ones lacks leaves.
Lacking = Callable[[Tensor, Tensor], Tensor]


def waves(position: Float[Tensor, "*B 3"]) -> Float[Tensor, "*B F"]:
    """Return coordinates, and waves of them: a network draws edges from these."""
    frequency = 2.0 ** torch.arange(POSITION_WAVES, device=position.device)
    phase = (position[..., None] * frequency).flatten(-2)
    return torch.cat([position, phase.sin(), phase.cos()], dim=-1)


POSITION_WIDTH = 3 * (1 + 2 * POSITION_WAVES)


class SmallDenoiser(nn.Module):
    """Denoises the values of one cell by themselves, and by what is given beside them.

    Parameters
    ----------
    num_values
        Width of what is denoised, of unit variance.
    num_seen, num_given
        Width of what it sees of the noisy values, and of what is given.
    """

    frequency: Tensor

    def __init__(self, num_values: int, num_seen: int, num_given: int) -> None:
        super().__init__()
        self.register_buffer("frequency", 2.0 ** torch.linspace(0, 6, FREQUENCIES))
        self.seen_in = nn.Linear(num_seen, WIDTH)
        self.given_in = nn.Linear(num_given, WIDTH, bias=False)
        self.time_in = nn.Sequential(nn.Linear(2 * FREQUENCIES, WIDTH), nn.SiLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 2 * WIDTH),
                nn.SiLU(),
                nn.Linear(2 * WIDTH, WIDTH),
            )
            for _ in range(BLOCKS)
        )
        self.out = zero_linear(WIDTH, num_values)

    def forward(
        self,
        seen: Float[Tensor, "*B S"],
        time: Float[Tensor, "*B 1"],
        given: Float[Tensor, "*B C"] | None = None,
    ) -> Float[Tensor, "*B V"]:
        """Return what the best linear prediction of the clean values lacks, in units of noise.

        Of the cosine schedule, signal and noise are the cosine and sine of the time: the linear
        prediction of values of unit variance is the noisy ones times the cosine.
        """
        phase = time * self.frequency
        beside = self.time_in(torch.cat([phase.sin(), phase.cos()], dim=-1))
        if given is not None:
            beside = beside + self.given_in(given)
        cells = self.seen_in(seen) + beside
        for block in self.blocks:
            cells = cells + block(cells + beside)
        return self.out(cells)


def noised(
    clean: Float[Tensor, "*B V"], noise: Float[Tensor, "*B V"], time: Float[Tensor, "*B 1"]
) -> tuple[Float[Tensor, "*B V"], Float[Tensor, "*B V"]]:
    """Return noisy values, and what the linear prediction of the clean ones lacks."""
    angle = time * (math.pi / 2)
    return angle.cos() * clean + angle.sin() * noise, angle.sin() * clean - angle.cos() * noise


def cleaned(
    noisy: Float[Tensor, "*B V"], lacking: Float[Tensor, "*B V"], time: Float[Tensor, "*B 1"]
) -> Float[Tensor, "*B V"]:
    """Return the clean values that noisy ones, and what the linear prediction lacks, stand for."""
    angle = time * (math.pi / 2)
    return angle.cos() * noisy + angle.sin() * lacking


class Surroundings(NamedTuple):
    """What lies around cells: neighbours (N, K), and the log distance of the last near one."""

    neighbours: Int[Tensor, "N K"]
    distance: Float[Tensor, "N 1"]


def surroundings(
    position: Float[Tensor, "N 3"],
    among: Float[Tensor, "M 3"] | None = None,
    *,
    is_among: Bool[Tensor, " N"] | None = None,
) -> Surroundings:
    """Find the neighbours of cells, near ones first; of few cells some count more than once.

    Parameters
    ----------
    position
        Where the cells lie.
    among
        The cells to look among; None for these cells.
    is_among
        Which cells are among those: the nearest to such a cell is itself.
    """
    from scipy.spatial import cKDTree

    others = position if among is None else among
    most = min(NEAR + AROUND + 1, len(others))
    at = position.double().cpu().numpy()
    distance, near = cKDTree(others.double().cpu().numpy()).query(at, k=list(range(1, most + 1)))
    distance, near = torch.from_numpy(distance), torch.from_numpy(near)
    if most > 1:
        own = torch.ones(len(at), dtype=torch.bool) if is_among is None else is_among.cpu()
        distance, near = (
            torch.where(own[:, None], part[:, 1:], part[:, :-1]) for part in (distance, near)
        )
    last = distance[:, min(NEAR, distance.shape[1]) - 1 :][:, :1].clamp(min=1e-6).log()
    columns = torch.arange(NEAR + AROUND) % near.shape[1]
    return Surroundings(near[:, columns], last.float())


class NicheModel(nn.Module):
    """Makes positions of new cells, and latents of cells at positions.

    Parameters
    ----------
    num_latents
        Width L of a latent.
    """

    center: Tensor
    middle: Tensor
    rotation: Tensor
    is_common: Tensor

    def __init__(self, num_latents: int) -> None:
        super().__init__()
        self.num_latents = num_latents
        given = 2 * num_latents + 1 + POSITION_WIDTH + TISSUES
        self.latents = SmallDenoiser(num_latents, num_latents, given)
        self.positions = SmallDenoiser(3, POSITION_WIDTH, TISSUES)
        # Of each tissue: the origin of its frame and the middle of its cells, in the user's units,
        # and its rotation into the frame that all tissues are compared in; whether the user's
        # frame is one for all of them.
        self.register_buffer("center", torch.zeros(TISSUES, 3, dtype=torch.float64))
        self.register_buffer("middle", torch.zeros(TISSUES, 3, dtype=torch.float64))
        self.register_buffer("is_common", torch.zeros((), dtype=torch.bool))
        self.register_buffer("rotation", torch.eye(3, dtype=torch.float64).repeat(TISSUES, 1, 1))

    def denoise_alone(
        self, noisy: Float[Tensor, "*B L"], time: Float[Tensor, "*B 1"]
    ) -> Float[Tensor, "*B L"]:
        """Predict clean latents, each by itself."""
        return cleaned(noisy, self.latents(noisy, time), time)

    def given(
        self,
        near: Float[Tensor, "*B L"],
        around: Float[Tensor, "*B L"],
        distance: Float[Tensor, "*B 1"],
        position: Float[Tensor, "*B 3"],
        tissue: Int[Tensor, "*B"],
    ) -> Float[Tensor, "*B C"]:
        """Join what a cell's latent is denoised by."""
        parts = near, around, distance, waves(position), self.tissue_code(tissue)
        return torch.cat(parts, dim=-1)

    def tissue_code(self, tissue: Int[Tensor, "*B"]) -> Float[Tensor, "*B T"]:
        """Say which tissue cells are of."""
        return F.one_hot(tissue, TISSUES).to(self.positions.out.weight)

    @torch.no_grad()
    def sample_latents(
        self,
        position: Float[Tensor, "N 3"],
        tissue: int,
        generator: torch.Generator,
        watch: Callable[[int], None] | None = None,
    ) -> Float[Tensor, "N L"]:
        """Sample a latent for each cell of a tissue at positions in the common frame.

        `watch` is called with the number of each step when it is done.
        """
        position = position.to(self.latents.out.weight)
        neighbours, distance = (part.to(position.device) for part in surroundings(position))
        rows = torch.split(torch.arange(len(position), device=position.device), CELLS_AT_ONCE)

        def lacking(noisy: Tensor, time: Tensor) -> Tensor:
            parts = []
            for chosen in rows:
                beside = noisy[neighbours[chosen]]
                given = self.given(
                    beside[:, :NEAR].mean(1),
                    beside[:, NEAR:].mean(1),
                    distance[chosen],
                    position[chosen],
                    torch.full_like(chosen, tissue),
                )
                parts.append(self.latents(noisy[chosen], time.expand(len(chosen), 1), given))
            return torch.cat(parts)

        return self._sampled((len(position), self.num_latents), lacking, generator, watch)

    @torch.no_grad()
    def sample_positions(
        self, number: int, tissue: int, generator: torch.Generator
    ) -> Float[Tensor, "N 3"]:
        """Sample positions of a tissue's cells in the common frame."""
        which = torch.full((number,), tissue, device=self.positions.out.weight.device)
        given = self.tissue_code(which)

        def lacking(noisy: Tensor, time: Tensor) -> Tensor:
            return self.positions(waves(noisy), time.expand(number, 1), given)

        return self._sampled((number, 3), lacking, generator)

    def _sampled(
        self,
        shape: tuple[int, int],
        lacking: Lacking,
        generator: torch.Generator,
        watch: Callable[[int], None] | None = None,
    ) -> Float[Tensor, "N V"]:
        """Go from noise to clean values."""
        noise = torch.randn(shape, generator=generator, device=generator.device)
        noisy = noise.to(self.latents.out.weight)
        before: Tensor | None = None
        for step in range(STEPS):
            # Deterministic: what lacks is the slope of the way down, followed by Adams and
            # Bashforth's second order; values of unit variance are left as wide as they are.
            slope = lacking(noisy, noisy.new_tensor([1 - step / STEPS]))
            ahead = slope if before is None else 1.5 * slope - 0.5 * before
            noisy, before = noisy + STEP_ANGLE * ahead, slope
            if watch is not None:
                watch(step)
        return noisy
