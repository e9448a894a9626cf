"""Masked diffusion: shapes and ratios enter, which entries to hide leaves.

`random` hides each entry by itself. `block` hides one run of neighbouring entries of each cell, in
the order of the gene list and round its end. `structured` hides what goes missing together in real
data: a gene in all cells of a set, as one panel lacks it, and all coordinates of a cell, as a
dissociated cell lacks them. In each, the expected share of hidden entries is the ratio.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Generator, Tensor

from alphastomics.config import MaskingConfig


class Hidden(NamedTuple):
    """Hidden entries of expression (B, N, G) and position (B, N, 3); None hides nothing."""

    expression: Tensor | None
    position: Tensor | None


def uniform(shape: tuple[int, ...], generator: Generator | None, device: torch.device) -> Tensor:
    """Draw from [0, 1) on the generator's device, so that one seed serves every device."""
    draw_device = device if generator is None else generator.device
    return torch.rand(shape, generator=generator, device=draw_device).to(device)


def random_mask(
    shape: tuple[int, int, int], ratio: float, generator: Generator | None, device: torch.device
) -> Bool[Tensor, "B N F"]:
    """Hide each entry with probability `ratio`."""
    return uniform(shape, generator, device) < ratio


def block_mask(
    shape: tuple[int, int, int], ratio: float, generator: Generator | None, device: torch.device
) -> Bool[Tensor, "B N F"]:
    """Hide a run of entries of each cell: of length ratio x F, rounded up or down at random."""
    num_sets, num_cells, width = shape
    start = (uniform((num_sets, num_cells, 1), generator, device) * width).long()
    # floor(r F + u) has the mean r F, whole number or not.
    length = (ratio * width + uniform((num_sets, num_cells, 1), generator, device)).long()
    offset = (torch.arange(width, device=device) - start) % width
    return offset < length


def structured_mask(
    shape: tuple[int, int, int],
    ratio: float,
    generator: Generator | None,
    device: torch.device,
    *,
    whole_cells: bool,
) -> Bool[Tensor, "B N F"]:
    """Hide whole columns of a set (genes), or whole rows (positions of cells)."""
    num_sets, num_cells, width = shape
    kept_shape = (num_sets, num_cells, 1) if whole_cells else (num_sets, 1, width)
    return (uniform(kept_shape, generator, device) < ratio).expand(shape)


def grown_ratio(ratio: float, settings: MaskingConfig, step: int) -> float:
    """Return the ratio of a step: growing from 0 over `progressive_steps` where asked for."""
    if not settings.progressive_masking:
        return ratio
    return ratio * min(1.0, step / settings.progressive_steps)


def hides(settings: MaskingConfig, generator: Generator | None, device: torch.device) -> bool:
    """Draw whether anything is hidden at all."""
    if not settings.enable:
        return False
    return bool(uniform((1,), generator, device) < settings.masking_probability)


def draw_hidden(
    settings: MaskingConfig,
    expression: Tensor,
    noised: Bool[Tensor, "B 2"],
    step: int,
    generator: Generator | None,
) -> Hidden:
    """Draw which entries of a batch to hide.

    Parameters
    ----------
    settings
        Ratios, strategy and schedule.
    expression
        The expression of the batch, for its shape and device.
    noised
        Whether expression and position of each set were noised: a given modality is not hidden.
    step
        Training steps done.
    generator
        Source of randomness.
    """
    if not hides(settings, generator, expression.device):
        return Hidden(None, None)
    masks = draw_masks(settings, expression, step, generator)
    return Hidden(*(mask & noised[:, index, None, None] for index, mask in enumerate(masks)))


def draw_masks(
    settings: MaskingConfig, expression: Tensor, step: int, generator: Generator | None
) -> tuple[Bool[Tensor, "B N G"], Bool[Tensor, "B N 3"]]:
    """Draw which entries to hide, whether they were noised or not."""
    device = expression.device
    num_sets, num_cells, num_genes = expression.shape
    ratios = [
        grown_ratio(ratio, settings, step)
        for ratio in (settings.expression_mask_ratio, settings.position_mask_ratio)
    ]
    masks = []
    for ratio, width, whole_cells in zip(ratios, (num_genes, 3), (False, True), strict=True):
        shape = (num_sets, num_cells, width)
        if settings.mask_strategy == "structured":
            mask = structured_mask(shape, ratio, generator, device, whole_cells=whole_cells)
        elif settings.mask_strategy == "block":
            mask = block_mask(shape, ratio, generator, device)
        else:
            mask = random_mask(shape, ratio, generator, device)
        masks.append(mask)
    return masks[0], masks[1]
