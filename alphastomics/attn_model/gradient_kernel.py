"""The way back through the experts on a GPU: gradients of mixed cells enter, all others leave.

Tiles and teams are those of `expert_kernel.py`. Sums over an expert's rows are stored by tile and
added up in one order, so that the result does not change from run to run.
"""

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from alphastomics.attn_model.expert_kernel import (
    _product,
    add_rows,
    most_tiles,
    parts_of,
    tiling_options,
)
from alphastomics.attn_model.launch import Key, key_of, launch
from alphastomics.attn_model.routing_kernel import (
    CELLS,
    Layout,
    Routed,
    _member,
    _softmax,
    _tile,
    has_descriptors,
    lanes,
)

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
            tl.zeros((ROWS, COLUMNS), tl.float32), 1, True, DEPTH, EVEN,
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


@triton.jit(do_not_specialize=["num_cells", "num_parts"])
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
            hidden, width, tl.zeros((ROWS, COLUMNS), tl.float32), MEMBERS, True, DEPTH, EVEN,
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
    a, b, table_ptr, plan_ptr, down_start, start, width, hidden, DESCRIBED: tl.constexpr,
    TEAMS: tl.constexpr, TEAM_LANES: tl.constexpr, MEMBERS: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A^T B over an expert's rows, or over SPLIT rows of a team's member."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if SPLIT:
        tile, member = tl.program_id(1) // MEMBERS, tl.program_id(1) % MEMBERS
        team, first, end = _tile(plan_ptr, tile, TEAMS, TEAM_LANES, SPLIT)
        end = tl.where(team < TEAMS, tl.minimum(end, first + SPLIT), first)
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


@triton.jit
@no_type_check
def _weight_gradient_kernel(
    grad, hidden_rows, x, before_grad, table_ptr, plan_ptr, down_ptr, up_ptr, width, hidden,
    DESCRIBED: tl.constexpr,
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
            grad, hidden_rows, table_ptr, plan_ptr, down_start, start, width, hidden, DESCRIBED,
            TEAMS, TEAM_LANES, MEMBERS, SPLIT, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        at = to + column[None, :] * width + down[:, None]
        tl.store(down_ptr + at, total.to(down_ptr.dtype.element_ty), mask=fits)
    else:
        total = _weight_gradient_part(
            x, before_grad, table_ptr, plan_ptr, down_start, start, width, hidden, DESCRIBED,
            TEAMS, TEAM_LANES, MEMBERS, SPLIT, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        at = to + down[:, None] * hidden + column[None, :]
        tl.store(up_ptr + at, total.to(up_ptr.dtype.element_ty), mask=fits)


@triton.jit
@no_type_check
def _sum_tiles(
    partial_ptr, to_ptr, table_ptr, plan_ptr, expert, start, width,
    TEAMS: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr,
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
        last = first + (end - begin + ROWS - 1) // ROWS
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


@triton.jit
@no_type_check
def _sum_kernel(
    up_partial_ptr, down_partial_ptr, up_bias_partial_ptr, partial_ptr, table_ptr, plan_ptr,
    up_ptr, down_ptr, up_bias_ptr, down_bias_ptr, router_ptr, noise_ptr, width, hidden,
    EXPERTS: tl.constexpr, TEAMS: tl.constexpr, MEMBERS: tl.constexpr,
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
            TEAMS, MEMBERS, HIDDEN_ROWS, NARROW_TILES, NARROW_COLUMNS,
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
                up_partial_ptr, up_ptr, table_ptr, plan_ptr, expert, matrix, size,
                TEAMS, MEMBERS, SPLIT, TILES, COLUMNS,
            )  # fmt: skip
        else:
            _sum_tiles(
                down_partial_ptr, down_ptr, table_ptr, plan_ptr, expert, matrix - large, size,
                TEAMS, MEMBERS, SPLIT, TILES, COLUMNS,
            )  # fmt: skip


class Upstream(NamedTuple):
    """The gradients of mixed cells, (T, D), and of statistics, None where nothing used them."""

    mixed: Tensor
    probability: Tensor | None
    balance_loss: Tensor | None
    z_loss: Tensor | None


class Gradients(NamedTuple):
    """The gradients of the cells, the logits (empty if not asked for), routers and experts."""

    cells: Tensor
    logit: Tensor
    router: Tensor
    noise: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor


class Saved(NamedTuple):
    """What the way there left: its hidden rows and slopes, the noise drawn, and the weights."""

    hidden: Tensor
    slope: Tensor
    draw: Tensor | None
    router: Tensor
    noise: Tensor | None
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor


class _Way:
    """One way back, step by step; a step leaves what the next ones need."""

    def __init__(
        self, upstream: Upstream, routed: Routed, layout: Layout, saved: Saved, key: Key | None
    ) -> None:
        self.upstream, self.routed, self.saved, self.key = upstream, routed, saved, key
        self.teams, self.table, self.sizes = layout
        self.told = {name: self.sizes[name] for name in ("TEAMS", "TEAM_LANES", "MEMBERS")}
        self.num_experts, self.width, self.hidden = saved.up.shape
        self.num_rows = routed.sent.shape[0]
        self.dtype, self.device = routed.sent.dtype, routed.sent.device
        self.numbers: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        self.matrices = 1 if saved.noise is None else 2

    def tiles(self, rows: int) -> int:
        """Return how many tiles there are at most."""
        return most_tiles(self.num_rows, self.teams.count, rows)

    def to_hidden(self) -> None:
        """Find the gradients before GELU."""
        tiling, options = tiling_options("hidden gradient", self.dtype, self.device)
        routed, saved = self.routed, self.saved
        tiles, self.num_parts = self.tiles(tiling.rows), parts_of(self.hidden, tiling.columns)
        self.hidden_rows = tiling.rows
        self.before_grad = torch.empty_like(saved.hidden)
        self.weight_grad = torch.empty(self.num_parts, *routed.weight.shape, **self.numbers)
        self.up_bias_partial = torch.empty(tiles, self.teams.members, self.hidden, **self.numbers)
        launch(
            self.key, _hidden_gradient_kernel, (tiles * self.teams.members * self.num_parts, 1, 1),
            (self.upstream.mixed, saved.down, saved.hidden, saved.slope, self.table, routed.plan,
             self.before_grad, self.weight_grad, self.up_bias_partial,
             routed.weight.numel(), self.width, self.hidden),
            {"EVEN": self.width % tiling.depth == 0, **self.sizes, **options},
        )  # fmt: skip

    def to_scores(self, *, shifted: bool, padded: bool) -> None:
        """Find the gradients of the router's scores."""
        tiling, options = tiling_options("score gradient", self.dtype, self.device)
        routed, saved = self.routed, self.saved
        (num_cells, _), padding = routed.weight.shape, lanes(self.num_experts)
        self.score_rows, tiles = tiling.rows, self.tiles(tiling.rows)
        self.sent_grad = torch.empty_like(routed.sent)
        self.score_grad = torch.empty(
            self.num_rows, self.matrices * padding, dtype=self.dtype, device=self.device
        )
        make = torch.zeros if padded else torch.empty
        self.logit_grad = make(num_cells, self.num_experts, **self.numbers) if shifted else None
        self.partial = torch.empty(
            tiles, self.matrices + 1, self.num_experts, self.width, **self.numbers
        )
        # These are columns that are read at a time: there is no depth.
        options = {name: value for name, value in options.items() if name != "DEPTH"}
        launch(
            self.key, _score_gradient_kernel, (tiles, 1, 1),
            (self.upstream.mixed, routed.sent, saved.down_bias, routed.score, saved.draw,
             routed.weight, self.weight_grad, routed.spot, routed.statistics, *self.upstream[1:],
             self.table, routed.plan, self.sent_grad, self.score_grad, self.logit_grad,
             self.partial, num_cells, self.num_parts, self.width),
            {"EXPERTS": self.num_experts, "LANES": padding, "CELLS": CELLS, **self.sizes,
             **options},
        )  # fmt: skip

    def to_cells(self, dtype: torch.dtype, *, padded: bool) -> Tensor:
        """Return the gradient of the cells."""
        tiling, options = tiling_options("cell gradient", self.dtype, self.device)
        saved = self.saved
        make = torch.zeros if padded else torch.empty
        cell_grad = make(self.num_rows, self.width, dtype=dtype, device=self.device)
        programs = self.tiles(tiling.rows) * parts_of(self.width, tiling.columns)
        launch(
            self.key, _cell_gradient_kernel, (programs, 1, 1),
            (self.before_grad, saved.up, self.score_grad, saved.router, saved.noise,
             self.table, self.routed.plan, cell_grad, self.width, self.hidden),
            {"EXPERTS": self.num_experts, "LANES": lanes(self.num_experts),
             "EVEN": self.hidden % tiling.depth == 0, **self.told, **options},
        )  # fmt: skip
        return add_rows(cell_grad, self.teams.rows)

    def to_weights(self) -> tuple[Tensor, ...]:
        """Return the gradients of router, noise and experts."""
        tiling, options = tiling_options("weight gradient", self.dtype, self.device)
        saved, plan = self.saved, self.routed.plan
        blocks = parts_of(self.width, tiling.rows) * parts_of(self.hidden, tiling.columns)
        split, chunks = self.split(2 * blocks)
        up_grad = torch.empty_like(saved.up, dtype=saved.up_bias.dtype)
        down_grad = torch.empty_like(saved.down, dtype=saved.down_bias.dtype)
        up_partial, down_partial = up_grad, down_grad
        if split:
            up_partial = torch.empty(chunks, self.width * self.hidden, **self.numbers)
            down_partial = torch.empty_like(up_partial)
        operands: list[Any] = [self.sent_grad, saved.hidden, self.routed.sent, self.before_grad]
        described = self.is_describable(tiling.depth)
        if described:
            sides = (tiling.rows, tiling.columns, tiling.rows, tiling.columns)
            operands = [
                TensorDescriptor.from_tensor(rows, [tiling.depth, side])
                for rows, side in zip(operands, sides, strict=True)
            ]
        key = None if self.key is None else (*self.key, split)
        launch(
            key, _weight_gradient_kernel, (blocks, chunks, 2),
            (*operands, self.table, plan, down_partial, up_partial, self.width, self.hidden),
            {"DESCRIBED": described, "SPLIT": split, **self.told, **options},
        )  # fmt: skip
        up_bias_grad, down_bias_grad = map(torch.empty_like, (saved.up_bias, saved.down_bias))
        router_grad = torch.empty_like(saved.router)
        noise_grad = None if saved.noise is None else torch.empty_like(saved.noise)
        narrow = parts_of(self.hidden, NARROW_COLUMNS)
        narrow += (1 + self.matrices) * parts_of(self.width, NARROW_COLUMNS)
        large = 2 * parts_of(self.width * self.hidden, COLUMNS) if split else 0
        launch(
            key, _sum_kernel, (narrow + large, self.num_experts, 1),
            (up_partial, down_partial, self.up_bias_partial, self.partial, self.table, plan,
             up_grad, down_grad, up_bias_grad, down_bias_grad, router_grad, noise_grad,
             self.width, self.hidden),
            {"EXPERTS": self.num_experts, "TEAMS": self.teams.count, "MEMBERS": self.teams.members,
             "SPLIT": split, "HIDDEN_ROWS": self.hidden_rows, "SCORE_ROWS": self.score_rows,
             "TILES": TILES, "COLUMNS": COLUMNS,
             "NARROW_TILES": NARROW_TILES, "NARROW_COLUMNS": NARROW_COLUMNS},
        )  # fmt: skip
        noise_grad = router_grad.new_empty(0) if noise_grad is None else noise_grad
        return router_grad, noise_grad, up_grad, up_bias_grad, down_grad, down_bias_grad

    def split(self, blocks: int) -> tuple[int, int]:
        """Return into how many rows teams are split for the matrices' gradients, and the programs.

        0: not at all, one program an expert and block.
        """
        if blocks * self.num_experts >= PROGRAMS:
            return 0, self.num_experts
        members = self.teams.members
        split = SPLIT * max(1, -(-self.num_rows * members * blocks // (2 * PROGRAMS * SPLIT)))
        return split, self.tiles(split) * members

    def is_describable(self, depth: int) -> bool:
        """Tell whether the copy engine can fetch tiles of rows, and if it pays: whole steps only."""
        return (
            has_descriptors(self.device)
            and self.dtype != torch.float32
            and all(
                side >= DESCRIBED_WIDTH and side % depth == 0 for side in (self.width, self.hidden)
            )
        )


def backward(
    upstream: Upstream,
    routed: Routed,
    layout: Layout,
    saved: Saved,
    cell_dtype: torch.dtype,
    *,
    padded: bool,
    shifted: bool,
) -> Gradients:
    """Return all gradients; that of the logits if `shifted`."""
    facts = (*saved.up.shape, routed.weight.shape[1], cell_dtype, shifted)
    key = key_of((*upstream, *saved[2:]), routed.sent.device, *facts)
    way = _Way(upstream, routed, layout, saved, key)
    way.to_hidden()
    way.to_scores(shifted=shifted, padded=padded)
    cells = way.to_cells(cell_dtype, padded=padded)
    logit = saved.router.new_empty(0) if way.logit_grad is None else way.logit_grad
    return Gradients(cells, logit, *way.to_weights())
