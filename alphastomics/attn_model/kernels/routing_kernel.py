"""Routing on a GPU: cells enter; weights, the order by expert group and statistics leave.

One kernel scores the experts, adds time and noise, chooses, weighs, and counts by blocks of cells;
a second adds the blocks up, which gives the statistics and, as in a counting sort, the row of each
assignment among those of its expert group. No atomics: the same cells give the same numbers.
`C` are the constants of `sizes.py`. The plain version is `routing.py`.
"""

from typing import no_type_check

import triton
import triton.language as tl

from alphastomics.attn_model.kernels import sizes
from alphastomics.attn_model.kernels.expert_groups import EXPERT_BITS

BLOCK = tl.constexpr(sizes.BLOCK)
NUMBERS = tl.constexpr(sizes.NUMBERS)
# Blocks that are added up at a time.
BLOCKS = tl.constexpr(128)


@triton.jit
@no_type_check  # Triton compiles the function's own source: nothing may be wrapped around it
def _expert(packed, nth, BITS: tl.constexpr = EXPERT_BITS):
    """Return the nth expert of a group."""
    return ((packed >> (BITS * nth)) & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
@no_type_check
def _zeros(rows, columns):
    """Return zeros; a shape is made of a function's arguments, not of a constant's attributes."""
    return tl.zeros((rows, columns), tl.float32)


@triton.jit
@no_type_check
def _tile(plan_ptr, tile, rows, C):
    """Return a tile's group (C.groups if there is no such tile), first row, and the group's end."""
    index = tl.arange(0, C.padded_groups)
    is_group = index < C.groups
    end = tl.load(plan_ptr + index, mask=is_group, other=0)
    begin = tl.load(plan_ptr + index - 1, mask=is_group & (index > 0), other=0)
    tiles = tl.where(is_group, (end - begin + rows - 1) // rows, 0)
    last = tl.cumsum(tiles, 0)
    group = tl.sum(tl.where(is_group & (last <= tile), 1, 0), 0)
    here = index == group
    first = tl.sum(tl.where(here, last - tiles, 0), 0)
    row = tl.sum(tl.where(here, begin, 0), 0) + (tile - first) * rows
    return group, row, tl.sum(tl.where(here, end, 0), 0)


@triton.jit
@no_type_check
def _scores(x_ptr, router_ptr, noise_ptr, cell, real, width, C):
    """Multiply cells by the router's and the noise's weights, reading each cell once."""
    expert = tl.arange(0, C.padded_experts)
    score = _zeros(BLOCK, C.padded_experts)
    noise_score = _zeros(BLOCK, C.padded_experts)
    row = cell.to(tl.int64) * width
    for start in range(0, width, C.columns):
        column = start + tl.arange(0, C.columns)
        inside = column < width
        # Padding may hold NaN, which no product with zero would remove.
        from_x = x_ptr + row[:, None] + column[None, :]
        x = tl.load(from_x, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
        at = expert[None, :] * width + column[:, None]
        fits = inside[:, None] & (expert < C.experts)[None, :]
        w = tl.load(router_ptr + at, mask=fits, other=0.0).to(tl.float32)
        # Three products of 11-bit parts are as good as one in float32, and run on tensor cores.
        score = tl.dot(x, w, score, input_precision="tf32x3")
        if noise_ptr is not None:
            w = tl.load(noise_ptr + at, mask=fits, other=0.0).to(tl.float32)
            noise_score = tl.dot(x, w, noise_score, input_precision="tf32x3")
    return score, noise_score


@triton.jit
@no_type_check
def _softmax(logit, among):
    """Softmax over the experts of `among`, and the logarithm of its denominator."""
    largest = tl.max(tl.where(among, logit, -float("inf")), 1)
    power = tl.where(among, tl.exp(logit - largest[:, None]), 0.0)
    total = tl.sum(power, 1)
    return power / total[:, None], largest + tl.log(total)


@triton.jit
@no_type_check
def _choose(logit, bias_ptr, real, C):
    """Return a 1 for the k experts with the largest logit + bias, the first of equals; weights."""
    expert = tl.arange(0, C.padded_experts)
    bias = tl.load(bias_ptr + expert, mask=expert < C.experts, other=0.0).to(tl.float32)
    key = logit + bias[None, :]
    # Even NaN must choose k different experts: the rows of assignments count on it.
    key = tl.where(key == key, tl.maximum(key, -3e38), -3e38)
    key = tl.where((expert < C.experts)[None, :], key, -float("inf"))
    chosen = _zeros(BLOCK, C.padded_experts).to(tl.int32)
    top_k: tl.constexpr = C.group_size * C.rows_per_cell
    for _ in tl.static_range(top_k):
        largest = expert[None, :] == tl.argmax(key, 1)[:, None]
        chosen = tl.where(largest, 1, chosen)
        key = tl.where(largest, -float("inf"), key)
    weight = _softmax(logit, chosen > 0)[0]
    return tl.where(real[:, None], chosen, 0), tl.where(real[:, None], weight, 0.0)


@triton.jit
@no_type_check
def _store_choices(chosen, weight, real, table_ptr, slot_ptr, weight_ptr, cell, num_cells, C):
    """Store weights, groups and ranks of the chosen experts; count the groups."""
    expert, here = tl.arange(0, C.padded_experts)[None, :], cell < num_cells
    nth = tl.cumsum(chosen, 1)
    top_k: tl.constexpr = C.group_size * C.rows_per_cell
    for j in tl.static_range(top_k):
        mark = (chosen > 0) & (nth == j + 1)
        at = cell * top_k + j
        tl.store(weight_ptr + at, tl.sum(tl.where(mark, weight, 0.0), 1), mask=here)
    if C.rows_per_cell == 1:
        at = table_ptr + C.groups + expert * C.group_size + nth - 1
        group = tl.sum(tl.load(at, mask=chosen > 0, other=0), 1).to(tl.int32)
        index = tl.arange(0, C.padded_groups)[None, :]
        in_group = ((group[:, None] == index) & real[:, None]).to(tl.int32)
        rank = tl.cumsum(in_group, 0) - in_group
        slot = group * BLOCK + tl.sum(tl.where(in_group > 0, rank, 0), 1)
        tl.store(slot_ptr + cell, tl.where(real, slot, -1), mask=here)
    else:
        in_group = chosen
        rank = tl.cumsum(in_group, 0) - in_group
        rows_per_cell: tl.constexpr = C.rows_per_cell
        for j in tl.static_range(rows_per_cell):
            mark = (chosen > 0) & (nth == j + 1)
            slot = tl.sum(tl.where(mark, expert * BLOCK + rank, 0), 1)
            tl.store(slot_ptr + cell * C.rows_per_cell + j, tl.where(real, slot, -1), mask=here)
    return tl.sum(in_group, 0)


@triton.jit(do_not_specialize=["num_cells", "cells_per_set"])
@no_type_check
def _route_kernel(
    x_ptr, router_ptr, noise_ptr, shift_ptr, epsilon_ptr, bias_ptr, mask_ptr, table_ptr,
    score_ptr, slot_ptr, weight_ptr, partial_ptr, num_cells, cells_per_set, width, C: tl.constexpr,
):  # fmt: skip
    """Route the cells of one block."""
    block = tl.program_id(0)
    cell = block * BLOCK + tl.arange(0, BLOCK)
    expert, group = tl.arange(0, C.padded_experts), tl.arange(0, C.padded_groups)
    real = cell < num_cells
    if mask_ptr is not None:
        real = real & (tl.load(mask_ptr + cell, mask=real, other=0) != 0)
    logit, noise_score = _scores(x_ptr, router_ptr, noise_ptr, cell, real, width, C)
    fits = (cell < num_cells)[:, None] & (expert < C.experts)[None, :]
    if shift_ptr is not None:
        shift_at = (cell // cells_per_set)[:, None] * C.experts + expert[None, :]
        logit += tl.load(shift_ptr + shift_at, mask=fits, other=0.0).to(tl.float32)
    matrices: tl.constexpr = 1 if noise_ptr is None else 2
    score = score_ptr + cell[:, None] * (matrices * C.experts) + expert[None, :]
    if noise_ptr is not None:
        std = tl.maximum(noise_score, 0.0) + tl.log(1 + tl.exp(-tl.abs(noise_score)))
        at = cell[:, None] * C.experts + expert[None, :]
        logit += tl.load(epsilon_ptr + at, mask=fits, other=0.0) * std
        tl.store(score + C.experts, noise_score, mask=fits)
    tl.store(score, logit, mask=fits)
    chosen, weight = _choose(logit, bias_ptr, real, C)
    group_counts = _store_choices(
        chosen, weight, real, table_ptr, slot_ptr, weight_ptr, cell, num_cells, C
    )
    counts = tl.sum(chosen, 0)
    share, partition = _softmax(logit, (expert < C.experts)[None, :])
    shares = tl.sum(tl.where(real[:, None], share, 0.0), 0)
    partial = partial_ptr + block * (C.groups + 2 * C.experts + 2)
    tl.store(partial + group, group_counts.to(tl.float32), mask=group < C.groups)
    tl.store(partial + C.groups + expert, counts.to(tl.float32), mask=expert < C.experts)
    tl.store(partial + C.groups + C.experts + expert, shares, mask=expert < C.experts)
    last = partial + C.groups + 2 * C.experts
    tl.store(last, tl.sum(tl.where(real, partition * partition, 0.0), 0))
    tl.store(last + 1, tl.sum(real.to(tl.float32), 0))


@triton.jit
@no_type_check
def _store_statistics(partial_ptr, statistics_ptr, num_blocks, C):
    """Form the statistics."""
    index = tl.arange(0, C.padded_experts)
    expert = index < C.experts
    padded: tl.constexpr = C.padded_experts
    counts = tl.zeros((padded,), tl.float32)
    shares = tl.zeros((padded,), tl.float32)
    square = tl.zeros((BLOCKS,), tl.float32)
    real = tl.zeros((BLOCKS,), tl.float32)
    for start in range(0, num_blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        row = partial_ptr + block * (C.groups + 2 * C.experts + 2) + C.groups
        inside = block < num_blocks
        fits = inside[:, None] & expert[None, :]
        at = row[:, None] + index[None, :]
        counts += tl.sum(tl.load(at, mask=fits, other=0.0), 0)
        shares += tl.sum(tl.load(at + C.experts, mask=fits, other=0.0), 0)
        square += tl.load(row + 2 * C.experts, mask=inside, other=0.0)
        real += tl.load(row + 2 * C.experts + 1, mask=inside, other=0.0)
    num_cells = tl.sum(real, 0)
    tl.store(statistics_ptr + index, counts, mask=expert)
    tl.store(statistics_ptr + C.experts + index, shares, mask=expert)
    even = C.experts / (tl.maximum(tl.sum(counts, 0), 1.0) * tl.maximum(num_cells, 1.0))
    last = statistics_ptr + 2 * C.experts
    tl.store(last, num_cells)
    tl.store(last + 1, tl.sum(counts * shares, 0) * even)
    tl.store(last + 2, tl.sum(square, 0) / tl.maximum(num_cells, 1.0))


@triton.jit
@no_type_check
def _round(from_ptr, to_ptr, part, size):
    """Copy NUMBERS numbers to another precision."""
    at = part.to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    number = tl.load(from_ptr + at, mask=at < size)
    tl.store(to_ptr + at, number.to(to_ptr.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["num_cells", "num_blocks"])
@no_type_check
def _send_kernel(
    partial_ptr, slot_ptr, x_ptr, plan_ptr, sent_ptr, statistics_ptr,
    up_ptr, down_ptr, rounded_up_ptr, rounded_down_ptr, num_cells, num_blocks, width, size,
    C: tl.constexpr,
):  # fmt: skip
    """Copy the cells of one block to their rows; programs past the blocks round the matrices.

    The first program forms the statistics too.
    """
    part = tl.program_id(0) - num_blocks
    if part < 0:
        program, group = tl.program_id(0), tl.arange(0, C.padded_groups)
        padded: tl.constexpr = C.padded_groups
        total = tl.zeros((padded,), tl.int32)
        before = tl.zeros((padded,), tl.int32)
        # Each program adds all blocks up: a launch for that alone would take longer.
        for start in range(0, num_blocks, BLOCKS):
            block = start + tl.arange(0, BLOCKS)
            at = partial_ptr + block[:, None] * (C.groups + 2 * C.experts + 2) + group[None, :]
            fits = (block < num_blocks)[:, None] & (group < C.groups)[None, :]
            counts = tl.load(at, mask=fits, other=0.0).to(tl.int32)
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where((block < program)[:, None], counts, 0), 0)
        ends = tl.cumsum(total, 0)
        base = ends - total + before
        cell = program * BLOCK + tl.arange(0, BLOCK)
        rows_per_cell: tl.constexpr = C.rows_per_cell
        for j in tl.static_range(rows_per_cell):
            assignment = cell * C.rows_per_cell + j
            slot = tl.load(slot_ptr + assignment, mask=cell < num_cells, other=-1)
            here = (slot // BLOCK)[:, None] == group[None, :]
            row = tl.sum(tl.where(here, base[None, :], 0), 1) + slot % BLOCK
            tl.store(plan_ptr + C.padded_groups + row, assignment, mask=slot >= 0)
            for start in range(0, width, C.columns):
                column = start + tl.arange(0, C.columns)
                fits = (slot >= 0)[:, None] & (column < width)[None, :]
                x = tl.load(x_ptr + cell.to(tl.int64)[:, None] * width + column[None, :], mask=fits)
                to = sent_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
                tl.store(to, x.to(sent_ptr.dtype.element_ty), mask=fits)
        if program == 0:
            tl.store(plan_ptr + group, ends)
            _store_statistics(partial_ptr, statistics_ptr, num_blocks, C)
    elif rounded_up_ptr is not None:
        parts = tl.cdiv(size, NUMBERS)
        if part < parts:
            _round(up_ptr, rounded_up_ptr, part, size)
        else:
            _round(down_ptr, rounded_down_ptr, part - parts, size)
