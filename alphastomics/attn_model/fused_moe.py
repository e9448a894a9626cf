"""The mixture of experts as two fused operations, forward and backward, for CUDA.

Routed, sent, multiplied and mixed by the kernels of `routing_kernel.py`, `dispatch_kernel.py` and
`expert_kernel.py`; `moe.py` does the same by torch alone, for other devices and as the reference.
Padding is not sent to any expert. A compiler sees the two operations whole; without one they are
called directly, since going through torch's registry takes longer than the work of a small layer.
"""

from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from alphastomics.attn_model.dispatch import compute_dtype
from alphastomics.attn_model.routing import RouterStatistics

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
    """Return the mixed cells, the five statistics, and what the backward pass needs."""
    from alphastomics.attn_model import dispatch_kernel, expert_kernel, routing_kernel

    chosen, ranks, sums = routing_kernel.route_forward(
        x, router, noise, shift, draw, balance_bias, mask, top_k, cells_per_set
    )
    visits, places = dispatch_kernel.send_forward(x, chosen, ranks, up_weight.dtype)
    before = expert_kernel.product(visits, up_weight, chosen.ends)
    hidden = expert_kernel.gelu(before, up_bias, chosen.ends)
    results = expert_kernel.product(hidden, down_weight, chosen.ends)
    mixed = dispatch_kernel.collect_forward(results, chosen, places.place, down_bias)
    return [mixed, *sums, *chosen, *places, visits, before, hidden, results]


def _backward(
    grads: list[Tensor],
    saved: list[Tensor],
    x: Tensor,
    draw: Tensor | None,
    mask: Tensor | None,
    router: Tensor,
    noise: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor,
    down_weight: Tensor,
    down_bias: Tensor,
) -> list[Tensor]:
    """Return the gradients of x, the logits, the two routers' weights (one matrix) and experts."""
    from alphastomics.attn_model import dispatch_kernel, expert_kernel, routing_kernel

    sums, chosen, places, (visits, before, hidden, results) = _unpack(saved)
    ends = chosen.ends
    results_grad, weight_grad, down_bias_grad = dispatch_kernel.collect_backward(
        grads[0].contiguous(), results, chosen, places.order, down_bias
    )
    down_grad = expert_kernel.weight_gradient(hidden, results_grad, ends, down_bias.dtype)
    hidden_grad = expert_kernel.product(results_grad, down_weight.mT, ends)
    before_grad, up_bias_grad = expert_kernel.gelu_backward(hidden_grad, before, up_bias, ends)
    up_grad = expert_kernel.weight_gradient(visits, before_grad, ends, up_bias.dtype)
    visits_grad = expert_kernel.product(before_grad, up_weight.mT, ends)
    logit_grad, spread_grad, router_grad = routing_kernel.route_backward(
        x, chosen, draw, mask, weight_grad, sums, routing_kernel.Sums(*grads[1:])
    )
    x_grad = dispatch_kernel.send_backward(
        visits_grad, places.place, (logit_grad, spread_grad), router, noise, x
    )
    return [x_grad, logit_grad, router_grad, up_grad, up_bias_grad, down_grad, down_bias_grad]


def _unpack(saved: list[Tensor]) -> tuple[Any, Any, Any, list[Tensor]]:
    """Give the saved tensors their names back."""
    from alphastomics.attn_model.dispatch_kernel import Places
    from alphastomics.attn_model.routing_kernel import Choices, Sums

    return Sums(*saved[:5]), Choices(*saved[5:10]), Places(*saved[10:12]), saved[12:]


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
    (num_cells, width), (num_experts, _, hidden) = x.shape, up_weight.shape
    visits, dtype = num_cells * top_k, up_weight.dtype

    def single(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.float32)

    def place(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    def half(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=dtype)

    sums = [single(num_experts), single(num_experts), single(), single(), single()]
    scores = [
        single(num_cells, num_experts),
        single(0 if noise is None else num_cells, num_experts),
    ]
    chosen = [place(num_cells, top_k), single(num_cells, top_k), place(num_experts)]
    places = [place(num_cells, top_k), place(visits)]
    rows = [half(visits, width), half(visits, hidden), half(visits, hidden), half(visits, width)]
    return [half(num_cells, width), *sums, *scores, *chosen, *places, *rows]


@backward_op.register_fake
def _backward_shapes(
    grads: list[Tensor],
    saved: list[Tensor],
    x: Tensor,
    draw: Tensor | None,
    mask: Tensor | None,
    router: Tensor,
    noise: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor,
    down_weight: Tensor,
    down_bias: Tensor,
) -> list[Tensor]:
    """Allocate what `_backward` returns."""
    (num_cells, width), num_experts = x.shape, len(router)
    matrices = 1 if noise is None else 2
    return [
        torch.empty_like(x),
        x.new_empty((num_cells, num_experts), dtype=torch.float32),
        x.new_empty((matrices, num_experts, width), dtype=torch.float32),
        up_weight.new_empty(up_weight.shape, dtype=up_bias.dtype),
        torch.empty_like(up_bias),
        down_weight.new_empty(down_weight.shape, dtype=down_bias.dtype),
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
        ctx.save_for_backward(x, draw, mask, router, noise, up, up_bias, down, down_bias, *saved)
        ctx.cells_per_set = cells_per_set
        ctx.shift_dtype = None if shift is None else shift.dtype
        counts, probability, num_cells, balance, z_loss = saved[:5]
        ctx.mark_non_differentiable(counts, num_cells)
        return mixed, counts, probability, num_cells, balance, z_loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing hands saved tensors out no second time.
        everything = ctx.saved_tensors
        inputs, saved = everything[:9], everything[9:]
        act = backward_op if torch.compiler.is_compiling() else _backward
        x_grad, logit_grad, router_grad, *expert_grads = act(list(grads), list(saved), *inputs)
        router, noise = inputs[3], inputs[4]
        shift_grad = None
        if ctx.shift_dtype is not None:
            by_set = logit_grad.view(-1, ctx.cells_per_set, logit_grad.shape[1])
            shift_grad = by_set.sum(1).to(ctx.shift_dtype)
        noise_grad = None if noise is None else router_grad[1].to(noise.dtype)
        routers = router_grad[0].to(router.dtype), noise_grad
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
    num_sets, num_cells, _ = cells.shape
    x = rearrange(cells, "b n d -> (b n) d").contiguous()
    mask = None if node_mask is None else node_mask.flatten().to(torch.uint8)
    draw = None
    if experts.noise is not None:
        draw = torch.randn(len(x), len(experts.router), device=x.device)
    mixed, *statistics = _Mixture.apply(  # type: ignore[no-untyped-call]
        x, logit_shift, draw, mask, balance_bias, *experts, top_k, num_cells, compute_dtype(cells)
    )
    return rearrange(mixed, "(b n) d -> b n d", b=num_sets), RouterStatistics(*statistics)
