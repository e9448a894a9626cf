"""Expression: generated and true values of the same cells enter, errors and correlations leave.

Only measured entries count: what a slice's panel lacks is neither right nor wrong. Rule for all
correlations: where the truth is constant nothing could be predicted and the value is NaN, which
`summary` leaves out; where only the prediction is constant it has found nothing: the value is 0.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from alphastomics.errors import InputError
from alphastomics.evaluation.arrays import (
    Array,
    as_tensor,
    over_blocks,
    require_enough_cells,
    require_finite,
    require_same_shape,
    spans,
)


class Summary(NamedTuple):
    """Mean and median over the cells or genes for which a value is defined."""

    mean: float
    median: float
    num_defined: int


def summary(values: Float[Tensor, " K"], what: str) -> Summary:
    """Average the values that are no NaN; refuse when there are none."""
    defined = values[~torch.isnan(values)]
    if len(defined) == 0:
        raise InputError(
            f"{what}: undefined for all {len(values)}, since the truth is constant. "
            "Check that the true values are the right layer, or leave this metric out."
        )
    # Not Tensor.median, which takes the lower of the two middle values.
    return Summary(float(defined.mean()), float(defined.quantile(0.5)), len(defined))


def expression_mse(
    predicted: Float[Array, "N G"], true: Float[Array, "N G"], measured: Bool[Array, "#N G"]
) -> float:
    """Mean over measured entries of (x - x_hat)^2: section 8's expression error."""
    x, y, mask = _checked(predicted, true, measured)
    mask = mask.expand_as(x)

    def errors(blocks: list[slice]) -> list[float]:
        squared = ((x[rows].double() - y[rows].double()).square_() for rows in blocks)
        parts = zip(blocks, squared, strict=True)
        return [float(torch.where(mask[rows], part, 0).sum()) for rows, part in parts]

    shares = over_blocks(errors, spans(x.shape[0], x.shape[1], x.device), x.device)
    # Exactly rounded: the number of threads changes no digit.
    return math.fsum(error for share in shares for error in share) / int(mask.sum())


def gene_correlations(
    predicted: Float[Array, "N G"], true: Float[Array, "N G"], measured: Bool[Array, "#N G"]
) -> Float[Tensor, " G"]:
    """Pearson r of each gene over the cells in which it was measured."""
    x, y, mask = _checked(predicted, true, measured)
    return _by_column(_pearson, x, y, mask.expand_as(x))


def cell_correlations(
    predicted: Float[Array, "N G"], true: Float[Array, "N G"], measured: Bool[Array, "#N G"]
) -> Float[Tensor, " N"]:
    """Pearson r of each cell over its measured genes."""
    x, y, mask = _checked(predicted, true, measured)
    return _by_column(_pearson, x.T, y.T, mask.expand_as(x).T)


def cell_cosines(
    predicted: Float[Array, "N G"], true: Float[Array, "N G"], measured: Bool[Array, "#N G"]
) -> Float[Tensor, " N"]:
    """Cosine of each cell's angle over its measured genes: x . y / |x| |y|."""
    x, y, mask = _checked(predicted, true, measured)
    return _by_column(_cosine, x.T, y.T, mask.expand_as(x).T)


def _checked(
    predicted: Float[Array, "N G"], true: Float[Array, "N G"], measured: Bool[Array, "#N G"]
) -> tuple[Float[Tensor, "N G"], Float[Tensor, "N G"], Bool[Tensor, "#N G"]]:
    """Wrap the arrays on one device; measured values must be finite, others may be anything."""
    require_same_shape(predicted, true, "expression values")
    y = as_tensor(true)
    x, mask = as_tensor(predicted).to(y.device), torch.as_tensor(measured, device=y.device)
    require_enough_cells(len(y), "expression", least=1)
    if not bool(mask.any()):
        raise InputError("expression: no gene is marked as measured, so that none can be scored.")
    require_finite(torch.isfinite(x) | ~mask, "predicted expression")
    require_finite(torch.isfinite(y) | ~mask, "true expression")
    return x, y, mask


def _by_column(
    score: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, y: Tensor, mask: Tensor
) -> Float[Tensor, " K"]:
    """Score the columns, a block of them at a time; unmeasured entries become 0."""
    result = torch.empty(x.shape[1], dtype=torch.float64, device=x.device)

    def fill(blocks: list[slice]) -> None:
        for part in blocks:
            real = mask[:, part]
            dx, dy = (torch.where(real, values[:, part].double(), 0) for values in (x, y))
            result[part] = score(dx, dy, real)

    over_blocks(fill, spans(x.shape[1], x.shape[0], x.device), x.device)
    return result


def _pearson(
    x: Float[Tensor, "M K"], y: Float[Tensor, "M K"], real: Bool[Tensor, "M K"]
) -> Float[Tensor, " K"]:
    """Pearson r: the cosine of x - mean x and y - mean y, over the real entries of a column."""
    constant = [_is_constant(values, real) for values in (x, y)]
    count = real.sum(0).clamp(min=1)
    dx, dy = (torch.where(real, values - values.sum(0) / count, 0) for values in (x, y))
    return _ratio(dx, dy, *constant)


def _cosine(
    x: Float[Tensor, "M K"], y: Float[Tensor, "M K"], real: Bool[Tensor, "M K"]
) -> Float[Tensor, " K"]:
    return _ratio(x, y, (x == 0).all(0), (y == 0).all(0))


def _ratio(
    x: Float[Tensor, "M K"],
    y: Float[Tensor, "M K"],
    constant_x: Bool[Tensor, " K"],
    constant_y: Bool[Tensor, " K"],
) -> Float[Tensor, " K"]:
    """Cosine x . y / |x| |y|; 0 where x says nothing, NaN where y does not."""
    # Scaled to 1 first: squares of tiny values would vanish.
    x, y = (values / values.abs().amax(0).clamp(min=1e-300) for values in (x, y))
    cosine = (x * y).sum(0) / (x.square().sum(0) * y.square().sum(0)).sqrt()
    return cosine.clamp(-1, 1).masked_fill(constant_x, 0).masked_fill(constant_y, torch.nan)


def _is_constant(values: Float[Tensor, "M K"], real: Bool[Tensor, "M K"]) -> Bool[Tensor, " K"]:
    # By the extremes: the variance of a constant is seldom exactly 0 after rounding.
    high = torch.where(real, values, -torch.inf).amax(0)
    low = torch.where(real, values, torch.inf).amin(0)
    return high <= low
