"""What the count model is fitted to: normalised cells enter; counts, masks and styles leave.

Beside the cells of slices, dissociated ones teach what genes look like, also genes that no slice
measured. The encoder sees of them the genes that slices have: else their latents would say that
they are dissociated, and the decoder nothing of slices.
"""

import logging
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from alphastomics.attn_model.count_model import STYLES, TARGET_SUM, CountModel
from alphastomics.config import Config
from alphastomics.diffusion_model.position_fit import most_cells, rows_of_slices
from alphastomics.preprocessing.batch_loader import BatchLoader
from alphastomics.preprocessing.cell_table import CellTable, joined_tables
from alphastomics.preprocessing.counts import LARGEST_LOG, LEAST_LOG, counts_of
from alphastomics.preprocessing.schema import REFERENCE
from alphastomics.preprocessing.shard_reader import Scaling, ShardReader

logger = logging.getLogger(__name__)

# Share of the cells that must be multiples of one number each.
LEAST_COUNTED = 0.98
# What standardising and back leaves of a zero; cells that are looked at together.
SMALLEST, BLOCK = 1e-5, 4_096


class FittedCells(NamedTuple):
    """What is fitted: cells of slices, then dissociated ones.

    Attributes
    ----------
    expression
        Standardised expression.
    measured, encoded
        Genes that were measured, and those of them that the encoder sees.
    counts, total
        Counts or values, and their sums.
    style
        The row of a style's offset and depth.
    """

    expression: Tensor
    measured: Tensor
    encoded: Tensor
    counts: Tensor
    total: Tensor
    style: Tensor


class Content(NamedTuple):
    """Counts (N, G), or values, with totals of cells, and sums of what they were normalised to.

    `is_kept` are the cells to fit; `is_signed` says that values may be below zero.
    """

    values: np.ndarray
    total: np.ndarray
    sums: np.ndarray
    is_kept: np.ndarray
    is_counts: bool
    is_signed: bool

    @property
    def kind(self) -> str:
        """Name what the values are."""
        positive = "counts" if self.is_counts else "values above zero"
        return "values below zero, too" if self.is_signed else positive


def values_to_fit(
    expression: np.ndarray, measured: np.ndarray, slice_id: np.ndarray, scaling: Scaling | None
) -> Content:
    """Return the counts that normalised values stand for, or themselves where they are none."""
    values = np.empty(expression.shape, np.float32)
    exact, sums = np.zeros(len(values), dtype=bool), np.zeros(len(values))
    blocks = [slice(start, start + BLOCK) for start in range(0, len(values), BLOCK)]
    is_signed = False
    for block in blocks:
        logs = unscaled(expression[block], measured[block], slice_id[block], scaling)
        is_signed |= bool((logs < LEAST_LOG).any())
        if not is_signed:
            recovered = counts_of(np.maximum(logs, 0))
            values[block], exact[block] = recovered.values, recovered.exact
            sums[block] = np.expm1(np.minimum(logs, LARGEST_LOG)).sum(1)
    is_counts = not is_signed and exact.mean() >= LEAST_COUNTED
    if not is_counts:
        for block in blocks:
            values[block] = unscaled(expression[block], measured[block], slice_id[block], scaling)
        exact[:] = True
    elif not exact.all():
        logger.info("%d cells hold values that are no counts: they are left out", (~exact).sum())
    return Content(values, values.sum(1), sums, exact, is_counts, is_signed)


def unscaled(
    expression: np.ndarray, measured: np.ndarray, slice_id: np.ndarray, scaling: Scaling | None
) -> np.ndarray:
    """Undo the standardising of slices; 0 where a gene was not measured or is nearly 0."""
    values = expression.astype(np.float64)
    if scaling is not None:
        values = values * scaling.std[slice_id] + scaling.mean[slice_id]
    return np.where(measured & (np.abs(values) > SMALLEST), values, 0)


class Style(NamedTuple):
    """What the cells of a slice have in common.

    Attributes
    ----------
    offset
        Logarithm of the genes' shares.
    depth
        Mean and std of the logarithm of totals.
    target
        What cells were normalised to: less than the whole where some genes are not the model's.
    """

    offset: Tensor
    depth: Tensor
    target: float


def style_of(content: Content, rows: np.ndarray) -> Style:
    """Return the style of some cells; values that are no counts have none."""
    if not content.is_counts or not len(rows):
        return Style(torch.zeros(content.values.shape[1]), torch.tensor([0.0, 1.0]), TARGET_SUM)
    counts = content.values[rows].sum(0, dtype=np.float64) + 1
    logs = np.log(np.maximum(content.total[rows], 1))
    sums = content.sums[rows]
    return Style(
        torch.from_numpy(np.log(counts / counts.sum())),
        torch.tensor([logs.mean(), max(logs.std(), 1e-3)]),
        float(np.median(sums[sums > 0])) if (sums > 0).any() else 1.0,
    )


class Dissociated(NamedTuple):
    """Dissociated cells to fit, and what the genes of each input are like.

    Attributes
    ----------
    cells
        The cells; their styles count from STYLES on.
    cell_type
        Numbers of their types; -1 for none.
    measured, offset, depth, mean, std
        A row for each input: its genes, its style, and mean and std of its genes.
    """

    cells: FittedCells
    cell_type: np.ndarray
    measured: Tensor
    offset: Tensor
    depth: Tensor
    mean: Tensor
    std: Tensor


def dissociated_cells(
    loader: BatchLoader, config: Config, seed: int, of_slices: Content
) -> Dissociated | None:
    """Read the dissociated cells of a loader's folder; None where there are none to fit.

    Parameters
    ----------
    loader
        The loader of the training cells.
    config, seed
        Settings; the seed of the choice of cells where there are very many.
    of_slices
        Values of the cells of slices: those of dissociated cells must be of the same kind.
    """
    if not loader.metadata.references:
        return None
    reader = ShardReader(
        loader.reader.folder, loader.metadata, REFERENCE, verify=loader.reader.verify
    )
    table = some_of(reader, most_cells(loader.metadata.num_genes, config), seed)
    expression = reader.dense(table)
    measured = reader.measured_genes[reader.panel_of_slice[table.slice_id]]
    content = values_to_fit(expression, measured, table.slice_id, reader.scaling)
    if content.kind != of_slices.kind:
        logger.warning(
            "the %d dissociated cells hold %s, the slices %s: the count model is fitted to slices "
            "alone; preprocess counts of both",
            *(loader.metadata.reference_cells, content.kind, of_slices.kind),
        )
        return None
    slices = len(loader.metadata.slices)
    seen = reader.measured_genes[reader.panel_of_slice[:slices]].any(0)
    style = np.empty(len(table), np.int64)
    rows = rows_of_slices(table)
    for number, chosen in enumerate(rows):
        style[chosen] = STYLES + number
    kept = content.is_kept
    parts = (expression, measured, measured & seen, content.values, content.total, style)
    styles = [style_of(content, chosen[kept[chosen]]) for chosen in rows]
    numbers = [table.slice_id[chosen[0]] for chosen in rows]
    shape = (len(rows), loader.metadata.num_genes)
    scaling = reader.scaling or Scaling(np.zeros(shape), np.ones(shape))
    mean, std = (part[numbers] if reader.scaling else part for part in scaling)
    return Dissociated(
        FittedCells(*(torch.tensor(part[kept]) for part in parts)),
        table.cell_type[kept],
        torch.from_numpy(reader.measured_genes[reader.panel_of_slice[numbers]]),
        *(torch.stack(part).float() for part in list(zip(*styles, strict=True))[:2]),
        *(torch.from_numpy(part).float() for part in (mean, std)),
    )


def some_of(reader: ShardReader, most: int, seed: int) -> CellTable:
    """Read a split, or a random part of it where it has more cells than `most`."""
    pieces = reader.pieces
    step = max(sum(map(len, pieces)) // most, 1)
    table = joined_tables([reader.read(piece) for piece in pieces[::step]])
    if len(table) <= most:
        return table
    return table.take(np.sort(np.random.default_rng(seed).permutation(len(table))[:most]))


def with_dissociated(cells: FittedCells, others: Dissociated | None) -> FittedCells:
    """Put dissociated cells below those of slices."""
    if others is None:
        return cells
    device = cells.expression.device
    pairs = zip(cells, others.cells, strict=True)
    return FittedCells(*(torch.cat([part, more.to(device)]) for part, more in pairs))


def fill_from_dissociated(model: CountModel, others: Dissociated) -> None:
    """Give genes that no slice measured what dissociated cells say of them.

    Shares are of the genes that both sides have, as an offset counts in a softmax of these.
    """
    new = others.measured.any(0) & ~model.measured.any(0)
    if not new.any():
        return
    shift = torch.zeros(len(model.offset), len(others.offset))
    for style, has in enumerate(model.measured):
        for number, other in enumerate(others.measured):
            if (has & other).any():
                ours, theirs = model.offset[style], others.offset[number]
                both = has & other
                shift[style, number] = ours[both].logsumexp(0) - theirs[both].logsumexp(0)
    weight = others.measured.float() / others.measured.sum(0).clamp(min=1)
    offset = torch.einsum("rg,srg->sg", weight, others.offset[None] + shift[:, :, None])
    mean, std = ((weight * part).sum(0).expand_as(offset) for part in (others.mean, others.std))
    for part, values in ((model.offset, offset), (model.mean, mean), (model.std, std)):
        part.copy_(torch.where(new, values, part))
