"""One call of the mixture of experts on a GPU, there and back: tensors enter, tensors leave.

The kernels are imported where they run: without a GPU there is no Triton.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from alphastomics.attn_model.launch import Key, Space, is_compiled, key_of
from alphastomics.attn_model.mixture import Experts, Mixture, known_layout, make_mixture


class Call(NamedTuple):
    """The shape of a call, and what decides how its kernels are compiled."""

    mixture: Mixture
    key: Key | None


def describe(
    x: Tensor,
    shift: Tensor | None,
    draw: Tensor | None,
    mask: Tensor | None,
    experts: Experts,
    top_k: int,
    dtype: torch.dtype,
) -> Call:
    """Describe a call."""
    up = experts.up_weight
    mixture = make_mixture(x, up, top_k, dtype, noisy=experts.noise is not None)
    key = key_of((x, shift, draw, mask, *experts), x.device, *up.shape, top_k, dtype)
    return Call(mixture, key)


def go(
    call: Call,
    x: Tensor,
    shift: Tensor | None,
    draw: Tensor | None,
    mask: Tensor | None,
    balance_bias: Tensor,
    experts: Experts,
    cells_per_set: int,
    *,
    wanted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mixed cells, the statistics, and what the way back needs, if that is wanted."""
    from alphastomics.attn_model import expert_kernel, routing_kernel

    mixture, device = call.mixture, x.device
    key = None if call.key is None else key_of((balance_bias,), call.key, wanted)
    router, noise, up, up_bias, down, down_bias = experts
    layout = known_layout(mixture, wanted=wanted)
    memory = torch.empty(layout.size, dtype=torch.uint8, device=device)
    space = Space(layout, memory, by_address=is_compiled(key, expert_kernel._down_kernel))
    statistics = torch.empty(2 * mixture.num_experts + 3, dtype=torch.float32, device=device)
    routers = (router, noise, shift, draw, balance_bias)
    routing_kernel.route(
        mixture, space, statistics, x, routers, mask, (up, down), cells_per_set, key
    )
    make = torch.empty if mask is None else torch.zeros
    mixed = make(mixture.num_rows, mixture.width, dtype=mixture.dtype, device=device)
    if mixture.rounded:
        up, down = space["up"], space["down"]
    expert_kernel.mix(mixture, space, mixed, (up, up_bias, down, down_bias), key, wanted=wanted)
    return _add_rows(mixed, mixture), statistics, memory


def _add_rows(rows: Tensor, mixture: Mixture) -> Tensor:
    """Add up the rows of each cell."""
    if mixture.teams.rows == 1:
        return rows
    # Autocast would sum to float32.
    return rows.view(mixture.num_cells, -1, mixture.width).sum(1, dtype=rows.dtype)


def come_back(
    call: Call,
    upstream: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    statistics: Tensor,
    memory: Tensor,
    draw: Tensor | None,
    experts: Experts,
    cell_dtype: torch.dtype,
    *,
    padded: bool,
    shifted: bool,
) -> tuple[Tensor, Tensor | None, Experts]:
    """Return the gradients of cells, logits (if `shifted`), and the weights."""
    from alphastomics.attn_model import gradient_kernel, weight_kernel

    mixture, key, grads = call.mixture, call.key, gradient_kernel.Upstream(*upstream)
    if key is not None:
        unused = (grad is None for grad in grads[1:])
        key = key_of((grads.mixed,), key, cell_dtype, shifted, *unused)
    layout = known_layout(mixture, wanted=True)
    space = Space(layout, memory, by_address=is_compiled(key, weight_kernel._sum_kernel))
    router, noise, up, up_bias, down, down_bias = experts
    make, device = torch.zeros if padded else torch.empty, memory.device
    cell_grad = make(mixture.num_rows, mixture.width, dtype=cell_dtype, device=device)
    logit_grad = None
    if shifted:
        logit_grad = make(mixture.num_cells, mixture.num_experts, device=device)
    weight_grads = Experts(
        torch.empty_like(router),
        None if noise is None else torch.empty_like(noise),
        torch.empty_like(up),
        torch.empty_like(up_bias),
        torch.empty_like(down),
        torch.empty_like(down_bias),
    )
    if mixture.rounded:
        experts = Experts(router, noise, space["up"], up_bias, space["down"], down_bias)
    way = gradient_kernel.Way(mixture, space, statistics, grads, experts, draw, key)
    way.to_hidden()
    way.to_scores(logit_grad)
    way.to_cells(cell_grad)
    way.to_weights(weight_grads)
    return _add_rows(cell_grad, mixture), logit_grad, weight_grads
