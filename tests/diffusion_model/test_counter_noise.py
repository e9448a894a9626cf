"""Numbers from counters: those of splitmix64, uniform and normal, one set at a time or all."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from alphastomics.diffusion_model.counter_noise import (
    BITS,
    Stream,
    hashed,
    hashes,
    normal_numbers,
    uniform_numbers,
)

SEEDS = torch.tensor([0, 1, 2**62 + 12345])
SHAPE = (200, 101)
DRAWS = [(uniform_numbers, "uniform"), (normal_numbers, "norm")]


def splitmix(seed: int, count: int) -> list[int]:
    """The generator as it is defined, on Python's own numbers."""
    mask, values = 2**64 - 1, []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        value = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        values.append(value ^ (value >> 31))
    return values


def normal_reference(value: int, *, sine: bool) -> float:
    """Box and Muller's equation for one hash."""
    u = ((value >> 40) + 0.5) / 2**BITS
    angle = 2 * math.pi * (value >> 16 & 2**BITS - 1) / 2**BITS
    return math.sqrt(-2 * math.log(u)) * (math.sin if sine else math.cos)(angle)


def test_hashes_are_those_of_splitmix64():
    # The first number of the published generator for seed 0.
    assert splitmix(0, 1) == [0xE220A8397B1DCDAF]
    index = torch.arange(1, 6) * (0x9E3779B97F4A7C15 - 2**64)
    assert [value % 2**64 for value in hashed(index).tolist()] == splitmix(0, 5)
    starts = [splitmix(int(seed), 2)[1] for seed in SEEDS]
    expected = [splitmix(start, 4) for start in starts]
    assert [[v % 2**64 for v in row] for row in hashes(SEEDS, 1, 4).tolist()] == expected


def test_normal_numbers_follow_their_equation_from_the_hashes():
    rows = [[value % 2**64 for value in row] for row in hashes(SEEDS, 1, 8).tolist()]
    expected = [
        [normal_reference(row[index // 2], sine=index % 2 == 1) for index in range(15)]
        for row in rows
    ]
    numbers = normal_numbers(SEEDS, 1, (5, 3)).flatten(1)
    torch.testing.assert_close(numbers, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("draw", "distribution"), DRAWS)
@pytest.mark.parametrize("stream", list(Stream))
def test_numbers_of_a_set_have_their_distribution(draw, distribution: str, stream: Stream):
    numbers = draw(SEEDS, stream, SHAPE).double().numpy()
    for cells in numbers:
        assert stats.kstest(cells.ravel(), distribution).pvalue > 0.001
    # Of one gene over cells, of one cell over genes, and of one entry over sets whose seeds count.
    assert stats.kstest(numbers[:, :, 7].ravel(), distribution).pvalue > 0.001
    assert stats.kstest(numbers[:, 11].ravel(), distribution).pvalue > 0.001
    entries = draw(torch.arange(5000), stream, (1, 2))[:, 0].double().numpy()
    for entry in entries.T:
        assert stats.kstest(entry, distribution).pvalue > 0.001


@pytest.mark.parametrize(("draw", "distribution"), DRAWS)
def test_sets_cells_genes_and_purposes_are_independent(draw, distribution: str):
    numbers = draw(SEEDS, 0, SHAPE).double()
    others = draw(SEEDS, 1, SHAPE).double()
    first, second = numbers[0], numbers[1]
    pairs = {
        "sets": (first, second),
        "cells": (first[:-1], first[1:]),
        "genes": (first[:, :-1], first[:, 1:]),
        "cosine and sine": (first.flatten()[::2], first.flatten()[1::2]),
        "purposes": (first, others[0]),
        "sets whose purposes differ": (first, others[1]),
    }
    for name, (one, two) in pairs.items():
        # Squares too: what is uncorrelated may still be large together.
        for power in (1, 2):
            left, right = (values.numpy().ravel() ** power for values in (one, two))
            bound = 4.5 / math.sqrt(left.size)
            assert abs(np.corrcoef(left, right)[0, 1]) < bound, name


def test_uniform_numbers_are_below_1_and_normal_ones_finite():
    seeds = torch.arange(64)
    uniform = uniform_numbers(seeds, 0, (1000, 64))
    assert float(uniform.min()) >= 0
    assert float(uniform.max()) < 1
    normal = normal_numbers(seeds, 1, (1000, 64))
    assert bool(torch.isfinite(normal).all())
    # The largest of 4 million is seen, and none is beyond what 24 bits can say.
    assert 4.5 < float(normal.abs().max()) < 6


def test_the_least_and_the_largest_hash_give_finite_numbers(monkeypatch):
    extremes = torch.tensor([[0, -1]])  # no bit, and every bit
    path = "alphastomics.diffusion_model.counter_noise.hashes"
    monkeypatch.setattr(path, lambda *_: extremes.clone())
    numbers = normal_numbers(torch.tensor([0]), 0, (1, 4))[0, 0]
    expected = [math.sqrt(2 * math.log(2 ** (BITS + 1))), 0.0, 0.0, 0.0]
    torch.testing.assert_close(numbers, torch.tensor(expected), rtol=1e-6, atol=1e-3)
    uniform = uniform_numbers(torch.tensor([0]), 0, (1, 2))[0, 0]
    assert uniform.tolist() == [0, 1 - 2**-BITS]


@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize(("draw", "distribution"), DRAWS)
def test_a_set_draws_the_same_alone_and_padded(draw, distribution: str, width: int):
    together = draw(SEEDS, 2, (10, width))
    alone = draw(SEEDS[1:2], 2, (7, width))
    torch.testing.assert_close(together[1:2, :7], alone)
    assert not torch.isclose(together[0], together[1]).any()
    assert not torch.isclose(together, draw(SEEDS, 3, (10, width))).any()


@pytest.mark.gpu
@pytest.mark.parametrize(("draw", "distribution"), DRAWS)
def test_a_gpu_draws_what_a_cpu_draws(draw, distribution: str):
    expected = draw(SEEDS, 0, (50, 7))
    torch.testing.assert_close(draw(SEEDS.cuda(), 0, (50, 7)).cpu(), expected)


@pytest.mark.gpu
def test_a_recorded_graph_draws_new_numbers_for_new_seeds():
    seeds = SEEDS.cuda()
    normal_numbers(seeds, 0, (50, 7))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers = normal_numbers(seeds, 0, (50, 7))
    for step in range(3):
        seeds.copy_(SEEDS + step)
        graph.replay()
        torch.testing.assert_close(numbers.cpu(), normal_numbers(SEEDS + step, 0, (50, 7)))
