"""The gate of attention on a GPU, one kernel each way; see `gated_attention.py`.

Heads' outputs and gate logits enter; gated outputs and the gate leave. A compiler fuses the plain
form by itself; eager torch runs six kernels for it.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

ROWS = 64


@triton.jit
@no_type_check  # Triton compiles the function's own source: nothing may be wrapped around it
def _gate_kernel(
    mixed_ptr, logit_ptr, gated_ptr, gate_ptr, num_rows, logit_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr,
    HEADWISE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gate one head of some cells."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head, lane = tl.program_id(1), tl.arange(0, LANES)
    here = row < num_rows
    fits = here[:, None] & (lane < SIZE)[None, :]
    at = row[:, None] * (HEADS * SIZE) + head * SIZE + lane[None, :]
    mixed = tl.load(mixed_ptr + at, mask=fits, other=0.0).to(tl.float32)
    if HEADWISE:
        logit = tl.load(logit_ptr + row * logit_stride + head, mask=here, other=0.0)
        gate = tl.sigmoid(logit.to(tl.float32)).to(gate_ptr.dtype.element_ty)
        tl.store(gate_ptr + row * HEADS + head, gate, mask=here)
        gated = mixed * gate.to(tl.float32)[:, None]
    else:
        logit_at = row[:, None] * logit_stride + head * SIZE + lane[None, :]
        logit = tl.load(logit_ptr + logit_at, mask=fits, other=0.0)
        gate = tl.sigmoid(logit.to(tl.float32)).to(gate_ptr.dtype.element_ty)
        tl.store(gate_ptr + at, gate, mask=fits)
        gated = mixed * gate.to(tl.float32)
    tl.store(gated_ptr + at, gated.to(gated_ptr.dtype.element_ty), mask=fits)


@triton.jit
@no_type_check
def _gate_backward_kernel(
    grad_ptr, mixed_ptr, gate_ptr, mixed_grad_ptr, logit_grad_ptr, num_rows,
    HEADS: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr,
    HEADWISE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of one head of some cells and of their gate's logits."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head, lane = tl.program_id(1), tl.arange(0, LANES)
    here = row < num_rows
    fits = here[:, None] & (lane < SIZE)[None, :]
    at = row[:, None] * (HEADS * SIZE) + head * SIZE + lane[None, :]
    grad = tl.load(grad_ptr + at, mask=fits, other=0.0).to(tl.float32)
    mixed = tl.load(mixed_ptr + at, mask=fits, other=0.0).to(tl.float32)
    logit_type = logit_grad_ptr.dtype.element_ty
    if HEADWISE:
        gate = tl.load(gate_ptr + row * HEADS + head, mask=here, other=0.0).to(tl.float32)
        logit_grad = tl.sum(grad * mixed, 1) * gate * (1 - gate)
        tl.store(logit_grad_ptr + row * HEADS + head, logit_grad.to(logit_type), mask=here)
        grad = grad * gate[:, None]
    else:
        gate = tl.load(gate_ptr + at, mask=fits, other=0.0).to(tl.float32)
        logit_grad = grad * mixed * gate * (1 - gate)
        tl.store(logit_grad_ptr + at, logit_grad.to(logit_type), mask=fits)
        grad = grad * gate
    tl.store(mixed_grad_ptr + at, grad.to(mixed_grad_ptr.dtype.element_ty), mask=fits)


def _sizes(mixed: Tensor, gate_width: int, n_heads: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid and the constants of a launch."""
    num_rows, d_head = mixed.shape[0] * mixed.shape[1], mixed.shape[2] // n_heads
    lanes = triton.next_power_of_2(d_head)
    constants = {"HEADS": n_heads, "SIZE": d_head, "LANES": lanes, "ROWS": ROWS}
    headwise = gate_width == n_heads and d_head > 1
    return (triton.cdiv(num_rows, ROWS), n_heads), {**constants, "HEADWISE": headwise}


class _Gated(torch.autograd.Function):
    """Multiply by the sigmoid of the logits."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, logits: Tensor, n_heads: int) -> tuple[Tensor, Tensor]:
        mixed = mixed.contiguous()
        if logits.stride(2) != 1 or logits.stride(0) != len(logits[0]) * logits.stride(1):
            logits = logits.contiguous()
        gated = torch.empty_like(mixed)
        gate = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        grid, constants = _sizes(mixed, logits.shape[-1], n_heads)
        num_rows = mixed.shape[0] * mixed.shape[1]
        _gate_kernel[grid](mixed, logits, gated, gate, num_rows, logits.stride(1), **constants)
        ctx.save_for_backward(mixed, gate)
        ctx.n_heads = n_heads
        ctx.mark_non_differentiable(gate)
        return gated, gate

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        mixed, gate = ctx.saved_tensors
        mixed_grad, logit_grad = torch.empty_like(mixed), torch.empty_like(gate)
        grid, constants = _sizes(mixed, gate.shape[-1], ctx.n_heads)
        num_rows = mixed.shape[0] * mixed.shape[1]
        _gate_backward_kernel[grid](
            grads[0].contiguous(), mixed, gate, mixed_grad, logit_grad, num_rows, **constants
        )
        return mixed_grad, logit_grad, None


def gated_cuda(
    mixed: Float[Tensor, "B N D"], logits: Float[Tensor, "B N G"], n_heads: int
) -> tuple[Float[Tensor, "B N D"], Float[Tensor, "B N G"]]:
    """Return the gated outputs and the gate; logits may be columns of a wider matrix."""
    gated: tuple[Tensor, Tensor] = _Gated.apply(mixed, logits, n_heads)  # type: ignore[no-untyped-call]
    return gated
