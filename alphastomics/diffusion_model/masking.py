"""Masked diffusion: seeds and ratios enter, which entries to hide leaves.

`random` hides each entry by itself. `block` hides one run of neighbouring entries of each cell, in
the order of the gene list and round its end. `structured` hides what goes missing together in real
data: a gene in all cells of a set, as one panel lacks it, and all coordinates of a cell, as a
dissociated cell lacks them. In each, the expected share of hidden entries is the ratio.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from alphastomics.config import MaskingConfig, MaskStrategy
from alphastomics.diffusion_model.counter_noise import Stream, uniform_numbers
from alphastomics.tasks import POSITION


class Hidden(NamedTuple):
    """Hidden entries of expression (B, N, G) and position (B, N, 3); None hides nothing."""

    expression: Tensor | None
    position: Tensor | None


# Draws numbers of [0, 1) of a shape for each set.
Uniform = Callable[[tuple[int, int]], Tensor]


def draw_mask(
    strategy: MaskStrategy,
    ratio: Float[Tensor, " B"],
    shape: tuple[int, int],
    draw: Uniform,
    *,
    whole: bool,
) -> Bool[Tensor, "B N F"]:
    """Draw the hidden entries of one modality; structured ones are `whole` cells, or columns."""
    num_cells, width = shape
    ratio = ratio[:, None, None]
    match strategy:
        case "random":
            return draw(shape) < ratio
        case "structured":
            kept = (num_cells, 1) if whole else (1, width)
            return (draw(kept) < ratio).expand(-1, *shape)
        case "block":
            numbers = draw((num_cells, 2))
            start = (numbers[..., :1] * width).long()
            # A run of length ratio x F: floor(r F + u) has the mean r F, whole number or not.
            length = (ratio * width + numbers[..., 1:]).long()
            return (torch.arange(width, device=start.device) - start) % width < length


def grown_ratio(ratio: float, settings: MaskingConfig, step: Int[Tensor, ""]) -> Float[Tensor, ""]:
    """Return the ratio of a step: growing from 0 over `progressive_steps` where asked for."""
    if not settings.progressive_masking:
        return torch.full_like(step, ratio, dtype=torch.float32)
    return ratio * (step / settings.progressive_steps).clamp(max=1)


def draw_masks(
    settings: MaskingConfig,
    seeds: Int64[Tensor, " B"],
    may_hide: Bool[Tensor, "B 2"],
    shape: tuple[int, int],
    step: Int[Tensor, ""],
) -> Hidden:
    """Draw which entries of a batch to hide.

    Parameters
    ----------
    settings
        Ratios, strategy and schedule.
    seeds
        Seed of each set.
    may_hide
        Whether anything of expression and of position of a set may be hidden.
    shape
        Cells of a set, and genes.
    step
        Training steps done.
    """
    num_cells, num_genes = shape
    ratios = settings.expression_mask_ratio, settings.position_mask_ratio
    sizes = (num_cells, num_genes), (num_cells, 3)
    streams = Stream.EXPRESSION_MASK, Stream.POSITION_MASK
    masks = []
    for modality, (ratio, size, stream) in enumerate(zip(ratios, sizes, streams, strict=True)):
        ratio_of_set = grown_ratio(ratio, settings, step) * may_hide[:, modality]
        # A gene is missing in all cells, as one panel lacks it; a cell lacks all coordinates.
        whole = modality == POSITION
        draw = partial(uniform_numbers, seeds, stream)
        masks.append(draw_mask(settings.mask_strategy, ratio_of_set, size, draw, whole=whole))
    return Hidden(*masks)
