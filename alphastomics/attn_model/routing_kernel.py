"""Routing on a GPU: cells enter; weights, the order by team and statistics leave; see `routing.py`.

One kernel scores the experts, adds time and noise, chooses, weighs, and counts by blocks of cells;
a second adds the blocks up, which gives the statistics and, as in a counting sort, the place of
each row among those of its team (`teams.py`). No atomics: the same cells give the same numbers.
"""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from alphastomics.attn_model.launch import Key, Space, launch
from alphastomics.attn_model.mixture import CELLS, Mixture, parts_of
from alphastomics.attn_model.teams import MEMBER_BITS

# Blocks that are added up at a time, and how many warps and stages a program has.
BLOCKS, WARPS, STAGES = 128, 4, 3
# Columns of a tile that is routed.
COLUMNS = 32
# Columns of a tile that is sent, and a program's warps.
SENT_COLUMNS, SENT_WARPS = 64, 4
# Numbers that a program rounds.
NUMBERS = 4096


@triton.jit
@no_type_check
def _real_cells(mask_ptr, cell, num_cells):
    """Say which of these cells are there and no padding."""
    real = cell < num_cells
    if mask_ptr is not None:
        real = real & (tl.load(mask_ptr + cell, mask=real, other=0) != 0)
    return real


@triton.jit
@no_type_check
def _scores(
    x_ptr, router_ptr, noise_ptr, cell, real, width,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, CELLS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply cells by the router's and the noise's weights, reading each cell once."""
    lane = tl.arange(0, LANES)
    score = tl.zeros((CELLS, LANES), tl.float32)
    spread = tl.zeros((CELLS, LANES), tl.float32)
    row = cell.to(tl.int64) * width
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        # Padding may hold NaN, which no product with zero would remove.
        from_x = x_ptr + row[:, None] + column[None, :]
        x = tl.load(from_x, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
        at = lane[None, :] * width + column[:, None]
        taken = inside[:, None] & (lane < EXPERTS)[None, :]
        w = tl.load(router_ptr + at, mask=taken, other=0.0).to(tl.float32)
        # Three products of 11-bit parts are as good as one in float32, and run on tensor cores.
        score = tl.dot(x, w, score, input_precision="tf32x3")
        if noise_ptr is not None:
            w = tl.load(noise_ptr + at, mask=taken, other=0.0).to(tl.float32)
            spread = tl.dot(x, w, spread, input_precision="tf32x3")
    return score, spread


@triton.jit
@no_type_check
def _softmax(logit, among):
    """Softmax over the lanes of `among`, and the logarithm of its denominator."""
    largest = tl.max(tl.where(among, logit, -float("inf")), 1)
    power = tl.where(among, tl.exp(logit - largest[:, None]), 0.0)
    total = tl.sum(power, 1)
    return power / total[:, None], largest + tl.log(total)


@triton.jit
@no_type_check
def _keys(logit, bias_ptr, EXPERTS: tl.constexpr, LANES: tl.constexpr):
    """Return what is compared to choose: -inf for lanes that are no expert, and for them alone."""
    lane = tl.arange(0, LANES)
    bias = tl.load(bias_ptr + lane, mask=lane < EXPERTS, other=0.0).to(tl.float32)
    key = logit + bias[None, :]
    # Even NaN must choose k different experts: the places of visits count on it.
    key = tl.where(key == key, tl.maximum(key, -3e38), -3e38)
    return tl.where((lane < EXPERTS)[None, :], key, -float("inf"))


@triton.jit
@no_type_check
def _store_choices(
    logit, key, real, table_ptr, spot_ptr, weight_ptr, cell, num_cells,
    LANES: tl.constexpr, TEAMS: tl.constexpr, TEAM_LANES: tl.constexpr, MEMBERS: tl.constexpr,
    VISITS: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """Store weights, teams and ranks of the k largest keys, the first of equals; count both."""
    lane, team_lane = tl.arange(0, LANES)[None, :], tl.arange(0, TEAM_LANES)[None, :]
    chosen = tl.zeros((CELLS, LANES), tl.int32)
    for _ in tl.static_range(MEMBERS * VISITS):
        mark = lane == tl.argmax(key, 1)[:, None]
        chosen = tl.where(mark, 1, chosen)
        key = tl.where(mark, -float("inf"), key)
    here = cell < num_cells
    weight = _softmax(logit, chosen > 0)[0]
    chosen = tl.where(real[:, None], chosen, 0)
    weight = tl.where(real[:, None], weight, 0.0)
    nth = tl.cumsum(chosen, 1)
    for j in tl.static_range(MEMBERS * VISITS):
        mark = (chosen > 0) & (nth == j + 1)
        at = cell * (MEMBERS * VISITS) + j
        tl.store(weight_ptr + at, tl.sum(tl.where(mark, weight, 0.0), 1), mask=here)
    if VISITS == 1:
        at = table_ptr + TEAMS + lane * MEMBERS + nth - 1
        team = tl.sum(tl.load(at, mask=chosen > 0, other=0), 1).to(tl.int32)
        in_team = ((team[:, None] == team_lane) & real[:, None]).to(tl.int32)
        rank = tl.cumsum(in_team, 0) - in_team
        spot = team * CELLS + tl.sum(tl.where(in_team > 0, rank, 0), 1)
        tl.store(spot_ptr + cell, tl.where(real, spot, -1), mask=here)
    else:
        in_team = chosen
        rank = tl.cumsum(in_team, 0) - in_team
        for j in tl.static_range(VISITS):
            mark = (chosen > 0) & (nth == j + 1)
            spot = tl.sum(tl.where(mark, lane * CELLS + rank, 0), 1)
            tl.store(spot_ptr + cell * VISITS + j, tl.where(real, spot, -1), mask=here)
    return tl.sum(chosen, 0), tl.sum(in_team, 0)


@triton.jit(do_not_specialize=["num_cells", "cells_per_set"])
@no_type_check
def _route_kernel(
    x_ptr, router_ptr, noise_ptr, shift_ptr, draw_ptr, bias_ptr, mask_ptr, table_ptr,
    score_ptr, spot_ptr, weight_ptr, partial_ptr, num_cells, cells_per_set, width,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, TEAMS: tl.constexpr, TEAM_LANES: tl.constexpr,
    MEMBERS: tl.constexpr, VISITS: tl.constexpr, CELLS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Route the cells of one block."""
    block = tl.program_id(0)
    cell = block * CELLS + tl.arange(0, CELLS)
    lane, team = tl.arange(0, LANES), tl.arange(0, TEAM_LANES)
    real = _real_cells(mask_ptr, cell, num_cells)
    logit, spread = _scores(
        x_ptr, router_ptr, noise_ptr, cell, real, width, EXPERTS, LANES, CELLS, COLUMNS
    )
    fits = (cell < num_cells)[:, None] & (lane < EXPERTS)[None, :]
    if shift_ptr is not None:
        shift_at = (cell // cells_per_set)[:, None] * EXPERTS + lane[None, :]
        logit += tl.load(shift_ptr + shift_at, mask=fits, other=0.0).to(tl.float32)
    matrices: tl.constexpr = 1 if noise_ptr is None else 2
    score = score_ptr + cell[:, None] * (matrices * EXPERTS) + lane[None, :]
    if noise_ptr is not None:
        softplus = tl.maximum(spread, 0.0) + tl.log(1 + tl.exp(-tl.abs(spread)))
        at = cell[:, None] * EXPERTS + lane[None, :]
        logit += tl.load(draw_ptr + at, mask=fits, other=0.0) * softplus
        tl.store(score + EXPERTS, spread, mask=fits)
    tl.store(score, logit, mask=fits)
    key = _keys(logit, bias_ptr, EXPERTS, LANES)
    counts, team_counts = _store_choices(
        logit, key, real, table_ptr, spot_ptr, weight_ptr, cell, num_cells,
        LANES, TEAMS, TEAM_LANES, MEMBERS, VISITS, CELLS,
    )  # fmt: skip
    share, partition = _softmax(logit, (lane < EXPERTS)[None, :])
    shares = tl.sum(tl.where(real[:, None], share, 0.0), 0)
    partial = partial_ptr + block * (TEAMS + 2 * EXPERTS + 2)
    tl.store(partial + team, team_counts.to(tl.float32), mask=team < TEAMS)
    tl.store(partial + TEAMS + lane, counts.to(tl.float32), mask=lane < EXPERTS)
    tl.store(partial + TEAMS + EXPERTS + lane, shares, mask=lane < EXPERTS)
    last = partial + TEAMS + 2 * EXPERTS
    tl.store(last, tl.sum(tl.where(real, partition * partition, 0.0), 0))
    tl.store(last + 1, tl.sum(real.to(tl.float32), 0))


@triton.jit
@no_type_check
def _add_up(
    partial_ptr, statistics_ptr, num_blocks,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, TEAMS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Form the statistics."""
    lane = tl.arange(0, LANES)
    expert = lane < EXPERTS
    counts = tl.zeros((LANES,), tl.float32)
    shares = tl.zeros((LANES,), tl.float32)
    square = tl.zeros((BLOCKS,), tl.float32)
    real = tl.zeros((BLOCKS,), tl.float32)
    for start in range(0, num_blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        row = partial_ptr + block * (TEAMS + 2 * EXPERTS + 2) + TEAMS
        inside = block < num_blocks
        fits = inside[:, None] & expert[None, :]
        counts += tl.sum(tl.load(row[:, None] + lane[None, :], mask=fits, other=0.0), 0)
        shares += tl.sum(tl.load(row[:, None] + EXPERTS + lane[None, :], mask=fits, other=0.0), 0)
        square += tl.load(row + 2 * EXPERTS, mask=inside, other=0.0)
        real += tl.load(row + 2 * EXPERTS + 1, mask=inside, other=0.0)
    num_cells = tl.sum(real, 0)
    tl.store(statistics_ptr + lane, counts, mask=expert)
    tl.store(statistics_ptr + EXPERTS + lane, shares, mask=expert)
    even = EXPERTS / (tl.maximum(tl.sum(counts, 0), 1.0) * tl.maximum(num_cells, 1.0))
    last = statistics_ptr + 2 * EXPERTS
    tl.store(last, num_cells)
    tl.store(last + 1, tl.sum(counts * shares, 0) * even)
    tl.store(last + 2, tl.sum(square, 0) / tl.maximum(num_cells, 1.0))


@triton.jit
@no_type_check
def _send(
    partial_ptr, spot_ptr, x_ptr, plan_ptr, sent_ptr, statistics_ptr, num_cells, num_blocks, width,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, TEAMS: tl.constexpr, TEAM_LANES: tl.constexpr,
    VISITS: tl.constexpr, CELLS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy the cells of one block to their rows; the first program forms the statistics too."""
    mine = tl.program_id(0)
    team = tl.arange(0, TEAM_LANES)
    total = tl.zeros((TEAM_LANES,), tl.int32)
    before = tl.zeros((TEAM_LANES,), tl.int32)
    # Each program adds all blocks up: a launch for that alone would take longer.
    for start in range(0, num_blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        at = partial_ptr + block[:, None] * (TEAMS + 2 * EXPERTS + 2) + team[None, :]
        fits = (block < num_blocks)[:, None] & (team < TEAMS)[None, :]
        counts = tl.load(at, mask=fits, other=0.0).to(tl.int32)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((block < mine)[:, None], counts, 0), 0)
    ends = tl.cumsum(total, 0)
    base = ends - total + before
    cell = mine * CELLS + tl.arange(0, CELLS)
    for j in tl.static_range(VISITS):
        at = cell * VISITS + j
        spot = tl.load(spot_ptr + at, mask=cell < num_cells, other=-1)
        here = (spot // CELLS)[:, None] == team[None, :]
        row = tl.sum(tl.where(here, base[None, :], 0), 1) + spot % CELLS
        tl.store(plan_ptr + TEAM_LANES + row, at, mask=spot >= 0)
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            fits = (spot >= 0)[:, None] & (column < width)[None, :]
            x = tl.load(x_ptr + cell.to(tl.int64)[:, None] * width + column[None, :], mask=fits)
            to = sent_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
            tl.store(to, x.to(sent_ptr.dtype.element_ty), mask=fits)
    if mine == 0:
        tl.store(plan_ptr + team, ends)
        _add_up(partial_ptr, statistics_ptr, num_blocks, EXPERTS, LANES, TEAMS, BLOCKS)


@triton.jit
@no_type_check
def _round(from_ptr, to_ptr, part, size, NUMBERS: tl.constexpr):
    """Copy NUMBERS numbers to another precision."""
    at = part.to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    number = tl.load(from_ptr + at, mask=at < size)
    tl.store(to_ptr + at, number.to(to_ptr.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["num_cells", "num_blocks"])
@no_type_check
def _send_kernel(
    partial_ptr, spot_ptr, x_ptr, plan_ptr, sent_ptr, statistics_ptr,
    up_ptr, down_ptr, rounded_up_ptr, rounded_down_ptr, num_cells, num_blocks, width, size,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, TEAMS: tl.constexpr, TEAM_LANES: tl.constexpr,
    VISITS: tl.constexpr, CELLS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
    NUMBERS: tl.constexpr,
):  # fmt: skip
    """Send the cells of one block; programs past the blocks round the experts' matrices."""
    part = tl.program_id(0) - num_blocks
    if part < 0:
        _send(
            partial_ptr, spot_ptr, x_ptr, plan_ptr, sent_ptr, statistics_ptr, num_cells,
            num_blocks, width, EXPERTS, LANES, TEAMS, TEAM_LANES, VISITS, CELLS, BLOCKS, COLUMNS,
        )  # fmt: skip
    elif rounded_up_ptr is not None:
        parts = tl.cdiv(size, NUMBERS)
        if part < parts:
            _round(up_ptr, rounded_up_ptr, part, size, NUMBERS)
        else:
            _round(down_ptr, rounded_down_ptr, part - parts, size, NUMBERS)


@triton.jit
@no_type_check
def _tile(
    plan_ptr, tile, TEAMS: tl.constexpr, TEAM_LANES: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Return a tile's team (TEAMS when there is no such tile), first row, and the team's end."""
    lane = tl.arange(0, TEAM_LANES)
    team = lane < TEAMS
    end = tl.load(plan_ptr + lane, mask=team, other=0)
    begin = tl.load(plan_ptr + lane - 1, mask=team & (lane > 0), other=0)
    tiles = tl.where(team, (end - begin + ROWS - 1) // ROWS, 0)
    last = tl.cumsum(tiles, 0)
    mine = tl.sum(tl.where(team & (last <= tile), 1, 0), 0)
    here = lane == mine
    first = tl.sum(tl.where(here, last - tiles, 0), 0)
    row = tl.sum(tl.where(here, begin, 0), 0) + (tile - first) * ROWS
    return mine, row, tl.sum(tl.where(here, end, 0), 0)


@triton.jit
@no_type_check
def _member(packed, place, BITS: tl.constexpr = MEMBER_BITS):
    """Return the expert at a place of a team."""
    return ((packed >> (BITS * place)) & ((1 << BITS) - 1)).to(tl.int32)


def route(
    mixture: Mixture,
    space: Space,
    statistics: Tensor,
    x: Tensor,
    routers: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor],
    mask: Tensor | None,
    matrices: tuple[Tensor, Tensor],
    cells_per_set: int,
    key: Key | None,
) -> None:
    """Route cells (T, D) and send them to their rows; `mask` (T,) is 0 for padding.

    `routers` are the router's and the noise's weights, the shift of each set, the noise drawn
    (T, E), and the balance bias; `statistics` (2 E + 3) become counts, probability, cells, balance
    loss and z-loss. The experts' `matrices` are rounded on the way.
    """
    m = mixture
    num_blocks = parts_of(m.num_cells, CELLS)
    names = ("EXPERTS", "LANES", "TEAMS", "TEAM_LANES", "MEMBERS", "VISITS", "CELLS")
    launch(
        key, _route_kernel, (num_blocks, 1, 1),
        (x, *routers, mask, m.table(x.device), space["score"], space["spot"], space["weight"],
         space["partial"], m.num_cells, cells_per_set, m.width),
        lambda: {
            **m.told(*names), "COLUMNS": COLUMNS, "num_warps": WARPS, "num_stages": STAGES,
        },
    )  # fmt: skip
    size = m.num_experts * m.width * m.hidden
    rounded, parts = (None, None), 0
    if m.rounded:
        rounded, parts = (space["up"], space["down"]), 2 * parts_of(size, NUMBERS)
    launch(
        key, _send_kernel, (num_blocks + parts, 1, 1),
        (space["partial"], space["spot"], x, space["plan"], space["sent"], statistics, *matrices,
         *rounded, m.num_cells, num_blocks, m.width, size),
        lambda: {
            **m.told("EXPERTS", "LANES", "TEAMS", "TEAM_LANES", "VISITS", "CELLS"),
            "BLOCKS": BLOCKS, "COLUMNS": SENT_COLUMNS, "NUMBERS": NUMBERS, "num_warps": SENT_WARPS,
        },
    )  # fmt: skip
