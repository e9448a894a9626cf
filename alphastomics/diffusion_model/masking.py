"""Masked diffusion: shapes and ratios enter, which entries to hide leaves.

`random` hides each entry by itself. `block` hides one run of neighbouring entries of each cell, in
the order of the gene list and round its end. `structured` hides what goes missing together in real
data: a gene in all cells of a set, as one panel lacks it, and all coordinates of a cell, as a
dissociated cell lacks them. In each, the expected share of hidden entries is the ratio.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Generator, Tensor

from alphastomics.config import MaskingConfig, MaskStrategy
from alphastomics.tasks import POSITION


class Hidden(NamedTuple):
    """Hidden entries of expression (B, N, G) and position (B, N, 3); None hides nothing."""

    expression: Tensor | None
    position: Tensor | None


Uniform = Callable[[tuple[int, ...]], Tensor]  # draws numbers of [0, 1) of a shape


def draw_mask(
    strategy: MaskStrategy, shape: tuple[int, int, int], ratio: float, draw: Uniform, *, whole: bool
) -> Bool[Tensor, "B N F"]:
    """Draw the hidden entries of one modality; structured ones are `whole` cells, or columns."""
    num_sets, num_cells, width = shape
    match strategy:
        case "random":
            return draw(shape) < ratio
        case "structured":
            kept = (num_sets, num_cells, 1) if whole else (num_sets, 1, width)
            return (draw(kept) < ratio).expand(shape)
        case "block":
            start = (draw((num_sets, num_cells, 1)) * width).long()
            # A run of length ratio x F: floor(r F + u) has the mean r F, whole number or not.
            length = (ratio * width + draw((num_sets, num_cells, 1))).long()
            return (torch.arange(width, device=start.device) - start) % width < length


def grown_ratio(ratio: float, settings: MaskingConfig, step: int) -> float:
    """Return the ratio of a step: growing from 0 over `progressive_steps` where asked for."""
    if not settings.progressive_masking:
        return ratio
    return ratio * min(1.0, step / settings.progressive_steps)


def draw_masks(
    settings: MaskingConfig, expression: Tensor, step: int, generator: Generator | None
) -> tuple[Bool[Tensor, "B N G"], Bool[Tensor, "B N 3"]]:
    """Draw which entries to hide, whether they were noised or not."""
    # On the generator's device, so that one seed serves every device.
    device = expression.device if generator is None else generator.device

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=generator, device=device).to(expression.device)

    num_sets, num_cells, num_genes = expression.shape
    masks = []
    for modality, (ratio, width) in enumerate(
        ((settings.expression_mask_ratio, num_genes), (settings.position_mask_ratio, 3))
    ):
        shape, grown = (num_sets, num_cells, width), grown_ratio(ratio, settings, step)
        # A gene is missing in all cells, as one panel lacks it; a cell lacks all coordinates.
        whole = modality == POSITION
        masks.append(draw_mask(settings.mask_strategy, shape, grown, draw, whole=whole))
    return masks[0], masks[1]
