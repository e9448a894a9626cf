"""The pairwise distance loss: two sets of positions enter, one number and its gradient leave.

L = sum over pairs i != j of real cells of (|q_i - q_j| - |p_i - p_j|)^2, over their number. The
N x N matrices are never held: the forward pass goes over them in tiles and adds up the loss and the
gradient at once, so that memory is O(N) and the backward pass is one multiplication.

With w_ij = 1 - |p_i - p_j| / |q_i - q_j|:  dL/dq_i = 4/M (q_i sum_j w_ij - sum_j w_ij q_j). Where
two predicted cells coincide w_ij is set to 0, a subgradient, so that no NaN arises.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

# Tiles of 2^16 pairs stay in a core's cache: larger ones were slower, and take more memory.
PAIRS_AT_A_TIME = 1 << 16


def distance_loss(
    predicted: Float[Tensor, "B N 3"],
    true: Float[Tensor, "B N 3"],
    node_mask: Bool[Tensor, "B N"],
) -> Float[Tensor, ""]:
    """Mean squared error of the distances between every two real cells of a set.

    All pairs of all sets weigh the same; without any pair the loss is 0. Gradients flow to
    `predicted` alone. Sums are taken in float32, or in float64 for float64 positions.
    """
    count = node_mask.sum(1).double()
    pairs = (count * (count - 1)).sum().clamp(min=1)
    total: Tensor = PairwiseError.apply(predicted, true.detach(), node_mask)  # type: ignore[no-untyped-call]
    return (total.double() / pairs).to(total.dtype)


class PairwiseError(torch.autograd.Function):
    """Sum over pairs of the squared error of distances, with the gradient found on the way."""

    @staticmethod
    def forward(ctx: Any, predicted: Tensor, true: Tensor, node_mask: Tensor) -> Tensor:
        """Return the sum; keep the gradient with respect to `predicted`."""
        exact = predicted.dtype if predicted.dtype == torch.float64 else torch.float32
        q, p = predicted.to(exact), true.to(exact)
        if predicted.is_cuda:
            from alphastomics.diffusion_model.distance_kernel import tiled_error_cuda

            total, gradient = tiled_error_cuda(q, p, node_mask)
        else:
            total, gradient = tiled_error(q, p, node_mask)
        ctx.save_for_backward(gradient)
        ctx.dtype = predicted.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        """Scale the gradient that the forward pass found."""
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream).to(ctx.dtype), None, None


def tiled_error(
    q: Float[Tensor, "B N 3"], p: Float[Tensor, "B N 3"], node_mask: Bool[Tensor, "B N"]
) -> tuple[Float[Tensor, ""], Float[Tensor, "B N 3"]]:
    """Sum of squared errors and its gradient, set by set, a block of rows at a time."""
    gradient = torch.zeros_like(q)
    total = q.new_zeros(())
    for index, real in enumerate(node_mask):
        cells = real.nonzero()[:, 0]
        if len(cells) > 1:
            error, part = _set_error(q[index, cells], p[index, cells])
            total = total + error
            gradient[index, cells] = part
    return total, gradient


def _set_error(
    q: Float[Tensor, "n 3"], p: Float[Tensor, "n 3"]
) -> tuple[Float[Tensor, ""], Float[Tensor, "n 3"]]:
    """Sum over all ordered pairs of one set, and its gradient."""
    rows = max(1, PAIRS_AT_A_TIME // len(q))
    total = q.new_zeros(())
    gradient = torch.empty_like(q)
    for start in range(0, len(q), rows):
        block = slice(start, start + rows)
        predicted = _distances(q[block], q)
        error = predicted - _distances(p[block], p)
        total = total + error.square().sum()
        # error / predicted = 1 - true / predicted, and 0 where the predicted distance is 0.
        weight = error.div_(predicted).masked_fill_(predicted == 0, 0)
        gradient[block] = q[block] * weight.sum(1, keepdim=True) - weight @ q
    return total, 4 * gradient


def _distances(rows: Float[Tensor, "m 3"], columns: Float[Tensor, "n 3"]) -> Float[Tensor, "m n"]:
    # Axis by axis: cdist's products of matrices lose all digits of near cells' distance, and its
    # exact mode is several times slower.
    squared = (rows[:, 0, None] - columns[:, 0]).square_()
    for axis in (1, 2):
        difference = rows[:, axis, None] - columns[:, axis]
        squared.addcmul_(difference, difference)
    return squared.sqrt_()
