"""Sampling: on a Gaussian every solver agrees with the closed form; frames and conditions hold."""

from typing import NamedTuple

import pytest
import torch

from alphastomics.attn_model import Model
from alphastomics.config import DiffusionConfig
from alphastomics.diffusion_model.noise import NoiseModel
from alphastomics.diffusion_model.sample import DiffusionSampler, Known, State
from alphastomics.errors import InputError

NOISE = NoiseModel(DiffusionConfig(num_timesteps=1000))
SOLVERS = ["ddim", "ddpm", "dpmpp"]


class Prediction(NamedTuple):
    expression: torch.Tensor
    position: torch.Tensor


class Gaussian:
    """The exact denoiser of cells whose features are independent N(mean, std^2).

    E[x0 | z_t] = mean + alpha std^2 / (alpha^2 std^2 + sigma^2) (z_t - alpha mean).
    """

    def __init__(self, mean: float, std: float) -> None:
        self.mean, self.std = mean, std
        self.calls = 0

    def __call__(self, expression, position, diffusion_time, node_mask, *, gene_mask):
        self.calls += 1
        t = (diffusion_time[:, 0].double() * NOISE.num_timesteps).round().long()
        alpha, sigma = (part[:, None, None] for part in NOISE.alpha_sigma(t, 1.0))
        gain = alpha * self.std**2 / (alpha**2 * self.std**2 + sigma**2)
        clean = self.mean + gain * (expression - alpha * self.mean)
        return Prediction(clean, torch.zeros_like(position))


def gaussian_sample(solver: str, num_steps: int, cells: int = 20_000) -> torch.Tensor:
    sampler = DiffusionSampler(Gaussian(1.5, 0.4), NOISE)
    expression, _ = sampler.sample(
        torch.zeros(1, cells, 1, dtype=torch.float64),
        torch.zeros(1, cells, 3, dtype=torch.float64),
        torch.ones(1, cells, dtype=torch.bool),
        "pos_to_expr",
        num_steps=num_steps,
        sampler=solver,
        generator=torch.Generator().manual_seed(0),
    )
    return expression


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_gaussian_comes_back_and_the_error_falls_with_steps(solver: str):
    errors = []
    for steps in (5, 20, 200):
        drawn = gaussian_sample(solver, steps)
        assert float(drawn.mean()) == pytest.approx(1.5, abs=0.02)
        errors.append(abs(float(drawn.std()) - 0.4))
    assert errors[2] < 0.01
    assert errors[1] < errors[0] / 2
    # The second-order solver is at the noise of 20,000 cells after 20 steps.
    assert errors[1] < 0.005 if solver == "dpmpp" else errors[2] < errors[1] / 5


def test_the_second_order_solver_needs_fewer_steps():
    first, second = (abs(float(gaussian_sample(s, 20).std()) - 0.4) for s in ("ddim", "dpmpp"))
    assert second < first / 3


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("num_steps", [1, 2, 7, 50])
def test_as_many_steps_as_asked_for_are_network_calls(solver: str, num_steps: int):
    model = Gaussian(0.0, 1.0)
    DiffusionSampler(model, NOISE).sample(
        torch.zeros(1, 4, 2), torch.zeros(1, 4, 3), torch.ones(1, 4, dtype=torch.bool),
        "joint", num_steps=num_steps, sampler=solver,
    )  # fmt: skip
    assert model.calls == num_steps


class Template:
    """A denoiser that knows the tissue, and answers in a frame of its own at every call."""

    def __init__(self, tissue: torch.Tensor, seed: int = 0) -> None:
        self.tissue, self.seed = tissue, seed

    def __call__(self, expression, position, diffusion_time, node_mask, *, gene_mask):
        self.seed += 1
        gen = torch.Generator().manual_seed(self.seed)
        rotation, _ = torch.linalg.qr(torch.randn(3, 3, generator=gen, dtype=torch.float64))
        return Prediction(expression, self.tissue @ rotation.to(self.tissue.dtype) + 7.0)


def tissue(cells: int = 40) -> torch.Tensor:
    gen = torch.Generator().manual_seed(1)
    return torch.randn(1, cells, 3, generator=gen, dtype=torch.float64) * torch.tensor([3.0, 2, 1])


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("num_steps", [1, 5, 50, 200])
def test_more_steps_never_hurt_though_every_answer_has_another_frame(solver, num_steps):
    points = tissue()
    mask = torch.ones(1, 40, dtype=torch.bool)
    _, predicted = DiffusionSampler(Template(points), NOISE, position_scale=10.0).sample(
        torch.zeros(1, 40, 2, dtype=torch.float64), torch.zeros_like(points), mask, "expr_to_pos",
        num_steps=num_steps, sampler=solver, generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    distances, expected = torch.cdist(predicted, predicted), 10 * torch.cdist(points, points)
    torch.testing.assert_close(distances, expected, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(predicted.mean(1), torch.zeros(1, 3, dtype=torch.float64))


def test_placed_cells_stay_and_give_the_others_their_frame():
    points = tissue()
    mask = torch.ones(1, 40, dtype=torch.bool)
    position = 10 * points + 500.0
    known = torch.zeros(1, 40, dtype=torch.bool)
    known[0, :8] = True
    given = torch.where(known[..., None], position, torch.zeros_like(position))
    _, found = DiffusionSampler(Template(points), NOISE, position_scale=10.0).sample(
        torch.zeros(1, 40, 2, dtype=torch.float64), given, mask, "expr_to_pos",
        num_steps=10, known=Known(positions=known), generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    assert torch.equal(found[known], position[known])
    torch.testing.assert_close(found, position)


def test_known_genes_are_kept_and_the_others_generated():
    values = torch.full((1, 30, 3), 9.0, dtype=torch.float64)
    genes = torch.zeros(1, 30, 3, dtype=torch.bool)
    genes[..., 0] = True
    expression, _ = DiffusionSampler(Gaussian(1.5, 0.4), NOISE).sample(
        values, torch.zeros(1, 30, 3, dtype=torch.float64), torch.ones(1, 30, dtype=torch.bool),
        "pos_to_expr", num_steps=20, known=Known(genes=genes),
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert (expression[..., 0] == 9.0).all()
    assert float(expression[..., 1:].mean()) == pytest.approx(1.5, abs=0.2)


def test_what_was_given_comes_back_as_it_came_and_padding_is_zero():
    gen = torch.Generator().manual_seed(0)
    expression, position = torch.randn(2, 6, 4, generator=gen), torch.randn(2, 6, 3, generator=gen)
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    sampler = DiffusionSampler(Gaussian(0.0, 1.0), NOISE)
    given, predicted = sampler.sample(expression, position, mask, "expr_to_pos", num_steps=3)
    assert torch.equal(given, expression)
    assert (predicted[~mask] == 0).all()
    made, kept = sampler.sample(expression, position, mask, "pos_to_expr", num_steps=3)
    assert torch.equal(kept, position)
    assert (made[~mask] == 0).all()


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_generator_decides_the_draw_and_the_global_state_is_left_alone(solver: str):
    before = torch.random.get_rng_state()
    samples = [gaussian_sample(solver, 5, 10) for _ in range(2)]
    assert torch.equal(*samples)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_path_can_be_watched():
    seen: list[tuple[int, State]] = []
    expression, _ = DiffusionSampler(Gaussian(0.0, 1.0), NOISE).sample(
        torch.zeros(1, 5, 2), torch.zeros(1, 5, 3), torch.ones(1, 5, dtype=torch.bool),
        num_steps=4, watch=lambda step, state: seen.append((step, state)),
    )  # fmt: skip
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    assert torch.equal(seen[-1][1].expression, expression)
    assert not torch.equal(seen[0][1].expression, expression)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_steps": 0}, "expected 1 to 1000"),
        ({"num_steps": 1001}, "expected 1 to 1000"),
        ({"sampler": "euler"}, "ddim"),
    ],
)
def test_what_cannot_be_sampled_is_refused(changes, words):
    sampler = DiffusionSampler(Gaussian(0.0, 1.0), NOISE)
    with pytest.raises(Exception, match=words) as refusal:
        sampler.sample(
            torch.zeros(1, 5, 2), torch.zeros(1, 5, 3), torch.ones(1, 5, dtype=torch.bool),
            **changes,
        )  # fmt: skip
    assert isinstance(refusal.value, InputError) or "typecheck" in str(refusal.value).lower()


def test_what_follows_from_given_expression_is_computed_once_for_several_samples():
    calls = []

    class Counting:
        def __call__(
            self, expression, position, diffusion_time, node_mask, *, gene_mask, bonus, **other
        ):
            assert other == {"reads_expression": False}
            return Prediction(expression, position * 0 + bonus)

        def prepare(self, expression, diffusion_time, node_mask, *, gene_mask, is_given):
            calls.append(len(expression))
            return {"bonus": expression[..., :3]}

    sampler = DiffusionSampler(Counting(), NOISE)
    expression, mask = torch.randn(1, 9, 5), torch.ones(1, 9, dtype=torch.bool)
    cache: dict = {}
    for _ in range(3):
        arguments = (expression, torch.zeros(1, 9, 3), mask, "expr_to_pos")
        sampler.sample(*arguments, num_steps=4, cache=cache)
    assert calls == [1]
    sampler.sample(*arguments, num_steps=4)
    assert calls == [1, 1]


@pytest.mark.parametrize("num_latents", [0, 4])
@pytest.mark.parametrize("mode", ["joint", "pos_to_expr", "expr_to_pos"])
def test_what_is_prepared_once_gives_the_cells_of_a_network_that_computes_it_in_each_call(
    mode, num_latents
):
    torch.manual_seed(3)
    model = Model(
        12,
        expects_positions=True,
        num_latents=num_latents,
        d_model=16,
        n_heads=2,
        n_layers=1,
        smoothing_rounds=2,
    ).eval()
    with torch.no_grad():
        for weight in model.parameters():  # what starts at zero would hide a difference
            weight.add_(0.1 * torch.randn(weight.shape))

    def unprepared(*cells, **known):  # a plain function has no `prepare`
        return model(*cells, **known)

    cells = torch.randn(2, 40, 12), torch.randn(2, 40, 3), torch.ones(2, 40, dtype=torch.bool)
    results = []
    for network in (model, unprepared):
        sampler = DiffusionSampler(network, NOISE, position_scale=1.0)
        sampler.counts = model.count_model
        results.append(
            sampler.sample(*cells, mode, num_steps=3, generator=torch.Generator().manual_seed(1))
        )
    once, every = results
    for fast, naive in zip(once, every, strict=True):
        assert torch.equal(fast, naive)
