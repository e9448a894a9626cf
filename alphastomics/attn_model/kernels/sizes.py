"""The sizes of a call: shapes enter; the kernels' constants, tiles and memory layouts leave."""

from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from alphastomics.attn_model.kernels.expert_groups import ExpertGroups, expert_groups, group_table
from alphastomics.attn_model.kernels.launch import Layout, Parts, lay_out

# Cells of a block that is routed.
BLOCK = 128
# The tensor cores' smallest side; experts and groups are padded to a power of two from here on.
SMALLEST_SIDE = 16
# Bytes of shared memory that a program may take on a GPU for data centres; others have 99 KiB.
AMPLE = 160 * 1024
# From this width on tiles are fetched by descriptors; making those takes Python time that narrower,
# quicker layers lack.
DESCRIPTOR_WIDTH = 512
# With fewer programs than this a group's rows are split into chunks, multiples of CHUNK, or the
# GPU idles.
PROGRAMS = 264
CHUNK = 1024
# Columns of narrow tiles added up at a time: 128 tiles, or few programs would have work.
NARROW_COLUMNS = 32
# Numbers that a program rounds.
NUMBERS = 4096


class Tiling(NamedTuple):
    """Rows and columns of a tile, the depth of a step, warps, and stages of the pipeline."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# Routing and sums are the same everywhere; there is no depth. Products: for half precision where
# shared memory is ample, for it elsewhere, and for float32.
FIXED = {
    "route": Tiling(BLOCK, 32, 0, 4, 3),
    "send": Tiling(BLOCK, 64, 0, 4, 3),
    "sum": Tiling(4, 512, 0, 4, 3),
}
HALF = {
    "up": Tiling(64, 128, 64, 4, 3),
    "down": Tiling(128, 256, 64, 8, 3),
    "hidden gradient": Tiling(128, 128, 64, 4, 3),
    "score gradient": Tiling(128, 64, 64, 4, 3),
    "cell gradient": Tiling(128, 128, 64, 4, 3),
    "weight gradient": Tiling(128, 128, 64, 4, 3),
}
SMALL = {kind: Tiling(128, 128, 32, 4, 3) for kind in HALF} | {
    "score gradient": Tiling(64, 64, 32, 4, 2),
}
SINGLE = Tiling(64, 64, 32, 4, 2)
# For gradients of matrices whose rows are fetched by descriptors.
WIDE = Tiling(128, 256, 64, 8, 3)


@lru_cache
def has_ample_shared_memory(device: torch.device) -> bool:
    """Tell whether a GPU has ample shared memory; Triton's interpreter counts as a small one."""
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    # Only NVIDIA's GPUs say how much a program may ask for.
    return getattr(properties, "shared_memory_per_block_optin", 0) >= AMPLE


@lru_cache
def has_descriptors(device: torch.device) -> bool:
    """Tell whether a GPU has an engine that copies tiles by descriptors."""
    return has_ample_shared_memory(device) and torch.cuda.get_device_properties(device).major >= 9


def padded_size(count: int) -> int:
    """Return a number of experts or groups, padded to what the kernels take."""
    return max(SMALLEST_SIDE, 1 << (count - 1).bit_length())


def num_steps(size: int, step: int) -> int:
    """Return how many steps there are; Triton's own function takes longer than the division."""
    return -(-size // step)


@dataclass(frozen=True)
class Constants:
    """What a kernel is compiled for: experts and their groups, its tile, and its variant.

    `even`: a product's depth is a multiple of the tile's. `split`: the matrices' gradients are
    formed by chunks of a group's rows, not by expert. `hidden_rows`, `score_rows`: rows of the
    tiles whose gradients are added up.
    """

    experts: int
    padded_experts: int
    groups: int
    padded_groups: int
    group_size: int
    rows_per_cell: int
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    even: bool
    split: bool
    by_descriptor: bool
    hidden_rows: int
    score_rows: int

    def __repr__(self) -> str:
        """Name the constants in characters that a compiled function's name may have."""
        return "_".join(str(int(value)) for value in astuple(self))


class Sizes(NamedTuple):
    """The sizes of a call, its precision, and its expert groups.

    T cells of width D have S rows, one or k each; E experts of width H, of which a cell has k.
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
    groups: ExpertGroups

    @property
    def num_rows(self) -> int:
        """Return the number of rows, S."""
        return self.num_cells * self.groups.rows_per_cell

    @property
    def matrices(self) -> int:
        """Return how many matrices score a cell: the router's, and with noise the noise's."""
        return 2 if self.noisy else 1

    def max_tiles(self, rows: int) -> int:
        """Return how many tiles there are at most: each group's last one may be short."""
        return num_steps(self.num_rows, rows) + min(self.groups.number, self.num_rows)


def make_sizes(
    x: Tensor, up_weight: Tensor, top_k: int, dtype: torch.dtype, *, noisy: bool
) -> Sizes:
    """Return the sizes of a call of cells (T, D) and matrices (E, D, H), in a precision."""
    (num_cells, width), (num_experts, _, hidden) = x.shape, up_weight.shape
    return Sizes(
        num_cells, width, hidden, num_experts, top_k, noisy, dtype, up_weight.dtype != dtype,
        expert_groups(num_experts, top_k),
    )  # fmt: skip


def tiling_of(kind: str, dtype: torch.dtype, device: torch.device) -> Tiling:
    """Return the tiling of one kind of kernel."""
    if kind in FIXED or dtype == torch.float32:
        return FIXED.get(kind, SINGLE)
    return (HALF if has_ample_shared_memory(device) else SMALL)[kind]


def saved_layout(sizes: Sizes, *, needs_grad: bool) -> Layout:
    """Lay out what the forward pass leaves for the backward pass; less without gradients.

    `sent` holds the cells by group, in the experts' precision; `score` logits and, with noise, its
    scale before the softplus; `weight` those of a cell's experts, ascending; `slot` 128 times the
    group of a row plus its rank in its block, -1 for padding; `plan` where each group's rows end,
    then the assignments in order; `hidden` and `slope` GELU and its slope, by row and expert of the
    group; `up` and `down` the rounded matrices.
    """
    m, rows = sizes, sizes.num_rows
    inner, matrices = m.groups.size * m.hidden, (m.num_experts, m.width, m.hidden)
    statistics = m.groups.number + 2 * m.num_experts + 2
    parts: Parts = (
        ("sent", (rows, m.width), m.dtype),
        ("score", (m.num_cells, m.matrices * m.num_experts), torch.float32),
        ("weight", (m.num_cells, m.top_k), torch.float32),
        ("slot", (rows,), torch.int32),
        ("plan", (padded_size(m.groups.number) + rows,), torch.int32),
        ("partial", (num_steps(m.num_cells, BLOCK), statistics), torch.float32),
        ("hidden", (rows, inner), m.dtype),
    )
    if needs_grad:
        parts = (*parts, ("slope", (rows, inner), m.dtype))
    if m.rounded:
        parts = (*parts, ("up", matrices, m.dtype), ("down", matrices, m.dtype))
    return lay_out(parts)


def backward_layout(m: Sizes, hidden: Tiling, score: Tiling, parts: int, chunks: int) -> Layout:
    """Lay out what the backward kernels leave to each other."""
    single, size, padded = torch.float32, m.groups.size, padded_size(m.num_experts)
    layout: Parts = (
        ("before_grad", (m.num_rows, size * m.hidden), m.dtype),
        ("weight_grad", (parts, m.num_cells, m.top_k), single),
        ("up_bias_partial", (m.max_tiles(hidden.rows), size, m.hidden), single),
        ("sent_grad", (m.num_rows, m.width), m.dtype),
        ("score_grad", (m.num_rows, m.matrices * padded), m.dtype),
        ("partial", (m.max_tiles(score.rows), m.matrices + 1, m.num_experts, m.width), single),
        ("up_partial", (chunks, m.width * m.hidden), single),
        ("down_partial", (chunks, m.width * m.hidden), single),
    )
    return lay_out(layout)


class CallPlan(NamedTuple):
    """The constants of each kernel, the table of expert groups, and the memory of both passes.

    The matrices' gradients are formed in `blocks`, by `programs` side by side, of `chunk` rows of
    a group each or, if that is 0, of one expert each. `parts`: tiles across the hidden width.
    """

    kernels: dict[str, Constants]
    table: Tensor
    saved: Layout
    backward: Layout
    parts: int
    chunk: int
    programs: int
    blocks: int


def uses_descriptors(sizes: Sizes, device: torch.device) -> bool:
    """Tell whether the copy engine can fetch tiles of rows, and if it pays: whole steps only."""
    depth, sides = WIDE.depth, (sizes.width, sizes.hidden)
    fits = all(side >= DESCRIPTOR_WIDTH and side % depth == 0 for side in sides)
    return fits and sizes.dtype != torch.float32 and has_descriptors(device)


@lru_cache
def _table(num_experts: int, groups: ExpertGroups, device: torch.device) -> Tensor:
    """Copy the expert groups' table to a device once, since a copy waits for the GPU."""
    return torch.tensor(group_table(num_experts, groups), device=device)


@lru_cache(maxsize=256)
def plan_call(sizes: Sizes, device: torch.device, *, needs_grad: bool) -> CallPlan:
    """Plan a call: its kernels, how the matrices' gradients are shared out, and its memory."""
    m, size, wide = sizes, sizes.groups.size, uses_descriptors(sizes, device)
    depth = {"up": m.width, "down": m.hidden, "hidden gradient": m.width, "cell gradient": m.hidden}
    tiles = {kind: tiling_of(kind, m.dtype, device) for kind in (*FIXED, *HALF)}
    hidden, score = tiles["hidden gradient"], tiles["score gradient"]
    tile = tiles["weight gradient"] = WIDE if wide else tiles["weight gradient"]
    blocks = num_steps(m.width, tile.rows) * num_steps(m.hidden, tile.columns)
    chunk, programs = 0, m.num_experts
    if 2 * blocks * m.num_experts < PROGRAMS:
        chunk = CHUNK * max(1, num_steps(m.num_rows * size * blocks, PROGRAMS * CHUNK))
        programs = m.max_tiles(chunk) * size
    kernels = {
        kind: Constants(
            m.num_experts, padded_size(m.num_experts), m.groups.number,
            padded_size(m.groups.number), size, m.groups.rows_per_cell, *tiling,
            even=kind in depth and depth[kind] % tiling.depth == 0, split=chunk > 0,
            by_descriptor=wide, hidden_rows=hidden.rows, score_rows=score.rows,
        )
        for kind, tiling in tiles.items()
    }  # fmt: skip
    parts = num_steps(m.hidden, hidden.columns)
    backward = backward_layout(m, hidden, score, parts, programs if chunk else 0)
    saved = saved_layout(m, needs_grad=needs_grad)
    table = _table(m.num_experts, m.groups, device)
    return CallPlan(kernels, table, saved, backward, parts, chunk, programs, blocks)
