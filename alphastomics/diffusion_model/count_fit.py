"""Fits the count model: training cells enter, a fitted autoencoder and denoisers leave.

Before the rest of the model is trained, and by itself, as the position head is: what one cell's
expression looks like needs many small steps. A pure function of the training cells, the settings
and the seed.
"""

import logging
import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from alphastomics.attn_model.count_model import (
    NO_TYPE,
    STYLES,
    TYPES,
    CountModel,
    negative_binomial_loss,
    value_loss,
)
from alphastomics.attn_model.niche_model import NicheModel
from alphastomics.config import Config
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.niche_fit import DENOISERS, fit_niches, niche_cells
from alphastomics.diffusion_model.position_fit import cells_to_fit, rows_of_slices, targets
from alphastomics.diffusion_model.randomness import stream_seed
from alphastomics.diffusion_model.small_fit import BATCH, minimise
from alphastomics.io.progress import Advance, track
from alphastomics.preprocessing.batch_loader import BatchLoader
from alphastomics.preprocessing.cell_table import CellTable
from alphastomics.preprocessing.counts import LARGEST_LOG, LEAST_LOG, counts_of
from alphastomics.preprocessing.shard_reader import Scaling

logger = logging.getLogger(__name__)

WEIGHT_DECAY = 1e-4
# Of the divergence from the prior: less than 1, so that latents keep what tells cells apart.
PRIOR_WEIGHT = 0.3
# Share of the cells that must be multiples of one number each.
LEAST_COUNTED = 0.98
# What standardising and back leaves of a zero; cells that are looked at together.
SMALLEST, BLOCK = 1e-5, 4_096
# Rows that a classifier of cell types is fitted to, at most.
TYPED_CELLS = 20_000


class FittedCells(NamedTuple):
    """What is fitted: expression, measured genes, counts or values, totals, and styles of cells."""

    expression: Tensor
    measured: Tensor
    counts: Tensor
    total: Tensor
    style: Tensor


def fit_count_model(
    module: AlphaSTomicsModule, loader: BatchLoader, config: Config, device: torch.device
) -> None:
    """Fit the count model of a module that has one, and of its average, to the loader's cells."""
    model = module.model.count_model
    if model is None:
        return
    seed = stream_seed(config.seed.global_seed, "count model")
    table = cells_to_fit(loader, config, seed)
    expression = loader.reader.dense(table)
    measured = loader.reader.measured_genes[loader.reader.panel_of_slice[table.slice_id]]
    rows = rows_of_slices(table)
    style = np.zeros(len(table), np.int64)
    for number, chosen in enumerate(rows):
        style[chosen] = number % STYLES
    module.style_names = [module.slice_names[table.slice_id[chosen[0]]] for chosen in rows]
    content = values_to_fit(expression, measured, table.slice_id, loader.reader.scaling)
    set_styles(model, loader, rows, table.slice_id, content)
    kept = content.is_kept
    cells = FittedCells(
        *(
            torch.tensor(part[kept]).to(device)
            for part in (expression, measured, content.values, content.total, style)
        )
    )
    model.is_counts.fill_(content.is_counts)
    model.is_signed.fill_(content.is_signed)
    model.is_fitted.fill_(value=True)
    model.to(device).train().requires_grad_(requires_grad=True)
    updates = config.expression.updates
    with track("count model", updates * (1 + DENOISERS), "updates") as advance:
        torch.manual_seed(stream_seed(seed, 0))
        fit_autoencoder(model, cells, updates, advance)
        latent, std = standardise_latents(model, cells)
        fit_types(model, module, loader, latent, table.cell_type[kept], seed)
        inner = set_frames(model.niches, module, table, rows, mixed=loader.draw.kind == "random")
        torch.manual_seed(stream_seed(seed, 1))
        niches = niche_cells(
            *(latent, std, inner[kept].to(device), cells.style),
            torch.tensor(table.slice_id[kept]).long(),
            seed,
        )
        fit_niches(model.niches, niches, updates * DENOISERS // 2, advance)
    model.cpu().requires_grad_(requires_grad=False).eval()
    assert module.average.count_model is not None
    module.average.count_model.load_state_dict(model.state_dict())


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
        logger.info(
            "expression is no counts: its values are modelled as Gaussian%s, with zeros by chance",
            "" if is_signed else " above zero",
        )
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


def set_styles(
    model: CountModel,
    loader: BatchLoader,
    rows: list[np.ndarray],
    slice_id: np.ndarray,
    content: Content,
) -> None:
    """Learn each slice's style: shares of its genes, their mean and std, totals of its cells."""
    scaling, reader = loader.reader.scaling, loader.reader
    measured = []
    for style in range(STYLES):
        chosen = rows[style % len(rows)]
        number = slice_id[chosen[0]]
        measured.append(reader.measured_genes[reader.panel_of_slice[number]])
        chosen = chosen[content.is_kept[chosen]]
        if scaling is not None:
            model.mean[style] = torch.from_numpy(scaling.mean[number])
            model.std[style] = torch.from_numpy(scaling.std[number])
        if content.is_counts and len(chosen):
            counts = content.values[chosen].sum(0, dtype=np.float64) + 1
            model.offset[style] = torch.from_numpy(np.log(counts / counts.sum()))
            logs = np.log(np.maximum(content.total[chosen], 1))
            model.depth[style] = torch.tensor([logs.mean(), max(logs.std(), 1e-3)])
            # Less than what cells were normalised to where some of their genes are not the model's.
            sums = content.sums[chosen]
            model.target[style] = float(np.median(sums[sums > 0])) if (sums > 0).any() else 1.0
    fill_unmeasured(model, torch.from_numpy(np.stack(measured)))


def fill_unmeasured(model: CountModel, measured: Bool[Tensor, "S G"]) -> None:
    """Give genes that a slice did not measure the mean of those that did."""
    model.measured.copy_(measured)
    number = measured.sum(0).clamp(min=1)
    for part in (model.offset, model.mean, model.std):
        usual = (part * measured).sum(0) / number
        part.copy_(torch.where(measured | (measured.sum(0) == 0), part, usual))


def fit_autoencoder(model: CountModel, cells: FittedCells, updates: int, advance: Advance) -> None:
    """Maximise the evidence lower bound."""
    is_counts = bool(model.is_counts)

    def loss() -> Tensor:
        rows = torch.randint(len(cells.total), (BATCH,), device=cells.total.device)
        expression, measured, values, total, style = (part[rows] for part in cells)
        mean, std = model.encode(expression, measured)
        decoded = model.decode(mean + std * torch.randn_like(mean))
        if is_counts:
            logits = decoded.genes + model.offset[style]
            logits = logits.masked_fill(~measured, -math.inf)
            rate = torch.softmax(logits, dim=-1) * total[:, None]
            entries = negative_binomial_loss(values, rate, model.log_dispersion)
            center, extent = model.depth[style].unbind(-1)
            depth = (total.clamp(min=1).log() - center) / extent
            middle, log_std = decoded.depth.unbind(-1)
            whole = 0.5 * ((depth - middle) / log_std.exp()).square() + log_std
        else:
            entries = value_loss(decoded, expression, values == 0, model.log_dispersion)
            whole = 0 * decoded.depth.sum(-1)
        prior = (mean.square() + std.square() - 1).sum(-1) / 2 - std.log().sum(-1)
        return (entries.masked_fill(~measured, 0).sum(-1) + whole + PRIOR_WEIGHT * prior).mean()

    parts = [model.encoder, model.decoder, model.genes_out, model.nonzero_out, model.depth_out]
    parameters = [weight for part in parts for weight in part.parameters()] + [model.dispersion]
    minimise(loss, parameters, updates, advance, weight_decay=WEIGHT_DECAY)


@torch.no_grad()
def standardise_latents(model: CountModel, cells: FittedCells) -> tuple[Tensor, Tensor]:
    """Learn mean and std of the latents; return mean and std of each cell's, standardised."""
    parts = [
        model.encode(expression, measured)
        for expression, measured in zip(
            *(torch.split(part, 8_192) for part in (cells.expression, cells.measured)), strict=True
        )
    ]
    mean, std = (torch.cat(part) for part in zip(*parts, strict=True))
    # That of the means, and of what is drawn around them.
    variance = mean.double().var(0, correction=0) + std.double().square().mean(0)
    model.latent_mean.copy_(mean.double().mean(0))
    model.latent_std.copy_(variance.clamp(min=1e-8).sqrt())
    return (mean - model.latent_mean) / model.latent_std, std / model.latent_std


def fit_types(
    model: CountModel,
    module: AlphaSTomicsModule,
    loader: BatchLoader,
    latent: Tensor,
    cell_type: np.ndarray,
    seed: int,
) -> None:
    """Learn cell types by the latent, where they are known."""
    from sklearn.linear_model import LogisticRegression

    names = loader.metadata.cell_types
    known = np.flatnonzero(cell_type >= 0)
    if names is None or not len(known):
        return
    chosen = np.random.default_rng(seed).permutation(known)[:TYPED_CELLS]
    number = np.bincount(cell_type[chosen], minlength=len(names))
    kept = np.sort(np.argsort(-number, kind="stable")[: min(TYPES, (number > 0).sum())])
    module.type_names = [names[index] for index in kept]
    model.type_weight.zero_()
    model.type_weight[len(kept) :, -1] = NO_TYPE
    if len(kept) < 2:
        return
    chosen = chosen[np.isin(cell_type[chosen], kept)]
    values = latent[torch.tensor(chosen, device=latent.device)].double().cpu().numpy()
    fitted = LogisticRegression(max_iter=200).fit(values, cell_type[chosen])
    weight = np.hstack([fitted.coef_, fitted.intercept_[:, None]])
    if len(kept) == 2:  # one row says both
        weight = np.vstack([-weight / 2, weight / 2])
    model.type_weight[: len(kept)] = torch.from_numpy(weight)


def set_frames(
    model: NicheModel,
    module: AlphaSTomicsModule,
    table: CellTable,
    rows: list[np.ndarray],
    *,
    mixed: bool,
) -> Float[Tensor, "N 3"]:
    """Learn where each tissue lies, and return positions of all cells in the common frame."""
    rotation, scale = module.slice_rotation.cpu(), float(module.position_scale)
    if len(rotation) == 1:  # nothing was rotated
        rotation = rotation.expand(len(module.slice_names), 3, 3)
    model.is_common.fill_(mixed)
    for tissue in range(STYLES):
        chosen = rows[tissue % len(rows)]
        middle = table.position[chosen].mean(0, dtype=np.float64)
        model.middle[tissue] = torch.from_numpy(middle)
        origin = table.position.mean(0, dtype=np.float64) if mixed else middle
        model.center[tissue] = torch.from_numpy(origin)
        model.rotation[tissue] = rotation[table.slice_id[chosen[0]]]
    return targets(table, rotation, scale, mixed=mixed)
