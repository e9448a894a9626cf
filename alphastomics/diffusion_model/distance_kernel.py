"""The pairwise distance loss on a GPU: one fused kernel, O(N) memory; see `distance.py`.

Each program takes a block of rows of a set, runs over all its columns in tiles held in registers,
and writes its rows' share of the loss and of the gradient. No atomics: the result does not change
from run to run.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

ROWS, COLUMNS, WARPS = 64, 64, 4


@triton.jit
@no_type_check  # Triton compiles the function's own source: nothing may be wrapped around it
def _pairwise_kernel(
    q_ptr, p_ptr, mask_ptr, loss_ptr, gradient_ptr, num_cells,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows `block` of set `index` against all its columns."""
    block, index = tl.program_id(0), tl.program_id(1)
    cells = index.to(tl.int64) * num_cells
    row = block * ROWS + tl.arange(0, ROWS)
    row_in = row < num_cells
    row_real = tl.load(mask_ptr + cells + row, mask=row_in, other=0) != 0
    at = (cells + row) * 3
    qx = tl.load(q_ptr + at, mask=row_in, other=0.0)
    qy = tl.load(q_ptr + at + 1, mask=row_in, other=0.0)
    qz = tl.load(q_ptr + at + 2, mask=row_in, other=0.0)
    px = tl.load(p_ptr + at, mask=row_in, other=0.0)
    py = tl.load(p_ptr + at + 1, mask=row_in, other=0.0)
    pz = tl.load(p_ptr + at + 2, mask=row_in, other=0.0)
    loss = tl.zeros((ROWS,), tl.float32)
    gx = tl.zeros((ROWS,), tl.float32)
    gy = tl.zeros((ROWS,), tl.float32)
    gz = tl.zeros((ROWS,), tl.float32)
    for start in range(0, num_cells, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        column_in = column < num_cells
        real = tl.load(mask_ptr + cells + column, mask=column_in, other=0) != 0
        other = (cells + column) * 3
        dx = qx[:, None] - tl.load(q_ptr + other, mask=column_in, other=0.0)[None, :]
        dy = qy[:, None] - tl.load(q_ptr + other + 1, mask=column_in, other=0.0)[None, :]
        dz = qz[:, None] - tl.load(q_ptr + other + 2, mask=column_in, other=0.0)[None, :]
        ex = px[:, None] - tl.load(p_ptr + other, mask=column_in, other=0.0)[None, :]
        ey = py[:, None] - tl.load(p_ptr + other + 1, mask=column_in, other=0.0)[None, :]
        ez = pz[:, None] - tl.load(p_ptr + other + 2, mask=column_in, other=0.0)[None, :]
        squared = dx * dx + dy * dy + dz * dz
        true = tl.sqrt(ex * ex + ey * ey + ez * ez)
        inverse = tl.where(squared > 0, tl.math.rsqrt(squared), 0.0)
        error = squared * inverse - true
        pair = row_real[:, None] & real[None, :]
        loss += tl.sum(tl.where(pair, error * error, 0.0), 1)
        # w_ij (q_i - q_j), the differences themselves: no cancellation between large sums.
        weight = tl.where(pair, error * inverse, 0.0)
        gx += tl.sum(weight * dx, 1)
        gy += tl.sum(weight * dy, 1)
        gz += tl.sum(weight * dz, 1)
    tl.store(loss_ptr + cells + row, loss, mask=row_in)
    tl.store(gradient_ptr + at, 4 * gx, mask=row_in)
    tl.store(gradient_ptr + at + 1, 4 * gy, mask=row_in)
    tl.store(gradient_ptr + at + 2, 4 * gz, mask=row_in)


def tiled_error_cuda(
    q: Float[Tensor, "B N 3"], p: Float[Tensor, "B N 3"], node_mask: Bool[Tensor, "B N"]
) -> tuple[Float[Tensor, ""], Float[Tensor, "B N 3"]]:
    """Sum of squared errors over pairs and its gradient; float32 inside."""
    num_sets, num_cells, _ = q.shape
    gradient = torch.empty_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
    loss = torch.empty(num_sets, num_cells, dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(num_cells, ROWS), num_sets)
    _pairwise_kernel[grid](
        q.float().contiguous(),
        p.float().contiguous(),
        node_mask.to(torch.int8).contiguous(),
        loss,
        gradient,
        num_cells,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )
    return loss.sum(dtype=torch.float64).to(q.dtype), gradient.to(q.dtype)
