"""Slices larger than a set: cells are dealt out to chunks, and drawn chunks become a slice again.

A few anchors, drawn at random, are in every chunk, and the other cells are dealt out at random: so
each chunk is a thinner picture of the whole slice. Where chunks disagree about the anchors, the
slice has a seam, which is measured.
"""

import logging
import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from alphastomics.config import Mode, SamplingConfig
from alphastomics.errors import InputError
from alphastomics.geometry import moved_onto
from alphastomics.tasks import TASKS

logger = logging.getLogger(__name__)

# Not tuned: enough to fix a frame at any size in use, with most of a chunk left for its own cells.
ANCHOR_SHARE = 0.125
LEAST_ANCHORS = 4  # three fix a frame in space, and one says which side is up
# Cells of a set, where the user names no number.
LARGEST_SET = 65_536
# Of a sample on a CPU: exact attention grows with the square of the cells, and no score with them.
SAMPLED_SET_ON_CPU = 2048


class ChunkPlan(NamedTuple):
    """Anchors, which are in every chunk, and the further cells of each chunk."""

    anchors: Int64[np.ndarray, " A"]
    parts: list[Int64[np.ndarray, " M"]]

    def rows(self, chunk: int) -> Int64[np.ndarray, " K"]:
        """Return the cells of a chunk, its anchors first."""
        return np.concatenate([self.anchors, self.parts[chunk]])


class Seam(NamedTuple):
    """How far the chunks of a slice disagree about the anchors they share.

    Attributes
    ----------
    slice_name
        The slice.
    chunks, anchors
        How many there are.
    rms
        Root mean square distance of an anchor in a chunk, after alignment, from its position in the
        first: in the user's units; of expression, the root mean square over measured genes.
    relative
        The same over the tissue's radius of gyration, or over the std of its expression.
    """

    slice_name: str
    chunks: int
    anchors: int
    rms: float
    relative: float


def largest_set(settings: SamplingConfig, device: torch.device, num_steps: int) -> int:
    """Return how many cells a set has at most: of one network call, or of a sample in several."""
    if settings.max_set_size is not None:
        return settings.max_set_size
    return SAMPLED_SET_ON_CPU if device.type == "cpu" and num_steps > 1 else LARGEST_SET


def plan_chunks(num_cells: int, max_set_size: int, seed: int) -> ChunkPlan:
    """Cut a slice into chunks of at most `max_set_size` cells; one without anchors if it fits."""
    if num_cells <= max_set_size:
        return ChunkPlan(np.empty(0, np.int64), [np.arange(num_cells)])
    num_anchors = max(LEAST_ANCHORS, round(max_set_size * ANCHOR_SHARE))
    capacity = max_set_size - num_anchors
    if capacity < LEAST_ANCHORS:
        raise InputError(
            f"sampling.max_set_size ({max_set_size}): too small to cut {num_cells} cells into "
            f"chunks; expected at least {2 * LEAST_ANCHORS}"
        )
    order = np.random.default_rng(seed).permutation(num_cells)
    rest = order[num_anchors:]
    parts = np.array_split(rest, math.ceil(len(rest) / capacity))
    return ChunkPlan(np.sort(order[:num_anchors]), [np.sort(part) for part in parts])


def onto_anchors(
    chunk: Float[Tensor, "1 K 3"], anchors: Float[Tensor, "1 A 3"], *, reflection: bool
) -> Float[Tensor, "1 K 3"]:
    """Move a chunk rigidly so that its first cells come nearest to where the anchors lie."""
    count = anchors.shape[1]
    target = torch.zeros_like(chunk)
    target[:, :count] = anchors
    everything = torch.ones(chunk.shape[:2], dtype=torch.bool, device=chunk.device)
    first = everything & (torch.arange(chunk.shape[1], device=chunk.device) < count)
    return moved_onto(chunk, target, everything, first, reflection=reflection)


def joined_chunks(plan: ChunkPlan, chunks: list[Float[Tensor, "1 _ K"]]) -> Float[Tensor, "1 N K"]:
    """Put the cells of all chunks into one slice; the anchors are those of the first."""
    num_cells = len(plan.anchors) + sum(map(len, plan.parts))
    whole = chunks[0].new_empty(1, num_cells, chunks[0].shape[2])
    whole[:, plan.rows(0)] = chunks[0]
    for part, values in zip(plan.parts[1:], chunks[1:], strict=True):
        whole[:, part] = values[:, len(plan.anchors) :]
    return whole


def disagreement(values: list[Float[Tensor, "1 A K"]]) -> Float[Tensor, " K"]:
    """Mean square difference of the anchors of later chunks from those of the first, by column."""
    first = values[0].double()
    return torch.stack(
        [(later.double() - first).square().mean((0, 1)) for later in values[1:]]
    ).mean(0)


def report_seams(seams: list[Seam], mode: Mode) -> None:
    """Say how well the chunks of large slices fit."""
    for seam in seams:
        if not TASKS[mode].is_conditional:
            logger.info(
                "%s: sampled in %d chunks around shared cells", seam.slice_name, seam.chunks
            )
            continue
        logger.info(
            "%s: sampled in %d chunks that share %d cells; seam error %.4g (%.1f %% of the %s)",
            *(seam.slice_name, seam.chunks, seam.anchors, seam.rms, 100 * seam.relative),
            "std of expression" if TASKS[mode].generates_expression else "tissue's radius",
        )
