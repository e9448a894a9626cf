"""Random numbers from counters: seeds enter, numbers leave, the same on every device.

A number is a hash of its seed and index (the finaliser of splitmix64; Steele et al. 2014), made
normal by Box and Muller (1958). Nothing is carried from one number to the next, so that all sets of
a batch are drawn together, and a set draws what it would draw alone, padded or not.
"""

import math

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

# 64-bit numbers are signed in torch: arithmetic on them wraps around as that of unsigned ones does.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
# Bits of a uniform number: as many as float32 holds.
BITS = 24


def shifted(values: Int64[Tensor, "*shape"], by: int) -> Int64[Tensor, "*shape"]:
    """Shift the bits of unsigned numbers to the right."""
    return (values >> by) & ((1 << (64 - by)) - 1)


def hashed(values: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Mix the bits of each number."""
    values = (values ^ shifted(values, 30)) * FIRST
    values = (values ^ shifted(values, 27)) * SECOND
    return values ^ shifted(values, 31)


def hashes(seeds: Int64[Tensor, " B"], stream: int, count: int) -> Int64[Tensor, "B K"]:
    """Return `count` hashes for each seed; another stream of a seed has others."""
    offset = ((stream + 1) * GOLDEN + 2**63) % 2**64 - 2**63
    start = hashed(seeds + offset)
    index = torch.arange(1, count + 1, device=seeds.device)
    return hashed(start[:, None] + index * GOLDEN)


def uniform_numbers(seeds: Int64[Tensor, " B"], stream: int, count: int) -> Float32[Tensor, "B K"]:
    """Return numbers in [0, 1)."""
    return shifted(hashes(seeds, stream, count), 64 - BITS).float() * 2.0**-BITS


def normal_numbers(
    seeds: Int64[Tensor, " B"], stream: int, shape: tuple[int, int]
) -> Float[Tensor, "B N W"]:
    """Return standard normal numbers, each set's rows one after the other."""
    number = math.prod(shape)
    bits = hashes(seeds, stream, -(-number // 2))
    # In (0, 1), so that the logarithm is finite.
    chance = (shifted(bits, 64 - BITS).float() + 0.5) * 2.0**-BITS
    turn = (shifted(bits, 16) & (2**BITS - 1)).float() * (2 * math.pi * 2.0**-BITS)
    radius = (-2 * chance.log()).sqrt()
    pairs = torch.stack([radius * turn.cos(), radius * turn.sin()], dim=-1)
    return pairs.flatten(1)[:, :number].reshape(-1, *shape)
