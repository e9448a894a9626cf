"""Sending cells to their experts and back on a GPU: see `dispatch.py`.

Visits are rows sorted by expert. A program that works on sorted rows takes a tile of one expert's;
`_tile` finds whose. Sums over an expert's rows are stored by tile and added up by `sum_tiles`, in
one order, so that the result does not change from run to run.
"""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from alphastomics.attn_model.routing_kernel import CELLS, Choices, Ranks, lanes

# Cells or sorted rows of a program, and columns that it reads at a time.
SEND, SEND_BACKWARD, COLLECT, COLLECT_BACKWARD = (16, 256), (32, 128), (16, 128), (64, 128)
# Tiles added up at a time, and their columns: many of narrow tiles, or few programs had work.
ADDED, ADDED_NARROW = (32, 128), (128, 32)
# Tiles of fewer numbers than this, over all experts, are narrow.
NARROW = 1 << 16


class Places(NamedTuple):
    """Where visits went: `place` (T, k) of each visit, -1 for padding; `order` (S,) its inverse."""

    place: Tensor
    order: Tensor


@triton.jit
@no_type_check
def _tile(
    ends_ptr, tile,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return a tile's expert (EXPERTS when there is no such tile), first row, and the end."""
    lane = tl.arange(0, LANES)
    expert = lane < EXPERTS
    end = tl.load(ends_ptr + lane, mask=expert, other=0)
    begin = tl.load(ends_ptr + lane - 1, mask=expert & (lane > 0), other=0)
    tiles = tl.where(expert, (end - begin + ROWS - 1) // ROWS, 0)
    last = tl.cumsum(tiles, 0)
    mine = tl.sum(tl.where(expert & (last <= tile), 1, 0), 0)
    here = lane == mine
    first = tl.sum(tl.where(here, last - tiles, 0), 0)
    row = tl.sum(tl.where(here, begin, 0), 0) + (tile - first) * ROWS
    return mine, row, tl.sum(tl.where(here, end, 0), 0)


@triton.jit
@no_type_check
def _send_kernel(
    x_ptr, choice_ptr, rank_ptr, base_ptr, visits_ptr, place_ptr, order_ptr, num_cells, width,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
    SENT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Find the places of some cells' visits, and copy the cells there."""
    cell = tl.program_id(0) * SENT + tl.arange(0, SENT)
    here = cell < num_cells
    for j in tl.static_range(TOP_K):
        at = cell * TOP_K + j
        choice = tl.load(choice_ptr + at, mask=here, other=-1)
        real = choice >= 0
        base = tl.load(base_ptr + (cell // BLOCK) * EXPERTS + choice, mask=real, other=0)
        place = base + tl.load(rank_ptr + at, mask=real, other=0)
        tl.store(place_ptr + at, tl.where(real, place, -1), mask=here)
        tl.store(order_ptr + place, at, mask=real)
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            fits = real[:, None] & (column < width)[None, :]
            # Read once from memory: what the first visit reads, the others find in the cache.
            x = tl.load(x_ptr + cell.to(tl.int64)[:, None] * width + column[None, :], mask=fits)
            to = visits_ptr + place.to(tl.int64)[:, None] * width + column[None, :]
            tl.store(to, x.to(visits_ptr.dtype.element_ty), mask=fits)


@triton.jit
@no_type_check
def _send_backward_kernel(
    visits_grad_ptr, place_ptr, logit_grad_ptr, spread_grad_ptr, router_ptr, noise_ptr, x_grad_ptr,
    num_cells, width,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, TOP_K: tl.constexpr,
    SENT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up what a cell's visits and its scores say of it."""
    cell = tl.program_id(0) * SENT + tl.arange(0, SENT)
    lane = tl.arange(0, LANES)
    here = cell < num_cells
    at = cell[:, None] * EXPERTS + lane[None, :]
    fits = here[:, None] & (lane < EXPERTS)[None, :]
    logit_grad = tl.load(logit_grad_ptr + at, mask=fits, other=0.0)
    spread_grad = logit_grad
    if noise_ptr is not None:
        spread_grad = tl.load(spread_grad_ptr + at, mask=fits, other=0.0)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        w_at = lane[:, None] * width + column[None, :]
        taken = (lane < EXPERTS)[:, None] & inside[None, :]
        w = tl.load(router_ptr + w_at, mask=taken, other=0.0).to(tl.float32)
        grad = tl.dot(logit_grad, w, input_precision="tf32x3")
        if noise_ptr is not None:
            w = tl.load(noise_ptr + w_at, mask=taken, other=0.0).to(tl.float32)
            grad = tl.dot(spread_grad, w, grad, input_precision="tf32x3")
        for j in tl.static_range(TOP_K):
            place = tl.load(place_ptr + cell * TOP_K + j, mask=here, other=-1)
            from_visit = visits_grad_ptr + place.to(tl.int64)[:, None] * width + column[None, :]
            sent = (place >= 0)[:, None] & inside[None, :]
            grad += tl.load(from_visit, mask=sent, other=0.0).to(tl.float32)
        to = x_grad_ptr + cell.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(to, grad.to(x_grad_ptr.dtype.element_ty), mask=here[:, None] & inside[None, :])


@triton.jit
@no_type_check
def _collect_kernel(
    results_ptr, place_ptr, choice_ptr, weight_ptr, bias_ptr, mixed_ptr, num_cells, width,
    TOP_K: tl.constexpr, SENT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Mix the results of some cells' visits, with the experts' biases, by weight."""
    cell = tl.program_id(0) * SENT + tl.arange(0, SENT)
    here = cell < num_cells
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        mixed = tl.zeros((SENT, COLUMNS), tl.float32)
        for j in tl.static_range(TOP_K):
            at = cell * TOP_K + j
            place = tl.load(place_ptr + at, mask=here, other=-1)
            choice = tl.load(choice_ptr + at, mask=here, other=-1)
            weight = tl.load(weight_ptr + at, mask=here, other=0.0)
            fits = (place >= 0)[:, None] & inside[None, :]
            from_result = results_ptr + place.to(tl.int64)[:, None] * width + column[None, :]
            result = tl.load(from_result, mask=fits, other=0.0).to(tl.float32)
            from_bias = bias_ptr + choice[:, None] * width + column[None, :]
            result += tl.load(from_bias, mask=fits, other=0.0).to(tl.float32)
            mixed += weight[:, None] * result
        to = mixed_ptr + cell.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(to, mixed.to(mixed_ptr.dtype.element_ty), mask=here[:, None] & inside[None, :])


@triton.jit
@no_type_check
def _collect_backward_kernel(
    grad_ptr, results_ptr, order_ptr, weight_ptr, bias_ptr, ends_ptr,
    results_grad_ptr, weight_grad_ptr, partial_ptr, width,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, TOP_K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile's results and weights, and its share of the expert's bias's."""
    tile = tl.program_id(0)
    expert, first, end = _tile(ends_ptr, tile, EXPERTS, LANES, ROWS)
    if expert < EXPERTS:
        row = first + tl.arange(0, ROWS)
        here = row < end
        visit = tl.load(order_ptr + row, mask=here, other=0)
        weight = tl.load(weight_ptr + visit, mask=here, other=0.0)
        weight_grad = tl.zeros((ROWS,), tl.float32)
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = column < width
            fits = here[:, None] & inside[None, :]
            from_cell = grad_ptr + (visit // TOP_K).to(tl.int64)[:, None] * width + column[None, :]
            grad = tl.load(from_cell, mask=fits, other=0.0).to(tl.float32)
            at = row.to(tl.int64)[:, None] * width + column[None, :]
            result = tl.load(results_ptr + at, mask=fits, other=0.0).to(tl.float32)
            bias = tl.load(bias_ptr + expert * width + column, mask=inside, other=0.0)
            weight_grad += tl.sum(grad * (result + bias.to(tl.float32)[None, :]), 1)
            grad = weight[:, None] * grad
            to = results_grad_ptr + at
            tl.store(to, grad.to(results_grad_ptr.dtype.element_ty), mask=fits)
            to = partial_ptr + tile.to(tl.int64) * width + column
            tl.store(to, tl.sum(grad, 0), mask=inside)
        tl.store(weight_grad_ptr + visit, weight_grad, mask=here)


@triton.jit
@no_type_check
def _sum_tiles_kernel(
    partial_ptr, ends_ptr, total_ptr, width,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the tiles of one expert."""
    expert, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, LANES)
    end = tl.load(ends_ptr + lane, mask=lane <= expert, other=0)
    begin = tl.load(ends_ptr + lane - 1, mask=(lane > 0) & (lane <= expert), other=0)
    tiles = (end - begin + ROWS - 1) // ROWS
    last = tl.sum(tiles, 0)
    first = last - tl.sum(tl.where(lane == expert, tiles, 0), 0)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(first, last, TILES):
        tile = start + tl.arange(0, TILES)
        at = partial_ptr + tile.to(tl.int64)[:, None] * width + column[None, :]
        total += tl.sum(tl.load(at, mask=(tile < last)[:, None] & inside[None, :], other=0.0), 0)
    to = total_ptr + expert.to(tl.int64) * width + column
    tl.store(to, total.to(total_ptr.dtype.element_ty), mask=inside)


def most_tiles(num_rows: int, num_experts: int, rows: int) -> int:
    """Return how many tiles there are at most: each expert's last one may be short."""
    return triton.cdiv(num_rows, rows) + min(num_experts, num_rows)


def sum_tiles(
    partial: Tensor, ends: Tensor, rows: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Add up tiles (tiles, ...) of `rows` rows by expert, to the shape (E, ...)."""
    num_experts = len(ends)
    total = torch.empty(shape, dtype=dtype, device=partial.device)
    width = total.numel() // num_experts
    tiles, columns = ADDED_NARROW if total.numel() < NARROW else ADDED
    _sum_tiles_kernel[(num_experts, triton.cdiv(width, columns))](
        partial, ends, total, width, EXPERTS=num_experts, LANES=lanes(num_experts),
        ROWS=rows, TILES=tiles, COLUMNS=columns,
    )  # fmt: skip
    return total


def send_forward(
    x: Tensor, chosen: Choices, ranks: Ranks, dtype: torch.dtype
) -> tuple[Tensor, Places]:
    """Copy cells (T, D) to the places of their visits (S, D), S = T k."""
    (num_cells, width), (_, top_k) = x.shape, chosen.choice.shape
    cells, columns = SEND
    visits = torch.empty(num_cells * top_k, width, dtype=dtype, device=x.device)
    place, order = torch.empty_like(chosen.choice), torch.empty_like(chosen.choice).flatten()
    _send_kernel[(triton.cdiv(num_cells, cells),)](
        x, chosen.choice, *ranks, visits, place, order, num_cells, width,
        EXPERTS=len(chosen.ends), TOP_K=top_k, BLOCK=CELLS, SENT=cells, COLUMNS=columns,
    )  # fmt: skip
    return visits, Places(place, order)


def send_backward(
    visits_grad: Tensor,
    place: Tensor,
    score_grads: tuple[Tensor, Tensor],
    router: Tensor,
    noise: Tensor | None,
    x: Tensor,
) -> Tensor:
    """Return the gradient of cells: of their visits, and of their scores through the router."""
    (num_cells, top_k), width = place.shape, x.shape[1]
    cells, columns = SEND_BACKWARD
    x_grad = torch.empty_like(x)
    _send_backward_kernel[(triton.cdiv(num_cells, cells),)](
        visits_grad, place, *score_grads, router, noise, x_grad, num_cells, width,
        EXPERTS=len(router), LANES=lanes(len(router)), TOP_K=top_k, SENT=cells, COLUMNS=columns,
    )  # fmt: skip
    return x_grad


def collect_forward(results: Tensor, chosen: Choices, place: Tensor, bias: Tensor) -> Tensor:
    """Mix results (S, D) and biases (E, D) to cells (T, D); padding gets zeros."""
    (num_cells, top_k), width = place.shape, results.shape[1]
    cells, columns = COLLECT
    mixed = torch.empty(num_cells, width, dtype=results.dtype, device=results.device)
    _collect_kernel[(triton.cdiv(num_cells, cells),)](
        results, place, chosen.choice, chosen.weight, bias, mixed, num_cells, width,
        TOP_K=top_k, SENT=cells, COLUMNS=columns,
    )  # fmt: skip
    return mixed


def collect_backward(
    grad: Tensor, results: Tensor, chosen: Choices, order: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of results, weights and biases."""
    (num_rows, width), num_experts = results.shape, len(bias)
    rows, columns = COLLECT_BACKWARD
    tiles = most_tiles(num_rows, num_experts, rows)
    results_grad, weight_grad = torch.empty_like(results), torch.empty_like(chosen.weight)
    partial = torch.empty(tiles, width, dtype=torch.float32, device=grad.device)
    _collect_backward_kernel[(tiles,)](
        grad, results, order, chosen.weight, bias, chosen.ends, results_grad, weight_grad,
        partial, width, EXPERTS=num_experts, LANES=lanes(num_experts),
        TOP_K=chosen.weight.shape[1], ROWS=rows, COLUMNS=columns,
    )  # fmt: skip
    return results_grad, weight_grad, sum_tiles(partial, chosen.ends, rows, bias.shape, bias.dtype)
