"""What is done to whole slices before training: a common frame, and smoothed expression.

Both are pure functions of the training cells: a resumed run finds the same again.
"""

import logging

import numpy as np
import torch

from alphastomics.attn_model.neighbourhood import smoothed_set
from alphastomics.config import Config, ModelConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.registration import SliceCells, register_slices
from alphastomics.preprocessing.cell_table import joined_tables
from alphastomics.preprocessing.holdout import Holdout
from alphastomics.preprocessing.memory import Smooth
from alphastomics.preprocessing.schema import Metadata
from alphastomics.preprocessing.shard_reader import ShardReader

logger = logging.getLogger(__name__)

REGISTRATION_CELLS = 200_000
LEAST_REGISTERED = 10
# Whole slices are smoothed ahead as long as the result fits, larger ones in parts.
MOST_SMOOTHED_BYTES, MOST_SMOOTHED_CELLS = 4_000_000_000, 16_384
THINNED_SHARE, THIN_PARTS, LEAST_THINNED = 1 / 3, 5, 500


def rotate_slices(
    module: AlphaSTomicsModule, reader: ShardReader, holdout: Holdout | None, seed: int
) -> None:
    """Bring slices that share no frame into one, by their expression."""
    metadata = reader.metadata
    rotation = np.tile(np.eye(3), (len(metadata.slices), 1, 1))
    if not metadata.shares_frame:
        cells = cells_of_slices(reader, REGISTRATION_CELLS)
        whole = set() if holdout is None else set(holdout.slices)
        held = [index for index, number in enumerate(cells) if number in whole]
        registration = register_slices(list(cells.values()), planar=True, seed=seed, held_out=held)
        rotation[list(cells)] = registration.rotation
        logger.info(
            "%d slices without a common frame were rotated onto one another by their expression "
            "(agreement %.2f to %.2f)",
            len(cells),
            registration.agreement.min(),
            registration.agreement.max(),
        )
    module.slice_rotation = torch.from_numpy(rotation)


def cells_of_slices(reader: ShardReader, most: int) -> dict[int, SliceCells]:
    """Read some cells of every slice: all row groups, or as many as hold `most` cells."""
    pieces = reader.pieces
    step = max(sum(map(len, pieces)) // most, 1)
    table = joined_tables([reader.read(piece) for piece in pieces[::step]])
    expression = reader.dense(table)
    return {
        number: SliceCells(expression[rows], table.position[rows])
        for number in np.unique(table.slice_id).tolist()
        if len(rows := np.flatnonzero(table.slice_id == number)) >= LEAST_REGISTERED
    }


def slice_smoother(config: Config, metadata: Metadata, device: torch.device) -> Smooth | None:
    """Return what smooths whole slices ahead of training, where that is of use and fits."""
    model = config.model
    width = model.smoothing_rounds * metadata.num_genes
    needed = 4 * width * metadata.splits["train"].cells
    is_used = config.diffusion.position_frame == "registered" and not config.masking.enable
    if not is_used or not width or config.data.loading.streaming or needed > MOST_SMOOTHED_BYTES:
        return None

    return lambda expression: smoothed_slice(expression, model, device)


def smoothed_slice(expression: np.ndarray, model: ModelConfig, device: torch.device) -> np.ndarray:
    """Smooth the expression of a slice, whole and in parts."""
    width = model.smoothing_rounds * expression.shape[1]
    smoothed = np.zeros((len(expression), width), np.float32)
    for rows, kept in smoothed_together(len(expression)):
        values = torch.from_numpy(np.ascontiguousarray(expression[rows])).to(device)
        averaged = smoothed_set(
            values,
            rounds=model.smoothing_rounds,
            neighbours=model.smoothing_neighbours,
            components=model.smoothing_components,
        )
        smoothed[rows[kept]] = averaged.cpu().numpy()[kept]
    return smoothed


def smoothed_together(num_cells: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Divide a slice into cells that are smoothed together, and which of them keep the result.

    Queries may be smaller than the slice, and neighbours of fewer cells are less near. So a third
    of the cells is smoothed among a part of the slice, and training knows both.
    """
    order = np.random.default_rng(num_cells).permutation(num_cells)
    thinned = order < num_cells * THINNED_SHARE
    whole = np.array_split(np.arange(num_cells), -(-num_cells // MOST_SMOOTHED_CELLS))
    thin = np.array_split(order, THIN_PARTS * len(whole)) if num_cells >= LEAST_THINNED else []
    if not thin:
        return [(rows, np.ones(len(rows), dtype=bool)) for rows in whole]
    return [(rows, ~thinned[rows]) for rows in whole] + [(rows, thinned[rows]) for rows in thin]
