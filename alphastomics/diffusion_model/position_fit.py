"""Fits the position head: training cells enter, a fitted head leaves.

Before the rest of the model is trained, and by itself: regression of one cell's position on its
expression needs many small steps, the diffusion model fewer large ones. A pure function of the
training cells, the settings and the seed.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from alphastomics.attn_model.position_head import Ensemble
from alphastomics.config import Config
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.randomness import stream_seed
from alphastomics.diffusion_model.slice_preparation import smoothed_slice
from alphastomics.diffusion_model.small_fit import BATCH, minimise
from alphastomics.io.progress import Advance, track
from alphastomics.preprocessing.batch_loader import BatchLoader
from alphastomics.preprocessing.cell_table import CellTable, joined_tables
from alphastomics.preprocessing.memory import MemorySource

WEIGHT_DECAY = 0.01
# Of the loss (|error|^2 + SOFT_SQUARE)^POWER, in units of the tissue's std: a cell whose kind lies
# in several regions is expected in one of them, not between them.
POWER, SOFT_SQUARE = 0.35, 1e-3
# What is fitted to stays on the device.
MOST_CELLS, MOST_BYTES = 200_000, 4_000_000_000


class RegressionCells(NamedTuple):
    """What is fitted: expression (N, G) and smoothed expression (N, F) to positions (N, 3)."""

    expression: Tensor
    smoothed: Tensor
    position: Tensor


def fit_position_head(
    module: AlphaSTomicsModule, loader: BatchLoader, config: Config, device: torch.device
) -> None:
    """Fit the head of a module that has one, and of its average, to the loader's cells."""
    head = module.model.position_head
    if head is None:
        return
    seed = stream_seed(config.seed.global_seed, "position head")
    table = cells_to_fit(loader, config, seed)
    expression = loader.reader.dense(table)
    smoothed = table.smoothed
    if smoothed is None:
        width = config.model.smoothing_rounds * expression.shape[1]
        smoothed = np.zeros((len(table), width), np.float32)
        for rows in rows_of_slices(table):
            smoothed[rows] = smoothed_slice(expression[rows], config.model, device)
    tensors = [torch.tensor(values) for values in (expression, smoothed)]
    head.remember([tensors[0][rows] for rows in rows_of_slices(table)])
    mixed = loader.draw.kind == "random"
    scale = float(module.position_scale)
    target = targets(table, module.slice_rotation.cpu(), scale, mixed=mixed)
    updates = config.training.position_head_updates
    cells = RegressionCells(*(values.to(device) for values in (*tensors, target)))
    head.to(device)
    ensembles = (head.plain, head.own, head.smoothed)
    with track("position head", len(ensembles) * updates, "updates") as advance:
        for number, ensemble in enumerate(ensembles):
            torch.manual_seed(stream_seed(seed, number))
            fit_ensemble(ensemble, cells, updates, advance)
    head.cpu()
    assert module.average.position_head is not None
    module.average.position_head.load_state_dict(head.state_dict())


def most_cells(num_genes: int, config: Config) -> int:
    """Return how many cells stay on the device, at most."""
    width = num_genes * (1 + config.model.smoothing_rounds)
    return min(MOST_CELLS, MOST_BYTES // (4 * width))


def cells_to_fit(loader: BatchLoader, config: Config, seed: int) -> CellTable:
    """Return the cells that the loader draws from, or a random part of very many."""
    source = loader.source
    most = most_cells(loader.metadata.num_genes, config)
    if isinstance(source, MemorySource):
        table = source.table()
    else:
        pieces = loader.reader.pieces
        step = max(sum(map(len, pieces)) // most, 1)
        table = joined_tables([loader.reader.read(piece) for piece in pieces[::step]])
    if len(table) <= most:
        return table
    return table.take(np.sort(np.random.default_rng(seed).permutation(len(table))[:most]))


def rows_of_slices(table: CellTable) -> list[np.ndarray]:
    """Return the rows of each slice."""
    return [np.flatnonzero(table.slice_id == number) for number in np.unique(table.slice_id)]


def targets(
    table: CellTable, rotation: Float[Tensor, "S 3 3"], scale: float, *, mixed: bool
) -> Float[Tensor, "N 3"]:
    """Return positions as the model sees them: centred, to scale, in the common frame."""
    position = torch.tensor(table.position)
    for rows in [np.arange(len(table))] if mixed else rows_of_slices(table):
        position[rows] -= position[rows].mean(0)
    number = torch.tensor(table.slice_id).long()
    return (torch.einsum("nij,nj->ni", rotation[number], position) / scale).float()


def robust_loss(
    expected: Float[Tensor, "*B 3"], position: Float[Tensor, "*B 3"]
) -> Float[Tensor, ""]:
    """Mean of (|error|^2 + s^2)^p: a squared loss near 0 that grows ever slower (Barron 2019)."""
    return ((expected - position).square().sum(-1) + SOFT_SQUARE).pow(POWER).mean()


def fit_ensemble(
    ensemble: Ensemble, cells: RegressionCells, updates: int, advance: Advance
) -> None:
    """Fit each network to cells of its own choice, by the robust loss."""
    ensemble.train().requires_grad_(requires_grad=True)
    num_networks, num_cells = len(ensemble.dropout), len(cells.position)

    def loss() -> Tensor:
        rows = torch.randint(num_cells, (num_networks, BATCH), device=cells.position.device)
        smoothed = None if ensemble.smoothed is None else cells.smoothed[rows]
        expected = ensemble(cells.expression[rows], smoothed)
        # A sum over the networks: each learns as if it were alone.
        return robust_loss(expected, cells.position[rows]) * num_networks

    weights = list(ensemble.parameters())
    minimise(loss, weights, updates, advance, weight_decay=WEIGHT_DECAY, clips=False)
    ensemble.requires_grad_(requires_grad=False)
