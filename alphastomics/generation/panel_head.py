"""Positions of cells that lack genes: a model and its training cells enter, a refitted one leaves.

Networks that were fitted to all genes take those that a query lacks for average, and lose more than
the genes say. So the position head is fitted again, to the training cells without these genes
(docs/notes/position-head.md).
"""

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from alphastomics.attn_model.position_head import Ensemble, PositionHead
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.position_fit import RegressionCells, fit_ensemble
from alphastomics.diffusion_model.randomness import stream_seed
from alphastomics.diffusion_model.slice_preparation import smoothed_slice
from alphastomics.generation.cells import InputCells, some_cells
from alphastomics.generation.training_cells import NAME_FOLDER, training_cells
from alphastomics.geometry import best_rotation
from alphastomics.io.progress import track

logger = logging.getLogger(__name__)

# This share of the model's genes is enough. Of a section that lacked 30 and 60 % of them, a head of
# the others predicted positions with a Spearman correlation 0.035 and 0.043 higher.
MOST_GENES = 0.9
# More training cells are not needed to fit the head again.
MOST_CELLS = 50_000

_refitted: WeakKeyDictionary[AlphaSTomicsModule, dict[bytes, AlphaSTomicsModule]] = (
    WeakKeyDictionary()
)


def fitted_to_panel(
    module: AlphaSTomicsModule, cells: InputCells, near: Sequence[Path], seed: int
) -> AlphaSTomicsModule:
    """Return the model for cells that lack many of its genes, where its training cells are found.

    Parameters
    ----------
    module, cells
        The model, and the query.
    near
        Where to look for the training cells beside the recorded folder.
    seed
        Seed of the fit.
    """
    if not lacks_genes(module, cells):
        return module
    known = training_cells(module, module.genes, near)
    if known is None:
        logger.warning(
            "%d of the model's %d genes were measured: a model of these genes predicts positions "
            "better, and is fitted where the training cells are found" + NAME_FOLDER,
            *(cells.measured[0].sum(), len(cells.measured[0])),
        )
    return refitted(module, cells, known, seed)


def lacks_genes(module: AlphaSTomicsModule, cells: InputCells) -> bool:
    """Say whether the slices of a query have one panel, which lacks many of the model's genes."""
    if module.average.position_head is None or (cells.measured != cells.measured[0]).any():
        return False
    return bool(0 < cells.measured[0].mean() < MOST_GENES)


def refitted(
    module: AlphaSTomicsModule, cells: InputCells, known: InputCells | None, seed: int
) -> AlphaSTomicsModule:
    """Fit the position head to the training cells without the genes that a query lacks."""
    if not lacks_genes(module, cells) or known is None or known.position is None:
        return module
    measured, done = cells.measured[0], _refitted.setdefault(module, {})
    shares = (known.measured & measured).sum(1) / np.maximum(known.measured.sum(1), 1)
    if shares.max() >= MOST_GENES:  # as much as a training slice has
        return module
    key = measured.tobytes()
    if key not in done:
        logger.info(
            "%d of the model's %d genes were measured: positions are learned again from these, by "
            "the training cells",
            *(measured.sum(), len(measured)),
        )
        done[key] = with_head(module, fit_head(module, known, measured, seed))
    return done[key]


def with_head(module: AlphaSTomicsModule, head: PositionHead) -> AlphaSTomicsModule:
    """Return a copy of a model that shares all but its position head."""
    average, result = copy.copy(module.average), copy.copy(module)
    average._modules = {**module.average._modules, "position_head": head}
    result._modules = {**module._modules, "average": average}
    return result


def fit_head(
    module: AlphaSTomicsModule, known: InputCells, measured: Bool[np.ndarray, " G"], seed: int
) -> PositionHead:
    """Fit a head to training cells of which nothing but some genes is seen."""
    rows = np.sort(np.random.default_rng(seed).permutation(len(known))[:MOST_CELLS])
    known = some_cells(known, rows)
    device, config = module.position_scale.device, module.config
    expression = (known.expression * measured).astype(np.float32)
    smoothed = np.zeros((len(known), config.model.smoothing_rounds * len(measured)), np.float32)
    slices = [known.rows_of(number) for number in range(len(known.slice_names))]
    for part in slices:
        smoothed[part] = smoothed_slice(expression[part], config.model, device)
    target = torch.from_numpy(targets(module, known, slices) / float(module.position_scale))
    tensors = (torch.from_numpy(values) for values in (expression, smoothed))
    cells = RegressionCells(*(values.float().to(device) for values in (*tensors, target)))
    width = config.model.smoothing_rounds * len(measured)
    torch.manual_seed(stream_seed(seed, "panel"))
    head = PositionHead(len(measured), width).to(device)
    head.remember([cells.expression[part] for part in slices])
    ensembles = (head.plain, head.own, head.smoothed)
    updates = config.training.position_head_updates
    with track("position head of the panel", len(ensembles) * updates, "updates") as advance:
        for ensemble in ensembles:
            fit_ensemble(ensemble, cells, updates, advance)
            ignore_genes(ensemble, ~measured)
    return head.eval()


def ignore_genes(ensemble: Ensemble, unseen: Bool[np.ndarray, " G"]) -> None:
    """Take out the weights of genes that no cell had in the fit: others, as anchors, may have them.

    Smoothed expression has all genes of a round, and then those of the next.
    """
    genes = torch.from_numpy(unseen)
    ensemble.own[:, genes.to(ensemble.own.device)] = 0
    if ensemble.smoothed is not None:
        rounds = ensemble.smoothed.shape[1] // len(unseen)
        ensemble.smoothed[:, genes.repeat(rounds).to(ensemble.own.device)] = 0


@torch.no_grad()
def targets(
    module: AlphaSTomicsModule, known: InputCells, slices: Sequence[np.ndarray]
) -> Float64[np.ndarray, "N 3"]:
    """Return positions of training cells in the frame that the model learned them in.

    Slices of their own frames are rotated onto what the model expects of them.
    """
    assert known.position is not None
    position = known.position.astype(np.float64)
    if known.common_frame or known.dims == 3:
        return position - position.mean(0)
    for number, part in enumerate(slices):
        centred = position[part] - position[part].mean(0)
        expected = expected_of(module, known, number, part)
        rotation = best_rotation(
            torch.from_numpy(centred),
            expected.double().cpu(),
            reflection=module.config.loss.reflection,
        )
        position[part] = centred @ rotation.numpy().T
    return position


def expected_of(
    module: AlphaSTomicsModule, known: InputCells, number: int, rows: np.ndarray
) -> Tensor:
    """Return where the model expects the cells of one of its training slices."""
    device = module.position_scale.device
    expression = torch.from_numpy(np.ascontiguousarray(known.expression[rows])).float()[None]
    genes = torch.from_numpy(known.measured[number])[None].to(device)
    time = torch.zeros(1, 2, device=device)
    prepared = module.average.prepare(expression.to(device), time, gene_mask=genes)
    return prepared["expected"][0]
