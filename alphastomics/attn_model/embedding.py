"""From a cell's position to its features, with direction, distance and local order kept.

Positions at unit scale enter; each set is centred about its real cells. A cell is described by its
offset, its distance and unit direction from the centre, and sines and cosines of its offset at ten
octaves (Tancik et al. 2020): the longest wave spans the tissue, the shortest resolves neighbours.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

# Wavelengths 16, 8, ..., 1/32 of the tissue's unit scale: 10,000 cells of a slice that is 4 units
# across lie about 1/25 apart.
NUM_OCTAVES = 10
LONGEST_WAVE = 16.0
# Inside this distance the direction fades to zero instead of changing at random with rounding.
SMALLEST_DISTANCE = 1e-6
NUM_COORDINATES = 3
NUM_FEATURES = NUM_COORDINATES + 1 + NUM_COORDINATES + 2 * NUM_OCTAVES * NUM_COORDINATES


def seen_coordinates(
    position: Float[Tensor, "B N 3"],
    node_mask: Bool[Tensor, "B N"] | None,
    hidden: Bool[Tensor, "B N 3"] | None,
) -> Bool[Tensor, "B N 3"]:
    """Say which coordinates are of a real cell and not hidden."""
    seen = torch.ones_like(position, dtype=torch.bool) if hidden is None else ~hidden
    return seen if node_mask is None else seen & node_mask[..., None]


def position_features(offset: Float[Tensor, "B N 3"]) -> Float[Tensor, "B N F"]:
    """Describe an offset p by p, |p|, p/|p| and sin, cos of 2 pi p / w for ten wavelengths w."""
    distance = (offset.square().sum(-1, keepdim=True) + SMALLEST_DISTANCE**2).sqrt()
    octave = torch.arange(NUM_OCTAVES, device=offset.device, dtype=offset.dtype)
    angle = (offset[..., None] * (2 * math.pi / LONGEST_WAVE * 2**octave)).flatten(-2)
    return torch.cat([offset, distance, offset / distance, angle.sin(), angle.cos()], dim=-1)


class PositionEncoding(nn.Module):
    """Embeds centred positions, and which of their coordinates were hidden."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.inner = nn.Linear(NUM_FEATURES + NUM_COORDINATES, d_model)
        self.outer = nn.Linear(d_model, d_model)

    def forward(
        self, offset: Float[Tensor, "B N 3"], seen: Bool[Tensor, "B N 3"]
    ) -> Float[Tensor, "B N D"]:
        """Embed offsets from the set's centre; a flag marks hidden coordinates."""
        features = torch.cat([position_features(offset), (~seen).to(offset.dtype)], dim=-1)
        return self.outer(F.silu(self.inner(features.to(self.inner.weight.dtype))))
