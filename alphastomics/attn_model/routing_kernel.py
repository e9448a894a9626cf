"""Routing on a GPU: cells enter; choices, weights, places and statistics leave; see `routing.py`.

One kernel scores the experts, adds time and noise, chooses, weighs, and counts by blocks of cells;
one program then adds the blocks up, which gives the statistics and, as in a counting sort, where
each block's visits to each expert begin. No atomics: the same cells give the same numbers.
"""

from functools import lru_cache
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

# Cells of a block, blocks that the adding program reads at a time, and how many warps and stages a
# program has.
CELLS, BLOCKS, WARPS, STAGES = 128, 128, 8, 2
# Columns of a tile; more in the backward pass where shared memory is ample.
COLUMNS, AMPLE_COLUMNS = 32, 128
# The tensor cores' smallest side; experts are padded to a power of two from here on.
SMALLEST_SIDE = 16
# Bytes of shared memory that a program may take on a GPU for data centres; others have 99 KiB.
AMPLE = 160 * 1024


class Means(NamedTuple):
    """What a GPU has: ample shared memory, and an engine that copies tiles by descriptors."""

    ample: bool
    descriptors: bool


@lru_cache
def means(device: torch.device) -> Means:
    """Look up what a device has; Triton's interpreter counts as a small one."""
    if device.type != "cuda":
        return Means(ample=False, descriptors=False)
    properties = torch.cuda.get_device_properties(device)
    # Only NVIDIA's GPUs say how much a program may ask for.
    ample = getattr(properties, "shared_memory_per_block_optin", 0) >= AMPLE
    return Means(ample, descriptors=ample and properties.major >= 9)


class Choices(NamedTuple):
    """What the router says of T cells, k choices each: -1 and weight 0 for padding.

    `logits` and `spread` (T, E), the latter empty without noise, `choice` and `weight` (T, k), and
    `ends` (E,): where each expert's visits end when they are sorted.
    """

    logits: Tensor
    spread: Tensor
    choice: Tensor
    weight: Tensor
    ends: Tensor


class Ranks(NamedTuple):
    """A visit's rank (T, k) among its block's visits to its expert, and where those begin."""

    rank: Tensor
    base: Tensor


class Sums(NamedTuple):
    """The statistics of `RouterStatistics`, in its order."""

    counts: Tensor
    probability: Tensor
    num_cells: Tensor
    balance_loss: Tensor
    z_loss: Tensor


def lanes(num_experts: int) -> int:
    """Return the number of experts, padded to what the kernels take."""
    return max(SMALLEST_SIDE, triton.next_power_of_2(num_experts))


@triton.jit
@no_type_check
def _real_cells(mask_ptr, cell, num_cells):
    """Say which of these cells are there and no padding."""
    real = cell < num_cells
    if mask_ptr is not None:
        real = real & (tl.load(mask_ptr + cell, mask=real, other=0) != 0)
    return real


@triton.jit
@no_type_check
def _scores(
    x_ptr, router_ptr, noise_ptr, cell, real, width,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, CELLS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply cells by the router's and the noise's weights, reading each cell once."""
    lane = tl.arange(0, LANES)
    score = tl.zeros((CELLS, LANES), tl.float32)
    spread = tl.zeros((CELLS, LANES), tl.float32)
    row = cell.to(tl.int64) * width
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        # Padding may hold NaN, which no product with zero would remove.
        from_x = x_ptr + row[:, None] + column[None, :]
        x = tl.load(from_x, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
        at = lane[None, :] * width + column[:, None]
        taken = inside[:, None] & (lane < EXPERTS)[None, :]
        w = tl.load(router_ptr + at, mask=taken, other=0.0).to(tl.float32)
        # Three products of 11-bit parts are as good as one in float32, and run on tensor cores.
        score = tl.dot(x, w, score, input_precision="tf32x3")
        if noise_ptr is not None:
            w = tl.load(noise_ptr + at, mask=taken, other=0.0).to(tl.float32)
            spread = tl.dot(x, w, spread, input_precision="tf32x3")
    return score, spread


@triton.jit
@no_type_check
def _softmax(logit, among):
    """Softmax over the lanes of `among`, and the logarithm of its denominator."""
    largest = tl.max(tl.where(among, logit, -float("inf")), 1)
    power = tl.where(among, tl.exp(logit - largest[:, None]), 0.0)
    total = tl.sum(power, 1)
    return power / total[:, None], largest + tl.log(total)


@triton.jit
@no_type_check
def _keys(logit, bias_ptr, EXPERTS: tl.constexpr, LANES: tl.constexpr):
    """Return what is compared to choose: -inf for lanes that are no expert, and for them alone."""
    lane = tl.arange(0, LANES)
    bias = tl.load(bias_ptr + lane, mask=lane < EXPERTS, other=0.0).to(tl.float32)
    key = logit + bias[None, :]
    # Even NaN must choose k different experts: the places of visits count on it.
    key = tl.where(key == key, tl.maximum(key, -3e38), -3e38)
    return tl.where((lane < EXPERTS)[None, :], key, -float("inf"))


@triton.jit
@no_type_check
def _store_choices(
    logit, key, real, choice_ptr, weight_ptr, rank_ptr, cell, num_cells,
    LANES: tl.constexpr, TOP_K: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """Store the k largest keys' experts, the first of equals, with weight and rank; count them."""
    lane = tl.arange(0, LANES)[None, :]
    chosen = tl.zeros((CELLS, LANES), tl.int32)
    rest = key
    for _ in tl.static_range(TOP_K):
        mark = lane == tl.argmax(rest, 1)[:, None]
        chosen = tl.where(mark, 1, chosen)
        rest = tl.where(mark, -float("inf"), rest)
    weight = _softmax(logit, chosen > 0)[0]
    visit = tl.where(real[:, None], chosen, 0)
    rank = tl.cumsum(visit, 0) - visit
    weight = tl.where(real[:, None], weight, 0.0)
    for j in tl.static_range(TOP_K):
        best = tl.argmax(key, 1)
        mark = lane == best[:, None]
        key = tl.where(mark, -float("inf"), key)
        at, here = cell * TOP_K + j, cell < num_cells
        tl.store(choice_ptr + at, tl.where(real, best, -1).to(tl.int32), mask=here)
        tl.store(weight_ptr + at, tl.sum(tl.where(mark, weight, 0.0), 1), mask=here)
        tl.store(rank_ptr + at, tl.sum(tl.where(mark, rank, 0), 1), mask=here)
    return tl.sum(visit, 0)


@triton.jit
@no_type_check
def _route_kernel(
    x_ptr, router_ptr, noise_ptr, shift_ptr, draw_ptr, bias_ptr, mask_ptr,
    logit_ptr, spread_ptr, choice_ptr, weight_ptr, rank_ptr, partial_ptr,
    num_cells, cells_per_set, width,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, TOP_K: tl.constexpr,
    CELLS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Route the cells of one block."""
    block = tl.program_id(0)
    cell = block * CELLS + tl.arange(0, CELLS)
    lane = tl.arange(0, LANES)
    real = _real_cells(mask_ptr, cell, num_cells)
    logit, spread = _scores(
        x_ptr, router_ptr, noise_ptr, cell, real, width, EXPERTS, LANES, CELLS, COLUMNS
    )
    at = cell[:, None] * EXPERTS + lane[None, :]
    fits = (cell < num_cells)[:, None] & (lane < EXPERTS)[None, :]
    if shift_ptr is not None:
        shift_at = (cell // cells_per_set)[:, None] * EXPERTS + lane[None, :]
        logit += tl.load(shift_ptr + shift_at, mask=fits, other=0.0).to(tl.float32)
    if noise_ptr is not None:
        softplus = tl.maximum(spread, 0.0) + tl.log(1 + tl.exp(-tl.abs(spread)))
        logit += tl.load(draw_ptr + at, mask=fits, other=0.0) * softplus
        tl.store(spread_ptr + at, spread, mask=fits)
    tl.store(logit_ptr + at, logit, mask=fits)
    key = _keys(logit, bias_ptr, EXPERTS, LANES)
    counts = _store_choices(
        logit, key, real, choice_ptr, weight_ptr, rank_ptr, cell, num_cells, LANES, TOP_K, CELLS
    )
    share, partition = _softmax(logit, (lane < EXPERTS)[None, :])
    shares = tl.sum(tl.where(real[:, None], share, 0.0), 0)
    partial = partial_ptr + block * (2 * EXPERTS + 2)
    tl.store(partial + lane, counts.to(tl.float32), mask=lane < EXPERTS)
    tl.store(partial + EXPERTS + lane, shares, mask=lane < EXPERTS)
    tl.store(partial + 2 * EXPERTS, tl.sum(tl.where(real, partition * partition, 0.0), 0))
    tl.store(partial + 2 * EXPERTS + 1, tl.sum(real.to(tl.float32), 0))


@triton.jit
@no_type_check
def _add_up_kernel(
    partial_ptr, base_ptr, ends_ptr, counts_ptr, probability_ptr, cells_ptr, balance_ptr, z_ptr,
    num_blocks, EXPERTS: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Add up the blocks of cells, and find where each block's visits to each expert begin."""
    lane = tl.arange(0, LANES)
    expert = lane < EXPERTS
    counts = tl.zeros((LANES,), tl.float32)
    shares = tl.zeros((LANES,), tl.float32)
    square = tl.zeros((BLOCKS,), tl.float32)
    real = tl.zeros((BLOCKS,), tl.float32)
    for start in range(0, num_blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        row = partial_ptr + block * (2 * EXPERTS + 2)
        inside = block < num_blocks
        fits = inside[:, None] & expert[None, :]
        counts += tl.sum(tl.load(row[:, None] + lane[None, :], mask=fits, other=0.0), 0)
        shares += tl.sum(tl.load(row[:, None] + EXPERTS + lane[None, :], mask=fits, other=0.0), 0)
        square += tl.load(row + 2 * EXPERTS, mask=inside, other=0.0)
        real += tl.load(row + 2 * EXPERTS + 1, mask=inside, other=0.0)
    num_cells = tl.sum(real, 0)
    tl.store(counts_ptr + lane, counts, mask=expert)
    tl.store(probability_ptr + lane, shares, mask=expert)
    tl.store(cells_ptr, num_cells)
    even = EXPERTS / (tl.maximum(tl.sum(counts, 0), 1.0) * tl.maximum(num_cells, 1.0))
    tl.store(balance_ptr, tl.sum(counts * shares, 0) * even)
    tl.store(z_ptr, tl.sum(square, 0) / tl.maximum(num_cells, 1.0))
    visits = counts.to(tl.int32)
    ends = tl.cumsum(visits, 0)
    tl.store(ends_ptr + lane, ends, mask=expert)
    begin = ends - visits
    for start in range(0, num_blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        fits = (block < num_blocks)[:, None] & expert[None, :]
        at = partial_ptr + block[:, None] * (2 * EXPERTS + 2) + lane[None, :]
        visits_2d = tl.load(at, mask=fits, other=0.0).to(tl.int32)
        before = begin[None, :] + tl.cumsum(visits_2d, 0) - visits_2d
        tl.store(base_ptr + block[:, None] * EXPERTS + lane[None, :], before, mask=fits)
        begin += tl.sum(visits_2d, 0)


@triton.jit
@no_type_check
def _logit_gradient(
    logit_ptr, choice_ptr, weight_ptr, weight_grad_ptr, counts_ptr, probability_grad_ptr,
    cells_ptr, balance_grad_ptr, z_grad_ptr, cell, real,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, TOP_K: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """Bring the gradients of weights, probabilities and losses back to the logits."""
    lane = tl.arange(0, LANES)
    expert = lane < EXPERTS
    fits = real[:, None] & expert[None, :]
    logit = tl.load(logit_ptr + cell[:, None] * EXPERTS + lane[None, :], mask=fits, other=0.0)
    share, partition = _softmax(logit, expert[None, :])
    # d(sum of p_e c_e)/dl = p (c - sum of p c), c the gradient of an expert's probability.
    counts = tl.load(counts_ptr + lane, mask=expert, other=0.0)
    num_cells = tl.maximum(tl.load(cells_ptr), 1.0)
    balance = tl.load(balance_grad_ptr) * EXPERTS / (tl.maximum(tl.sum(counts, 0), 1.0) * num_cells)
    upstream = tl.load(probability_grad_ptr + lane, mask=expert, other=0.0) + balance * counts
    mean = tl.sum(share * upstream[None, :], 1)
    log_partition = 2 * tl.load(z_grad_ptr) / num_cells * partition
    grad = share * (upstream[None, :] - mean[:, None] + log_partition[:, None])
    # The same for the softmax over the chosen.
    mean = tl.zeros((CELLS,), tl.float32)
    for j in tl.static_range(TOP_K):
        at = cell * TOP_K + j
        weight = tl.load(weight_ptr + at, mask=real, other=0.0)
        mean += weight * tl.load(weight_grad_ptr + at, mask=real, other=0.0)
    for j in tl.static_range(TOP_K):
        at = cell * TOP_K + j
        weight = tl.load(weight_ptr + at, mask=real, other=0.0)
        part = weight * (tl.load(weight_grad_ptr + at, mask=real, other=0.0) - mean)
        mine = tl.load(choice_ptr + at, mask=real, other=-1)[:, None] == lane[None, :]
        grad += tl.where(mine, part[:, None], 0.0)
    return tl.where(fits, grad, 0.0)


@triton.jit
@no_type_check
def _route_backward_kernel(
    x_ptr, logit_ptr, spread_ptr, draw_ptr, mask_ptr, choice_ptr, weight_ptr, weight_grad_ptr,
    counts_ptr, probability_grad_ptr, cells_ptr, balance_grad_ptr, z_grad_ptr,
    logit_grad_ptr, spread_grad_ptr, partial_ptr, num_cells, width,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, TOP_K: tl.constexpr,
    CELLS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of one block's logits, and its share of the router's and the noise's weights'."""
    block = tl.program_id(0)
    cell = block * CELLS + tl.arange(0, CELLS)
    lane = tl.arange(0, LANES)
    real = _real_cells(mask_ptr, cell, num_cells)
    grad = _logit_gradient(
        logit_ptr, choice_ptr, weight_ptr, weight_grad_ptr, counts_ptr, probability_grad_ptr,
        cells_ptr, balance_grad_ptr, z_grad_ptr, cell, real, EXPERTS, LANES, TOP_K, CELLS,
    )  # fmt: skip
    at = cell[:, None] * EXPERTS + lane[None, :]
    fits = (cell < num_cells)[:, None] & (lane < EXPERTS)[None, :]
    tl.store(logit_grad_ptr + at, grad, mask=fits)
    spread_grad = grad
    if spread_ptr is not None:
        spread = tl.load(spread_ptr + at, mask=fits, other=0.0)
        spread_grad = grad * tl.load(draw_ptr + at, mask=fits, other=0.0) * tl.sigmoid(spread)
        tl.store(spread_grad_ptr + at, spread_grad, mask=fits)
    turned, spread_turned = tl.trans(grad), tl.trans(spread_grad)
    row = cell.to(tl.int64) * width
    matrices = 1 if spread_ptr is None else 2
    partial = partial_ptr + block.to(tl.int64) * (matrices * EXPERTS) * width
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        from_x = x_ptr + row[:, None] + column[None, :]
        x = tl.load(from_x, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
        to = partial + lane[:, None] * width + column[None, :]
        taken = (lane < EXPERTS)[:, None] & inside[None, :]
        tl.store(to, tl.dot(turned, x, input_precision="tf32x3"), mask=taken)
        if spread_ptr is not None:
            product = tl.dot(spread_turned, x, input_precision="tf32x3")
            tl.store(to + EXPERTS * width, product, mask=taken)


def route_forward(
    x: Tensor,
    router: Tensor,
    noise: Tensor | None,
    shift: Tensor | None,
    draw: Tensor | None,
    bias: Tensor,
    mask: Tensor | None,
    top_k: int,
    cells_per_set: int,
) -> tuple[Choices, Ranks, Sums]:
    """Route T cells, (T, D); `draw` (T, E) is the noise, `mask` (T,) False for padding."""
    (num_cells, width), num_experts = x.shape, len(router)
    num_blocks = triton.cdiv(num_cells, CELLS)
    numbers: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    places: dict[str, Any] = {"dtype": torch.int32, "device": x.device}
    chosen = Choices(
        torch.empty(num_cells, num_experts, **numbers),
        torch.empty(0 if noise is None else num_cells, num_experts, **numbers),
        torch.empty(num_cells, top_k, **places),
        torch.empty(num_cells, top_k, **numbers),
        torch.empty(num_experts, **places),
    )
    rank = torch.empty(num_cells, top_k, **places)
    base = torch.empty(num_blocks, num_experts, **places)
    sums = Sums(*(torch.empty(s, **numbers) for s in ([num_experts], [num_experts], [], [], [])))
    partial = torch.empty(num_blocks, 2 * num_experts + 2, **numbers)
    sizes = {"EXPERTS": num_experts, "LANES": lanes(num_experts)}
    _route_kernel[(num_blocks,)](
        x, router, noise, shift, draw, bias, mask,
        chosen.logits, chosen.spread, chosen.choice, chosen.weight, rank, partial,
        num_cells, cells_per_set, width, TOP_K=top_k, CELLS=CELLS, COLUMNS=COLUMNS, num_warps=WARPS,
        num_stages=STAGES,
        **sizes,
    )  # fmt: skip
    _add_up_kernel[(1,)](partial, base, chosen.ends, *sums, num_blocks, BLOCKS=BLOCKS, **sizes)
    return chosen, Ranks(rank, base), sums


def route_backward(
    x: Tensor,
    chosen: Choices,
    draw: Tensor | None,
    mask: Tensor | None,
    weight_grad: Tensor,
    sums: Sums,
    sums_grad: Sums,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of logits and spread, (T, E), and of the weights, (1 or 2, E, D)."""
    (num_cells, width), (_, num_experts) = x.shape, chosen.logits.shape
    num_blocks = triton.cdiv(num_cells, CELLS)
    noisy = draw is not None
    columns = AMPLE_COLUMNS if means(x.device).ample else COLUMNS
    logit_grad, spread_grad = torch.empty_like(chosen.logits), torch.empty_like(chosen.spread)
    partial = torch.empty(
        num_blocks, 1 + noisy, num_experts, width, dtype=torch.float32, device=x.device
    )
    _route_backward_kernel[(num_blocks,)](
        x, chosen.logits, chosen.spread if noisy else None, draw, mask, chosen.choice,
        chosen.weight, weight_grad, sums.counts, sums_grad.probability, sums.num_cells,
        sums_grad.balance_loss, sums_grad.z_loss, logit_grad, spread_grad, partial,
        num_cells, width, EXPERTS=num_experts, LANES=lanes(num_experts),
        TOP_K=chosen.choice.shape[1], CELLS=CELLS, COLUMNS=columns, num_warps=WARPS,
        num_stages=STAGES,
    )  # fmt: skip
    return logit_grad, spread_grad, partial.sum(0)
