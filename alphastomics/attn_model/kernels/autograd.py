"""The mixture of experts as two fused operators, forward and backward, for CUDA.

`passes.py` runs the kernels; `moe.py` does the same by torch alone, for other devices and as the
reference. Padding is not sent to any expert. A compiler sees the two operators whole; without one
their functions are called directly, since going through torch's registry takes longer than the work
of a small layer.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from alphastomics.attn_model.dispatch import compute_dtype
from alphastomics.attn_model.kernels.passes import Experts, run_backward, run_forward
from alphastomics.attn_model.kernels.sizes import make_sizes, saved_layout
from alphastomics.attn_model.routing import RouterStatistics

# More would not fit into the shared memory of a multiprocessor.
MAX_EXPERTS = 32
# Compute capability from which on the tensor cores take bf16, and float32 in parts.
TENSOR_CORES_SINCE = 8

_forward_op = torch.library.custom_op(
    "alphastomics::mixture_forward", run_forward, mutates_args=(),
    schema="(Tensor?[] tensors, SymInt top_k, SymInt cells_per_set, ScalarType dtype, "
    "bool needs_grad) -> Tensor[]",
)  # fmt: skip
_backward_op = torch.library.custom_op(
    "alphastomics::mixture_backward", run_backward, mutates_args=(),
    schema="(Tensor?[] tensors, SymInt top_k, ScalarType dtype, ScalarType cell_dtype, "
    "bool padded, bool shifted) -> Tensor[]",
)  # fmt: skip


def fused_serves(cells: Tensor, num_experts: int) -> bool:
    """Tell whether the kernels take these cells: CUDA, at most float32, not too many experts."""
    return (
        cells.is_cuda
        and cells.dtype != torch.float64
        and cells.numel() > 0
        and num_experts <= MAX_EXPERTS
        and _generation(cells.device) >= TENSOR_CORES_SINCE
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
@lru_cache
def _generation(device: torch.device) -> int:
    """Return the first number of a GPU's compute capability."""
    return torch.cuda.get_device_properties(device).major


@_forward_op.register_fake
def _forward_shapes(
    tensors: Sequence[Any], top_k: int, cells_per_set: int, dtype: torch.dtype, needs_grad: bool
) -> list[Tensor]:
    """Allocate what `run_forward` returns."""
    x, (router, noise, up_weight) = tensors[0], tensors[5:8]
    sizes = make_sizes(x, up_weight, top_k, dtype, noisy=noise is not None)
    return [
        torch.empty_like(x, dtype=dtype),
        x.new_empty(2 * router.shape[0] + 3, dtype=torch.float32),
        x.new_empty(saved_layout(sizes, needs_grad=needs_grad).size, dtype=torch.uint8),
    ]


@_backward_op.register_fake
def _backward_shapes(
    tensors: Sequence[Any],
    top_k: int,
    dtype: torch.dtype,
    cell_dtype: torch.dtype,
    padded: bool,
    shifted: bool,
) -> list[Tensor]:
    """Allocate what `run_backward` returns."""
    mixed_grad, experts, router = tensors[0], tensors[7:], tensors[7]
    logits = router.new_empty(0)
    if shifted:
        logits = router.new_empty(mixed_grad.shape[0], router.shape[0], dtype=torch.float32)
    weights = [router.new_empty(0) if w is None else torch.empty_like(w) for w in experts]
    return [torch.empty_like(mixed_grad, dtype=cell_dtype), logits, *weights]


class _Mixture(torch.autograd.Function):
    """Cells and weights enter; mixed cells and statistics leave."""

    @staticmethod
    def forward(
        ctx: Any, top_k: int, cells_per_set: int, dtype: torch.dtype, needs_grad: bool,
        *tensors: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        # Of a compiled call the backward pass may be run by torch itself.
        ctx.compiled = torch.compiler.is_compiling()
        run = _forward_op if ctx.compiled else run_forward
        mixed, statistics, memory = run(tensors, top_k, cells_per_set, dtype, needs_grad)
        x, shift, epsilon, mask, _, *experts = tensors
        ctx.save_for_backward(statistics, memory, epsilon, *experts)
        ctx.facts = top_k, dtype, x.dtype, mask is not None, shift is not None
        ctx.num_cells, ctx.cells_per_set = x.shape[0], cells_per_set
        ctx.shift_dtype = None if shift is None else shift.dtype
        # No zeros are made for losses that nothing uses.
        ctx.set_materialize_grads(False)
        return mixed, *_split_statistics(ctx, statistics)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing hands saved tensors out no second time.
        saved = ctx.saved_tensors
        mixed, _, probability, _, *losses = grads
        if mixed is None:
            mixed = saved[0].new_zeros((ctx.num_cells, saved[-1].shape[1]), dtype=ctx.facts[1])
        if probability is not None:
            probability = probability.contiguous()
        run = _backward_op if ctx.compiled else run_backward
        x_grad, logit_grad, router_grad, noise_grad, *rest = run(
            [mixed.contiguous(), probability, *losses, *saved], *ctx.facts
        )
        shift_grad = None
        if ctx.shift_dtype is not None:
            by_set = logit_grad.view(-1, ctx.cells_per_set, logit_grad.shape[1])
            shift_grad = by_set.sum(1).to(ctx.shift_dtype)
        noise_grad = None if saved[4] is None else noise_grad
        constants = (None, None, None, None)
        return *constants, x_grad, shift_grad, None, None, None, router_grad, noise_grad, *rest


def _split_statistics(ctx: Any, statistics: Tensor) -> tuple[Tensor, ...]:
    """Return the five statistics, of which counts have no gradient."""
    num_experts = (statistics.shape[0] - 3) // 2
    counts, probability, rest = statistics.split_with_sizes([num_experts, num_experts, 3])
    parts = (counts, probability, *rest.unbind())
    if ctx.compiled:
        # A compiler takes views of one tensor for one output.
        parts = tuple(part.clone() for part in parts)
    ctx.mark_non_differentiable(parts[0], parts[2])
    return parts


def fused_mixture(
    cells: Float[Tensor, "B N D"],
    node_mask: Bool[Tensor, "B N"] | None,
    logit_shift: Float[Tensor, "B E"] | None,
    balance_bias: Float[Tensor, " E"],
    experts: Experts,
    top_k: int,
) -> tuple[Float[Tensor, "B N D"], RouterStatistics]:
    """Route every real cell to its experts and mix their results; see `MixtureOfExperts`."""
    num_sets, num_cells, width = cells.shape
    x = cells.reshape(num_sets * num_cells, width).contiguous()
    mask = None if node_mask is None else node_mask.flatten().to(torch.uint8)
    shift = None if logit_shift is None else logit_shift.contiguous()
    epsilon = None
    if experts.noise is not None:
        epsilon = torch.randn(x.shape[0], experts.router.shape[0], device=x.device)
    mixed, *statistics = _Mixture.apply(  # type: ignore[no-untyped-call]
        top_k, num_cells, compute_dtype(cells), torch.is_grad_enabled(),
        x, shift, epsilon, mask, balance_bias, *experts,
    )  # fmt: skip
    return mixed.view(cells.shape), RouterStatistics(*statistics)
