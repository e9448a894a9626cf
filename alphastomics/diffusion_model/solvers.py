"""The solvers of the reverse process: noisy and predicted values enter, less noisy ones leave.

All use x0-prediction, one modality at a time: `ddpm` draws from the exact posterior; `ddim` (Song
et al. 2021) and `dpmpp`, DPM-Solver++(2M) (Lu et al. 2022), follow the deterministic path.
"""

from collections.abc import Callable
from typing import NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from alphastomics.config import Solver
from alphastomics.diffusion_model.noise import NoiseModel
from alphastomics.errors import InputError

SOLVERS = get_args(Solver)


class Step(NamedTuple):
    """A step from time t to s < t of one modality.

    Attributes
    ----------
    noise_model, nu
        The process, and the exponent of the modality's schedule.
    span, earlier
        The times (t, s), and the time before t; None at the first step.
    before
        The clean values predicted at the time before; None at the first step.
    draw
        Draws noise of the modality's shape.
    """

    noise_model: NoiseModel
    nu: float
    span: tuple[int, int]
    earlier: int | None
    before: Tensor | None
    draw: Callable[[], Tensor]


def ddpm(
    noisy: Float[Tensor, "B N F"], clean: Float[Tensor, "B N F"], step: Step
) -> Float[Tensor, "B N F"]:
    """Draw z_s from q(z_s | z_t, x0)."""
    t, s = (torch.tensor([time]) for time in step.span)
    on = step.noise_model.posterior(t, s, step.nu)
    return float(on.on_noisy) * noisy + float(on.on_clean) * clean + float(on.std) * step.draw()


def ddim(
    noisy: Float[Tensor, "B N F"], clean: Float[Tensor, "B N F"], step: Step
) -> Float[Tensor, "B N F"]:
    """z_s = alpha_s x0 + sigma_s (z_t - alpha_t x0) / sigma_t: eq. 12 of DDIM, eta = 0."""
    (alpha_t, sigma_t), (alpha_s, sigma_s) = (
        level(step.noise_model, time, step.nu) for time in step.span
    )
    return alpha_s * clean + sigma_s * (noisy - alpha_t * clean) / sigma_t


def dpmpp(
    noisy: Float[Tensor, "B N F"], clean: Float[Tensor, "B N F"], step: Step
) -> Float[Tensor, "B N F"]:
    """Take the step of `ddim` with clean values extrapolated from the last two predictions."""
    return ddim(noisy, extrapolated(clean, step), step)


def extrapolated(clean: Float[Tensor, "B N F"], step: Step) -> Float[Tensor, "B N F"]:
    """Second order: D = x0 + (x0 - x0') / 2r, r the ratio of the steps in log(alpha / sigma).

    At both ends of the schedule the logarithm is infinite, and the step is of first order.
    """
    t, s = step.span
    if step.before is None or step.earlier is None:
        return clean
    if s == 0 or step.earlier == step.noise_model.num_timesteps:
        return clean
    half = [log_ratio(step.noise_model, time, step.nu) for time in (step.earlier, t, s)]
    ratio = (half[1] - half[0]) / (half[2] - half[1])
    return clean + (clean - step.before) / (2 * ratio)


def level(noise_model: NoiseModel, time: int, nu: float) -> tuple[float, float]:
    """Signal and noise at a time, as numbers."""
    alpha, sigma = noise_model.alpha_sigma(torch.tensor([time]), nu)
    return float(alpha), float(sigma)


def log_ratio(noise_model: NoiseModel, time: int, nu: float) -> float:
    """log(alpha / sigma)."""
    alpha, sigma = noise_model.alpha_sigma(torch.tensor([time]), nu)
    return float((alpha / sigma).log())


STEPS: dict[str, Callable[[Tensor, Tensor, Step], Tensor]] = {
    "ddim": ddim,
    "ddpm": ddpm,
    "dpmpp": dpmpp,
}


def require_way(noise_model: NoiseModel, num_steps: int, solver: str) -> None:
    """Refuse a number of steps, or a solver, that there is not."""
    total = noise_model.num_timesteps
    if not 1 <= num_steps <= total:
        raise InputError(
            f"num_steps: expected 1 to {total} (diffusion.num_timesteps), got {num_steps}"
        )
    if solver not in SOLVERS:
        raise InputError(f"sampler: expected one of {', '.join(SOLVERS)}; got {solver!r}")
