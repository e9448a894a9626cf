"""Numbers from counters: those of splitmix64, uniform and normal, one set at a time or all."""

import numpy as np
import pytest
import torch
from scipy import stats

from alphastomics.diffusion_model.counter_noise import (
    hashed,
    hashes,
    normal_numbers,
    uniform_numbers,
)

SEEDS = torch.tensor([0, 1, 2**62 + 12345])


def splitmix(seed: int, count: int) -> list[int]:
    """The generator as it is defined, on Python's own numbers."""
    mask, found = 2**64 - 1, []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        value = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        found.append(value ^ (value >> 31))
    return found


def test_hashes_are_those_of_splitmix64():
    # The first numbers of the published generator for seed 0.
    assert splitmix(0, 1) == [0xE220A8397B1DCDAF]
    index = torch.arange(1, 6) * (0x9E3779B97F4A7C15 - 2**64)
    found = [value % 2**64 for value in hashed(index).tolist()]
    assert found == splitmix(0, 5)
    starts = [splitmix(int(seed), 2)[1] for seed in SEEDS]
    expected = [splitmix(start, 4) for start in starts]
    assert [[v % 2**64 for v in row] for row in hashes(SEEDS, 1, 4).tolist()] == expected


def test_numbers_have_their_distributions():
    uniform = uniform_numbers(SEEDS, 0, 20_000).double().numpy()
    assert 0 <= uniform.min() <= uniform.max() < 1
    normal = normal_numbers(SEEDS, 1, (200, 101)).flatten(1).double().numpy()
    for row in range(len(SEEDS)):
        assert stats.kstest(uniform[row], "uniform").pvalue > 0.001
        assert stats.kstest(normal[row], "norm").pvalue > 0.001
    for numbers in (uniform, normal):
        assert np.abs(np.corrcoef(numbers) - np.eye(3)).max() < 0.03
        assert abs(np.corrcoef(numbers[0, :-1], numbers[0, 1:])[0, 1]) < 0.03


@pytest.mark.parametrize("width", [3, 4])
def test_a_set_draws_the_same_alone_and_padded(width: int):
    together = normal_numbers(SEEDS, 2, (10, width))
    alone = normal_numbers(SEEDS[1:2], 2, (7, width))
    assert torch.equal(together[1:2, :7], alone)
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(together, normal_numbers(SEEDS, 3, (10, width)))


@pytest.mark.gpu
def test_a_gpu_draws_what_a_cpu_draws():
    expected = normal_numbers(SEEDS, 0, (50, 7))
    torch.testing.assert_close(normal_numbers(SEEDS.cuda(), 0, (50, 7)).cpu(), expected)
