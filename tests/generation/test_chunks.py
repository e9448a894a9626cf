"""Slices drawn in chunks: where the answer is known, the chunks fit, or miss by that much."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from alphastomics.config import Config, ModelConfig, SamplingConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.randomness import stream_seed
from alphastomics.errors import InputError
from alphastomics.evaluation.position import rmsd
from alphastomics.generation.cells import Blank, InputCells, blank_cells
from alphastomics.generation.chunks import largest_set, plan_chunks
from alphastomics.generation.generate import generate
from alphastomics.generation.slices import SliceSampler, radius_of_gyration

CELLS, GENES, SCALE = 300, 5, 100.0
CHUNKED = SamplingConfig(num_steps=5, num_samples=2, max_set_size=100)
WHOLE = CHUNKED.model_copy(update={"max_set_size": CELLS})


class Prediction(NamedTuple):
    expression: Tensor
    position: Tensor


class Toy(nn.Module):
    """Reads a cell's position off its first three genes, or its genes off its position.

    It errs by a given amount. Each call's positions are rotated and shifted at random, as those of
    a network that ignores frames.
    """

    def __init__(self, growth: float = 0.0, noise: float = 0.0) -> None:
        super().__init__()
        self.growth, self.noise = growth, noise
        self.stream = torch.Generator().manual_seed(9)
        self.seen: set[float] = set()

    def forward(self, expression, position, diffusion_time, node_mask, *, gene_mask=None):
        turn, _ = torch.linalg.qr(torch.randn(3, 3, generator=self.stream))
        self.seen.add(float(expression[0, -1, 3]))  # the last cell tells the chunks apart
        path = expression[..., :3] * (1 + self.growth * (len(self.seen) - 1))
        path = (path + self.noise * position) @ turn + torch.randn(3, generator=self.stream)
        genes = torch.zeros_like(expression)
        genes[..., :3] = position + self.noise * expression[..., :3]
        return Prediction(genes, path)


def toy_module(toy: nn.Module) -> AlphaSTomicsModule:
    config = Config(model=ModelConfig(d_model=8, n_heads=1, n_layers=1))
    module = AlphaSTomicsModule(config, GENES, position_scale=SCALE)
    module.average = toy
    return module.eval()


def tissue() -> InputCells:
    """Cells whose first three genes are their position about the centre, in the model's units."""
    rng = np.random.default_rng(0)
    position = (rng.normal(size=(CELLS, 3)) * [3.0, 2.0, 1.0]).astype(np.float32)
    position -= position.mean(0)
    expression = np.zeros((CELLS, GENES), np.float32)
    expression[:, :3], expression[:, 3] = position, rng.normal(size=CELLS)
    blank = blank_cells(Blank(CELLS), GENES, dims=3)
    return replace(blank, expression=expression, position=position * SCALE)


def test_every_cell_is_in_one_chunk_and_anchors_are_in_all():
    plan = plan_chunks(1000, 100, seed=3)
    assert sorted(np.concatenate([plan.anchors, *plan.parts]).tolist()) == list(range(1000))
    assert max(len(plan.rows(chunk)) for chunk in range(len(plan.parts))) <= 100
    again, other = plan_chunks(1000, 100, seed=3), plan_chunks(1000, 100, seed=4)
    np.testing.assert_array_equal(plan.anchors, again.anchors)
    assert not np.array_equal(plan.anchors, other.anchors)
    assert [len(part) for part in plan_chunks(100, 100, seed=3).parts] == [100]
    with pytest.raises(InputError, match="max_set_size"):
        plan_chunks(100, 7, seed=0)


@pytest.mark.parametrize("estimator", ["mean", "sample"])
def test_chunks_of_an_exact_denoiser_join_without_a_seam(estimator):
    cells = tissue()
    settings = CHUNKED.model_copy(update={"estimator": estimator})
    generated = generate(toy_module(Toy()), cells, "expr_to_pos", settings, 1)
    assert rmsd(generated.position, cells.position, reflection=True) < 1e-3 * SCALE
    (seam,) = generated.seams
    assert (seam.chunks, seam.anchors) == (4, 12)
    assert seam.rms < 1e-3 * SCALE
    np.testing.assert_allclose(generated.position.mean(0), 0, atol=1e-3 * SCALE)


def test_the_seam_error_is_that_of_the_anchors_worked_by_hand():
    cells = tissue()
    # Chunk c is 1 + 0.1 c times the truth: an anchor is off by 0.1 c times its way to their centre.
    settings = CHUNKED.model_copy(update={"num_samples": 1, "num_steps": 1, "estimator": "sample"})
    generated = generate(toy_module(Toy(growth=0.1)), cells, "expr_to_pos", settings, 1)
    (seam,) = generated.seams
    radius = np.sqrt(((generated.position - generated.position.mean(0)) ** 2).sum(1).mean())
    assert seam.relative == pytest.approx(seam.rms / radius, rel=1e-3)
    anchors = plan_of(cells)
    position = cells.position[anchors]
    gyration = ((position - position.mean(0)) ** 2).sum(1).mean()
    expected = np.sqrt(np.mean([(0.1 * chunk) ** 2 * gyration for chunk in (1, 2, 3)]))
    assert seam.rms == pytest.approx(expected, rel=1e-3)


def plan_of(cells: InputCells) -> np.ndarray:
    return plan_chunks(len(cells.names), 100, stream_seed(1, "anchors", 0)).anchors


@pytest.mark.parametrize("solver", ["ddim", "dpmpp"])
def test_a_chunked_slice_is_near_the_whole_one(solver):
    cells = tissue()
    parts = {"sampler": solver, "estimator": "sample", "num_samples": 1}
    chunked, whole = (
        generate(
            toy_module(Toy(noise=0.05)),
            cells,
            "expr_to_pos",
            settings.model_copy(update=parts),
            1,
        )
        for settings in (CHUNKED, WHOLE)
    )
    apart = rmsd(chunked.position, whole.position, reflection=True)
    assert whole.seams == ()
    assert apart < 0.05 * radius_of_gyration(torch.from_numpy(cells.position))
    assert 0 < chunked.seams[0].relative < 0.05


def test_expression_of_independent_cells_does_not_depend_on_the_chunks():
    cells = tissue()
    parts = {"estimator": "sample", "num_samples": 1}

    class Alone(Toy):
        def forward(self, expression, position, diffusion_time, node_mask, *, gene_mask=None):
            return Prediction(0.5 * expression + 0.1, position)

    chunked, whole = (
        generate(toy_module(Alone()), cells, "pos_to_expr", one.model_copy(update=parts), 1)
        for one in (CHUNKED, WHOLE)
    )
    np.testing.assert_allclose(chunked.expression, whole.expression, atol=1e-5)
    np.testing.assert_array_equal(chunked.position, cells.position)
    assert chunked.seams[0].rms == pytest.approx(0, abs=1e-6)


def test_new_tissue_in_chunks_is_drawn_around_the_same_anchors():
    seen: list[Tensor] = []

    class Watching(Toy):
        def forward(self, expression, position, diffusion_time, node_mask, *, gene_mask=None):
            seen.append(expression[0, :12].clone())
            return Prediction(torch.tanh(expression), torch.tanh(position))

    cells = blank_cells(Blank(CELLS), GENES, dims=3)
    generated = generate(toy_module(Watching()), cells, "joint", CHUNKED, 1)
    again = generate(toy_module(Watching()), cells, "joint", CHUNKED, 1)
    np.testing.assert_array_equal(generated.position, again.position)
    assert np.isnan(generated.seams[0].rms)
    anchors = plan_of(cells)
    # At the last step of a later chunk, the anchors are nearly what the first chunk made of them.
    last = seen[4 * CHUNKED.num_steps - 1].numpy()
    assert np.abs(last - generated.expression[anchors]).mean() < 0.5
    assert len(np.unique(generated.expression[:, 0])) == CELLS


def test_the_result_is_a_pure_function_of_the_seed():
    cells = tissue()
    one, two, other = (
        generate(toy_module(Toy(noise=0.1)), cells, "expr_to_pos", CHUNKED, seed)
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one.position, two.position)
    assert not np.array_equal(one.position, other.position)


def trained_for_positions() -> AlphaSTomicsModule:
    """A network with smoothing and a position head, whose weights are random."""
    torch.manual_seed(4)
    config = Config(
        model=ModelConfig(d_model=16, n_heads=2, n_layers=1, smoothing_rounds=2),
        diffusion={"position_frame": "registered"},
    )
    assert config.has_position_head
    return AlphaSTomicsModule(config, GENES, position_scale=SCALE).eval()


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("mode", ["expr_to_pos", "pos_to_expr"])
def test_samples_in_the_same_network_calls_are_those_of_one_call_each(mode, num_steps):
    settings = SamplingConfig(num_steps=3, num_samples=5)
    sampler = SliceSampler(trained_for_positions(), tissue(), 0, mode, settings, 1)
    counted: list[int] = []

    def advance(finished, *, note=None):
        counted.append(finished)

    alone = [sampler.sample(num_steps, index, advance).cells for index in range(5)]
    assert counted == [1] * 5 * num_steps
    sampler.sets_at_once = 2
    together = [sample.cells for sample in sampler.samples(num_steps, 5, advance)]
    assert counted[5 * num_steps :] == [2] * num_steps + [2] * num_steps + [1] * num_steps
    for one, other in zip(alone, together, strict=True):
        for fast, naive in zip(other, one, strict=True):
            torch.testing.assert_close(fast, naive, rtol=1e-4, atol=1e-3)


def test_chunks_see_the_neighbours_of_the_whole_slice():
    module, cells = trained_for_positions(), tissue()
    settings = SamplingConfig(num_steps=1, num_samples=1)
    whole = SliceSampler(module, cells, 0, "expr_to_pos", settings, 1)
    rows = np.array([5, 250, 7, 31])
    part, prepared = whole.prepared_part(rows), whole.prepared()
    for name in ("embedded", "context"):
        torch.testing.assert_close(part[name], prepared[name][:, rows])
    expected = prepared["expected"][0, rows] - prepared["expected"][0, rows].mean(0)
    torch.testing.assert_close(part["expected"][0], expected)
    # A slice that is too large for a set is never held as one.
    chunked = SliceSampler(module, cells, 0, "expr_to_pos", CHUNKED, 1)
    assert chunked.prepared_part(rows) is None


def test_sets_are_as_large_as_asked_for_or_as_the_device_bears():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    left_out, given = SamplingConfig(), SamplingConfig(max_set_size=300)
    assert [largest_set(left_out, device, 20) for device in (cpu, gpu)] == [2048, 65536]
    assert [largest_set(left_out, device, 1) for device in (cpu, gpu)] == [65536, 65536]
    assert [largest_set(given, device, n) for device in (cpu, gpu) for n in (1, 20)] == [300] * 4
