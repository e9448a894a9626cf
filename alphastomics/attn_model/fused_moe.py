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
from alphastomics.attn_model.launch import Space, is_compiled, key_of, lay_out
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


def _mixture(x: Tensor, up_weight: Tensor, top_k: int, *, noisy: bool) -> Any:
    """Describe a call."""
    from alphastomics.attn_model import routing_kernel

    (num_cells, width), (num_experts, _, hidden) = x.shape, up_weight.shape
    return routing_kernel.Mixture(
        num_cells, width, hidden, num_experts, top_k, noisy, up_weight.dtype,
        make_teams(num_experts, top_k),
    )  # fmt: skip


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
    wanted: bool,  # noqa: FBT001 - torch's operators take no keywords without a default
) -> list[Tensor]:
    """Return the mixed cells, the statistics, and what the way back needs, if that is wanted."""
    from alphastomics.attn_model import expert_kernel, routing_kernel

    mixture = _mixture(x, up_weight, top_k, noisy=noise is not None)
    tensors = (
        x, router, noise, shift, draw, balance_bias, mask, up_weight, up_bias, down_weight,
        down_bias,
    )  # fmt: skip
    key = key_of(tensors, x.device, *up_weight.shape, top_k, wanted)
    layout = lay_out(routing_kernel.saved_parts(mixture, wanted=wanted))
    memory = torch.empty(layout.size, dtype=torch.uint8, device=x.device)
    space = Space(layout, memory, by_address=is_compiled(key, expert_kernel._down_kernel))
    statistics = torch.empty(2 * mixture.num_experts + 3, device=x.device)
    routing_kernel.route(mixture, space, statistics, x, tensors[1:6], mask, cells_per_set, key)
    make = torch.empty if mask is None else torch.zeros
    mixed = make(mixture.num_rows, mixture.width, dtype=mixture.dtype, device=x.device)
    expert_kernel.mix(mixture, space, mixed, tensors[7:], key, wanted=wanted)
    return [_add_rows(mixed, mixture), statistics, memory if wanted else memory.new_empty(0)]


def _add_rows(rows: Tensor, mixture: Any) -> Tensor:
    """Add up the rows of each cell."""
    if mixture.num_rows == mixture.num_cells:
        return rows
    return rows.view(mixture.num_cells, -1, mixture.width).sum(1)


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
    cell_dtype: torch.dtype,
    padded: bool,  # noqa: FBT001
    shifted: bool,  # noqa: FBT001
) -> list[Tensor]:
    """Return the gradients of cells, logits, the two routers' weights and the experts'."""
    from alphastomics.attn_model import gradient_kernel, routing_kernel

    mixture = _mixture(mixed_grad, up_weight, top_k, noisy=noise is not None)
    upstream = gradient_kernel.Upstream(mixed_grad, probability_grad, balance_grad, z_grad)
    weights = gradient_kernel.Weights(router, noise, up_weight, up_bias, down_weight, down_bias)
    facts = (router.device, *up_weight.shape, top_k, cell_dtype, shifted)
    key = key_of((*upstream, draw, *weights), *facts)
    way = gradient_kernel.Way(
        mixture,
        Space(
            lay_out(routing_kernel.saved_parts(mixture, wanted=True)),
            memory,
            by_address=is_compiled(key, gradient_kernel._sum_kernel),
        ),
        statistics, upstream, weights, draw, key,
    )  # fmt: skip
    make = torch.zeros if padded else torch.empty
    cell_grad = make(mixture.num_rows, mixture.width, dtype=cell_dtype, device=router.device)
    logit_grad = None
    if shifted:
        logit_grad = make(mixture.num_cells, mixture.num_experts, device=router.device)
    grads = gradient_kernel.Weights(
        torch.empty_like(router),
        None if noise is None else torch.empty_like(noise),
        torch.empty_like(up_weight, dtype=up_bias.dtype),
        torch.empty_like(up_bias),
        torch.empty_like(down_weight, dtype=down_bias.dtype),
        torch.empty_like(down_bias),
    )
    way.to_hidden()
    way.to_scores(logit_grad)
    way.to_cells(cell_grad)
    way.to_weights(grads)
    some = [router.new_empty(0) if grad is None else grad for grad in (logit_grad, *grads)]
    return [_add_rows(cell_grad, mixture), *some]


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
    wanted: bool,  # noqa: FBT001
) -> list[Tensor]:
    """Allocate what `_forward` returns."""
    memory = 0
    if wanted:
        from alphastomics.attn_model.routing_kernel import saved_parts

        mixture = _mixture(x, up_weight, top_k, noisy=noise is not None)
        # Not from the cache: the number of cells may be a symbol here.
        memory = lay_out.__wrapped__(saved_parts(mixture, wanted=True)).size
    return [
        torch.empty_like(x, dtype=up_weight.dtype),
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
        mixed, statistics, memory = act(
            x, shift, draw, mask, balance_bias, router, noise, up, up_bias, down, down_bias,
            top_k, cells_per_set, any(ctx.needs_input_grad),
        )  # fmt: skip
        ctx.save_for_backward(statistics, memory, draw, router, noise, up, up_bias, down, down_bias)
        ctx.top_k, ctx.cells_per_set = top_k, cells_per_set
        ctx.num_cells, ctx.cell_dtype, ctx.padded = x.shape[0], x.dtype, mask is not None
        ctx.shift_dtype = None if shift is None else shift.dtype
        # No zeros are made for losses that nothing uses.
        ctx.set_materialize_grads(False)
        num_experts = router.shape[0]
        counts, probability, rest = statistics.split([num_experts, num_experts, 3])
        num_cells, balance, z_loss = rest.unbind()
        ctx.mark_non_differentiable(counts, num_cells)
        return mixed, counts, probability, num_cells, balance, z_loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing hands saved tensors out no second time.
        saved = ctx.saved_tensors
        noise, up, down_bias = saved[4], saved[5], saved[8]
        mixed, _, probability, _, balance, z_loss = grads
        if mixed is None:
            mixed = up.new_zeros(ctx.num_cells, down_bias.shape[1])
        act: Any = backward_op if torch.compiler.is_compiling() else _backward
        x_grad, logit_grad, router_grad, noise_grad, *expert_grads = act(
            mixed.contiguous(), probability, balance, z_loss, *saved, ctx.top_k, ctx.cell_dtype,
            ctx.padded, ctx.shift_dtype is not None,
        )  # fmt: skip
        shift_grad = None
        if ctx.shift_dtype is not None:
            by_set = logit_grad.view(-1, ctx.cells_per_set, logit_grad.shape[1])
            shift_grad = by_set.sum(1).to(ctx.shift_dtype)
        routers = router_grad, None if noise is None else noise_grad
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
