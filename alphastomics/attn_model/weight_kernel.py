"""The gradients of the experts' weights on a GPU: rows and their gradients enter, sums leave.

Sums over an expert's rows are stored by tile and added up in one order, so that the result does not
change from run to run.
"""

from typing import no_type_check

import triton
import triton.language as tl

from alphastomics.attn_model.routing_kernel import _member, _tile


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
def _add_tiles(
    total, partial_ptr, first, last, column, width, stride,
    TILES: tl.constexpr,
):  # fmt: skip
    """Add some columns of the tiles from first to last, TILES of them side by side."""
    for i in range(first, last, TILES):
        tile = i + tl.arange(0, TILES)
        at = partial_ptr + tile.to(tl.int64)[:, None] * stride + column[None, :]
        total += tl.load(at, mask=(tile < last)[:, None] & (column < width)[None, :], other=0.0)
    return total


@triton.jit
@no_type_check
def _sum_tiles(
    partial_ptr, to_ptr, table_ptr, plan_ptr, expert, start, width, rows,
    TEAMS: tl.constexpr, MEMBERS: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up some columns of one expert's tiles, which lie by tile and member."""
    column = start * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((TILES, COLUMNS), tl.float32)
    first = 0
    begin = 0
    for team in range(TEAMS):
        packed, end = tl.load(table_ptr + team), tl.load(plan_ptr + team)
        last = first + (end - begin + rows - 1) // rows
        for member in tl.static_range(MEMBERS):
            if _member(packed, member) == expert:
                total = _add_tiles(
                    total, partial_ptr + member * width, first, last, column, width,
                    MEMBERS * width, TILES,
                )  # fmt: skip
        first = last
        begin = end
    to = to_ptr + expert.to(tl.int64) * width + column
    tl.store(to, tl.sum(total, 0).to(to_ptr.dtype.element_ty), mask=column < width)


@triton.jit
@no_type_check
def _sum_all_tiles(
    partial_ptr, to_ptr, plan_ptr, expert, start, width, stride,
    TEAMS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up some columns of the tiles of all teams, in an expert's row."""
    column = start * COLUMNS + tl.arange(0, COLUMNS)
    last = 0
    begin = 0
    for team in range(TEAMS):
        end = tl.load(plan_ptr + team)
        last += (end - begin + ROWS - 1) // ROWS
        begin = end
    total = tl.zeros((TILES, COLUMNS), tl.float32)
    total = _add_tiles(total, partial_ptr + expert * width, 0, last, column, width, stride, TILES)
    to = to_ptr + expert.to(tl.int64) * width + column
    tl.store(to, tl.sum(total, 0).to(to_ptr.dtype.element_ty), mask=column < width)


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
