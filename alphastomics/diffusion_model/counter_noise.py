"""Random numbers from counters: seeds enter, numbers leave, the same on every device.

A number is a hash of its seed and index (the finaliser of splitmix64; Steele et al. 2014), made
normal by Box and Muller (1958). Nothing is carried from one number to the next, so that all sets of
a batch are drawn together, a set draws what it would draw alone, padded or not, and a CUDA graph
draws new numbers when its seeds change. Devices agree but for the rounding of normal numbers.
"""

import math
from enum import IntEnum

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

# 64-bit numbers are signed in torch: arithmetic on them wraps around as that of unsigned ones does.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
# Bits of a uniform number: as many as float32 holds.
BITS = 24


class Stream(IntEnum):
    """What numbers of a seed are for: each purpose has its own, and none depends on another."""

    CHOICES = 0
    POSE = 1
    EXPRESSION_NOISE = 2
    POSITION_NOISE = 3
    EXPRESSION_MASK = 4
    POSITION_MASK = 5
    LATENT = 6


def shifted(values: Int64[Tensor, "*shape"], by: int) -> Int64[Tensor, "*shape"]:
    """Shift the bits of unsigned numbers to the right."""
    return (values >> by).bitwise_and_((1 << (64 - by)) - 1)


def hashed(values: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Mix the bits of each number."""
    # In place: a batch has millions of numbers, and memory takes longer than arithmetic.
    values = (shifted(values, 30).bitwise_xor_(values)).mul_(FIRST)
    values = (shifted(values, 27).bitwise_xor_(values)).mul_(SECOND)
    return shifted(values, 31).bitwise_xor_(values)


def hashes(seeds: Int64[Tensor, " B"], stream: int, count: int) -> Int64[Tensor, "B K"]:
    """Return `count` hashes for each seed; another stream of a seed has others."""
    offset = ((stream + 1) * GOLDEN + 2**63) % 2**64 - 2**63
    start = hashed(seeds + offset)
    index = torch.arange(1, count + 1, device=seeds.device)
    return hashed(start[:, None] + index * GOLDEN)


def uniform_numbers(
    seeds: Int64[Tensor, " B"], stream: int, shape: tuple[int, int]
) -> Float32[Tensor, "B N W"]:
    """Return numbers in [0, 1), each set's rows one after the other."""
    bits = shifted(hashes(seeds, stream, math.prod(shape)), 64 - BITS)
    return bits.float().mul_(2.0**-BITS).reshape(-1, *shape)


def normal_numbers(
    seeds: Int64[Tensor, " B"], stream: int, shape: tuple[int, int]
) -> Float32[Tensor, "B N W"]:
    """Return standard normal numbers, each set's rows one after the other.

    A hash gives two: sqrt(-2 log u) times the cosine and the sine of 2 pi v.
    """
    number = math.prod(shape)
    bits = hashes(seeds, stream, -(-number // 2))
    # In (0, 1], so that the logarithm is finite.
    u = shifted(bits, 64 - BITS).float().add_(0.5).mul_(2.0**-BITS)
    angle = (bits >> 16).bitwise_and_(2**BITS - 1).float().mul_(2 * math.pi * 2.0**-BITS)
    radius = u.log_().mul_(-2).sqrt_()
    pairs = torch.stack([angle.cos().mul_(radius), angle.sin().mul_(radius)], dim=-1)
    return pairs.flatten(1)[:, :number].reshape(-1, *shape)
