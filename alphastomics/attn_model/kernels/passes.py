"""One call of the fused mixture: tensors enter, nine kernels run, tensors leave.

Four kernels are the forward pass, five the backward pass. They are imported where they run: without
a GPU there is no Triton.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alphastomics.attn_model.kernels.launch import Key, Space, is_compiled, key_of, launch
from alphastomics.attn_model.kernels.sizes import (
    BLOCK,
    NARROW_COLUMNS,
    NUMBERS,
    CallPlan,
    Sizes,
    make_sizes,
    num_steps,
    plan_call,
)


class Experts(NamedTuple):
    """The weights of a mixture, or their gradients; `noise` is None where none is sampled."""

    router: Any
    noise: Any
    up_weight: Any
    up_bias: Any
    down_weight: Any
    down_bias: Any


def run_forward(
    tensors: Sequence[Any], top_k: int, cells_per_set: int, dtype: torch.dtype, needs_grad: bool
) -> list[Tensor]:
    """Return the mixed cells, the statistics, and the memory that the backward pass needs.

    `tensors` are cells (T, D), the logits' shift of each set, noise (T, E), a mask (T,) that is 0
    for padding, the balance bias, and `Experts`. The statistics (2 E + 3) are counts, probability,
    cells, balance loss and z-loss.
    """
    from alphastomics.attn_model.kernels import expert_kernel, routing_kernel

    x, shift, epsilon, mask, bias, *weights = tensors
    router, noise, up, up_bias, down, down_bias = weights
    m, device = make_sizes(x, up, top_k, dtype, noisy=noise is not None), x.device
    key = key_of(tensors, device, *up.shape, top_k, dtype, needs_grad)
    plan = plan_call(m, device, needs_grad=needs_grad)
    kernels, table, num_blocks = plan.kernels, plan.table, num_steps(m.num_cells, BLOCK)
    memory = torch.empty(plan.saved.size, dtype=torch.uint8, device=device)
    statistics = torch.empty(2 * m.num_experts + 3, dtype=torch.float32, device=device)
    s = Space(plan.saved, memory, by_address=is_compiled(key, expert_kernel._down_kernel))
    launch(
        key, routing_kernel._route_kernel, (num_blocks, 1, 1), kernels["route"],
        x, router, noise, shift, epsilon, bias, mask, table, s["score"], s["slot"], s["weight"],
        s["partial"], m.num_cells, cells_per_set, m.width,
    )  # fmt: skip
    size, rounded, parts = m.num_experts * m.width * m.hidden, (None, None), 0
    if m.rounded:
        rounded, parts = (s["up"], s["down"]), 2 * num_steps(size, NUMBERS)
    launch(
        key, routing_kernel._send_kernel, (num_blocks + parts, 1, 1), kernels["send"],
        s["partial"], s["slot"], x, s["plan"], s["sent"], statistics, up, down, *rounded,
        m.num_cells, num_blocks, m.width, size,
    )  # fmt: skip
    if m.rounded:
        up, down = rounded
    tile = kernels["up"]
    tiles = m.max_tiles(tile.rows) * m.groups.size * num_steps(m.hidden, tile.columns)
    launch(
        key, expert_kernel._up_kernel, (tiles, 1, 1), tile, s["sent"], up, up_bias, s["weight"],
        table, s["plan"], s["hidden"], s["slope"] if needs_grad else None, m.width, m.hidden,
    )  # fmt: skip
    make = torch.empty if mask is None else torch.zeros
    mixed, tile = make(m.num_rows, m.width, dtype=dtype, device=device), kernels["down"]
    tiles = m.max_tiles(tile.rows) * num_steps(m.width, tile.columns)
    launch(
        key, expert_kernel._down_kernel, (tiles, 1, 1), tile, s["hidden"], down, down_bias,
        s["weight"], table, s["plan"], mixed, m.width, m.hidden,
    )  # fmt: skip
    return [_add_rows(mixed, m), statistics, memory]


def _add_rows(rows: Tensor, sizes: Sizes) -> Tensor:
    """Add up the rows of each cell."""
    if sizes.groups.rows_per_cell == 1:
        return rows
    # Autocast would sum to float32.
    return rows.view(sizes.num_cells, -1, sizes.width).sum(1, dtype=rows.dtype)


def run_backward(
    tensors: Sequence[Any],
    top_k: int,
    dtype: torch.dtype,
    cell_dtype: torch.dtype,
    padded: bool,
    shifted: bool,
) -> list[Tensor]:
    """Return the gradients of cells, of logits if `shifted`, and of `Experts`; empty where absent.

    `tensors` are the gradients of mixed cells, probability, balance loss and z-loss, of which the
    last three may be None; the statistics and the memory of the forward pass; noise and `Experts`.
    """
    from alphastomics.attn_model.kernels import expert_kernel, score_kernel, weight_kernel

    mixed_grad, *loss_grads, statistics, memory, epsilon = tensors[:7]
    experts, device = Experts(*tensors[7:]), memory.device
    up, noise = experts.up_weight, experts.noise
    m = make_sizes(mixed_grad, up, top_k, dtype, noisy=noise is not None)
    absent = (grad is None for grad in loss_grads)
    facts = (device, *up.shape, top_k, dtype, cell_dtype, shifted, *absent)
    key = key_of((mixed_grad, epsilon, *experts), *facts)
    plan = plan_call(m, device, needs_grad=True)
    by_address = is_compiled(key, weight_kernel._sum_kernel)
    saved = Space(plan.saved, memory, by_address=by_address)
    between = torch.empty(plan.backward.size, dtype=torch.uint8, device=device)
    space = Space(plan.backward, between, by_address=by_address)
    make = torch.zeros if padded else torch.empty
    cell_grad = make(m.num_rows, m.width, dtype=cell_dtype, device=device)
    logit_grad = make(m.num_cells, m.num_experts, device=device) if shifted else None
    grads = Experts(*[None if weight is None else torch.empty_like(weight) for weight in experts])
    down, tile = experts.down_weight, plan.kernels["hidden gradient"]
    if m.rounded:
        up, down = saved["up"], saved["down"]
    launch(
        key, expert_kernel._hidden_gradient_kernel,
        (m.max_tiles(tile.rows) * m.groups.size * plan.parts, 1, 1), tile,
        mixed_grad, down, saved["hidden"], saved["slope"], plan.table, saved["plan"],
        space["before_grad"], space["weight_grad"], space["up_bias_partial"],
        m.num_cells * m.top_k, m.width, m.hidden,
    )  # fmt: skip
    tile = plan.kernels["score gradient"]
    launch(
        key, score_kernel._score_gradient_kernel, (m.max_tiles(tile.rows), 1, 1), tile,
        mixed_grad, saved["sent"], experts.down_bias, saved["score"], epsilon, saved["weight"],
        space["weight_grad"], saved["slot"], statistics, *loss_grads, plan.table, saved["plan"],
        space["sent_grad"], space["score_grad"], logit_grad, space["partial"], m.num_cells,
        plan.parts, m.width,
    )  # fmt: skip
    tile = plan.kernels["cell gradient"]
    tiles = m.max_tiles(tile.rows) * num_steps(m.width, tile.columns)
    launch(
        key, expert_kernel._cell_gradient_kernel, (tiles, 1, 1), tile, space["before_grad"], up,
        space["score_grad"], experts.router, noise, plan.table, saved["plan"], cell_grad,
        m.width, m.hidden,
    )  # fmt: skip
    _sum_weights(m, plan, saved, space, grads, key)
    router = experts.router
    some = [router.new_empty(0) if grad is None else grad for grad in (logit_grad, *grads)]
    return [_add_rows(cell_grad, m), *some]


def _sum_weights(
    m: Sizes, plan: CallPlan, saved: Space, space: Space, grads: Experts, key: Key | None
) -> None:
    """Form the gradients of router, noise and experts."""
    from alphastomics.attn_model.kernels.weight_kernel import _sum_kernel, _weight_gradient_kernel

    partials, narrow = (grads.up_weight, grads.down_weight), NARROW_COLUMNS
    programs = num_steps(m.hidden, narrow) + (1 + m.matrices) * num_steps(m.width, narrow)
    if plan.chunk:
        partials = (space["up_partial"], space["down_partial"])
        programs += 2 * num_steps(m.width * m.hidden, plan.kernels["sum"].columns)
    launch(
        key, _weight_gradient_kernel, (plan.blocks, plan.programs, 2),
        plan.kernels["weight gradient"], *_factors(plan, saved, space), plan.table, saved["plan"],
        *partials, plan.chunk, m.width, m.hidden,
    )  # fmt: skip
    launch(
        key, _sum_kernel, (programs, m.num_experts, 1), plan.kernels["sum"],
        *partials, space["up_bias_partial"], space["partial"], plan.table, saved["plan"],
        grads.up_weight, grads.down_weight, grads.up_bias, grads.down_bias, grads.router,
        grads.noise, plan.chunk, m.width, m.hidden,
    )  # fmt: skip


def _factors(plan: CallPlan, saved: Space, space: Space) -> list[Any]:
    """Return the factors of the matrices' gradients: gradients and hidden rows, and so on."""
    tile = plan.kernels["weight gradient"]
    factors = (
        (space, "sent_grad", tile.rows),
        (saved, "hidden", tile.columns),
        (saved, "sent", tile.rows),
        (space, "before_grad", tile.columns),
    )
    if not tile.by_descriptor:
        return [memory[name] for memory, name, _ in factors]
    from triton.tools.tensor_descriptor import TensorDescriptor

    return [
        TensorDescriptor.from_tensor(memory.tensor(name), [tile.depth, side])
        for memory, name, side in factors
    ]
