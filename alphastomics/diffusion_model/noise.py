"""Forward and reverse process: clean cells and noise enter, noised cells leave, and the reverse.

Variance-preserving diffusion, z_t = alpha_t x0 + sigma_t eps, with the cosine schedule of Nichol &
Dhariwal (2021, eq. 17). The exponent nu bends the clock of each modality (Vignac et al. 2023), and
each has its own time: a condition is a modality at time 0.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from alphastomics.config import DiffusionConfig, Mode
from alphastomics.geometry import centered
from alphastomics.tasks import TASKS

OFFSET = 0.008  # s of eq. 17: keeps the first steps from being too small to matter


class Steps(NamedTuple):
    """Factors of one reverse step: z_s = on_noisy z_t + on_clean x0 + std eps."""

    on_noisy: Tensor
    on_clean: Tensor
    std: Tensor


def cosine_alpha_bar(u: Float[Tensor, "*batch"], nu: float) -> Float[Tensor, "*batch"]:
    """Signal power left at time u in [0, 1]: eq. 17, on the clock u^nu; 1 at u = 0, 0 at u = 1."""

    def f(clock: Tensor) -> Tensor:
        return torch.cos((clock + OFFSET) / (1 + OFFSET) * math.pi / 2) ** 2

    power = f(u.double() ** nu) / f(torch.zeros_like(u, dtype=torch.float64))
    # cos(pi / 2) is 6e-17 in binary: at u = 1 nothing of the signal is left.
    return torch.where(u >= 1, torch.zeros_like(power), power).clamp(0, 1)


def centered_noise(
    shape: tuple[int, ...],
    node_mask: Bool[Tensor, "B N"],
    generator: Generator | None,
    dtype: torch.dtype,
) -> Float[Tensor, "B N 3"]:
    """Draw standard noise on the real cells whose mean over them is zero; padding gets zeros."""
    return centered(draw_noise(shape, node_mask, generator, dtype), node_mask)


def draw_noise(
    shape: tuple[int, ...],
    node_mask: Bool[Tensor, "B N"],
    generator: Generator | None,
    dtype: torch.dtype,
) -> Float[Tensor, "B N F"]:
    """Draw standard noise on the real cells; padding gets zeros.

    A CPU generator draws on the CPU, so that one seed gives one result on every device.
    """
    device = node_mask.device if generator is None else generator.device
    noise = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    return noise.to(node_mask.device) * node_mask[..., None]


@dataclass(frozen=True)
class NoiseModel:
    """The schedule of both modalities.

    Parameters
    ----------
    settings
        Number of timesteps and the exponents of the clocks.
    """

    settings: DiffusionConfig

    @property
    def num_timesteps(self) -> int:
        """Return T."""
        return self.settings.num_timesteps

    def alpha_sigma(
        self, t: Int[Tensor, "*batch"], nu: float
    ) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        """Signal and noise at time t: alpha^2 = alpha_bar, sigma^2 = 1 - alpha_bar."""
        alpha_bar = cosine_alpha_bar(t.double() / self.num_timesteps, nu)
        return alpha_bar.sqrt(), (1 - alpha_bar).sqrt()

    def noised(
        self,
        clean: Float[Tensor, "B N F"],
        noise: Float[Tensor, "B N F"],
        t: Int[Tensor, " B"],
        nu: float,
    ) -> Float[Tensor, "B N F"]:
        """z_t = alpha_t x0 + sigma_t eps; at t = 0 the clean cells themselves."""
        alpha, sigma = (factor.to(clean.dtype)[:, None, None] for factor in self.alpha_sigma(t, nu))
        return alpha * clean + sigma * noise

    def posterior(self, t: Int[Tensor, " B"], s: Int[Tensor, " B"], nu: float) -> Steps:
        """Factors of q(z_s | z_t, x0) for s < t: exact, so that any steps compose to the schedule.

        With alpha_ts = alpha_t / alpha_s and sigma_ts^2 = sigma_t^2 - alpha_ts^2 sigma_s^2:
        on_noisy = alpha_ts sigma_s^2 / sigma_t^2, on_clean = alpha_s sigma_ts^2 / sigma_t^2,
        std^2 = sigma_ts^2 sigma_s^2 / sigma_t^2.
        """
        alpha_t, sigma_t = self.alpha_sigma(t, nu)
        alpha_s, sigma_s = self.alpha_sigma(s, nu)
        alpha_ts = alpha_t / alpha_s
        power_ts = (sigma_t**2 - alpha_ts**2 * sigma_s**2).clamp(min=0)
        return Steps(
            alpha_ts * sigma_s**2 / sigma_t**2,
            alpha_s * power_ts / sigma_t**2,
            (power_ts * sigma_s**2 / sigma_t**2).sqrt(),
        )

    def times_of(self, numbers: Float[Tensor, "B 4"], mode: Mode) -> Int[Tensor, "B 2"]:
        """Return the time of expression and of position of each set; 0 where one is given.

        In `joint` training the sets fall into four kinds: the settings' `equal_time_share` has one
        time for both, `condition_share` has one modality given (either with equal chance), and the
        rest has two independent times. So one checkpoint serves all three modes. A
        `full_noise_share` of the sets with a given modality has the other one at T, where every
        sample begins and the point estimate is read off.

        Parameters
        ----------
        numbers
            Uniform in [0, 1): for the two times, the kind of a set, and whether its noise is full.
        mode
            What is trained.
        """
        # float64: in float32 a number just below 1 may give T + 1.
        times = 1 + (numbers[:, :2].double() * self.num_timesteps).long()
        kind, full = numbers[:, 2], numbers[:, 3]
        task = TASKS[mode]
        if task.is_conditional:
            pairs = zip(times.unbind(1), task.noised(1), strict=True)
            times = torch.stack([time * noised for time, noised in pairs], dim=1)
        else:
            equal = self.settings.equal_time_share
            given = equal + self.settings.condition_share
            middle = (equal + given) / 2
            expression = times[:, 0].masked_fill((kind >= equal) & (kind < middle), 0)
            position = torch.where(kind < equal, times[:, 0], times[:, 1])
            position = position.masked_fill((kind >= middle) & (kind < given), 0)
            times = torch.stack([expression, position], dim=1)
        is_full = (full < self.settings.full_noise_share) & (times == 0).any(1)
        return times.masked_fill(is_full[:, None] & (times > 0), self.num_timesteps)

    def network_time(self, t: Int[Tensor, "B 2"], dtype: torch.dtype) -> Float[Tensor, "B 2"]:
        """Return t / T, as the network takes it."""
        return (t.double() / self.num_timesteps).to(dtype)


def step_times(num_timesteps: int, num_steps: int) -> list[int]:
    """Return num_steps + 1 times from T down to 0, as even as whole numbers allow.

    Each neighbouring pair is one network call, so that `num_steps` steps are exactly that many.
    """
    assert 1 <= num_steps <= num_timesteps
    return [(num_timesteps * (num_steps - step)) // num_steps for step in range(num_steps + 1)]
