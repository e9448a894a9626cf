"""The way back through the experts on a GPU: gradients of mixed cells enter, all others leave.

Tiles and teams are those of `expert_kernel.py`. Sums over an expert's rows are stored by tile and
added up in one order, so that the result does not change from run to run.
"""

from functools import lru_cache
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from alphastomics.attn_model.expert_kernel import (
    HALF,
    Tiling,
    _product,
    most_tiles,
    tiling_options,
)
from alphastomics.attn_model.launch import Key, Parts, Space, is_compiled, launch, lay_out
from alphastomics.attn_model.launch import Layout as SpaceLayout
from alphastomics.attn_model.routing_kernel import (
    Mixture,
    _member,
    _softmax,
    _tile,
    has_descriptors,
    lanes,
    parts_of,
)
from alphastomics.attn_model.teams import Experts

# From this width on descriptors pay; below, products wait for memory.
DESCRIBED_WIDTH = 512
# With fewer programs than this a team's rows are split, or the GPU idles.
PROGRAMS = 264
# A team's rows are split in multiples of this.
SPLIT = 1024
# Tiles added up at a time, and their columns: many of narrow tiles, or few programs had work.
TILES, COLUMNS, NARROW_TILES, NARROW_COLUMNS = 4, 512, 128, 32


@triton.jit(do_not_specialize=["num_weights"])
@no_type_check
def _hidden_gradient_kernel(
    grad_ptr, w_ptr, hidden_ptr, slope_ptr, table_ptr, plan_ptr,
    before_grad_ptr, weight_grad_ptr, partial_ptr, num_weights, width, hidden,
    TEAMS: tl.constexpr, TEAM_LANES: tl.constexpr, MEMBERS: tl.constexpr, VISITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Take some hidden columns of a tile: gradients before GELU, and what they say of weights.

    Of a weight's gradient, times the weight, this is one part; of the bias's the tile's share.
    """
    parts = tl.cdiv(hidden, COLUMNS)
    tile, rest = tl.program_id(0) // (parts * MEMBERS), tl.program_id(0) % (parts * MEMBERS)
    member, part = rest // parts, rest % parts
    team, first, end = _tile(plan_ptr, tile, TEAMS, TEAM_LANES, ROWS)
    if team < TEAMS:
        row = first + tl.arange(0, ROWS)
        visit = tl.load(plan_ptr + TEAM_LANES + tl.minimum(row, end - 1))
        expert = _member(tl.load(table_ptr + team), member)
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        product = _product(
            grad_ptr, w_ptr, visit // VISITS, expert, column, width, width, hidden,
            tl.zeros((ROWS, COLUMNS), tl.float32), MEMBERS=1, TURNED=True, DEPTH=DEPTH, EVEN=EVEN,
        )  # fmt: skip
        at = row.to(tl.int64)[:, None] * (MEMBERS * hidden) + member * hidden + column[None, :]
        fits = (row < end)[:, None] & (column < hidden)[None, :]
        after = tl.load(hidden_ptr + at, mask=fits, other=0.0).to(tl.float32)
        to = weight_grad_ptr + part * num_weights + visit * MEMBERS + member
        tl.store(to, tl.sum(product * after, 1), mask=row < end)
        # Zero where no slope was loaded.
        grad = product * tl.load(slope_ptr + at, mask=fits, other=0.0).to(tl.float32)
        tl.store(before_grad_ptr + at, grad.to(before_grad_ptr.dtype.element_ty), mask=fits)
        partial = partial_ptr + (tile * MEMBERS + member).to(tl.int64) * hidden
        tl.store(partial + column, tl.sum(grad, 0), mask=column < hidden)


@triton.jit
@no_type_check
def _chosen(
    weight_ptr, weight_grad_ptr, spot_ptr, packed, cell, real, num_cells, num_parts,
    LANES: tl.constexpr, MEMBERS: tl.constexpr, VISITS: tl.constexpr, CELLS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return by expert some cells' weights, and the weights' gradients times the weights."""
    lane = tl.arange(0, LANES)[None, :]
    weights = tl.zeros((ROWS, LANES), tl.float32)
    grads = tl.zeros((ROWS, LANES), tl.float32)
    for j in tl.static_range(MEMBERS * VISITS):
        at = cell * (MEMBERS * VISITS) + j
        weight = tl.load(weight_ptr + at, mask=real, other=0.0)
        grad = tl.zeros((ROWS,), tl.float32)
        for part in range(num_parts):
            from_part = weight_grad_ptr + part * (num_cells * MEMBERS * VISITS) + at
            grad += tl.load(from_part, mask=real, other=0.0)
        if VISITS == 1:
            mine = (lane == _member(packed, j)) & real[:, None]
        else:
            spot = tl.load(spot_ptr + at, mask=real, other=-CELLS)
            mine = lane == (spot // CELLS)[:, None]
        weights += tl.where(mine, weight[:, None], 0.0)
        grads += tl.where(mine, grad[:, None], 0.0)
    return weights, grads


@triton.jit
@no_type_check
def _logit_gradient(
    score_ptr, statistics_ptr, probability_grad_ptr, balance_grad_ptr, z_grad_ptr,
    weights, weight_grads, cell, real,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Bring the gradients of weights, probabilities and losses back to some cells' logits."""
    lane = tl.arange(0, LANES)
    expert = lane < EXPERTS
    fits = real[:, None] & expert[None, :]
    logit = tl.load(score_ptr + cell[:, None] * STRIDE + lane[None, :], mask=fits, other=0.0)
    share, partition = _softmax(logit, expert[None, :])
    # d(sum of p_e c_e)/dl = p (c - sum of p c), c the gradient of an expert's probability.
    upstream = tl.zeros((LANES,), tl.float32)
    if probability_grad_ptr is not None:
        upstream += tl.load(probability_grad_ptr + lane, mask=expert, other=0.0)
    there = tl.maximum(tl.load(statistics_ptr + 2 * EXPERTS), 1.0)
    if balance_grad_ptr is not None:
        counts = tl.load(statistics_ptr + lane, mask=expert, other=0.0)
        even = EXPERTS / (tl.maximum(tl.sum(counts, 0), 1.0) * there)
        upstream += tl.load(balance_grad_ptr) * even * counts
    grad = share * (upstream[None, :] - tl.sum(share * upstream[None, :], 1)[:, None])
    if z_grad_ptr is not None:
        grad += share * (2 * tl.load(z_grad_ptr) / there * partition)[:, None]
    # The same for the softmax over the chosen, whose gradients come times the weights.
    grad += weight_grads - weights * tl.sum(weight_grads, 1)[:, None]
    return tl.where(fits, grad, 0.0)


@triton.jit(
    do_not_specialize=["num_cells", "num_parts"],
    # Those of a model's layers lie side by side.
    do_not_specialize_on_alignment=["probability_grad_ptr", "balance_grad_ptr", "z_grad_ptr"],
)
@no_type_check
def _score_gradient_kernel(
    grad_ptr, x_ptr, bias_ptr, score_ptr, draw_ptr, weight_ptr, weight_grad_ptr, spot_ptr,
    statistics_ptr, probability_grad_ptr, balance_grad_ptr, z_grad_ptr, table_ptr, plan_ptr,
    sent_grad_ptr, score_grad_ptr, logit_grad_ptr, partial_ptr, num_cells, num_parts, width,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, CELLS: tl.constexpr,
    TEAMS: tl.constexpr, TEAM_LANES: tl.constexpr, MEMBERS: tl.constexpr, VISITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile's scores, and its share of the router's, the noise's and last biases'.

    A cell with several rows has its scores in the first. Gradients of mixed cells are sent, as
    cells were, for the kernels to come.
    """
    tile = tl.program_id(0)
    team, first, end = _tile(plan_ptr, tile, TEAMS, TEAM_LANES, ROWS)
    if team < TEAMS:
        row = first + tl.arange(0, ROWS)
        here = row < end
        visit = tl.load(plan_ptr + TEAM_LANES + row, mask=here, other=0)
        cell = visit // VISITS
        real = here & (visit % VISITS == 0)
        packed = tl.load(table_ptr + team)
        lane = tl.arange(0, LANES)
        matrices: tl.constexpr = 1 if draw_ptr is None else 2
        dtype = score_grad_ptr.dtype.element_ty
        weights, weight_grads = _chosen(
            weight_ptr, weight_grad_ptr, spot_ptr, packed, cell, real, num_cells, num_parts,
            LANES, MEMBERS, VISITS, CELLS, ROWS,
        )  # fmt: skip
        own = weights
        if VISITS > 1:
            weight = tl.load(weight_ptr + visit, mask=here, other=0.0)
            own = tl.where(lane[None, :] == _member(packed, 0), weight[:, None], 0.0)
        own = tl.trans(own.to(dtype))
        partial = partial_ptr + tile.to(tl.int64) * ((matrices + 1) * EXPERTS) * width
        biased = tl.zeros((ROWS, LANES), tl.float32)
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = column < width
            fits = here[:, None] & inside[None, :]
            from_cell = grad_ptr + cell.to(tl.int64)[:, None] * width + column[None, :]
            grad = tl.load(from_cell, mask=fits, other=0.0)
            to = sent_grad_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
            tl.store(to, grad, mask=fits)
            from_bias = bias_ptr + lane[None, :] * width + column[:, None]
            taken = inside[:, None] & (lane < EXPERTS)[None, :]
            bias = tl.load(from_bias, mask=taken, other=0.0).to(dtype)
            biased = tl.dot(grad, bias, biased, input_precision="tf32x3")
            to = partial + (matrices * EXPERTS + lane)[:, None] * width + column[None, :]
            taken = (lane < EXPERTS)[:, None] & inside[None, :]
            tl.store(to, tl.dot(own, grad, input_precision="tf32x3"), mask=taken)
        logit_grad = _logit_gradient(
            score_ptr, statistics_ptr, probability_grad_ptr, balance_grad_ptr, z_grad_ptr,
            weights, weight_grads + weights * biased, cell, real,
            EXPERTS, LANES, matrices * EXPERTS,
        )  # fmt: skip
        fits = real[:, None] & (lane < EXPERTS)[None, :]
        at = cell[:, None] * EXPERTS + lane[None, :]
        if logit_grad_ptr is not None:
            tl.store(logit_grad_ptr + at, logit_grad, mask=fits)
        score_grad = score_grad_ptr + row[:, None] * (matrices * LANES) + lane[None, :]
        tl.store(score_grad, logit_grad.to(dtype), mask=here[:, None])
        logit_turned = tl.trans(logit_grad.to(dtype))
        spread_turned = logit_turned
        if draw_ptr is not None:
            spread_at = score_ptr + EXPERTS + cell[:, None] * (2 * EXPERTS) + lane[None, :]
            slope = tl.sigmoid(tl.load(spread_at, mask=fits, other=0.0))
            spread_grad = logit_grad * slope * tl.load(draw_ptr + at, mask=fits, other=0.0)
            tl.store(score_grad + LANES, spread_grad.to(dtype), mask=here[:, None])
            spread_turned = tl.trans(spread_grad.to(dtype))
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = column < width
            from_row = x_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
            x = tl.load(from_row, mask=here[:, None] & inside[None, :], other=0.0)
            to = partial + lane[:, None] * width + column[None, :]
            taken = (lane < EXPERTS)[:, None] & inside[None, :]
            tl.store(to, tl.dot(logit_turned, x, input_precision="tf32x3"), mask=taken)
            if draw_ptr is not None:
                product = tl.dot(spread_turned, x, input_precision="tf32x3")
                tl.store(to + EXPERTS * width, product, mask=taken)


@triton.jit
@no_type_check
def _cell_gradient_kernel(
    before_grad_ptr, w_ptr, score_grad_ptr, router_ptr, noise_ptr, table_ptr, plan_ptr, x_grad_ptr,
    width, hidden,
    EXPERTS: tl.constexpr, LANES: tl.constexpr,
    TEAMS: tl.constexpr, TEAM_LANES: tl.constexpr, MEMBERS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Bring some columns of a tile's gradients to its cells, through experts and router."""
    parts = tl.cdiv(width, COLUMNS)
    team, first, end = _tile(plan_ptr, tl.program_id(0) // parts, TEAMS, TEAM_LANES, ROWS)
    if team < TEAMS:
        row = first + tl.arange(0, ROWS)
        safe = tl.minimum(row, end - 1)
        visit = tl.load(plan_ptr + TEAM_LANES + safe)
        column = (tl.program_id(0) % parts) * COLUMNS + tl.arange(0, COLUMNS)
        product = _product(
            before_grad_ptr, w_ptr, safe, tl.load(table_ptr + team), column, MEMBERS * hidden,
            hidden, width, tl.zeros((ROWS, COLUMNS), tl.float32),
            MEMBERS=MEMBERS, TURNED=True, DEPTH=DEPTH, EVEN=EVEN,
        )  # fmt: skip
        lane = tl.arange(0, LANES)
        matrices: tl.constexpr = 1 if noise_ptr is None else 2
        inside = column < width
        from_score = score_grad_ptr + safe[:, None] * (matrices * LANES) + lane[None, :]
        at = lane[:, None] * width + column[None, :]
        taken = (lane < EXPERTS)[:, None] & inside[None, :]
        dtype = score_grad_ptr.dtype.element_ty
        router = tl.load(router_ptr + at, mask=taken, other=0.0).to(dtype)
        product = tl.dot(tl.load(from_score), router, product, input_precision="tf32x3")
        if noise_ptr is not None:
            noise = tl.load(noise_ptr + at, mask=taken, other=0.0).to(dtype)
            product = tl.dot(tl.load(from_score + LANES), noise, product, input_precision="tf32x3")
        to = x_grad_ptr + visit.to(tl.int64)[:, None] * width + column[None, :]
        fits = (row < end)[:, None] & inside[None, :]
        tl.store(to, product.to(x_grad_ptr.dtype.element_ty), mask=fits)


@triton.jit
@no_type_check
def _outer_product(
    a, b, first, end, down_start, start, width, hidden, member, total, DESCRIBED: tl.constexpr,
    MEMBERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Add A^T B over the rows from first to end, A (S, D) and B (S, MEMBERS x H)."""
    if DESCRIBED:
        whole = first + (end - first) // DEPTH * DEPTH
        shift = member * hidden + start
        for i in range(first, whole, DEPTH):
            total = tl.dot(a.load([i, down_start]).T, b.load([i, shift]), total)
        if whole < end:
            # The rows after the last are another team's, or nobody's and hold anything.
            here = (whole + tl.arange(0, DEPTH) < end)[:, None]
            left = tl.where(here, a.load([whole, down_start]), 0.0)
            right = tl.where(here, b.load([whole, shift]), 0.0)
            total = tl.dot(left.T, right, total)
    else:
        down, column = down_start + tl.arange(0, ROWS), start + tl.arange(0, COLUMNS)
        inside, fitting = (down < width)[None, :], (column < hidden)[None, :]
        for i in range(first, end, DEPTH):
            row = i + tl.arange(0, DEPTH)
            here = (row < end)[:, None]
            at = row.to(tl.int64)[:, None] * width + down[None, :]
            left = tl.load(a + at, mask=here & inside, other=0.0)
            at = row.to(tl.int64)[:, None] * (MEMBERS * hidden) + member * hidden + column[None, :]
            right = tl.load(b + at, mask=here & fitting, other=0.0)
            total = tl.dot(tl.trans(left), right, total, input_precision="tf32x3")
    return total


@triton.jit
@no_type_check
def _weight_gradient_part(
    a, b, table_ptr, plan_ptr, down_start, start, width, hidden, chunk, DESCRIBED: tl.constexpr,
    TEAMS: tl.constexpr, TEAM_LANES: tl.constexpr, MEMBERS: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Form A^T B over an expert's rows, or if SPLIT over a chunk of rows of a team's member."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if SPLIT:
        tile, member = tl.program_id(1) // MEMBERS, tl.program_id(1) % MEMBERS
        team, first, end = _tile(plan_ptr, tile, TEAMS, TEAM_LANES, chunk)
        end = tl.where(team < TEAMS, tl.minimum(end, first + chunk), first)
        total = _outer_product(
            a, b, first, end, down_start, start, width, hidden, member, total, DESCRIBED,
            MEMBERS, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
    else:
        first = 0
        for team in range(TEAMS):
            packed, end = tl.load(table_ptr + team), tl.load(plan_ptr + team)
            mine, there = 0, 0
            for member in tl.static_range(MEMBERS):
                if _member(packed, member) == tl.program_id(1):
                    mine, there = member, 1
            if there > 0:
                total = _outer_product(
                    a, b, first, end, down_start, start, width, hidden, mine, total, DESCRIBED,
                    MEMBERS, ROWS, COLUMNS, DEPTH,
                )  # fmt: skip
            first = end
    return total


@triton.jit(do_not_specialize=["chunk"])
@no_type_check
def _weight_gradient_kernel(
    grad, hidden_rows, x, before_grad, table_ptr, plan_ptr, up_ptr, down_ptr,
    chunk, width, hidden, DESCRIBED: tl.constexpr,
    TEAMS: tl.constexpr, TEAM_LANES: tl.constexpr, MEMBERS: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Form a block of an expert's gradients, or of a chunk's share: the last matrix's, the first's.

    The last lies the other way around.
    """
    parts = tl.cdiv(hidden, COLUMNS)
    down_start = (tl.program_id(0) // parts) * ROWS
    start = (tl.program_id(0) % parts) * COLUMNS
    down, column = down_start + tl.arange(0, ROWS), start + tl.arange(0, COLUMNS)
    fits = (down < width)[:, None] & (column < hidden)[None, :]
    to = tl.program_id(1).to(tl.int64) * width * hidden
    if tl.program_id(2) == 0:
        total = _weight_gradient_part(
            grad, hidden_rows, table_ptr, plan_ptr, down_start, start, width, hidden, chunk,
            DESCRIBED, TEAMS, TEAM_LANES, MEMBERS, SPLIT, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        at = to + column[None, :] * width + down[:, None]
        tl.store(down_ptr + at, total.to(down_ptr.dtype.element_ty), mask=fits)
    else:
        total = _weight_gradient_part(
            x, before_grad, table_ptr, plan_ptr, down_start, start, width, hidden, chunk,
            DESCRIBED, TEAMS, TEAM_LANES, MEMBERS, SPLIT, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        at = to + down[:, None] * hidden + column[None, :]
        tl.store(up_ptr + at, total.to(up_ptr.dtype.element_ty), mask=fits)


@triton.jit
@no_type_check
def _sum_tiles(
    partial_ptr, to_ptr, table_ptr, plan_ptr, expert, start, width, rows,
    TEAMS: tl.constexpr, MEMBERS: tl.constexpr,
    TILES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up some columns of one expert's tiles, which lie by tile and member."""
    column = start * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros((TILES, COLUMNS), tl.float32)
    first = 0
    begin = 0
    for team in range(TEAMS):
        packed, end = tl.load(table_ptr + team), tl.load(plan_ptr + team)
        last = first + (end - begin + rows - 1) // rows
        for member in tl.static_range(MEMBERS):
            if _member(packed, member) == expert:
                for i in range(first, last, TILES):
                    tile = i + tl.arange(0, TILES)
                    at = (tile * MEMBERS + member).to(tl.int64)[:, None] * width + column[None, :]
                    fits = (tile < last)[:, None] & inside[None, :]
                    total += tl.load(partial_ptr + at, mask=fits, other=0.0)
        first = last
        begin = end
    to = to_ptr + expert.to(tl.int64) * width + column
    tl.store(to, tl.sum(total, 0).to(to_ptr.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _sum_all_tiles(
    partial_ptr, to_ptr, plan_ptr, expert, start, width, stride,
    TEAMS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up some columns of the tiles of all teams, in an expert's row."""
    column = start * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros((TILES, COLUMNS), tl.float32)
    last = 0
    begin = 0
    for team in range(TEAMS):
        end = tl.load(plan_ptr + team)
        last += (end - begin + ROWS - 1) // ROWS
        begin = end
    for i in range(0, last, TILES):
        tile = i + tl.arange(0, TILES)
        at = tile.to(tl.int64)[:, None] * stride + expert * width + column[None, :]
        fits = (tile < last)[:, None] & inside[None, :]
        total += tl.load(partial_ptr + at, mask=fits, other=0.0)
    to = to_ptr + expert.to(tl.int64) * width + column
    tl.store(to, tl.sum(total, 0).to(to_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["chunk"])
@no_type_check
def _sum_kernel(
    up_partial_ptr, down_partial_ptr, up_bias_partial_ptr, partial_ptr, table_ptr, plan_ptr,
    up_ptr, down_ptr, up_bias_ptr, down_bias_ptr, router_ptr, noise_ptr,
    chunk, width, hidden, EXPERTS: tl.constexpr, TEAMS: tl.constexpr, MEMBERS: tl.constexpr,
    SPLIT: tl.constexpr, HIDDEN_ROWS: tl.constexpr, SCORE_ROWS: tl.constexpr,
    TILES: tl.constexpr, COLUMNS: tl.constexpr,
    NARROW_TILES: tl.constexpr, NARROW_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up one expert's gradients: a program takes some numbers of one of them."""
    part, expert = tl.program_id(0), tl.program_id(1)
    size = width * hidden
    large = tl.cdiv(size, COLUMNS) if SPLIT else 0
    of_hidden, of_width = tl.cdiv(hidden, NARROW_COLUMNS), tl.cdiv(width, NARROW_COLUMNS)
    matrices: tl.constexpr = 1 if noise_ptr is None else 2
    stride = (matrices + 1) * EXPERTS * width
    # The longest first: the last to start are the last to end.
    router, bias = part, part - of_width
    up_bias, noise = bias - of_width, part - 2 * of_width - of_hidden
    matrix = noise - (matrices - 1) * of_width
    if bias < 0:
        _sum_all_tiles(
            partial_ptr, router_ptr, plan_ptr, expert, router, width, stride,
            TEAMS, SCORE_ROWS, NARROW_TILES, NARROW_COLUMNS,
        )  # fmt: skip
    elif up_bias < 0:
        _sum_all_tiles(
            partial_ptr + matrices * EXPERTS * width, down_bias_ptr, plan_ptr, expert, bias, width,
            stride, TEAMS, SCORE_ROWS, NARROW_TILES, NARROW_COLUMNS,
        )  # fmt: skip
    elif noise < 0:
        _sum_tiles(
            up_bias_partial_ptr, up_bias_ptr, table_ptr, plan_ptr, expert, up_bias, hidden,
            HIDDEN_ROWS, TEAMS, MEMBERS, NARROW_TILES, NARROW_COLUMNS,
        )  # fmt: skip
    elif matrix < 0:
        if noise_ptr is not None:
            _sum_all_tiles(
                partial_ptr + EXPERTS * width, noise_ptr, plan_ptr, expert, noise, width, stride,
                TEAMS, SCORE_ROWS, NARROW_TILES, NARROW_COLUMNS,
            )  # fmt: skip
    elif SPLIT:
        if matrix < large:
            _sum_tiles(
                up_partial_ptr, up_ptr, table_ptr, plan_ptr, expert, matrix, size, chunk,
                TEAMS, MEMBERS, TILES, COLUMNS,
            )  # fmt: skip
        else:
            _sum_tiles(
                down_partial_ptr, down_ptr, table_ptr, plan_ptr, expert, matrix - large, size,
                chunk, TEAMS, MEMBERS, TILES, COLUMNS,
            )  # fmt: skip


class Upstream(NamedTuple):
    """The gradients of mixed cells, (T, D), and of statistics, None where nothing used them."""

    mixed: Tensor
    probability: Tensor | None
    balance_loss: Tensor | None
    z_loss: Tensor | None


class Split(NamedTuple):
    """Rows of a chunk of a team for the matrices' gradients, 0 for one program an expert.

    `programs` side by side, of one for each of `blocks`; tiles by descriptors if `described`.
    """

    rows: int
    programs: int
    blocks: int
    described: bool


def split_rows(mixture: Mixture, tiling: Tiling, *, described: bool) -> Split:
    """Choose how the matrices' gradients are shared out."""
    m = mixture
    blocks = parts_of(m.width, tiling.rows) * parts_of(m.hidden, tiling.columns)
    if 2 * blocks * m.num_experts >= PROGRAMS:
        return Split(0, m.num_experts, blocks, described)
    members = m.teams.members
    rows = SPLIT * max(1, parts_of(m.num_rows * members * blocks, PROGRAMS * SPLIT))
    return Split(rows, most_tiles(m, rows) * members, blocks, described)


def is_describable(mixture: Mixture, device: torch.device) -> bool:
    """Tell whether the copy engine can fetch tiles of rows, and if it pays: whole steps only."""
    sides, depth = (mixture.width, mixture.hidden), HALF["wide weight gradient"].depth
    return (
        has_descriptors(device)
        and mixture.dtype != torch.float32
        and all(side >= DESCRIBED_WIDTH and side % depth == 0 for side in sides)
    )


class Steps(NamedTuple):
    """The shapes of the steps back: tilings and options, parts of a row, and the memory between."""

    hidden: tuple[Tiling, dict[str, Any]]
    scores: tuple[Tiling, dict[str, Any]]
    cells: tuple[Tiling, dict[str, Any]]
    weights: tuple[Tiling, dict[str, Any]]
    split: Split
    num_parts: int
    layout: SpaceLayout


@lru_cache(maxsize=256)
def plan_steps(mixture: Mixture, device: torch.device) -> Steps:
    """Shape the steps back, and lay out what they leave to each other."""
    m, single, described = mixture, torch.float32, is_describable(mixture, device)
    kinds = ["hidden gradient", "score gradient", "cell gradient", "weight gradient"]
    if described:
        kinds[3] = "wide weight gradient"
    steps = [tiling_options(kind, m.dtype, device) for kind in kinds]
    hidden, scores, _, weights = (tiling for tiling, _ in steps)
    split = split_rows(m, weights, described=described)
    num_parts, members = parts_of(m.hidden, hidden.columns), m.teams.members
    score_tiles = (most_tiles(m, scores.rows), m.matrices + 1, m.num_experts, m.width)
    parts: Parts = (
        ("before_grad", (m.num_rows, members * m.hidden), m.dtype),
        ("weight_grad", (num_parts, m.num_cells, m.top_k), single),
        ("up_bias_partial", (most_tiles(m, hidden.rows), members, m.hidden), single),
        ("sent_grad", (m.num_rows, m.width), m.dtype),
        ("score_grad", (m.num_rows, m.matrices * lanes(m.num_experts)), m.dtype),
        ("partial", score_tiles, single),
    )
    if split.rows:
        shape = (split.programs, m.width * m.hidden)
        parts = (*parts, ("up_partial", shape, single), ("down_partial", shape, single))
    return Steps(steps[0], steps[1], steps[2], steps[3], split, num_parts, lay_out(parts))


class Way:
    """One way back, step by step; a step leaves in `space` what the next ones need."""

    def __init__(
        self,
        mixture: Mixture,
        saved: Space,
        statistics: Tensor,
        upstream: Upstream,
        weights: Experts,
        draw: Tensor | None,
        key: Key | None,
    ) -> None:
        self.mixture, self.saved, self.statistics = mixture, saved, statistics
        self.upstream, self.weights, self.draw, self.key = upstream, weights, draw, key
        device = upstream.mixed.device
        self.table, self.steps = mixture.table(device), plan_steps(mixture, device)
        memory = torch.empty(self.steps.layout.size, dtype=torch.uint8, device=device)
        self.space = Space(self.steps.layout, memory, by_address=is_compiled(key, _sum_kernel))

    def to_hidden(self) -> None:
        """Find the gradients before GELU."""
        m, saved, space, (tiling, options) = (
            self.mixture, self.saved, self.space, self.steps.hidden,
        )  # fmt: skip
        programs = most_tiles(m, tiling.rows) * m.teams.members * self.steps.num_parts
        launch(
            self.key, _hidden_gradient_kernel, (programs, 1, 1),
            (self.upstream.mixed, self.weights.down_weight, saved["hidden"], saved["slope"],
             self.table, saved["plan"], space["before_grad"], space["weight_grad"],
             space["up_bias_partial"], m.num_cells * m.top_k, m.width, m.hidden),
            lambda: {
                "EVEN": m.width % tiling.depth == 0,
                **m.told("TEAMS", "TEAM_LANES", "MEMBERS", "VISITS"), **options,
            },
        )  # fmt: skip

    def to_scores(self, logit_grad: Tensor | None) -> None:
        """Find the gradients of the router's scores, and of logits where asked for."""
        m, saved, space, (tiling, _) = self.mixture, self.saved, self.space, self.steps.scores
        names = ("EXPERTS", "LANES", "CELLS", "TEAMS", "TEAM_LANES", "MEMBERS", "VISITS")
        launch(
            self.key, _score_gradient_kernel, (most_tiles(m, tiling.rows), 1, 1),
            (self.upstream.mixed, saved["sent"], self.weights.down_bias, saved["score"], self.draw,
             saved["weight"], space["weight_grad"], saved["spot"], self.statistics,
             *self.upstream[1:], self.table, saved["plan"], space["sent_grad"],
             space["score_grad"], logit_grad, space["partial"], m.num_cells, self.steps.num_parts,
             m.width),
            # Columns are what is read at a time: there is no depth.
            lambda: {
                **m.told(*names), "ROWS": tiling.rows, "COLUMNS": tiling.columns,
                "num_warps": tiling.warps, "num_stages": tiling.stages,
            },
        )  # fmt: skip

    def to_cells(self, cell_grad: Tensor) -> None:
        """Find the gradients of rows, (S, D), at the places of their cells."""
        m, space, weights, (tiling, options) = (
            self.mixture, self.space, self.weights, self.steps.cells,
        )  # fmt: skip
        programs = most_tiles(m, tiling.rows) * parts_of(m.width, tiling.columns)
        launch(
            self.key, _cell_gradient_kernel, (programs, 1, 1),
            (space["before_grad"], weights.up_weight, space["score_grad"], weights.router,
             weights.noise, self.table, self.saved["plan"], cell_grad, m.width, m.hidden),
            lambda: {
                "EVEN": m.hidden % tiling.depth == 0,
                **m.told("EXPERTS", "LANES", "TEAMS", "TEAM_LANES", "MEMBERS"), **options,
            },
        )  # fmt: skip

    def to_weights(self, grads: Experts) -> None:
        """Find the gradients of router, noise and experts."""
        m, saved, space, steps = self.mixture, self.saved, self.space, self.steps
        rows, programs, blocks, described = steps.split
        partials = (
            (space["up_partial"], space["down_partial"])
            if rows
            else (grads.up_weight, grads.down_weight)
        )
        launch(
            self.key, _weight_gradient_kernel, (blocks, programs, 2),
            (*self._operands(), self.table, saved["plan"], *partials, rows, m.width, m.hidden),
            lambda: {
                "DESCRIBED": described, "SPLIT": rows > 0,
                **m.told("TEAMS", "TEAM_LANES", "MEMBERS"), **steps.weights[1],
            },
        )  # fmt: skip
        narrow = parts_of(m.hidden, NARROW_COLUMNS)
        narrow += (1 + m.matrices) * parts_of(m.width, NARROW_COLUMNS)
        large = 2 * parts_of(m.width * m.hidden, COLUMNS) if rows else 0
        launch(
            self.key, _sum_kernel, (narrow + large, m.num_experts, 1),
            (*partials, space["up_bias_partial"], space["partial"], self.table, saved["plan"],
             grads.up_weight, grads.down_weight, grads.up_bias, grads.down_bias, grads.router,
             grads.noise, rows, m.width, m.hidden),
            lambda: {
                **m.told("EXPERTS", "TEAMS", "MEMBERS"), "SPLIT": rows > 0,
                "HIDDEN_ROWS": steps.hidden[0].rows, "SCORE_ROWS": steps.scores[0].rows,
                "TILES": TILES, "COLUMNS": COLUMNS,
                "NARROW_TILES": NARROW_TILES, "NARROW_COLUMNS": NARROW_COLUMNS,
            },
        )  # fmt: skip

    def _operands(self) -> list[Any]:
        """Return the factors of the matrices' gradients: gradients and hidden rows, and so on."""
        of_width, of_hidden, depth = self.steps.weights[0][:3]
        factors = (
            (self.space, "sent_grad", of_width),
            (self.saved, "hidden", of_hidden),
            (self.saved, "sent", of_width),
            (self.space, "before_grad", of_hidden),
        )
        if not self.steps.split.described:
            return [space[name] for space, name, _ in factors]
        return [
            TensorDescriptor.from_tensor(space.tensor(name), [depth, side])
            for space, name, side in factors
        ]
