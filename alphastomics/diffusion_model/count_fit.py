"""Fits the count model: training cells enter, a fitted autoencoder and denoisers leave.

Before the rest of the model is trained, and by itself, as the position head is: what one cell's
expression looks like needs many small steps. A pure function of the training cells, the settings
and the seed.
"""

import logging
import math

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from alphastomics.attn_model.count_model import (
    NO_SHARE,
    NO_TYPE,
    STYLES,
    TYPES,
    CountModel,
    negative_binomial_loss,
    value_loss,
)
from alphastomics.attn_model.niche_model import NicheModel
from alphastomics.config import Config
from alphastomics.diffusion_model.count_cells import (
    Content,
    Dissociated,
    FittedCells,
    dissociated_cells,
    fill_from_dissociated,
    style_of,
    values_to_fit,
    with_dissociated,
)
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.niche_fit import DENOISERS, fit_niches, niche_cells
from alphastomics.diffusion_model.position_fit import cells_to_fit, rows_of_slices, targets
from alphastomics.diffusion_model.randomness import stream_seed
from alphastomics.diffusion_model.small_fit import BATCH, minimise
from alphastomics.io.progress import Advance, track
from alphastomics.preprocessing.batch_loader import BatchLoader
from alphastomics.preprocessing.cell_table import CellTable

logger = logging.getLogger(__name__)

WEIGHT_DECAY = 1e-4
# Of the divergence from the prior: less than 1, so that latents keep what tells cells apart.
PRIOR_WEIGHT = 0.3
# Rows that a classifier of cell types is fitted to, at most.
TYPED_CELLS = 20_000


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
    if not content.is_counts:
        logger.info("expression is no counts: it is modelled as Gaussian %s", content.kind)
    others = dissociated_cells(loader, config, seed, content)
    set_styles(model, loader, rows, table.slice_id, content, others)
    silence_unmeasured(model, torch.from_numpy(measured.any(0)), others)
    kept = content.is_kept
    parts = (expression, measured, measured, content.values, content.total, style)
    cells = FittedCells(*(torch.tensor(part[kept]).to(device) for part in parts))
    model.is_counts.fill_(content.is_counts)
    model.is_signed.fill_(content.is_signed)
    model.is_fitted.fill_(value=True)
    model.to(device).train().requires_grad_(requires_grad=True)
    updates = config.expression.updates
    with track("count model", updates * (1 + DENOISERS), "updates") as advance:
        torch.manual_seed(stream_seed(seed, 0))
        fit_autoencoder(model, cells, others, updates, advance)
        latent, std = standardise_latents(model, cells)
        # New cells have latents as wide as those of cells, and not as their means.
        drawn = latent + std * torch.randn_like(std)
        typed = typed_latents(model, drawn, table.cell_type[kept], others)
        fit_types(model, module, loader, *typed, seed)
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


def set_styles(
    model: CountModel,
    loader: BatchLoader,
    rows: list[np.ndarray],
    slice_id: np.ndarray,
    content: Content,
    others: Dissociated | None,
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
        known = style_of(content, chosen)
        model.offset[style], model.depth[style] = known.offset, known.depth
        model.target[style] = known.target
    fill_unmeasured(model, torch.from_numpy(np.stack(measured)))
    if others is not None:
        fill_from_dissociated(model, others)


def fill_unmeasured(model: CountModel, measured: Bool[Tensor, "S G"]) -> None:
    """Give genes that a slice did not measure the mean of those that did."""
    model.measured.copy_(measured)
    number = measured.sum(0).clamp(min=1)
    for part in (model.offset, model.mean, model.std):
        usual = (part * measured).sum(0) / number
        part.copy_(torch.where(measured | (measured.sum(0) == 0), part, usual))


def silence_unmeasured(
    model: CountModel, measured: Bool[Tensor, " G"], others: Dissociated | None
) -> None:
    """Let genes that neither a slice nor dissociated cells measured be 0 in new cells."""
    if others is not None:
        measured = measured | others.measured.any(0)
    model.offset[:, ~measured] = NO_SHARE
    model.mean[:, ~measured], model.std[:, ~measured] = 0, 1


def fit_autoencoder(
    model: CountModel,
    cells: FittedCells,
    others: Dissociated | None,
    updates: int,
    advance: Advance,
) -> None:
    """Maximise the evidence lower bound, of slices and of dissociated cells."""
    is_counts, slices = bool(model.is_counts), len(cells.total)
    cells, device = with_dissociated(cells, others), cells.total.device
    more = 0 if others is None else len(others.cells.total)
    # At most half: a reference of many cells must not crowd out the slices.
    of_others = min(BATCH // 2, BATCH * more // (slices + more))
    offsets, depths = model.offset, model.depth
    if others is not None:
        offsets = torch.cat([offsets, others.offset.to(device)])
        depths = torch.cat([depths, others.depth.to(device)])

    def loss() -> Tensor:
        rows = torch.randint(slices, (BATCH - of_others,), device=device)
        if of_others:
            below = torch.randint(more, (of_others,), device=device) + slices
            rows = torch.cat([rows, below])
        expression, measured, encoded, values, total, style = (part[rows] for part in cells)
        mean, std = model.encode(expression, encoded)
        decoded = model.decode(mean + std * torch.randn_like(mean))
        if is_counts:
            logits = decoded.genes + offsets[style]
            logits = logits.masked_fill(~measured, -math.inf)
            rate = torch.softmax(logits, dim=-1) * total[:, None]
            entries = negative_binomial_loss(values, rate, model.log_dispersion)
            center, extent = depths[style].unbind(-1)
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
    mean, std = encoded(model, cells)
    # That of the means, and of what is drawn around them.
    variance = mean.double().var(0, correction=0) + std.double().square().mean(0)
    model.latent_mean.copy_(mean.double().mean(0))
    model.latent_std.copy_(variance.clamp(min=1e-8).sqrt())
    return (mean - model.latent_mean) / model.latent_std, std / model.latent_std


def encoded(model: CountModel, cells: FittedCells) -> tuple[Tensor, Tensor]:
    """Return mean and std of each cell's latent."""
    split = (torch.split(part, 8_192) for part in (cells.expression, cells.encoded))
    parts = [model.encode(*both) for both in zip(*split, strict=True)]
    mean, std = (torch.cat(part) for part in zip(*parts, strict=True))
    return mean, std


@torch.no_grad()
def typed_latents(
    model: CountModel, latent: Tensor, cell_type: np.ndarray, others: Dissociated | None
) -> tuple[Tensor, np.ndarray]:
    """Add the latents and types of dissociated cells to those of slices."""
    if others is None:
        return latent, cell_type
    near = FittedCells(*(part.to(latent.device) for part in others.cells))
    mean, std = encoded(model, near)
    more = (mean + std * torch.randn_like(std) - model.latent_mean) / model.latent_std
    return torch.cat([latent, more]), np.concatenate([cell_type, others.cell_type])


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
