"""Embeddings by the count model: which mode, on which scale, and the surroundings of each cell.

A cell's latent says what it expresses; the mean latent of its nearest neighbours says where it is.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int
from scipy.spatial import cKDTree
from torch import Tensor

from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.errors import InputError
from alphastomics.extract.files import BLOCK_ROWS, stored

logger = logging.getLogger(__name__)

ExtractMode = Literal["latent", "niche", "encoder", "transformer", "all_layers"]
LATENT_MODES = ("latent", "niche")
# Cells around a cell whose latents are averaged, and the weight of the mean beside the own latent:
# with 1 few of the cell's neighbours in the embedding share its domain, with 3 few share its type.
NEIGHBOURS, WEIGHT = 20, 1.5
# Mean shift of the genes of a slice, in stds of the training slices: beyond it the cells are of
# another assay, and standardising them by themselves says more of them.
LARGEST_SHIFT = 0.5


def resolve_mode(mode: str, module: AlphaSTomicsModule) -> ExtractMode:
    """Return the mode that `auto` stands for; refuse latents of a model that has none."""
    counts = module.average.count_model
    has_latents = counts is not None and bool(counts.is_fitted)
    if mode in LATENT_MODES and not has_latents:
        raise InputError(
            f"extract_mode {mode}: the model has no count model (expression.space genes, a task "
            "without expression, or version 0.1): leave the mode out, or train again"
        )
    if mode != "auto":
        return mode  # type: ignore[return-value]
    return "niche" if has_latents else "encoder"


def log_mode(asked: str, mode: ExtractMode) -> None:
    """Say where `auto` is not what it is for other models."""
    if asked == "auto" and mode == "encoder":
        logger.info("the model has no count model: cells are embedded by its encoder")


class TrainingScale(NamedTuple):
    """Brings standardised expression of slices to the scale of training: times, plus (S, G)."""

    factor: Float32[np.ndarray, "S G"]
    offset: Float32[np.ndarray, "S G"]

    def apply(
        self, expression: Float[Tensor, "*B G"], slice_id: Int[Tensor, "*B"]
    ) -> Float[Tensor, "*B G"]:
        """Bring the cells of slices to the scale of training; padding takes any slice."""
        factor, offset = (torch.from_numpy(part).to(expression) for part in self)
        rows = slice_id.clamp(min=0)
        return expression * factor[rows] + offset[rows]


def training_scale(
    module: AlphaSTomicsModule,
    mean: Float64[np.ndarray, "S G"],
    std: Float64[np.ndarray, "S G"],
    measured: Bool[np.ndarray, "S G"],
    names: Sequence[str],
) -> TrainingScale:
    """Compare slices, standardised by their own mean and std, with those of training.

    A slice that holds other cell types than training did has other means: by its own, the same cell
    would get another latent. Slices of another assay keep their own.
    """
    counts = module.average.count_model
    assert counts is not None
    usual, extent = (part.double().cpu().numpy().mean(0) for part in (counts.mean, counts.std))
    shift = np.abs((mean - usual) / extent)
    shift = (shift * measured).sum(1) / np.maximum(measured.sum(1), 1)
    factor, offset = std / extent, (mean - usual) / extent
    for number in np.flatnonzero(shift > LARGEST_SHIFT).tolist():
        logger.info(
            "%s: its genes are %.1f stds from those of training on average, as of another assay: "
            "standardised by itself",
            *(names[number], shift[number]),
        )
        factor[number], offset[number] = 1, 0
    return TrainingScale(factor.astype(np.float32), offset.astype(np.float32))


def add_surroundings(
    rows: Path,
    shape: tuple[int, ...],
    position: Float[np.ndarray, "N 3"] | None,
    slice_id: Int[np.ndarray, " N"],
    target: Path,
) -> tuple[int, ...]:
    """Write the rows of a file, each with the mean row around the cell, to another.

    Neighbours are of the same slice. Cells without a position, and a cell alone in its slice, get
    zeros, the mean of a latent. The first file is removed.
    """
    own = stored(rows, shape)
    both = np.memmap(target, np.float32, mode="w+", shape=(shape[0], 2 * shape[1]))
    for start in range(0, shape[0], BLOCK_ROWS):
        both[start : start + BLOCK_ROWS, : shape[1]] = own[start : start + BLOCK_ROWS]
    if position is not None:
        known = np.isfinite(position).all(1)
        for number in np.unique(slice_id):
            cells = np.flatnonzero(known & (slice_id == number))
            for block, mean in means_around(np.asarray(own[cells]), position[cells]):
                both[cells[block], shape[1] :] = mean
    both.flush()
    rows.unlink()
    return both.shape


def means_around(
    values: Float32[np.ndarray, "N L"], position: Float[np.ndarray, "N 3"]
) -> Iterator[tuple[Int[np.ndarray, " M"], Float32[np.ndarray, "M L"]]]:
    """Yield the weighted mean of the cells nearest to those of a slice, without themselves."""
    number = min(NEIGHBOURS, len(values) - 1)
    if number < 1:
        return
    tree = cKDTree(position)
    for start in range(0, len(values), BLOCK_ROWS):
        block = np.arange(start, min(start + BLOCK_ROWS, len(values)))
        near = tree.query(position[block], k=number + 1)[1]
        own = near == block[:, None]
        # Of cells on one point another may come first: then the farthest is left out.
        own[~own.any(1), -1] = True
        yield block, WEIGHT * values[near[~own].reshape(len(block), number)].mean(1)
