"""Sends cells to their experts and back: one sort, grouped matrix products, no cell dropped.

Cells and choices enter, cells sorted by expert leave; both directions are gathers along a
permutation, so that forward and backward are the same on every run.
"""

from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

# Public since torch 2.10, private in 2.9.
_GROUPED_MM = getattr(F, "grouped_mm", getattr(torch, "_grouped_mm", None))
_GROUPED_MM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_GROUPED_MM_ALIGNMENT_BYTES = 16


class DispatchPlan(NamedTuple):
    """The row of each of the T x k assignments.

    `order` (T k,) lists assignments by expert, `inverse` (T k,) undoes it, and `ends` (E,) has the
    row where each expert's assignments end.
    """

    order: Tensor
    inverse: Tensor
    ends: Tensor


def plan_dispatch(choice: Int[Tensor, "T k"], num_experts: int) -> DispatchPlan:
    """Sort the assignments by expert, and by cell within an expert."""
    # Short keys: a radix sort on a GPU takes time in proportion to their bits.
    expert, order = choice.flatten().to(torch.int16).sort(stable=True)
    rows = torch.arange(len(order), device=order.device)
    inverse = torch.empty_like(order).scatter(0, order, rows)
    experts = torch.arange(num_experts, device=order.device, dtype=expert.dtype)
    ends = torch.searchsorted(expert, experts, right=True, out_int32=True)
    return DispatchPlan(order, inverse, ends)


class _Send(torch.autograd.Function):
    """Copy each cell to its k rows; backward adds up the k gradients of a cell."""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return cells.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        grad = rearrange(grads[0].index_select(0, inverse), "(t k) d -> t k d", k=ctx.top_k)
        return grad.sum(1), None, None, None


class _Return(torch.autograd.Function):
    """Put results back in the order of cells; backward sorts the gradient by expert again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grads[0].index_select(0, order), None, None


def send(cells: Float[Tensor, "T D"], plan: DispatchPlan, top_k: int) -> Float[Tensor, "S D"]:
    """Copy each cell to the rows of its k assignments, S = T k."""
    sent: Tensor = _Send.apply(cells, plan.order, plan.inverse, top_k)  # type: ignore[no-untyped-call]
    return sent


def collect(rows: Float[Tensor, "S D"], plan: DispatchPlan, top_k: int) -> Float[Tensor, "T k D"]:
    """Bring the k results of each cell back together."""
    returned: Tensor = _Return.apply(rows, plan.order, plan.inverse)  # type: ignore[no-untyped-call]
    return rearrange(returned, "(t k) d -> t k d", k=top_k)


def with_bias(
    cells: Float[Tensor, "T K"], weight: Float[Tensor, "E K M"], bias: Float[Tensor, "E M"]
) -> tuple[Float[Tensor, "T L"], Float[Tensor, "E L M"]]:
    """Give each cell a 1 and each matrix its bias as a row, so that the product adds the bias.

    A bias added afterwards would read and write all hidden states once more. The rest of
    the new columns is zero: they keep the rows on the grid that grouped products ask for.
    """
    extra = max(1, _GROUPED_MM_ALIGNMENT_BYTES // cells.element_size())
    ones = torch.ones_like(cells[:, :1])
    wider = torch.cat([cells, ones, ones.new_zeros(len(cells), extra - 1)], dim=1)
    rows = torch.cat([bias[:, None], bias.new_zeros(len(bias), extra - 1, bias.shape[1])], dim=1)
    return wider, torch.cat([weight, rows], dim=1)


def grouped_product(
    rows: Float[Tensor, "S K"], weight: Float[Tensor, "E K M"], ends: Int[Tensor, " E"]
) -> Float[Tensor, "S M"]:
    """Multiply each expert's run of rows by that expert's matrix."""
    dtype = compute_dtype(rows)
    rows, weight = rows.to(dtype), weight.to(dtype)
    if _GROUPED_MM is not None and _grouped_mm_serves(weight):
        product: Tensor = _GROUPED_MM(rows, weight, offs=ends)
        return product
    # One product an expert: float64, widths off the 16-byte grid, and float32 under compile.
    lengths = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    runs = torch.split(rows, lengths)
    return torch.cat([run @ matrix for run, matrix in zip(runs, weight.unbind(), strict=True)])


def compute_dtype(value: Float[Tensor, "*shape"]) -> torch.dtype:
    """Return the dtype in which torch would multiply `value`: autocast's where it is on."""
    device = value.device.type
    if value.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return value.dtype


def _grouped_mm_serves(weight: Float[Tensor, "E K M"]) -> bool:
    """Tell whether torch's grouped product takes these widths in this precision."""
    if weight.dtype not in _GROUPED_MM_DTYPES:
        return False
    if weight.dtype == torch.float32 and torch.compiler.is_compiling():
        return False  # inductor lowers it for half precision only
    rows = (weight.shape[1] * weight.element_size(), weight.shape[2] * weight.element_size())
    return all(size % _GROUPED_MM_ALIGNMENT_BYTES == 0 for size in rows)
