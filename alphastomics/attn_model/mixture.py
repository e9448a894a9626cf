"""The shape of a call of the mixture of experts on a GPU: sizes enter; constants and layouts leave.

What the kernels of routing, experts and gradients agree on.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alphastomics.attn_model.launch import Layout, Parts, lay_out
from alphastomics.attn_model.teams import Teams, make_teams, team_table

# Cells of a block that is routed.
CELLS = 128
# The tensor cores' smallest side; experts and teams are padded to a power of two from here on.
SMALLEST_SIDE = 16
# Bytes of shared memory that a program may take on a GPU for data centres; others have 99 KiB.
AMPLE = 160 * 1024


@lru_cache
def is_ample(device: torch.device) -> bool:
    """Tell whether a GPU has ample shared memory; Triton's interpreter counts as a small one."""
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    # Only NVIDIA's GPUs say how much a program may ask for.
    return getattr(properties, "shared_memory_per_block_optin", 0) >= AMPLE


@lru_cache
def has_descriptors(device: torch.device) -> bool:
    """Tell whether a GPU has an engine that copies tiles by descriptors."""
    return is_ample(device) and torch.cuda.get_device_properties(device).major >= 9


def lanes(count: int) -> int:
    """Return a number of experts or teams, padded to what the kernels take."""
    return max(SMALLEST_SIDE, 1 << (count - 1).bit_length())


class Experts(NamedTuple):
    """The weights of a mixture, or their gradients; `noise` is None where none is drawn.

    Matrices are tensors, or where their kernels are compiled already addresses.
    """

    router: Tensor
    noise: Tensor | None
    up_weight: Any
    up_bias: Tensor
    down_weight: Any
    down_bias: Tensor


class Mixture(NamedTuple):
    """The shape of a call: its sizes, its precision, and its teams.

    T cells of width D have S rows, one or k each; E experts of width H, of which a cell visits k.
    `rounded`: matrices are in another precision than the call.
    """

    num_cells: int
    width: int
    hidden: int
    num_experts: int
    top_k: int
    noisy: bool
    dtype: torch.dtype
    rounded: bool
    teams: Teams

    @property
    def num_rows(self) -> int:
        """Return the number of rows, S."""
        return self.num_cells * self.teams.rows

    @property
    def matrices(self) -> int:
        """Return how many matrices score a cell: the router's, and with noise the noise's."""
        return 2 if self.noisy else 1

    def table(self, device: torch.device) -> Tensor:
        """Return the table of the teams."""
        return _table(self.num_experts, self.top_k, device)

    def told(self, *names: str) -> dict[str, int]:
        """Return by name what the kernels are told of experts and teams."""
        told = {
            "EXPERTS": self.num_experts,
            "LANES": lanes(self.num_experts),
            "TEAMS": self.teams.number,
            "TEAM_LANES": lanes(self.teams.number),
            "MEMBERS": self.teams.members,
            "VISITS": self.teams.rows,
            "CELLS": CELLS,
        }
        return {name: told[name] for name in names}


def make_mixture(
    x: Tensor, up_weight: Tensor, top_k: int, dtype: torch.dtype, *, noisy: bool
) -> Mixture:
    """Describe a call of cells (T, D) and matrices (E, D, H), in a precision."""
    (num_cells, width), (num_experts, _, hidden) = x.shape, up_weight.shape
    return Mixture(
        num_cells, width, hidden, num_experts, top_k, noisy, dtype, up_weight.dtype != dtype,
        make_teams(num_experts, top_k),
    )  # fmt: skip


@lru_cache
def _table(num_experts: int, top_k: int, device: torch.device) -> Tensor:
    """Return the table of a mixture's teams."""
    return torch.tensor(team_table(num_experts, make_teams(num_experts, top_k)), device=device)


def saved_layout(mixture: Mixture, *, wanted: bool) -> Layout:
    """Lay out what a call leaves for the way back; less if none is `wanted`.

    `sent` holds the cells by team, in the experts' precision; `score` logits and, with noise, its
    scale before the softplus; `weight` those of a cell's experts, ascending; `spot` 128 times the
    team of a row plus its rank in its block, -1 for padding; `plan` where each team's rows end,
    then the rows in order; `hidden` and `slope` GELU and its slope, by row and member; `up` and
    `down` the rounded matrices.
    """
    m = mixture
    rows, members, matrices = m.num_rows, m.teams.members, (m.num_experts, m.width, m.hidden)
    parts: Parts = (
        ("sent", (rows, m.width), m.dtype),
        ("score", (m.num_cells, m.matrices * m.num_experts), torch.float32),
        ("weight", (m.num_cells, m.top_k), torch.float32),
        ("spot", (rows,), torch.int32),
        ("plan", (lanes(m.teams.number) + rows,), torch.int32),
        (
            "partial",
            (parts_of(m.num_cells, CELLS), m.teams.number + 2 * m.num_experts + 2),
            torch.float32,
        ),
        ("hidden", (rows, members * m.hidden), m.dtype),
    )
    if wanted:
        parts = (*parts, ("slope", (rows, members * m.hidden), m.dtype))
    if m.rounded:
        parts = (*parts, ("up", matrices, m.dtype), ("down", matrices, m.dtype))
    return lay_out(parts)


# For calls whose sizes are numbers; where a compiler has symbols there is nothing to look up.
known_layout = lru_cache(maxsize=256)(saved_layout)


def parts_of(size: int, step: int) -> int:
    """Return how many steps there are; Triton's own function takes longer than the division."""
    return -(-size // step)
