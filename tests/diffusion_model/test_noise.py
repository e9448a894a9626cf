"""The forward and reverse process: exact for every pair of times."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from alphastomics.config import DiffusionConfig
from alphastomics.diffusion_model.noise import (
    NoiseModel,
    centered_noise,
    cosine_alpha_bar,
    step_times,
)
from alphastomics.geometry import centered

NOISE = NoiseModel(DiffusionConfig())


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_schedule_is_equation_17():
    t, total, s = 300, 1000, 0.008
    f = [math.cos((u + s) / (1 + s) * math.pi / 2) ** 2 for u in (t / total, 0)]
    found = cosine_alpha_bar(torch.tensor([t / total]), 1.0)
    assert float(found) == pytest.approx(f[0] / f[1], rel=1e-6)


@pytest.mark.parametrize("nu", [0.5, 1.0, 2.0])
def test_the_signal_falls_from_one_to_nothing(nu: float):
    alpha, sigma = NOISE.alpha_sigma(torch.arange(1001), nu)
    assert alpha[0] == 1
    assert sigma[0] == 0
    assert alpha[-1] == 0
    assert (alpha.diff() < 0).all()
    torch.testing.assert_close(alpha**2 + sigma**2, torch.ones(1001, dtype=torch.float64))


def test_nu_bends_the_clock():
    half, quarter = torch.tensor([0.5]), torch.tensor([0.25])
    assert cosine_alpha_bar(half, 2.0) == cosine_alpha_bar(quarter, 1.0)


@given(st.integers(1, 1000), st.data(), st.sampled_from([0.5, 1.0, 2.5]))
def test_noising_to_t_and_stepping_back_to_s_is_noising_to_s(t: int, data, nu: float):
    s = data.draw(st.integers(0, t - 1))
    times = [torch.tensor([time]) for time in (t, s)]
    (alpha_t, sigma_t), (alpha_s, sigma_s) = (NOISE.alpha_sigma(time, nu) for time in times)
    step = NOISE.posterior(*times, nu)
    torch.testing.assert_close(step.on_noisy * alpha_t + step.on_clean, alpha_s)
    variance = step.on_noisy**2 * sigma_t**2 + step.std**2
    torch.testing.assert_close(variance, sigma_s**2)


@given(st.integers(3, 1000), st.data())
def test_two_steps_compose_to_one(t: int, data):
    s = data.draw(st.integers(2, t - 1))
    r = data.draw(st.integers(1, s - 1))
    first, second, whole = (
        NOISE.posterior(torch.tensor([a]), torch.tensor([b]), 1.0)
        for a, b in ((t, s), (s, r), (t, r))
    )
    torch.testing.assert_close(second.on_noisy * first.on_noisy, whole.on_noisy)
    clean = second.on_noisy * first.on_clean + second.on_clean
    torch.testing.assert_close(clean, whole.on_clean)
    variance = second.on_noisy**2 * first.std**2 + second.std**2
    torch.testing.assert_close(variance, whole.std**2)


def test_the_posterior_is_bayes_rule_on_gaussians():
    # q(z_s | z_t, x0) by hand: product of N(z_t; a z_s, v) and N(z_s; alpha_s x0, sigma_s^2).
    t, s = torch.tensor([700]), torch.tensor([300])
    (alpha_t, sigma_t), (alpha_s, sigma_s) = NOISE.alpha_sigma(t, 1.0), NOISE.alpha_sigma(s, 1.0)
    a = alpha_t / alpha_s
    v = sigma_t**2 - a**2 * sigma_s**2
    precision = a**2 / v + 1 / sigma_s**2
    step = NOISE.posterior(t, s, 1.0)
    torch.testing.assert_close(step.std**2, 1 / precision)
    torch.testing.assert_close(step.on_noisy, (a / v) / precision)
    torch.testing.assert_close(step.on_clean, (alpha_s / sigma_s**2) / precision)


@given(st.integers(1, 300), st.data())
def test_any_number_of_steps_is_exactly_that_many_from_t_to_0(total: int, data):
    steps = data.draw(st.integers(1, total))
    times = step_times(total, steps)
    assert len(times) == steps + 1
    assert times[0] == total
    assert times[-1] == 0
    gaps = -np.diff(times)
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1


def test_position_noise_has_zero_mean_over_the_real_cells_and_none_on_padding():
    mask = torch.rand(4, 30, generator=generator()) < 0.6
    mask[3] = False
    noise = centered_noise((4, 30, 3), mask, generator(), torch.float64)
    torch.testing.assert_close(noise.sum(1), torch.zeros(4, 3, dtype=torch.float64))
    assert (noise[~mask] == 0).all()
    # The mean takes one of n degrees of freedom: the variance is 1 - 1/n.
    many = centered_noise((20_000, 5, 3), torch.ones(20_000, 5).bool(), generator(), torch.float64)
    assert float(many.var()) == pytest.approx(0.8, abs=0.01)


def test_centering_leaves_padding_at_zero():
    position = torch.randn(2, 6, 3, generator=generator())
    mask = torch.tensor([[True] * 4 + [False] * 2, [False] * 6])
    moved = centered(position, mask)
    torch.testing.assert_close(moved[0, :4], position[0, :4] - position[0, :4].mean(0))
    assert (moved[~mask] == 0).all()


@pytest.mark.parametrize(("mode", "given"), [("expr_to_pos", 0), ("pos_to_expr", 1)])
def test_a_conditional_mode_noises_one_modality(mode: str, given: int):
    times = NOISE.times_of(torch.rand(500, 4, generator=generator()), mode)
    assert (times[:, given] == 0).all()
    assert times[:, 1 - given].min() >= 1
    assert times.max() <= 1000


def test_joint_times_come_in_the_stated_shares_and_are_uniform():
    noise = NoiseModel(DiffusionConfig(full_noise_share=0))
    times = noise.times_of(torch.rand(40_000, 4, generator=generator()), "joint").numpy()
    equal = (times[:, 0] == times[:, 1]).mean()
    given = [(times[:, modality] == 0).mean() for modality in (0, 1)]
    assert equal == pytest.approx(0.25, abs=0.01)
    assert given == pytest.approx([0.25, 0.25], abs=0.01)
    assert not (times == 0).all(1).any()
    for modality in (0, 1):
        drawn = times[times[:, modality] > 0, modality]
        assert stats.kstest(drawn / 1000, "uniform").pvalue > 1e-3


def test_the_least_and_the_largest_number_are_the_first_and_the_last_time():
    largest = 1 - 2**-24
    numbers = torch.tensor([[0, largest, 0.99, 1], [largest, 0, 0.99, 1], [0.5, 0.25, 0.1, 1]])
    noise = NoiseModel(DiffusionConfig(equal_time_share=0.2))
    assert noise.times_of(numbers, "joint").tolist() == [[1, 1000], [1000, 1], [501, 501]]


def test_noising_has_the_closed_form_mean_and_variance():
    clean = torch.full((1, 50_000, 1), 2.0, dtype=torch.float64)
    noise = torch.randn(clean.shape, generator=generator(), dtype=torch.float64)
    t = torch.tensor([400])
    alpha, sigma = NOISE.alpha_sigma(t, 1.0)
    noised = NOISE.noised(clean, noise, t, 1.0)
    assert float(noised.mean()) == pytest.approx(2 * float(alpha), abs=0.01)
    assert float(noised.std()) == pytest.approx(float(sigma), rel=0.01)
    assert torch.equal(NOISE.noised(clean, noise, torch.tensor([0]), 1.0), clean)


def test_a_share_of_the_conditioned_sets_is_all_noise() -> None:
    settings = DiffusionConfig(full_noise_share=0.6, condition_share=0.5)
    times = NoiseModel(settings).times_of(torch.rand(40_000, 4, generator=generator()), "joint")
    given = (times == 0).any(1)
    full = (times == settings.num_timesteps).any(1)
    assert float(full[given].double().mean()) == pytest.approx(0.6, abs=0.02)
    assert float(full[~given].double().mean()) < 0.01
    assert bool((times[given] == 0).any(1).all())
