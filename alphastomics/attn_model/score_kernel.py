"""The way back to the router on a GPU: gradients of mixed cells and weights enter, of scores leave.

Tiles and teams are those of `expert_kernel.py`; `gradient_kernel.py` has the rest of the way.
"""

from typing import no_type_check

import triton
import triton.language as tl

from alphastomics.attn_model.routing_kernel import _member, _softmax, _tile


@triton.jit
@no_type_check
def _chosen(
    weight_ptr, weight_grad_ptr, spot_ptr, packed, cell, real, num_cells, num_parts,
    LANES: tl.constexpr, MEMBERS: tl.constexpr, VISITS: tl.constexpr, CELLS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return by expert some cells' weights, and the weights' gradients times the weights."""
    lane = tl.arange(0, LANES)[None, :]
    weights = tl.zeros((ROWS, LANES), tl.float32)
    grads = tl.zeros((ROWS, LANES), tl.float32)
    for j in tl.static_range(MEMBERS * VISITS):
        at = cell * (MEMBERS * VISITS) + j
        weight = tl.load(weight_ptr + at, mask=real, other=0.0)
        grad = tl.zeros((ROWS,), tl.float32)
        for part in range(num_parts):
            from_part = weight_grad_ptr + part * (num_cells * MEMBERS * VISITS) + at
            grad += tl.load(from_part, mask=real, other=0.0)
        if VISITS == 1:
            mine = (lane == _member(packed, j)) & real[:, None]
        else:
            spot = tl.load(spot_ptr + at, mask=real, other=-CELLS)
            mine = lane == (spot // CELLS)[:, None]
        weights += tl.where(mine, weight[:, None], 0.0)
        grads += tl.where(mine, grad[:, None], 0.0)
    return weights, grads


@triton.jit
@no_type_check
def _logit_gradient(
    score_ptr, statistics_ptr, probability_grad_ptr, balance_grad_ptr, z_grad_ptr,
    weights, weight_grads, cell, real,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Bring the gradients of weights, probabilities and losses back to some cells' logits."""
    lane = tl.arange(0, LANES)
    expert = lane < EXPERTS
    fits = real[:, None] & expert[None, :]
    logit = tl.load(score_ptr + cell[:, None] * STRIDE + lane[None, :], mask=fits, other=0.0)
    share, partition = _softmax(logit, expert[None, :])
    # d(sum of p_e c_e)/dl = p (c - sum of p c), c the gradient of an expert's probability.
    upstream = tl.zeros((LANES,), tl.float32)
    if probability_grad_ptr is not None:
        upstream += tl.load(probability_grad_ptr + lane, mask=expert, other=0.0)
    there = tl.maximum(tl.load(statistics_ptr + 2 * EXPERTS), 1.0)
    if balance_grad_ptr is not None:
        counts = tl.load(statistics_ptr + lane, mask=expert, other=0.0)
        even = EXPERTS / (tl.maximum(tl.sum(counts, 0), 1.0) * there)
        upstream += tl.load(balance_grad_ptr) * even * counts
    grad = share * (upstream[None, :] - tl.sum(share * upstream[None, :], 1)[:, None])
    if z_grad_ptr is not None:
        grad += share * (2 * tl.load(z_grad_ptr) / there * partition)[:, None]
    # The same for the softmax over the chosen, whose gradients come times the weights.
    grad += weight_grads - weights * tl.sum(weight_grads, 1)[:, None]
    return tl.where(fits, grad, 0.0)


@triton.jit
@no_type_check
def _bias_gradient(
    grad_ptr, bias_ptr, sent_grad_ptr, partial_ptr, own, cell, row, here, width,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Send a tile's gradients, and store its share of the last biases'; return gradient x biases.

    `own` (LANES, ROWS) has the weights of each row's experts.
    """
    lane = tl.arange(0, LANES)
    biased = tl.zeros((ROWS, LANES), tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        fits = here[:, None] & inside[None, :]
        from_cell = grad_ptr + cell.to(tl.int64)[:, None] * width + column[None, :]
        grad = tl.load(from_cell, mask=fits, other=0.0)
        to = sent_grad_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(to, grad, mask=fits)
        from_bias = bias_ptr + lane[None, :] * width + column[:, None]
        there = inside[:, None] & (lane < EXPERTS)[None, :]
        bias = tl.load(from_bias, mask=there, other=0.0).to(grad.dtype)
        biased = tl.dot(grad, bias, biased, input_precision="tf32x3")
        share = tl.dot(own, grad, input_precision="tf32x3")
        taken = (lane < EXPERTS)[:, None] & inside[None, :]
        tl.store(partial_ptr + lane[:, None] * width + column[None, :], share, mask=taken)
    return biased


@triton.jit
@no_type_check
def _spread_gradient(
    score_ptr, draw_ptr, logit_grad, cell, fits, EXPERTS: tl.constexpr, LANES: tl.constexpr
):
    """Bring gradients of logits to the scale of the noise, before its softplus."""
    lane = tl.arange(0, LANES)[None, :]
    spread_at = score_ptr + EXPERTS + cell[:, None] * (2 * EXPERTS) + lane
    slope = tl.sigmoid(tl.load(spread_at, mask=fits, other=0.0))
    draw = tl.load(draw_ptr + cell[:, None] * EXPERTS + lane, mask=fits, other=0.0)
    return logit_grad * slope * draw


@triton.jit
@no_type_check
def _router_gradient(
    x_ptr, partial_ptr, logit_turned, spread_turned, row, here, width,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, NOISY: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store a tile's share of the router's and the noise's gradients."""
    lane = tl.arange(0, LANES)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        from_row = x_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
        x = tl.load(from_row, mask=here[:, None] & inside[None, :], other=0.0)
        to = partial_ptr + lane[:, None] * width + column[None, :]
        taken = (lane < EXPERTS)[:, None] & inside[None, :]
        tl.store(to, tl.dot(logit_turned, x, input_precision="tf32x3"), mask=taken)
        if NOISY:
            product = tl.dot(spread_turned, x, input_precision="tf32x3")
            tl.store(to + EXPERTS * width, product, mask=taken)


@triton.jit(
    do_not_specialize=["num_cells", "num_parts"],
    # Those of a model's layers lie side by side.
    do_not_specialize_on_alignment=["probability_grad_ptr", "balance_grad_ptr", "z_grad_ptr"],
)
@no_type_check
def _score_gradient_kernel(
    grad_ptr, x_ptr, bias_ptr, score_ptr, draw_ptr, weight_ptr, weight_grad_ptr, spot_ptr,
    statistics_ptr, probability_grad_ptr, balance_grad_ptr, z_grad_ptr, table_ptr, plan_ptr,
    sent_grad_ptr, score_grad_ptr, logit_grad_ptr, partial_ptr, num_cells, num_parts, width,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, CELLS: tl.constexpr,
    TEAMS: tl.constexpr, TEAM_LANES: tl.constexpr, MEMBERS: tl.constexpr, VISITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Find the gradients of a tile's scores, and its share of the routers' and last biases'.

    A cell with several rows has its scores in the first. Gradients of mixed cells are sent, as
    cells were, for the kernels to come.
    """
    tile = tl.program_id(0)
    team, first, end = _tile(plan_ptr, tile, TEAMS, TEAM_LANES, ROWS)
    if team < TEAMS:
        row = first + tl.arange(0, ROWS)
        here = row < end
        visit = tl.load(plan_ptr + TEAM_LANES + row, mask=here, other=0)
        cell, real = visit // VISITS, here & (visit % VISITS == 0)
        packed, lane = tl.load(table_ptr + team), tl.arange(0, LANES)
        matrices: tl.constexpr = 1 if draw_ptr is None else 2
        dtype = score_grad_ptr.dtype.element_ty
        weights, weight_grads = _chosen(
            weight_ptr, weight_grad_ptr, spot_ptr, packed, cell, real, num_cells, num_parts,
            LANES, MEMBERS, VISITS, CELLS, ROWS,
        )  # fmt: skip
        own = weights
        if VISITS > 1:
            weight = tl.load(weight_ptr + visit, mask=here, other=0.0)
            own = tl.where(lane[None, :] == _member(packed, 0), weight[:, None], 0.0)
        own = tl.trans(own.to(dtype))
        partial = partial_ptr + tile.to(tl.int64) * ((matrices + 1) * EXPERTS) * width
        biased = _bias_gradient(
            grad_ptr, bias_ptr, sent_grad_ptr, partial + matrices * EXPERTS * width,
            own, cell, row, here, width, EXPERTS, LANES, ROWS, COLUMNS,
        )  # fmt: skip
        logit_grad = _logit_gradient(
            score_ptr, statistics_ptr, probability_grad_ptr, balance_grad_ptr, z_grad_ptr,
            weights, weight_grads + weights * biased, cell, real,
            EXPERTS, LANES, matrices * EXPERTS,
        )  # fmt: skip
        fits = real[:, None] & (lane < EXPERTS)[None, :]
        if logit_grad_ptr is not None:
            at = cell[:, None] * EXPERTS + lane[None, :]
            tl.store(logit_grad_ptr + at, logit_grad, mask=fits)
        score_grad = score_grad_ptr + row[:, None] * (matrices * LANES) + lane[None, :]
        tl.store(score_grad, logit_grad.to(dtype), mask=here[:, None])
        logit_turned = tl.trans(logit_grad.to(dtype))
        spread_turned = logit_turned
        if draw_ptr is not None:
            spread_grad = _spread_gradient(
                score_ptr, draw_ptr, logit_grad, cell, fits, EXPERTS, LANES
            )
            tl.store(score_grad + LANES, spread_grad.to(dtype), mask=here[:, None])
            spread_turned = tl.trans(spread_grad.to(dtype))
        _router_gradient(
            x_ptr, partial, logit_turned, spread_turned, row, here, width,
            EXPERTS, LANES, matrices == 2, COLUMNS,
        )  # fmt: skip
