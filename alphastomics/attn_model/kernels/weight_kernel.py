"""The gradients of the experts' weights on a GPU: rows and their gradients enter, sums leave.

Sums over an expert's rows are stored by tile and added up in one order, so that the result does not
change from run to run. `C` are the constants of `sizes.py`.
"""

from typing import no_type_check

import triton
import triton.language as tl

from alphastomics.attn_model.kernels import sizes
from alphastomics.attn_model.kernels.routing_kernel import _expert, _tile, _zeros

NARROW_TILES = tl.constexpr(128)
NARROW_COLUMNS = tl.constexpr(sizes.NARROW_COLUMNS)


@triton.jit
@no_type_check
def _outer_product(a, b, first, end, a_start, b_start, width, hidden, nth, total, C):
    """Add A^T B over the rows from first to end, A (S, D) and B (S, group size x H)."""
    if C.by_descriptor:
        whole = first + (end - first) // C.depth * C.depth
        shift = nth * hidden + b_start
        for i in range(first, whole, C.depth):
            total = tl.dot(a.load([i, a_start]).T, b.load([i, shift]), total)
        if whole < end:
            # The rows after the last are another group's, or nobody's and hold anything.
            here = (whole + tl.arange(0, C.depth) < end)[:, None]
            left = tl.where(here, a.load([whole, a_start]), 0.0)
            right = tl.where(here, b.load([whole, shift]), 0.0)
            total = tl.dot(left.T, right, total)
    else:
        a_column, b_column = a_start + tl.arange(0, C.rows), b_start + tl.arange(0, C.columns)
        a_fits, b_fits = (a_column < width)[None, :], (b_column < hidden)[None, :]
        for i in range(first, end, C.depth):
            row = i + tl.arange(0, C.depth)
            here = (row < end)[:, None]
            at = row.to(tl.int64)[:, None] * width + a_column[None, :]
            left = tl.load(a + at, mask=here & a_fits, other=0.0)
            at = row.to(tl.int64)[:, None] * (C.group_size * hidden) + nth * hidden
            right = tl.load(b + at + b_column[None, :], mask=here & b_fits, other=0.0)
            total = tl.dot(tl.trans(left), right, total, input_precision="tf32x3")
    return total


@triton.jit
@no_type_check
def _matrix_gradient(a, b, table_ptr, plan_ptr, a_start, b_start, width, hidden, chunk, C):
    """Form A^T B over an expert's rows, or if split over a chunk of rows for one of the group's."""
    total = _zeros(C.rows, C.columns)
    if C.split:
        tile, nth = tl.program_id(1) // C.group_size, tl.program_id(1) % C.group_size
        group, first, end = _tile(plan_ptr, tile, chunk, C)
        end = tl.where(group < C.groups, tl.minimum(end, first + chunk), first)
        total = _outer_product(a, b, first, end, a_start, b_start, width, hidden, nth, total, C)
    else:
        first = 0
        group_size: tl.constexpr = C.group_size
        for group in range(C.groups):
            packed, end = tl.load(table_ptr + group), tl.load(plan_ptr + group)
            nth, in_group = 0, 0
            for i in tl.static_range(group_size):
                if _expert(packed, i) == tl.program_id(1):
                    nth, in_group = i, 1
            if in_group > 0:
                total = _outer_product(
                    a, b, first, end, a_start, b_start, width, hidden, nth, total, C
                )
            first = end
    return total


@triton.jit(do_not_specialize=["chunk"])
@no_type_check
def _weight_gradient_kernel(
    grad, hidden_rows, x, before_grad, table_ptr, plan_ptr, up_ptr, down_ptr,
    chunk, width, hidden, C: tl.constexpr,
):  # fmt: skip
    """Form a block of an expert's gradients, or of a chunk's share: the last matrix's, the first's.

    The last is transposed.
    """
    parts = tl.cdiv(hidden, C.columns)
    a_start = (tl.program_id(0) // parts) * C.rows
    b_start = (tl.program_id(0) % parts) * C.columns
    a_column, b_column = a_start + tl.arange(0, C.rows), b_start + tl.arange(0, C.columns)
    fits = (a_column < width)[:, None] & (b_column < hidden)[None, :]
    to = tl.program_id(1).to(tl.int64) * width * hidden
    if tl.program_id(2) == 0:
        total = _matrix_gradient(
            grad, hidden_rows, table_ptr, plan_ptr, a_start, b_start, width, hidden, chunk, C
        )
        at = to + b_column[None, :] * width + a_column[:, None]
        tl.store(down_ptr + at, total.to(down_ptr.dtype.element_ty), mask=fits)
    else:
        total = _matrix_gradient(
            x, before_grad, table_ptr, plan_ptr, a_start, b_start, width, hidden, chunk, C
        )
        at = to + a_column[:, None] * hidden + b_column[None, :]
        tl.store(up_ptr + at, total.to(up_ptr.dtype.element_ty), mask=fits)


@triton.jit
@no_type_check
def _add_tiles(total, partial_ptr, first, last, column, width, stride, TILES):
    """Add some columns of the tiles from first to last, TILES of them side by side."""
    for i in range(first, last, TILES):
        tile = i + tl.arange(0, TILES)
        at = partial_ptr + tile.to(tl.int64)[:, None] * stride + column[None, :]
        total += tl.load(at, mask=(tile < last)[:, None] & (column < width)[None, :], other=0.0)
    return total


@triton.jit
@no_type_check
def _sum_tiles(
    partial_ptr, to_ptr, table_ptr, plan_ptr, part, width, rows, PER_TILE, TILES, COLUMNS, C
):  # fmt: skip
    """Add up some columns of an expert's tiles, which lie by tile and expert of the group.

    PER_TILE: if not 0, every tile has so many rows, an expert's at its own index.
    """
    expert, column = tl.program_id(1), part * COLUMNS + tl.arange(0, COLUMNS)
    total = _zeros(TILES, COLUMNS)
    first = 0
    begin = 0
    group_size: tl.constexpr = C.group_size
    for group in range(C.groups):
        end = tl.load(plan_ptr + group)
        last = first + (end - begin + rows - 1) // rows
        if PER_TILE == 0:
            packed, stride = tl.load(table_ptr + group), group_size * width
            for nth in tl.static_range(group_size):
                if _expert(packed, nth) == expert:
                    share = partial_ptr + nth * width
                    total = _add_tiles(total, share, first, last, column, width, stride, TILES)
        first = last
        begin = end
    if PER_TILE > 0:
        share = partial_ptr + expert * width
        total = _add_tiles(total, share, 0, first, column, width, PER_TILE * width, TILES)
    to = to_ptr + expert.to(tl.int64) * width + column
    tl.store(to, tl.sum(total, 0).to(to_ptr.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["chunk"])
@no_type_check
def _sum_kernel(
    up_partial_ptr, down_partial_ptr, up_bias_partial_ptr, partial_ptr, table_ptr, plan_ptr,
    up_ptr, down_ptr, up_bias_ptr, down_bias_ptr, router_ptr, noise_ptr,
    chunk, width, hidden, C: tl.constexpr,
):  # fmt: skip
    """Add up one expert's gradients: a program takes some numbers of one of them."""
    size = width * hidden
    of_hidden, of_width = tl.cdiv(hidden, NARROW_COLUMNS), tl.cdiv(width, NARROW_COLUMNS)
    matrices: tl.constexpr = 1 if noise_ptr is None else 2
    per_tile: tl.constexpr = (matrices + 1) * C.experts
    # The longest first: the last to start are the last to end.
    router, bias = tl.program_id(0), tl.program_id(0) - of_width
    up_bias = bias - of_width
    noise = up_bias - of_hidden
    matrix = noise - (matrices - 1) * of_width
    if bias < 0:
        _sum_tiles(
            partial_ptr, router_ptr, table_ptr, plan_ptr, router, width, C.score_rows, per_tile,
            NARROW_TILES, NARROW_COLUMNS, C,
        )  # fmt: skip
    elif up_bias < 0:
        _sum_tiles(
            partial_ptr + matrices * C.experts * width, down_bias_ptr, table_ptr, plan_ptr, bias,
            width, C.score_rows, per_tile, NARROW_TILES, NARROW_COLUMNS, C,
        )  # fmt: skip
    elif noise < 0:
        _sum_tiles(
            up_bias_partial_ptr, up_bias_ptr, table_ptr, plan_ptr, up_bias, hidden, C.hidden_rows,
            0, NARROW_TILES, NARROW_COLUMNS, C,
        )  # fmt: skip
    elif matrix < 0:
        if noise_ptr is not None:
            _sum_tiles(
                partial_ptr + C.experts * width, noise_ptr, table_ptr, plan_ptr, noise, width,
                C.score_rows, per_tile, NARROW_TILES, NARROW_COLUMNS, C,
            )  # fmt: skip
    elif C.split:
        part = matrix - tl.cdiv(size, C.columns)
        if part < 0:
            _sum_tiles(
                up_partial_ptr, up_ptr, table_ptr, plan_ptr, matrix, size, chunk, 0,
                C.rows, C.columns, C,
            )  # fmt: skip
        else:
            _sum_tiles(
                down_partial_ptr, down_ptr, table_ptr, plan_ptr, part, size, chunk, 0,
                C.rows, C.columns, C,
            )  # fmt: skip
