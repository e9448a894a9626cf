"""The experts' matrix products on a GPU: rows sorted by expert enter, each meets its own matrix.

Tiles are those of `dispatch_kernel.py`, so that no tile holds rows of two experts. GELU is a pass
of its own: at the end of a product, where nothing hides it, it took longer than this pass does.
"""

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from alphastomics.attn_model.dispatch_kernel import _tile, most_tiles, sum_tiles
from alphastomics.attn_model.routing_kernel import lanes, means


class Tiling(NamedTuple):
    """The shape of a tile, rows x columns, the depth of a step, and how many run side by side."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# For half precision where shared memory is ample, for it elsewhere, and for float32.
HALF = Tiling(128, 128, 64, 4, 3)
SMALL = Tiling(128, 128, 32, 4, 3)
SINGLE = Tiling(64, 64, 32, 4, 2)
# Rows, columns and warps of a program that takes GELU.
GELU_ROWS, GELU_COLUMNS, GELU_WARPS = 64, 128, 8
# From this width on descriptors pay; below, products wait for memory.
DESCRIBED_WIDTH = 512
# With fewer programs than this an expert's rows are split, or the GPU idles.
PROGRAMS = 264
# An expert's rows are split in multiples of this.
SPLIT = 1024


@triton.jit
@no_type_check
def _normal(x):
    """Cumulative distribution and density of the normal distribution at x, to 1e-7.

    Eq. 7.1.26 of Abramowitz & Stegun (1964): one exponential serves both, where the library's erf
    would cost as much as the matrix product.
    """
    power = tl.exp2(-0.7213475204444817 * x * x)
    t = 1 / (1 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
    tail = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    tail = 0.5 * power * t * (0.254829592 + t * (-0.284496736 + t * tail))
    return tl.where(x < 0, tail, 1 - tail), 0.3989422804014327 * power


@triton.jit
@no_type_check
def _product(
    a_ptr, w_ptr, row, column, depth_size, num_columns, w_depth, w_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Multiply some rows by some columns of one matrix; EVEN: the depth is a multiple of DEPTH."""
    step = tl.arange(0, DEPTH)
    inside = (column < num_columns)[None, :]
    a_at = a_ptr + row.to(tl.int64)[:, None] * depth_size + step[None, :]
    w_at = w_ptr + step[:, None] * w_depth + column[None, :] * w_column
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth_size, DEPTH):
        if EVEN:
            a = tl.load(a_at)
            w = tl.load(w_at, mask=inside, other=0.0)
        else:
            deep = start + step < depth_size
            a = tl.load(a_at, mask=deep[None, :], other=0.0)
            w = tl.load(w_at, mask=deep[:, None] & inside, other=0.0)
        product = tl.dot(a, w, product, input_precision="tf32x3")
        a_at += DEPTH
        w_at += DEPTH * w_depth
    return product


@triton.jit
@no_type_check
def _described_product(
    a, w, expert, first, column, depth_size, num_columns,
    TURNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Multiply like `_product`, by descriptors of a (S, K) and w (E K, M), or TURNED (E M, K)."""
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth_size, DEPTH):
        if TURNED:
            part = w.load([expert * num_columns + column, start]).T
        else:
            part = w.load([expert * depth_size + start, column])
        product = tl.dot(a.load([first, start]), part, product)
    return product


@triton.jit
@no_type_check
def _product_kernel(
    a, w, out_ptr, ends_ptr, depth_size, num_columns, w_expert, w_depth, w_column,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, DESCRIBED: tl.constexpr, TURNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of one expert's rows by some columns of its matrix."""
    parts = tl.cdiv(num_columns, COLUMNS)
    tile = tl.program_id(0) // parts
    expert, first, end = _tile(ends_ptr, tile, EXPERTS, LANES, ROWS)
    if expert < EXPERTS:
        row = first + tl.arange(0, ROWS)
        start = (tl.program_id(0) % parts) * COLUMNS
        column = start + tl.arange(0, COLUMNS)
        if DESCRIBED:
            product = _described_product(
                a, w, expert, first, start, depth_size, num_columns, TURNED, ROWS, COLUMNS, DEPTH
            )
        else:
            # Rows past the end repeat the last: unmasked loads are faster; nothing stores them.
            product = _product(
                a, w + expert.to(tl.int64) * w_expert, tl.minimum(row, end - 1), column,
                depth_size, num_columns, w_depth, w_column, ROWS, COLUMNS, DEPTH, EVEN,
            )  # fmt: skip
        to = out_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
        fits = (row < end)[:, None] & (column < num_columns)[None, :]
        tl.store(to, product.to(out_ptr.dtype.element_ty), mask=fits)


@triton.jit
@no_type_check
def _gelu_kernel(
    before_ptr, bias_ptr, hidden_ptr, ends_ptr, width,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the bias to some columns of a tile, and take GELU."""
    parts = tl.cdiv(width, COLUMNS)
    expert, first, end = _tile(ends_ptr, tl.program_id(0) // parts, EXPERTS, LANES, ROWS)
    if expert < EXPERTS:
        row = first + tl.arange(0, ROWS)
        column = (tl.program_id(0) % parts) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        fits = (row < end)[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        bias = tl.load(bias_ptr + expert * width + column, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(before_ptr + at, mask=fits, other=0.0).to(tl.float32) + bias[None, :]
        below, _ = _normal(x)
        tl.store(hidden_ptr + at, (x * below).to(hidden_ptr.dtype.element_ty), mask=fits)


@triton.jit
@no_type_check
def _gelu_backward_kernel(
    grad_ptr, before_ptr, bias_ptr, partial_ptr, ends_ptr, width,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply a gradient, in its place, by the derivative of GELU; add up columns for the bias."""
    parts = tl.cdiv(width, COLUMNS)
    tile = tl.program_id(0) // parts
    expert, first, end = _tile(ends_ptr, tile, EXPERTS, LANES, ROWS)
    if expert < EXPERTS:
        row = first + tl.arange(0, ROWS)
        column = (tl.program_id(0) % parts) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        fits = (row < end)[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        bias = tl.load(bias_ptr + expert * width + column, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(before_ptr + at, mask=fits, other=0.0).to(tl.float32) + bias[None, :]
        grad = tl.load(grad_ptr + at, mask=fits, other=0.0).to(tl.float32)
        below, density = _normal(x)
        # Zero outside: nothing was loaded there.
        grad = grad * (below + x * density)
        tl.store(partial_ptr + tile.to(tl.int64) * width + column, tl.sum(grad, 0), mask=inside)
        tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=fits)


@triton.jit
@no_type_check
def _outer_product(
    a_ptr, grad_ptr, first, end, down, column, a_width, grad_width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A^T G over the rows from first to end; ROWS x COLUMNS of it."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, end, DEPTH):
        row = start + tl.arange(0, DEPTH)
        here = (row < end)[:, None]
        at = row.to(tl.int64)[:, None]
        fits = here & (down < a_width)[None, :]
        a = tl.load(a_ptr + at * a_width + down[None, :], mask=fits, other=0.0)
        fits = here & (column < grad_width)[None, :]
        grad = tl.load(grad_ptr + at * grad_width + column[None, :], mask=fits, other=0.0)
        total = tl.dot(tl.trans(a), grad, total, input_precision="tf32x3")
    return total


@triton.jit
@no_type_check
def _described_outer_product(
    a, grad, first, end, down, column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Multiply like `_outer_product`, by descriptors of a and grad."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    whole = first + (end - first) // DEPTH * DEPTH
    for start in range(first, whole, DEPTH):
        total = tl.dot(a.load([start, down]).T, grad.load([start, column]), total)
    if whole < end:
        # The rows after the last are another expert's, or nobody's and hold anything.
        here = (whole + tl.arange(0, DEPTH) < end)[:, None]
        left = tl.where(here, a.load([whole, down]), 0.0)
        right = tl.where(here, grad.load([whole, column]), 0.0)
        total = tl.dot(left.T, right, total)
    return total


@triton.jit
@no_type_check
def _weight_gradient_kernel(
    a, grad, out_ptr, ends_ptr, a_width, grad_width,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, SPLIT: tl.constexpr, DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A^T G over one expert's rows, or over SPLIT of them; ROWS x COLUMNS of it."""
    parts = tl.cdiv(grad_width, COLUMNS)
    tile = tl.program_id(1)
    if SPLIT:
        expert, first, end = _tile(ends_ptr, tile, EXPERTS, LANES, SPLIT)
        end = tl.minimum(end, first + SPLIT)
    else:
        expert = tile
        first = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends_ptr + expert)
    if expert < EXPERTS:
        down_start = (tl.program_id(0) // parts) * ROWS
        start = (tl.program_id(0) % parts) * COLUMNS
        down, column = down_start + tl.arange(0, ROWS), start + tl.arange(0, COLUMNS)
        if DESCRIBED:
            total = _described_outer_product(
                a, grad, first, end, down_start, start, ROWS, COLUMNS, DEPTH
            )
        else:
            total = _outer_product(
                a, grad, first, end, down, column, a_width, grad_width, ROWS, COLUMNS, DEPTH
            )
        to = (tile.to(tl.int64) * a_width + down)[:, None] * grad_width + column[None, :]
        fits = (down < a_width)[:, None] & (column < grad_width)[None, :]
        tl.store(out_ptr + to, total.to(out_ptr.dtype.element_ty), mask=fits)


def _options(a: Tensor) -> tuple[Tiling, dict[str, Any]]:
    """Return the tiling for a product of this matrix, and how to hand it to a kernel."""
    tiling = HALF if means(a.device).ample else SMALL
    if a.dtype == torch.float32:
        tiling = SINGLE
    options = {
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "DEPTH": tiling.depth,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }
    return tiling, options


def _describable(sides: tuple[int, int], *operands: Tensor) -> bool:
    """Tell whether the copy engine can fetch tiles of a product's operands, and if it pays.

    Whole steps only: past the last row of an expert's matrix the next one's begins.
    """
    return (
        means(operands[0].device).descriptors
        and all(side >= DESCRIBED_WIDTH and side % HALF.depth == 0 for side in sides)
        and all(x.dtype != torch.float32 and x.is_contiguous() for x in operands)
        and all(x.data_ptr() % 16 == 0 for x in operands)
    )


def product(a: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows (S, K) by its matrix (K, M) of (E, K, M).

    The axes of the matrices may lie in memory in any order.
    """
    (num_rows, depth), (num_experts, _, num_columns) = a.shape, weight.shape
    out = a.new_empty(num_rows, num_columns)
    tiling, options = _options(a)
    turned = not weight.is_contiguous()
    matrices = weight.mT if turned else weight
    described = _describable((depth, num_columns), a, matrices)
    operands: tuple[Any, Any] = (a, weight)
    if described:
        block = [tiling.columns, tiling.depth] if turned else [tiling.depth, tiling.columns]
        operands = (
            TensorDescriptor.from_tensor(a, [tiling.rows, tiling.depth]),
            TensorDescriptor.from_tensor(matrices.flatten(0, 1), block),
        )
    tiles = most_tiles(num_rows, num_experts, tiling.rows)
    _product_kernel[(tiles * triton.cdiv(num_columns, tiling.columns),)](
        *operands, out, ends, depth, num_columns, *weight.stride(),
        EXPERTS=num_experts, LANES=lanes(num_experts), DESCRIBED=described, TURNED=turned,
        EVEN=depth % tiling.depth == 0, **options,
    )  # fmt: skip
    return out


def gelu(before: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    """Return GELU of rows (S, M) plus their expert's bias, of (E, M)."""
    (num_rows, width), num_experts = before.shape, len(bias)
    hidden = torch.empty_like(before)
    tiles = most_tiles(num_rows, num_experts, GELU_ROWS)
    _gelu_kernel[(tiles * triton.cdiv(width, GELU_COLUMNS),)](
        before, bias, hidden, ends, width, EXPERTS=num_experts, LANES=lanes(num_experts),
        ROWS=GELU_ROWS, COLUMNS=GELU_COLUMNS, num_warps=GELU_WARPS,
    )  # fmt: skip
    return hidden


def gelu_backward(
    grad: Tensor, before: Tensor, bias: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Turn the gradient of `gelu` into that of `before`, in its place; return it and the bias's."""
    (num_rows, width), num_experts = before.shape, len(bias)
    tiles = most_tiles(num_rows, num_experts, GELU_ROWS)
    partial = torch.empty(tiles, width, dtype=torch.float32, device=grad.device)
    _gelu_backward_kernel[(tiles * triton.cdiv(width, GELU_COLUMNS),)](
        grad, before, bias, partial, ends, width, EXPERTS=num_experts, LANES=lanes(num_experts),
        ROWS=GELU_ROWS, COLUMNS=GELU_COLUMNS, num_warps=GELU_WARPS,
    )  # fmt: skip
    return grad, sum_tiles(partial, ends, GELU_ROWS, bias.shape, bias.dtype)


def weight_gradient(a: Tensor, grad: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Return A^T G, (E, K, M), of each expert's rows of a (S, K) and grad (S, M)."""
    num_experts, num_rows, num_columns = len(ends), a.shape[1], grad.shape[1]
    tiling, options = _options(a)
    parts = triton.cdiv(num_rows, tiling.rows) * triton.cdiv(num_columns, tiling.columns)
    split = 0
    if parts * num_experts < PROGRAMS:
        split = SPLIT * max(1, len(a) * parts // (2 * PROGRAMS * SPLIT))
    chunks = most_tiles(len(a), num_experts, split) if split else num_experts
    shape = (chunks, num_rows, num_columns)
    out = torch.empty(shape, dtype=torch.float32 if split else dtype, device=a.device)
    described = _describable((num_rows, num_columns), a, grad)
    operands: tuple[Any, Any] = (a, grad)
    if described:
        operands = (
            TensorDescriptor.from_tensor(a, [tiling.depth, tiling.rows]),
            TensorDescriptor.from_tensor(grad, [tiling.depth, tiling.columns]),
        )
    _weight_gradient_kernel[(parts, chunks)](
        *operands, out, ends, num_rows, num_columns, EXPERTS=num_experts,
        LANES=lanes(num_experts), SPLIT=split, DESCRIBED=described, **options,
    )  # fmt: skip
    return sum_tiles(out, ends, split, (num_experts, *shape[1:]), dtype) if split else out
