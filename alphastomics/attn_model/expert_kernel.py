"""The experts on a GPU: rows sorted by team enter, each meets its team's matrices.

A program takes a tile of one team's rows; `_tile` finds whose. Results go back to their cells where
they are written; `gradient_kernel.py` has the way back. T cells, S rows, E experts of width H.
"""

from functools import lru_cache
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from alphastomics.attn_model.launch import Key, Space, launch
from alphastomics.attn_model.mixture import Mixture, is_ample, parts_of
from alphastomics.attn_model.routing_kernel import _member, _tile


class Tiling(NamedTuple):
    """The shape of a tile, rows x columns, the depth of a step, and how many run side by side."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# For half precision where shared memory is ample, for it elsewhere, and for float32.
HALF = {
    "up": Tiling(64, 128, 64, 4, 3),
    "down": Tiling(128, 256, 64, 8, 3),
    "hidden gradient": Tiling(128, 128, 64, 4, 3),
    "score gradient": Tiling(128, 64, 64, 4, 3),
    "cell gradient": Tiling(128, 128, 64, 4, 3),
    "weight gradient": Tiling(128, 128, 64, 4, 3),
    "wide weight gradient": Tiling(128, 256, 64, 8, 3),
}
SMALL = {kind: Tiling(128, 128, 32, 4, 3) for kind in HALF} | {
    "score gradient": Tiling(64, 64, 32, 4, 2),
}
SINGLE = Tiling(64, 64, 32, 4, 2)


@triton.jit
@no_type_check
def _gelu(x, EXACT: tl.constexpr):
    """Return GELU over x, the distribution function of the normal distribution, and its slope.

    EXACT: to 1e-7, by eq. 7.1.26 of Abramowitz & Stegun (1964), where one exponential serves both.
    Otherwise a logistic function of an odd polynomial, fitted here, and the slope of that: GELU to
    3e-5 and its slope to 1.1e-4, a fraction of half precision's rounding, with fewer operations.
    """
    if EXACT:
        power = tl.exp2(-0.7213475204444817 * x * x)
        t = 1 / (1 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
        tail = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
        tail = 0.5 * power * t * (0.254829592 + t * (-0.284496736 + t * tail))
        below = tl.where(x < 0, tail, 1 - tail)
        slope = below + 0.3989422804014327 * power * x
    else:
        # Past 7 the polynomial would turn around; the function is 0 or 1 there.
        square = tl.minimum(x * x, 49.0)
        power = x * (2.3011142474 + square * (0.1067701571772 - square * 0.00101292233804))
        away = 1 + tl.exp2(-power)
        # A reciprocal in one instruction, which division is not.
        below = tl.rsqrt(away * away)
        rise = 1.5950108527 + square * (0.2220223002 - square * 0.0035105213)
        slope = below + below * x * (rise - below * rise)
    return below, slope


@triton.jit
@no_type_check
def _product(
    a_ptr, w_ptr, row, packed, column, a_width, depth_size, num_columns, product,
    MEMBERS: tl.constexpr, TURNED: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Add to a product some rows (MEMBERS parts of `depth_size`) times the members' matrices.

    Matrices are (E, depth, columns), or TURNED (E, columns, depth). EVEN: the depth is a multiple
    of DEPTH. One loop over all members: several would each fill and drain the pipeline.
    """
    step = tl.arange(0, DEPTH)
    inside = (column < num_columns)[None, :]
    w_depth = 1 if TURNED else num_columns
    w_column = depth_size if TURNED else 1
    steps = (depth_size + DEPTH - 1) // DEPTH
    a_at = a_ptr + row.to(tl.int64)[:, None] * a_width
    w_at = w_ptr + column[None, :] * w_column
    for i in range(MEMBERS * steps):
        member = i // steps
        start = (i - member * steps) * DEPTH
        expert = _member(packed, member).to(tl.int64)
        w_from = w_at + expert * depth_size * num_columns + (start + step)[:, None] * w_depth
        if EVEN:
            # Parts lie side by side: the compiler sees whole steps in memory.
            a = tl.load(a_at + (i * DEPTH + step)[None, :])
            w = tl.load(w_from, mask=inside, other=0.0)
        else:
            deep = start + step < depth_size
            a_from = a_at + (member * depth_size + start + step)[None, :]
            a = tl.load(a_from, mask=deep[None, :], other=0.0)
            w = tl.load(w_from, mask=deep[:, None] & inside, other=0.0)
        product = tl.dot(a, w, product, input_precision="tf32x3")
    return product


@triton.jit
@no_type_check
def _rows(plan_ptr, first, end, TEAM_LANES: tl.constexpr, ROWS: tl.constexpr):
    """Return a tile's rows; the same with the last in place of those past the end; whose they are.

    Unmasked loads are faster, and nothing stores the rows past the end.
    """
    row = first + tl.arange(0, ROWS)
    safe = tl.minimum(row, end - 1)
    return row, safe, tl.load(plan_ptr + TEAM_LANES + safe)


@triton.jit
@no_type_check
def _up_kernel(
    x_ptr, w_ptr, bias_ptr, weight_ptr, table_ptr, plan_ptr, hidden_ptr, slope_ptr, width, hidden,
    TEAMS: tl.constexpr, TEAM_LANES: tl.constexpr, MEMBERS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Take some hidden columns of a tile: GELU and its slope, both times the member's weight.

    The slope is stored, not what is before GELU: then the way back has nothing to work out again.
    """
    parts = tl.cdiv(hidden, COLUMNS)
    tile, rest = tl.program_id(0) // (parts * MEMBERS), tl.program_id(0) % (parts * MEMBERS)
    member, part = rest // parts, rest % parts
    team, first, end = _tile(plan_ptr, tile, TEAMS, TEAM_LANES, ROWS)
    if team < TEAMS:
        row, safe, visit = _rows(plan_ptr, first, end, TEAM_LANES, ROWS)
        expert = _member(tl.load(table_ptr + team), member)
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        product = _product(
            x_ptr, w_ptr, safe, expert, column, width, width, hidden,
            tl.zeros((ROWS, COLUMNS), tl.float32), MEMBERS=1, TURNED=False, DEPTH=DEPTH, EVEN=EVEN,
        )  # fmt: skip
        inside = column < hidden
        bias = tl.load(bias_ptr + expert * hidden + column, mask=inside, other=0.0)
        x = product + bias.to(tl.float32)[None, :]
        weight = tl.load(weight_ptr + visit * MEMBERS + member)[:, None]
        at = row.to(tl.int64)[:, None] * (MEMBERS * hidden) + member * hidden + column[None, :]
        fits = (row < end)[:, None] & inside[None, :]
        below, slope = _gelu(x, hidden_ptr.dtype.element_ty == tl.float32)
        tl.store(hidden_ptr + at, (x * below * weight).to(hidden_ptr.dtype.element_ty), mask=fits)
        if slope_ptr is not None:
            tl.store(slope_ptr + at, (slope * weight).to(slope_ptr.dtype.element_ty), mask=fits)


@triton.jit
@no_type_check
def _down_kernel(
    hidden_ptr, w_ptr, bias_ptr, weight_ptr, table_ptr, plan_ptr, mixed_ptr, width, hidden,
    TEAMS: tl.constexpr, TEAM_LANES: tl.constexpr, MEMBERS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Mix some columns of a tile's results, all members together, to where they belong."""
    parts = tl.cdiv(width, COLUMNS)
    team, first, end = _tile(plan_ptr, tl.program_id(0) // parts, TEAMS, TEAM_LANES, ROWS)
    if team < TEAMS:
        row, safe, visit = _rows(plan_ptr, first, end, TEAM_LANES, ROWS)
        packed = tl.load(table_ptr + team)
        column = (tl.program_id(0) % parts) * COLUMNS + tl.arange(0, COLUMNS)
        product = _product(
            hidden_ptr, w_ptr, safe, packed, column, MEMBERS * hidden, hidden, width,
            tl.zeros((ROWS, COLUMNS), tl.float32),
            MEMBERS=MEMBERS, TURNED=False, DEPTH=DEPTH, EVEN=EVEN,
        )  # fmt: skip
        inside = column < width
        for member in tl.static_range(MEMBERS):
            weight = tl.load(weight_ptr + visit * MEMBERS + member)
            from_bias = bias_ptr + _member(packed, member) * width + column
            bias = tl.load(from_bias, mask=inside, other=0.0).to(tl.float32)
            product += weight[:, None] * bias[None, :]
        to = mixed_ptr + visit.to(tl.int64)[:, None] * width + column[None, :]
        fits = (row < end)[:, None] & inside[None, :]
        tl.store(to, product.to(mixed_ptr.dtype.element_ty), mask=fits)


@lru_cache
def tiling_options(
    kind: str, dtype: torch.dtype, device: torch.device
) -> tuple[Tiling, dict[str, Any]]:
    """Return the tiling of a kernel, and how to hand it over."""
    tiling = (HALF if is_ample(device) else SMALL)[kind]
    if dtype == torch.float32:
        tiling = SINGLE
    options = {
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "DEPTH": tiling.depth,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }
    return tiling, options


def most_tiles(mixture: Mixture, rows: int) -> int:
    """Return how many tiles there are at most: each team's last one may be short."""
    return parts_of(mixture.num_rows, rows) + min(mixture.teams.number, mixture.num_rows)


def mix(
    mixture: Mixture,
    space: Space,
    mixed: Tensor,
    experts: tuple[Any, Tensor, Any, Tensor],
    key: Key | None,
    *,
    wanted: bool,
) -> None:
    """Send rows through their experts to the mixture (S, D), at the places of their cells.

    `experts` are matrices and biases, up and down; slopes are left if the way back is `wanted`.
    """
    m, (up, up_bias, down, down_bias) = mixture, experts
    names, table = ("TEAMS", "TEAM_LANES", "MEMBERS"), m.table(mixed.device)
    tiling, options = tiling_options("up", m.dtype, mixed.device)
    tiles = most_tiles(m, tiling.rows) * m.teams.members
    launch(
        key, _up_kernel, (tiles * parts_of(m.hidden, tiling.columns), 1, 1),
        (space["sent"], up, up_bias, space["weight"], table, space["plan"], space["hidden"],
         space["slope"] if wanted else None, m.width, m.hidden),
        lambda: {"EVEN": m.width % tiling.depth == 0, **m.told(*names), **options},
    )  # fmt: skip
    tiling, options = tiling_options("down", m.dtype, mixed.device)
    tiles = most_tiles(m, tiling.rows)
    launch(
        key, _down_kernel, (tiles * parts_of(m.width, tiling.columns), 1, 1),
        (space["hidden"], down, down_bias, space["weight"], table, space["plan"], mixed,
         m.width, m.hidden),
        lambda: {"EVEN": m.hidden % tiling.depth == 0, **m.told(*names), **options},
    )  # fmt: skip
