"""The mixture of experts as two fused operations, forward and backward, for CUDA.

`fused_call.py` lets the kernels route, send, multiply and mix, and bring gradients back; `moe.py`
does the same by torch alone, for other devices and as the reference.
Padding is not sent to any expert. A compiler sees the two operations whole; without one they are
called directly, since going through torch's registry takes longer than the work of a small layer.
"""

from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from alphastomics.attn_model.dispatch import compute_dtype
from alphastomics.attn_model.fused_call import come_back, describe, go
from alphastomics.attn_model.mixture import Experts, make_mixture, saved_layout
from alphastomics.attn_model.routing import RouterStatistics

# More would not fit into the shared memory of a multiprocessor.
MOST_EXPERTS = 32
# Compute capability from which on the tensor cores take bf16, and float32 in parts.
TENSOR_CORES_SINCE = 8


def fused_serves(cells: Tensor, num_experts: int) -> bool:
    """Tell whether the kernels take these cells: CUDA, at most float32, not too many experts."""
    return (
        cells.is_cuda
        and cells.dtype != torch.float64
        and cells.numel() > 0
        and num_experts <= MOST_EXPERTS
        and _generation(cells.device) >= TENSOR_CORES_SINCE
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
@lru_cache
def _generation(device: torch.device) -> int:
    """Return the first number of a GPU's compute capability."""
    return torch.cuda.get_device_properties(device).major


def _forward(
    x: Tensor,
    shift: Tensor | None,
    draw: Tensor | None,
    mask: Tensor | None,
    balance_bias: Tensor,
    router: Tensor,
    noise: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor,
    down_weight: Tensor,
    down_bias: Tensor,
    top_k: int,
    cells_per_set: int,
    dtype: torch.dtype,
    wanted: bool,  # noqa: FBT001 - torch's operators take no keywords without a default
) -> list[Tensor]:
    """Go there, for a compiler: see `go`."""
    experts = Experts(router, noise, up_weight, up_bias, down_weight, down_bias)
    call = describe(x, shift, draw, mask, experts, top_k, dtype)
    mixed, statistics, memory = go(
        call, x, shift, draw, mask, balance_bias, experts, cells_per_set, wanted=wanted
    )
    return [mixed, statistics, memory if wanted else memory.new_empty(0)]


def _backward(
    mixed_grad: Tensor,
    probability_grad: Tensor | None,
    balance_grad: Tensor | None,
    z_grad: Tensor | None,
    statistics: Tensor,
    memory: Tensor,
    draw: Tensor | None,
    router: Tensor,
    noise: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor,
    down_weight: Tensor,
    down_bias: Tensor,
    top_k: int,
    dtype: torch.dtype,
    cell_dtype: torch.dtype,
    padded: bool,  # noqa: FBT001
    shifted: bool,  # noqa: FBT001
) -> list[Tensor]:
    """Come back, for a compiler: see `come_back`; what is not there is empty."""
    experts = Experts(router, noise, up_weight, up_bias, down_weight, down_bias)
    call = describe(mixed_grad, None, draw, None, experts, top_k, dtype)
    upstream = (mixed_grad, probability_grad, balance_grad, z_grad)
    cells, logits, weights = come_back(
        call, upstream, statistics, memory, draw, experts, cell_dtype,
        padded=padded, shifted=shifted,
    )  # fmt: skip
    some = [router.new_empty(0) if grad is None else grad for grad in (logits, *weights)]
    return [cells, *some]


forward_op = torch.library.custom_op("alphastomics::mixture_forward", _forward, mutates_args=())
backward_op = torch.library.custom_op("alphastomics::mixture_backward", _backward, mutates_args=())


@forward_op.register_fake
def _forward_shapes(
    x: Tensor,
    shift: Tensor | None,
    draw: Tensor | None,
    mask: Tensor | None,
    balance_bias: Tensor,
    router: Tensor,
    noise: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor,
    down_weight: Tensor,
    down_bias: Tensor,
    top_k: int,
    cells_per_set: int,
    dtype: torch.dtype,
    wanted: bool,  # noqa: FBT001
) -> list[Tensor]:
    """Allocate what `_forward` returns."""
    memory = 0
    if wanted:
        mixture = make_mixture(x, up_weight, top_k, dtype, noisy=noise is not None)
        memory = saved_layout(mixture, wanted=True).size
    return [
        torch.empty_like(x, dtype=dtype),
        x.new_empty(2 * router.shape[0] + 3, dtype=torch.float32),
        x.new_empty(memory, dtype=torch.uint8),
    ]


@backward_op.register_fake
def _backward_shapes(
    mixed_grad: Tensor,
    probability_grad: Tensor | None,
    balance_grad: Tensor | None,
    z_grad: Tensor | None,
    statistics: Tensor,
    memory: Tensor,
    draw: Tensor | None,
    router: Tensor,
    noise: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor,
    down_weight: Tensor,
    down_bias: Tensor,
    top_k: int,
    dtype: torch.dtype,
    cell_dtype: torch.dtype,
    padded: bool,  # noqa: FBT001
    shifted: bool,  # noqa: FBT001
) -> list[Tensor]:
    """Allocate what `_backward` returns."""
    logits = (mixed_grad.shape[0], router.shape[0]) if shifted else (0,)
    return [
        torch.empty_like(mixed_grad, dtype=cell_dtype),
        router.new_empty(logits, dtype=torch.float32 if shifted else router.dtype),
        torch.empty_like(router),
        router.new_empty(0) if noise is None else torch.empty_like(noise),
        torch.empty_like(up_weight),
        torch.empty_like(up_bias),
        torch.empty_like(down_weight),
        torch.empty_like(down_bias),
    ]


class _Mixture(torch.autograd.Function):
    """Cells and weights enter; mixed cells and statistics leave."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shift: Tensor | None,
        draw: Tensor | None,
        mask: Tensor | None,
        balance_bias: Tensor,
        router: Tensor,
        noise: Tensor | None,
        up_weight: Tensor,
        up_bias: Tensor,
        down_weight: Tensor,
        down_bias: Tensor,
        top_k: int,
        cells_per_set: int,
        dtype: torch.dtype,
        wanted: bool,  # noqa: FBT001 - torch's functions take no keywords
    ) -> tuple[Tensor, ...]:
        experts = Experts(router, noise, up_weight, up_bias, down_weight, down_bias)
        # Of a compiled call the way back may be run by torch itself.
        ctx.call = None
        if torch.compiler.is_compiling():
            mixed, statistics, memory = forward_op(
                x, shift, draw, mask, balance_bias, *experts, top_k, cells_per_set, dtype, wanted
            )
        else:
            ctx.call = describe(x, shift, draw, mask, experts, top_k, dtype)
            mixed, statistics, memory = go(
                ctx.call, x, shift, draw, mask, balance_bias, experts, cells_per_set, wanted=wanted
            )
        ctx.save_for_backward(statistics, memory, draw, *experts)
        ctx.top_k, ctx.cells_per_set, ctx.dtype = top_k, cells_per_set, dtype
        ctx.num_cells, ctx.cell_dtype, ctx.padded = x.shape[0], x.dtype, mask is not None
        ctx.shift_dtype = None if shift is None else shift.dtype
        # No zeros are made for losses that nothing uses.
        ctx.set_materialize_grads(False)
        return mixed, *_split_statistics(ctx, statistics)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing hands saved tensors out no second time.
        statistics, memory, draw, *weights = ctx.saved_tensors
        experts = Experts(*weights)
        mixed, _, probability, _, balance, z_loss = grads
        if mixed is None:
            shape = (ctx.num_cells, experts.down_bias.shape[1])
            mixed = statistics.new_zeros(shape, dtype=ctx.dtype)
        if probability is not None:
            probability = probability.contiguous()
        upstream = (mixed.contiguous(), probability, balance, z_loss)
        padded, shifted = ctx.padded, ctx.shift_dtype is not None
        if ctx.call is None:
            x_grad, logit_grad, router_grad, noise_grad, *rest = backward_op(
                *upstream, statistics, memory, draw, *experts, ctx.top_k, ctx.dtype,
                ctx.cell_dtype, padded, shifted,
            )  # fmt: skip
            noise_grad = None if experts.noise is None else noise_grad
            weight_grads = (router_grad, noise_grad, *rest)
        else:
            x_grad, logit_grad, weight_grads = come_back(
                ctx.call, upstream, statistics, memory, draw, experts, ctx.cell_dtype,
                padded=padded, shifted=shifted,
            )  # fmt: skip
        shift_grad = None
        if shifted:
            by_set = logit_grad.view(-1, ctx.cells_per_set, logit_grad.shape[1])
            shift_grad = by_set.sum(1).to(ctx.shift_dtype)
        return x_grad, shift_grad, None, None, None, *weight_grads, None, None, None, None


def _split_statistics(ctx: Any, statistics: Tensor) -> tuple[Tensor, ...]:
    """Return the five statistics, of which counts have no gradient."""
    num_experts = (statistics.shape[0] - 3) // 2
    counts, probability, rest = statistics.split_with_sizes([num_experts, num_experts, 3])
    parts = (counts, probability, *rest.unbind())
    if torch.compiler.is_compiling():
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
    draw = None
    if experts.noise is not None:
        draw = torch.randn(x.shape[0], experts.router.shape[0], device=x.device)
    mixed, *statistics = _Mixture.apply(  # type: ignore[no-untyped-call]
        x, shift, draw, mask, balance_bias, *experts, top_k, num_cells, compute_dtype(cells),
        torch.is_grad_enabled(),
    )  # fmt: skip
    return mixed.view(cells.shape), RouterStatistics(*statistics)
