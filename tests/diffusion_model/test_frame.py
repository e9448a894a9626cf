"""The frame of a tissue: the network chooses it, training and sampling keep to its choice."""

import math

import pytest
import torch

from alphastomics.config import DiffusionConfig
from alphastomics.config.file import parse_document
from alphastomics.diffusion_model import AlphaSTomicsModule, DiffusionSampler
from alphastomics.diffusion_model.loss import aligned_loss
from alphastomics.diffusion_model.noise import NoiseModel
from alphastomics.diffusion_model.randomness import rotation_of
from alphastomics.diffusion_model.solvers import SOLVERS
from alphastomics.geometry import best_rotation, centered
from alphastomics.utils.dataholder import DataHolder
from tests.diffusion_model.test_sample import Prediction

NOISE = NoiseModel(DiffusionConfig())
GIVEN = torch.tensor([[0, 300], [0, 800], [0, 999]])


def module_of(frame: str, loss: str, **model) -> AlphaSTomicsModule:
    document = {
        "model": {"d_model": 16, "n_heads": 2, "n_layers": 2, **model},
        "diffusion": {"position_frame": frame},
        "loss": {"position": loss},
    }
    torch.manual_seed(0)
    module = AlphaSTomicsModule(parse_document(document, "test"), 5, position_scale=2.0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return module.double().eval()


def cells_of(rotation: torch.Tensor | None = None) -> DataHolder:
    gen = torch.Generator().manual_seed(3)
    position = 3 * torch.randn(3, 30, 3, generator=gen, dtype=torch.float64)
    position = position if rotation is None else position @ rotation.mT + 50
    mask = torch.ones(3, 30, dtype=torch.bool)
    mask[1, 20:] = False
    expression = torch.randn(3, 30, 5, generator=gen, dtype=torch.float64)
    return DataHolder.of(expression, position, mask)


@pytest.mark.parametrize("loss", ["distance", "aligned", "both"])
@pytest.mark.parametrize("smoothing", [0, 1])
def test_beside_given_expression_a_slice_may_lie_any_way(loss: str, smoothing: int):
    rotation = rotation_of(
        torch.tensor([[0.3, -1.2, 0.5, 0.8]], dtype=torch.float64), torch.tensor([True])
    )[0]
    same = {}
    for frame in ("predicted", "random"):
        module = module_of(frame, loss, smoothing_rounds=smoothing, smoothing_neighbours=5)
        randomness = module.draw(cells_of(), "test")._replace(times=GIVEN)
        one, two = (float(module.score(cells, randomness).terms.position)
                    for cells in (cells_of(), cells_of(rotation)))  # fmt: skip
        same[frame] = one == pytest.approx(two, rel=1e-6)
    # In a frame of chance the noisy positions, and with them the answer, are others.
    assert same == {"predicted": True, "random": False}


def test_a_set_is_turned_onto_what_the_network_says_of_pure_noise():
    module, cells = module_of("predicted", "aligned"), cells_of()
    randomness = module.draw(cells, "test")._replace(times=GIVEN)
    seen: list[torch.Tensor] = []
    module.average.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    module.score(cells, randomness)
    start, noisy = seen
    noise = randomness.noise(cells).position
    assert torch.equal(start, noise)
    times = torch.tensor([[0.0, 1.0]], dtype=torch.float64).expand(3, 2)
    chosen = module.average(cells.expression, start, times, cells.node_mask).position
    alpha, sigma = (value[:, None, None] for value in NOISE.alpha_sigma(GIVEN[:, 1], 1.0))
    clean = centered((noisy - sigma * noise) / alpha, cells.node_mask)
    rotation = best_rotation(clean, chosen, reflection=True)
    torch.testing.assert_close(rotation, torch.eye(3).double().expand(3, 3, 3), atol=1e-5, rtol=0)


def test_other_sets_stay_as_they_lie():
    module, cells = module_of("predicted", "aligned"), cells_of()
    times = torch.tensor([[300, 300], [500, 0], [1000, 20]])
    randomness = module.draw(cells, "test")._replace(times=times)
    seen: list[torch.Tensor] = []
    module.average.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    module.score(cells, randomness)
    (noisy,) = seen
    wanted = NOISE.noised(
        centered(cells.positions / 2.0, cells.node_mask),
        randomness.noise(cells).position,
        times[:, 1],
        1.0,
    )
    torch.testing.assert_close(noisy, wanted)


def test_only_a_set_that_knows_its_frame_is_asked_for_it():
    # Two cells at x = -1 and 1, predicted at y = -1 and 1: each is off by the root of 2.
    true = torch.tensor([[[-1.0, 0, 0], [1.0, 0, 0]]]).repeat(2, 1, 1)
    predicted = true[..., [1, 0, 2]]
    mask, frame_known = torch.ones(2, 2, dtype=torch.bool), torch.tensor([True, False])
    loss = aligned_loss(predicted, true, mask, reflection=True, frame_known=frame_known)
    assert float(loss) == pytest.approx((2 + 0) / 2, abs=1e-6)
    assert float(aligned_loss(predicted, true, mask, reflection=True)) == pytest.approx(0, abs=1e-6)


class Posterior:
    """The exact denoiser of cells that lie about known positions, in its own frame, by a std."""

    def __init__(self, positions: torch.Tensor, std: float) -> None:
        self.positions, self.std = positions, std

    def __call__(self, expression, position, diffusion_time, node_mask, *, gene_mask):
        alpha, sigma = NOISE.alpha_sigma((diffusion_time[:, 1] * 1000).round().long(), 1.0)
        alpha, sigma = alpha[:, None, None], sigma[:, None, None]
        gain = alpha * self.std**2 / (alpha**2 * self.std**2 + sigma**2)
        return Prediction(expression, self.positions + gain * (position - alpha * self.positions))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("num_steps", [50, 200])
def test_draws_keep_to_the_networks_frame_and_have_its_spread(solver: str, num_steps: int):
    gen = torch.Generator().manual_seed(1)
    positions = torch.randn(1, 2000, 3, generator=gen, dtype=torch.float64)
    positions = centered(positions * torch.tensor([1.5, 1.0, 0.0]), torch.ones(1, 2000) > 0)
    _, drawn = DiffusionSampler(Posterior(positions, 0.3), NOISE).sample(
        torch.zeros(1, 2000, 2, dtype=torch.float64), torch.zeros_like(positions),
        torch.ones(1, 2000, dtype=torch.bool), "expr_to_pos", num_steps=num_steps,
        sampler=solver, generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    error = (drawn - positions).square().mean().sqrt()
    assert math.isclose(float(error), 0.3, rel_tol=0.12)
