"""The router's gradients on a GPU: those of mixed cells and weights enter, those of scores leave.

Tiles and expert groups are those of `expert_kernel.py`; `C` are the constants of `sizes.py`.
"""

from typing import no_type_check

import triton
import triton.language as tl

from alphastomics.attn_model.kernels.routing_kernel import BLOCK, _expert, _softmax, _tile, _zeros


@triton.jit
@no_type_check
def _weights(weight_ptr, weight_grad_ptr, slot_ptr, packed, cell, real, num_cells, num_parts, C):
    """Return by expert some cells' weights, and the weights' gradients times the weights."""
    expert = tl.arange(0, C.padded_experts)[None, :]
    weights = _zeros(C.rows, C.padded_experts)
    grads = _zeros(C.rows, C.padded_experts)
    rows: tl.constexpr = C.rows
    top_k: tl.constexpr = C.group_size * C.rows_per_cell
    for j in tl.static_range(top_k):
        at = cell * top_k + j
        weight = tl.load(weight_ptr + at, mask=real, other=0.0)
        grad = tl.zeros((rows,), tl.float32)
        for part in range(num_parts):
            from_part = weight_grad_ptr + part * (num_cells * top_k) + at
            grad += tl.load(from_part, mask=real, other=0.0)
        if C.rows_per_cell == 1:
            chosen = (expert == _expert(packed, j)) & real[:, None]
        else:
            slot = tl.load(slot_ptr + at, mask=real, other=-BLOCK)
            chosen = expert == (slot // BLOCK)[:, None]
        weights += tl.where(chosen, weight[:, None], 0.0)
        grads += tl.where(chosen, grad[:, None], 0.0)
    return weights, grads


@triton.jit
@no_type_check
def _logit_gradient(
    score_ptr, statistics_ptr, probability_grad_ptr, balance_grad_ptr, z_grad_ptr,
    weights, weight_grads, cell, real, stride, C,
):  # fmt: skip
    """Form the gradients of some cells' logits from those of weights, probabilities and losses."""
    index = tl.arange(0, C.padded_experts)
    expert = index < C.experts
    fits = real[:, None] & expert[None, :]
    logit = tl.load(score_ptr + cell[:, None] * stride + index[None, :], mask=fits, other=0.0)
    share, partition = _softmax(logit, expert[None, :])
    # d(sum of p_e c_e)/dl = p (c - sum of p c), c the gradient of an expert's probability.
    padded: tl.constexpr = C.padded_experts
    upstream = tl.zeros((padded,), tl.float32)
    if probability_grad_ptr is not None:
        upstream += tl.load(probability_grad_ptr + index, mask=expert, other=0.0)
    num_real = tl.maximum(tl.load(statistics_ptr + 2 * C.experts), 1.0)
    if balance_grad_ptr is not None:
        counts = tl.load(statistics_ptr + index, mask=expert, other=0.0)
        even = C.experts / (tl.maximum(tl.sum(counts, 0), 1.0) * num_real)
        upstream += tl.load(balance_grad_ptr) * even * counts
    grad = share * (upstream[None, :] - tl.sum(share * upstream[None, :], 1)[:, None])
    if z_grad_ptr is not None:
        grad += share * (2 * tl.load(z_grad_ptr) / num_real * partition)[:, None]
    # The same for the softmax over the chosen, whose gradients come times the weights.
    grad += weight_grads - weights * tl.sum(weight_grads, 1)[:, None]
    return tl.where(fits, grad, 0.0)


@triton.jit
@no_type_check
def _bias_gradient(grad_ptr, bias_ptr, sent_grad_ptr, partial_ptr, own, cell, row, here, width, C):
    """Send a tile's gradients, and store its share of the last biases'; return gradient x biases.

    `own` (padded experts, rows) has the weights of each row's experts.
    """
    expert = tl.arange(0, C.padded_experts)
    biased = _zeros(C.rows, C.padded_experts)
    for start in range(0, width, C.columns):
        column = start + tl.arange(0, C.columns)
        inside = column < width
        fits = here[:, None] & inside[None, :]
        from_cell = grad_ptr + cell.to(tl.int64)[:, None] * width + column[None, :]
        grad = tl.load(from_cell, mask=fits, other=0.0)
        to = sent_grad_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(to, grad, mask=fits)
        from_bias = bias_ptr + expert[None, :] * width + column[:, None]
        fits = inside[:, None] & (expert < C.experts)[None, :]
        bias = tl.load(from_bias, mask=fits, other=0.0).to(grad.dtype)
        biased = tl.dot(grad, bias, biased, input_precision="tf32x3")
        share = tl.dot(own, grad, input_precision="tf32x3")
        fits = (expert < C.experts)[:, None] & inside[None, :]
        tl.store(partial_ptr + expert[:, None] * width + column[None, :], share, mask=fits)
    return biased


@triton.jit
@no_type_check
def _router_gradient(x_ptr, partial_ptr, logit_grad, noise_grad, row, here, width, NOISY, C):
    """Store a tile's share of the router's and the noise's gradients."""
    expert = tl.arange(0, C.padded_experts)
    for start in range(0, width, C.columns):
        column = start + tl.arange(0, C.columns)
        inside = column < width
        from_row = x_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
        x = tl.load(from_row, mask=here[:, None] & inside[None, :], other=0.0)
        to = partial_ptr + expert[:, None] * width + column[None, :]
        fits = (expert < C.experts)[:, None] & inside[None, :]
        tl.store(to, tl.dot(logit_grad, x, input_precision="tf32x3"), mask=fits)
        if NOISY:
            product = tl.dot(noise_grad, x, input_precision="tf32x3")
            tl.store(to + C.experts * width, product, mask=fits)


@triton.jit(
    do_not_specialize=["num_cells", "num_parts"],
    # Those of a model's layers lie side by side.
    do_not_specialize_on_alignment=["probability_grad_ptr", "balance_grad_ptr", "z_grad_ptr"],
)
@no_type_check
def _score_gradient_kernel(
    grad_ptr, x_ptr, bias_ptr, score_ptr, epsilon_ptr, weight_ptr, weight_grad_ptr, slot_ptr,
    statistics_ptr, probability_grad_ptr, balance_grad_ptr, z_grad_ptr, table_ptr, plan_ptr,
    sent_grad_ptr, score_grad_ptr, logit_grad_ptr, partial_ptr, num_cells, num_parts, width,
    C: tl.constexpr,
):  # fmt: skip
    """Form the gradients of a tile's scores, and its share of the routers' and last biases'.

    A cell with several rows has its scores in the first. Gradients of mixed cells are sent, as
    cells were, for the kernels that follow.
    """
    tile = tl.program_id(0)
    group, first, end = _tile(plan_ptr, tile, C.rows, C)
    if group < C.groups:
        row = first + tl.arange(0, C.rows)
        here = row < end
        assignment = tl.load(plan_ptr + C.padded_groups + row, mask=here, other=0)
        cell, real = assignment // C.rows_per_cell, here & (assignment % C.rows_per_cell == 0)
        packed, expert = tl.load(table_ptr + group), tl.arange(0, C.padded_experts)
        matrices: tl.constexpr = 1 if epsilon_ptr is None else 2
        dtype = score_grad_ptr.dtype.element_ty
        weights, weight_grads = _weights(
            weight_ptr, weight_grad_ptr, slot_ptr, packed, cell, real, num_cells, num_parts, C
        )
        own = weights
        if C.rows_per_cell > 1:
            weight = tl.load(weight_ptr + assignment, mask=here, other=0.0)
            own = tl.where(expert[None, :] == _expert(packed, 0), weight[:, None], 0.0)
        own = tl.trans(own.to(dtype))
        partial = partial_ptr + tile.to(tl.int64) * ((matrices + 1) * C.experts) * width
        biased = _bias_gradient(
            grad_ptr, bias_ptr, sent_grad_ptr, partial + matrices * C.experts * width,
            own, cell, row, here, width, C,
        )  # fmt: skip
        logit_grad = _logit_gradient(
            score_ptr, statistics_ptr, probability_grad_ptr, balance_grad_ptr, z_grad_ptr,
            weights, weight_grads + weights * biased, cell, real, matrices * C.experts, C,
        )  # fmt: skip
        fits = real[:, None] & (expert < C.experts)[None, :]
        at = cell[:, None] * C.experts + expert[None, :]
        if logit_grad_ptr is not None:
            tl.store(logit_grad_ptr + at, logit_grad, mask=fits)
        to = score_grad_ptr + row[:, None] * (matrices * C.padded_experts) + expert[None, :]
        tl.store(to, logit_grad.to(dtype), mask=here[:, None])
        transposed = tl.trans(logit_grad.to(dtype))
        noise_transposed = transposed
        if epsilon_ptr is not None:
            # Of the noise's scale, before its softplus.
            score_at = score_ptr + C.experts + cell[:, None] * (2 * C.experts) + expert[None, :]
            slope = tl.sigmoid(tl.load(score_at, mask=fits, other=0.0))
            noise_grad = logit_grad * slope * tl.load(epsilon_ptr + at, mask=fits, other=0.0)
            tl.store(to + C.padded_experts, noise_grad.to(dtype), mask=here[:, None])
            noise_transposed = tl.trans(noise_grad.to(dtype))
        _router_gradient(
            x_ptr, partial, transposed, noise_transposed, row, here, width, matrices == 2, C
        )
