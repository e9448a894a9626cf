"""The mixture of experts as two fused operations, forward and backward, for CUDA.

Routed by the kernels of `routing_kernel.py`, sent, multiplied and mixed by those of
`expert_kernel.py`, and brought back by those of `gradient_kernel.py`; `moe.py` does the same by
torch alone, for other devices and as the reference.
Padding is not sent to any expert. A compiler sees the two operations whole; without one they are
called directly, since going through torch's registry takes longer than the work of a small layer.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from alphastomics.attn_model.dispatch import compute_dtype
from alphastomics.attn_model.launch import key_of
from alphastomics.attn_model.routing import RouterStatistics
from alphastomics.attn_model.teams import make_teams

# More would not fit into the shared memory of a multiprocessor.
MOST_EXPERTS = 32
# Compute capability from which on the tensor cores take bf16, and float32 in parts.
TENSOR_CORES_SINCE = 8


class Experts(NamedTuple):
    """The weights of a mixture; `noise` is None where no noise is drawn."""

    router: Tensor
    noise: Tensor | None
    up_weight: Tensor
    up_bias: Tensor
    down_weight: Tensor
    down_bias: Tensor


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
) -> list[Tensor]:
    """Return the mixed cells, hidden rows and slopes, and what the router says."""
    from alphastomics.attn_model import expert_kernel, routing_kernel

    tensors = (
        x, shift, draw, mask, balance_bias, router, noise, up_weight, up_bias, down_weight,
        down_bias,
    )  # fmt: skip
    key = key_of(tensors, x.device, *up_weight.shape, top_k)
    routed = routing_kernel.route_forward(
        x, router, noise, shift, draw, balance_bias, mask, top_k, cells_per_set, up_weight.dtype,
        key,
    )  # fmt: skip
    layout = routing_kernel.layout(router.shape[0], top_k, x.device)
    experts = (up_weight, up_bias, down_weight, down_bias)
    mixed, hidden, slope = expert_kernel.forward(
        routed, layout, experts, key, padded=mask is not None
    )
    return [mixed, hidden, slope, *routed]


def _backward(
    mixed_grad: Tensor,
    probability_grad: Tensor | None,
    balance_grad: Tensor | None,
    z_grad: Tensor | None,
    hidden: Tensor,
    slope: Tensor,
    routed: list[Tensor],
    draw: Tensor | None,
    router: Tensor,
    noise: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor,
    down_weight: Tensor,
    down_bias: Tensor,
    cell_dtype: torch.dtype,
    padded: bool,
    shifted: bool,
) -> list[Tensor]:
    """Return the gradients of cells, logits, the two routers' weights and the experts'."""
    from alphastomics.attn_model import gradient_kernel, routing_kernel

    said = routing_kernel.Routed(*routed)
    gradients = gradient_kernel.backward(
        gradient_kernel.Upstream(mixed_grad, probability_grad, balance_grad, z_grad),
        said,
        routing_kernel.layout(router.shape[0], said.weight.shape[1], router.device),
        gradient_kernel.Saved(
            hidden, slope, draw, router, noise, up_weight, up_bias, down_weight, down_bias
        ),
        cell_dtype,
        padded=padded,
        shifted=shifted,
    )
    return list(gradients)


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
) -> list[Tensor]:
    """Allocate what `_forward` returns."""
    from alphastomics.attn_model.routing_kernel import lanes

    (num_cells, width), (num_experts, _, hidden) = x.shape, up_weight.shape
    teams = make_teams(num_experts, top_k)
    rows = num_cells * teams.rows

    def single(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.float32)

    def place(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    def half(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=up_weight.dtype)

    return [
        half(num_cells, width),
        half(rows, teams.members * hidden),
        half(rows, teams.members * hidden),
        half(rows, width),
        single(num_cells, num_experts if noise is None else 2 * num_experts),
        single(num_cells, top_k),
        place(rows),
        place(lanes(teams.count) + rows),
        single(2 * num_experts + 3),
    ]


@backward_op.register_fake
def _backward_shapes(
    mixed_grad: Tensor,
    probability_grad: Tensor | None,
    balance_grad: Tensor | None,
    z_grad: Tensor | None,
    hidden: Tensor,
    slope: Tensor,
    routed: list[Tensor],
    draw: Tensor | None,
    router: Tensor,
    noise: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor,
    down_weight: Tensor,
    down_bias: Tensor,
    cell_dtype: torch.dtype,
    padded: bool,
    shifted: bool,
) -> list[Tensor]:
    """Allocate what `_backward` returns."""
    logits = (mixed_grad.shape[0], router.shape[0]) if shifted else (0,)
    return [
        torch.empty_like(mixed_grad, dtype=cell_dtype),
        router.new_empty(logits, dtype=torch.float32 if shifted else router.dtype),
        torch.empty_like(router),
        router.new_empty(0) if noise is None else torch.empty_like(noise),
        torch.empty_like(up_weight, dtype=up_bias.dtype),
        torch.empty_like(up_bias),
        torch.empty_like(down_weight, dtype=down_bias.dtype),
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
    ) -> tuple[Tensor, ...]:
        up, down = up_weight.to(dtype), down_weight.to(dtype)
        act = forward_op if torch.compiler.is_compiling() else _forward
        mixed, *saved = act(
            x, shift, draw, mask, balance_bias, router, noise, up, up_bias, down, down_bias,
            top_k, cells_per_set,
        )  # fmt: skip
        ctx.save_for_backward(*saved, draw, router, noise, up, up_bias, down, down_bias)
        ctx.cells_per_set, ctx.cell_dtype, ctx.padded = cells_per_set, x.dtype, mask is not None
        ctx.shift_dtype = None if shift is None else shift.dtype
        # No zeros are made for losses that nothing uses.
        ctx.set_materialize_grads(False)
        num_experts = router.shape[0]
        counts, probability, rest = saved[-1].split([num_experts, num_experts, 3])
        num_cells, balance, z_loss = rest.unbind()
        ctx.mark_non_differentiable(counts, num_cells)
        return mixed, counts, probability, num_cells, balance, z_loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing hands saved tensors out no second time.
        hidden, slope, *rest = ctx.saved_tensors
        routed, inputs = rest[:6], rest[6:]
        mixed, _, probability, _, balance, z_loss = grads
        if mixed is None:
            mixed = hidden.new_zeros(routed[2].shape[0], inputs[3].shape[1])
        act = backward_op if torch.compiler.is_compiling() else _backward
        x_grad, logit_grad, router_grad, noise_grad, *expert_grads = act(
            mixed.contiguous(), probability, balance, z_loss, hidden, slope, routed, *inputs,
            ctx.cell_dtype, ctx.padded, ctx.shift_dtype is not None,
        )  # fmt: skip
        shift_grad = None
        if ctx.shift_dtype is not None:
            by_set = logit_grad.view(-1, ctx.cells_per_set, logit_grad.shape[1])
            shift_grad = by_set.sum(1).to(ctx.shift_dtype)
        routers = router_grad, None if inputs[2] is None else noise_grad
        return x_grad, shift_grad, None, None, None, *routers, *expert_grads, None, None, None


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
    draw = None
    if experts.noise is not None:
        draw = torch.randn(x.shape[0], experts.router.shape[0], device=x.device)
    mixed, *statistics = _Mixture.apply(  # type: ignore[no-untyped-call]
        x, logit_shift, draw, mask, balance_bias, *experts, top_k, num_cells, compute_dtype(cells)
    )
    return mixed.view(cells.shape), RouterStatistics(*statistics)
