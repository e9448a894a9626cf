"""The experts' matrix products on a GPU: rows sorted by expert enter, each meets its own matrix.

The activation and its derivative are taken while a product is still in registers. Tiles are those
of `dispatch_kernel.py`, so that no tile holds rows of two experts.
"""

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from alphastomics.attn_model.dispatch_kernel import _tile, most_tiles, sum_tiles
from alphastomics.attn_model.routing_kernel import lanes


class Tiling(NamedTuple):
    """The shape of a tile, rows x columns, the depth of a step, and how many run side by side."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


HALF = Tiling(128, 128, 64, 8, 3)
HALF_WEIGHTS = Tiling(128, 128, 64, 8, 3)
SINGLE = Tiling(64, 64, 32, 4, 2)
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
    power = tl.exp(-0.5 * x * x)
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
def _product_kernel(
    a_ptr, w_ptr, bias_ptr, before_ptr, out_ptr, partial_ptr, ends_ptr,
    depth_size, num_columns, w_expert, w_depth, w_column,
    EPILOGUE: tl.constexpr, EXPERTS: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of one expert's rows by some columns of its matrix, and finish it.

    EPILOGUE "none"; "gelu": add the bias, keep the sum in `before`, store its GELU;
    "gelu_backward": multiply by the derivative of GELU at `before`, add up columns for the bias.
    """
    parts = tl.cdiv(num_columns, COLUMNS)
    tile = tl.program_id(0) // parts
    expert, first, end = _tile(ends_ptr, tile, EXPERTS, LANES, ROWS)
    if expert < EXPERTS:
        row = first + tl.arange(0, ROWS)
        column = (tl.program_id(0) % parts) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < num_columns
        # Rows past the end repeat the last: unmasked loads are faster, and nothing stores them.
        read = tl.minimum(row, end - 1)
        product = _product(
            a_ptr, w_ptr + expert.to(tl.int64) * w_expert, read, column, depth_size, num_columns,
            w_depth, w_column, ROWS, COLUMNS, DEPTH, EVEN,
        )  # fmt: skip
        at = row.to(tl.int64)[:, None] * num_columns + column[None, :]
        fits = (row < end)[:, None] & inside[None, :]
        if EPILOGUE == "gelu":
            bias = tl.load(bias_ptr + expert * num_columns + column, mask=inside, other=0.0)
            before = (product + bias.to(tl.float32)[None, :]).to(before_ptr.dtype.element_ty)
            tl.store(before_ptr + at, before, mask=fits)
            # Of the rounded sum: the derivative is taken there too.
            product = before.to(tl.float32)
            below, _ = _normal(product)
            product = product * below
        if EPILOGUE == "gelu_backward":
            before = tl.load(before_ptr + at, mask=fits, other=0.0).to(tl.float32)
            below, density = _normal(before)
            product = tl.where(fits, product * (below + before * density), 0.0)
            to = partial_ptr + tile.to(tl.int64) * num_columns + column
            tl.store(to, tl.sum(product, 0), mask=inside)
        tl.store(out_ptr + at, product.to(out_ptr.dtype.element_ty), mask=fits)


@triton.jit
@no_type_check
def _weight_gradient_kernel(
    a_ptr, grad_ptr, out_ptr, ends_ptr, a_width, grad_width,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, SPLIT: tl.constexpr,
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
        down = (tl.program_id(0) // parts) * ROWS + tl.arange(0, ROWS)
        column = (tl.program_id(0) % parts) * COLUMNS + tl.arange(0, COLUMNS)
        down_fits, fits = down < a_width, column < grad_width
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(first, end, DEPTH):
            row = start + tl.arange(0, DEPTH)
            here = (row < end)[:, None]
            at = row.to(tl.int64)[:, None]
            a = tl.load(
                a_ptr + at * a_width + down[None, :], mask=here & down_fits[None, :], other=0.0
            )
            grad = tl.load(
                grad_ptr + at * grad_width + column[None, :], mask=here & fits[None, :], other=0.0
            )
            total = tl.dot(tl.trans(a), grad, total, input_precision="tf32x3")
        to = (tile.to(tl.int64) * a_width + down)[:, None] * grad_width + column[None, :]
        tl.store(
            out_ptr + to,
            total.to(out_ptr.dtype.element_ty),
            mask=down_fits[:, None] & fits[None, :],
        )


def _options(dtype: torch.dtype, half: Tiling) -> tuple[Tiling, dict[str, Any]]:
    """Return the tiling for a dtype, and how to hand it to a kernel."""
    tiling = SINGLE if dtype == torch.float32 else half
    options = {
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "DEPTH": tiling.depth,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }
    return tiling, options


def _launch_product(
    epilogue: str,
    a: Tensor,
    weight: Tensor,
    ends: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    before: Tensor | None = None,
    partial: Tensor | None = None,
) -> Tensor:
    """Multiply rows (S, K) by matrices (E, K, M), whatever the order of their axes in memory."""
    (num_rows, depth), (num_experts, _, num_columns) = a.shape, weight.shape
    tiling, options = _options(a.dtype, HALF)
    tiles = most_tiles(num_rows, num_experts, tiling.rows)
    _product_kernel[(tiles * triton.cdiv(num_columns, tiling.columns),)](
        a, weight, bias, before, out, partial, ends, depth, num_columns, *weight.stride(),
        EPILOGUE=epilogue, EXPERTS=num_experts, LANES=lanes(num_experts),
        EVEN=depth % tiling.depth == 0, **options,
    )  # fmt: skip
    return out


def product(a: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows (S, K) by its matrix (K, M) of (E, K, M)."""
    return _launch_product("none", a, weight, ends, a.new_empty(len(a), weight.shape[2]))


def activated_product(
    a: Tensor, weight: Tensor, bias: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a W + b and its GELU."""
    before, hidden = (a.new_empty(len(a), weight.shape[2]) for _ in range(2))
    _launch_product("gelu", a, weight, ends, hidden, bias=bias, before=before)
    return before, hidden


def activated_product_backward(
    grad: Tensor, weight: Tensor, before: Tensor, ends: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `before` and of the bias, from that of the product behind GELU."""
    tiling, _ = _options(grad.dtype, HALF)
    tiles = most_tiles(len(grad), len(ends), tiling.rows)
    partial = torch.empty(tiles, before.shape[1], dtype=torch.float32, device=grad.device)
    out = torch.empty_like(before)
    _launch_product("gelu_backward", grad, weight.mT, ends, out, before=before, partial=partial)
    return out, sum_tiles(partial, ends, tiling.rows, bias.shape, bias.dtype)


def weight_gradient(a: Tensor, grad: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Return A^T G, (E, K, M), of each expert's rows of a (S, K) and grad (S, M)."""
    num_experts, num_rows, num_columns = len(ends), a.shape[1], grad.shape[1]
    tiling, options = _options(a.dtype, HALF_WEIGHTS)
    parts = triton.cdiv(num_rows, tiling.rows) * triton.cdiv(num_columns, tiling.columns)
    split = 0
    if parts * num_experts < PROGRAMS:
        split = SPLIT * max(1, len(a) * parts // (2 * PROGRAMS * SPLIT))
    chunks = most_tiles(len(a), num_experts, split) if split else num_experts
    shape = (chunks, num_rows, num_columns)
    out = torch.empty(shape, dtype=torch.float32 if split else dtype, device=a.device)
    _weight_gradient_kernel[(parts, chunks)](
        a, grad, out, ends, num_rows, num_columns,
        EXPERTS=num_experts, LANES=lanes(num_experts), SPLIT=split, **options,
    )  # fmt: skip
    return sum_tiles(out, ends, split, (num_experts, *shape[1:]), dtype) if split else out
