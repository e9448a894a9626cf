"""The experts on a GPU, forward and backward: rows sorted by expert group meet their matrices.

A program takes a tile of one group's rows; `_tile` finds whose. Results are written where their
cells are. T cells, S rows, E experts of width H; `C` are the constants of `sizes.py`. The router's
gradients are in `score_kernel.py`, the matrices' in `weight_kernel.py`.
"""

from typing import no_type_check

import triton
import triton.language as tl

from alphastomics.attn_model.kernels.routing_kernel import _expert, _tile, _zeros


@triton.jit
@no_type_check
def _gelu(x, EXACT):
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
        # Past 7 the polynomial would not be monotonic; the function is 0 or 1 there.
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
def _product(a_ptr, w_ptr, row, packed, column, depth, num_columns, C, EXPERTS, TRANSPOSED):
    """Multiply some rows, EXPERTS parts of `depth` numbers each, by the matrices of the experts.

    Matrices are (E, depth, columns), or TRANSPOSED (E, columns, depth). One loop over all experts:
    several would each fill and drain the pipeline.
    """
    product = _zeros(C.rows, C.columns)
    step = tl.arange(0, C.depth)
    inside = (column < num_columns)[None, :]
    w_depth = 1 if TRANSPOSED else num_columns
    w_column = depth if TRANSPOSED else 1
    steps = (depth + C.depth - 1) // C.depth
    a_at = a_ptr + row.to(tl.int64)[:, None] * (EXPERTS * depth)
    w_at = w_ptr + column[None, :] * w_column
    for i in range(EXPERTS * steps):
        nth = i // steps
        start = (i - nth * steps) * C.depth
        expert = _expert(packed, nth).to(tl.int64)
        w_from = w_at + expert * depth * num_columns + (start + step)[:, None] * w_depth
        if C.even:
            # Parts lie side by side: the compiler sees whole steps in memory.
            a = tl.load(a_at + (i * C.depth + step)[None, :])
            w = tl.load(w_from, mask=inside, other=0.0)
        else:
            deep = start + step < depth
            a_from = a_at + (nth * depth + start + step)[None, :]
            a = tl.load(a_from, mask=deep[None, :], other=0.0)
            w = tl.load(w_from, mask=deep[:, None] & inside, other=0.0)
        product = tl.dot(a, w, product, input_precision="tf32x3")
    return product


@triton.jit
@no_type_check
def _hidden_program(hidden, C):
    """Return a program's tile, which expert of its group it takes, and which hidden columns."""
    parts = tl.cdiv(hidden, C.columns)
    tile = tl.program_id(0) // (parts * C.group_size)
    rest = tl.program_id(0) % (parts * C.group_size)
    return tile, rest // parts, rest % parts


@triton.jit
@no_type_check
def _rows(plan_ptr, first, end, C):
    """Return a tile's rows; the same with the last in place of those past the end; assignments.

    Unmasked loads are faster, and nothing stores the rows past the end.
    """
    row = first + tl.arange(0, C.rows)
    safe = tl.minimum(row, end - 1)
    return row, safe, tl.load(plan_ptr + C.padded_groups + safe)


@triton.jit
@no_type_check
def _up_kernel(
    x_ptr, w_ptr, bias_ptr, weight_ptr, table_ptr, plan_ptr, hidden_ptr, slope_ptr, width, hidden,
    C: tl.constexpr,
):  # fmt: skip
    """Take some hidden columns of a tile: GELU and its slope, both times the expert's weight.

    The slope is stored, not what is before GELU: then the backward pass computes nothing again.
    """
    tile, nth, part = _hidden_program(hidden, C)
    group, first, end = _tile(plan_ptr, tile, C.rows, C)
    if group < C.groups:
        row, safe, assignment = _rows(plan_ptr, first, end, C)
        expert = _expert(tl.load(table_ptr + group), nth)
        column = part * C.columns + tl.arange(0, C.columns)
        product = _product(
            x_ptr, w_ptr, safe, expert, column, width, hidden, C, 1, TRANSPOSED=False
        )
        inside = column < hidden
        bias = tl.load(bias_ptr + expert * hidden + column, mask=inside, other=0.0)
        x = product + bias.to(tl.float32)[None, :]
        weight = tl.load(weight_ptr + assignment * C.group_size + nth)[:, None]
        at = row.to(tl.int64)[:, None] * (C.group_size * hidden) + nth * hidden + column[None, :]
        fits = (row < end)[:, None] & inside[None, :]
        below, slope = _gelu(x, hidden_ptr.dtype.element_ty == tl.float32)
        tl.store(hidden_ptr + at, (x * below * weight).to(hidden_ptr.dtype.element_ty), mask=fits)
        if slope_ptr is not None:
            tl.store(slope_ptr + at, (slope * weight).to(slope_ptr.dtype.element_ty), mask=fits)


@triton.jit
@no_type_check
def _down_kernel(
    hidden_ptr, w_ptr, bias_ptr, weight_ptr, table_ptr, plan_ptr, mixed_ptr, width, hidden,
    C: tl.constexpr,
):  # fmt: skip
    """Mix some columns of a tile's results, all experts of the group, at the rows of its cells."""
    parts = tl.cdiv(width, C.columns)
    group, first, end = _tile(plan_ptr, tl.program_id(0) // parts, C.rows, C)
    if group < C.groups:
        row, safe, assignment = _rows(plan_ptr, first, end, C)
        packed = tl.load(table_ptr + group)
        column = (tl.program_id(0) % parts) * C.columns + tl.arange(0, C.columns)
        product = _product(
            hidden_ptr, w_ptr, safe, packed, column, hidden, width, C, C.group_size,
            TRANSPOSED=False,
        )  # fmt: skip
        inside = column < width
        group_size: tl.constexpr = C.group_size
        for nth in tl.static_range(group_size):
            weight = tl.load(weight_ptr + assignment * C.group_size + nth)
            from_bias = bias_ptr + _expert(packed, nth) * width + column
            bias = tl.load(from_bias, mask=inside, other=0.0).to(tl.float32)
            product += weight[:, None] * bias[None, :]
        to = mixed_ptr + assignment.to(tl.int64)[:, None] * width + column[None, :]
        fits = (row < end)[:, None] & inside[None, :]
        tl.store(to, product.to(mixed_ptr.dtype.element_ty), mask=fits)


@triton.jit(do_not_specialize=["num_weights"])
@no_type_check
def _hidden_gradient_kernel(
    grad_ptr, w_ptr, hidden_ptr, slope_ptr, table_ptr, plan_ptr,
    before_grad_ptr, weight_grad_ptr, partial_ptr, num_weights, width, hidden, C: tl.constexpr,
):  # fmt: skip
    """Take some hidden columns of a tile: gradients before GELU, and parts of the weights'.

    Of a weight's gradient, times the weight, this is one part; of the bias's the tile's share.
    """
    tile, nth, part = _hidden_program(hidden, C)
    group, first, end = _tile(plan_ptr, tile, C.rows, C)
    if group < C.groups:
        row, _, assignment = _rows(plan_ptr, first, end, C)
        expert = _expert(tl.load(table_ptr + group), nth)
        column = part * C.columns + tl.arange(0, C.columns)
        cell = assignment // C.rows_per_cell
        product = _product(
            grad_ptr, w_ptr, cell, expert, column, width, hidden, C, 1, TRANSPOSED=True
        )
        at = row.to(tl.int64)[:, None] * (C.group_size * hidden) + nth * hidden + column[None, :]
        fits = (row < end)[:, None] & (column < hidden)[None, :]
        after = tl.load(hidden_ptr + at, mask=fits, other=0.0).to(tl.float32)
        to = weight_grad_ptr + part * num_weights + assignment * C.group_size + nth
        tl.store(to, tl.sum(product * after, 1), mask=row < end)
        # Zero where no slope was loaded.
        grad = product * tl.load(slope_ptr + at, mask=fits, other=0.0).to(tl.float32)
        tl.store(before_grad_ptr + at, grad.to(before_grad_ptr.dtype.element_ty), mask=fits)
        partial = partial_ptr + (tile * C.group_size + nth).to(tl.int64) * hidden
        tl.store(partial + column, tl.sum(grad, 0), mask=column < hidden)


@triton.jit
@no_type_check
def _cell_gradient_kernel(
    before_grad_ptr, w_ptr, score_grad_ptr, router_ptr, noise_ptr, table_ptr, plan_ptr, x_grad_ptr,
    width, hidden, C: tl.constexpr,
):  # fmt: skip
    """Form some columns of the gradients of a tile's cells, through experts and router."""
    parts = tl.cdiv(width, C.columns)
    group, first, end = _tile(plan_ptr, tl.program_id(0) // parts, C.rows, C)
    if group < C.groups:
        row, safe, assignment = _rows(plan_ptr, first, end, C)
        column = (tl.program_id(0) % parts) * C.columns + tl.arange(0, C.columns)
        packed = tl.load(table_ptr + group)
        product = _product(
            before_grad_ptr, w_ptr, safe, packed, column, hidden, width, C, C.group_size,
            TRANSPOSED=True,
        )  # fmt: skip
        expert = tl.arange(0, C.padded_experts)
        matrices: tl.constexpr = 1 if noise_ptr is None else 2
        inside = column < width
        score = score_grad_ptr + safe[:, None] * (matrices * C.padded_experts) + expert[None, :]
        at = expert[:, None] * width + column[None, :]
        fits = (expert < C.experts)[:, None] & inside[None, :]
        dtype = score_grad_ptr.dtype.element_ty
        router = tl.load(router_ptr + at, mask=fits, other=0.0).to(dtype)
        product = tl.dot(tl.load(score), router, product, input_precision="tf32x3")
        if noise_ptr is not None:
            noise = tl.load(noise_ptr + at, mask=fits, other=0.0).to(dtype)
            noise_score = tl.load(score + C.padded_experts)
            product = tl.dot(noise_score, noise, product, input_precision="tf32x3")
        to = x_grad_ptr + assignment.to(tl.int64)[:, None] * width + column[None, :]
        fits = (row < end)[:, None] & inside[None, :]
        tl.store(to, product.to(x_grad_ptr.dtype.element_ty), mask=fits)
