"""Expression as counts: standardised expression enters, a latent leaves, and counts come back.

A variational autoencoder (Kingma & Welling 2014) with a negative binomial likelihood (as in Lopez
et al. 2018): the latent of a cell says which share of its counts each gene has, and how many it has
in all. Values that are no counts get a Gaussian above zero instead, and a chance of being zero. A
slice has a style of its own: what its genes and cells have more or less of than other slices'.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from alphastomics.attn_model.gated_attention import without_padding
from alphastomics.attn_model.layers import zero_linear
from alphastomics.attn_model.niche_model import TISSUES, NicheModel

WIDTH = 256
# Slices whose style is kept; more of them are represented by some.
STYLES = TISSUES
# Cell types that are known: the most frequent ones, if there are more.
TYPES, NO_TYPE = 64, -1e9
# Logarithm of the share of a gene that no cell of the fit measured: its column was never fitted.
NO_SHARE = -1e9
TARGET_SUM = 1e4
LEAST_LOG_VARIANCE, MOST_LOG_VARIANCE = -8.0, 4.0
LEAST_LOG_STD, MOST_LOG_STD = -4.0, 2.0
MOST_LOG_DISPERSION, DISPERSION_STEPS = 6.0, 10.0
# Values that are decoded at a time.
DECODED = 2**24
# Counts expected below this are mostly found within as many steps.
INVERTED_RATE = 20.0


class Decoded(NamedTuple):
    """What a latent says of a cell.

    Attributes
    ----------
    genes
        Counts: the logarithm of each gene's share, but for a number. Values: their mean where they
        are not zero, standardised.
    nonzero
        Values: the logit of not being zero.
    depth
        Counts: mean and log std of the standardised logarithm of the cell's total.
    """

    genes: Tensor
    nonzero: Tensor
    depth: Tensor


class Drawn(NamedTuple):
    """Expression, standardised, and the counts that it stands for, if it does."""

    expression: Float32[np.ndarray, "*B G"]
    counts: Int64[np.ndarray, "*B G"] | None


class CountModel(nn.Module):
    """The autoencoder of a cell's expression, and the denoisers of latents and positions.

    Parameters
    ----------
    num_genes
        Genes G.
    num_latents
        Width L of a latent.
    """

    is_counts: Tensor
    is_signed: Tensor
    is_fitted: Tensor
    measured: Tensor
    latent_mean: Tensor
    latent_std: Tensor
    offset: Tensor
    mean: Tensor
    std: Tensor
    depth: Tensor
    target: Tensor
    type_weight: Tensor

    def __init__(self, num_genes: int, num_latents: int) -> None:
        super().__init__()
        self.num_latents = num_latents
        self.encoder = nn.Sequential(
            nn.Linear(num_genes, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.SiLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.SiLU(),
            nn.Linear(WIDTH, 2 * num_latents),
        )
        self.decoder = nn.Sequential(
            nn.Linear(num_latents, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU()
        )
        self.genes_out = nn.Linear(WIDTH, num_genes)
        self.nonzero_out = nn.Linear(WIDTH, num_genes)
        self.depth_out = nn.Linear(WIDTH, 2)
        # A part of the logarithm of the dispersion of counts, or of the std of values: Adam's steps
        # are of one size, and these have further to go than weights.
        self.dispersion = nn.Parameter(torch.zeros(num_genes))
        self.niches = NicheModel(num_latents)
        # Counts, or else values, which may be below zero; and whether anything was fitted yet.
        self.register_buffer("is_counts", torch.ones((), dtype=torch.bool))
        self.register_buffer("is_signed", torch.zeros((), dtype=torch.bool))
        self.register_buffer("is_fitted", torch.zeros((), dtype=torch.bool))
        self.register_buffer("latent_mean", torch.zeros(num_latents))
        self.register_buffer("latent_std", torch.ones(num_latents))
        # Of each style: what is added to the genes (of values: to their chance, 0 or NO_SHARE);
        # mean and std of the genes; of the log totals; what a normalised cell sums up to, over the
        # genes that the slice measured.
        self.register_buffer("offset", torch.zeros(STYLES, num_genes))
        self.register_buffer("mean", torch.zeros(STYLES, num_genes))
        self.register_buffer("std", torch.ones(STYLES, num_genes))
        self.register_buffer("depth", torch.tensor([[0.0, 1.0]]).repeat(STYLES, 1))
        self.register_buffer("measured", torch.ones(STYLES, num_genes, dtype=torch.bool))
        self.register_buffer("target", torch.full((STYLES,), TARGET_SUM))
        # Cell types by the latent: weights and a constant, very low for types that are not there.
        self.register_buffer("type_weight", torch.zeros(TYPES, num_latents + 1))
        self.type_weight[:, -1] = NO_TYPE
        self.requires_grad_(requires_grad=False)  # but while it is fitted

    @property
    def log_dispersion(self) -> Float[Tensor, " G"]:
        """Return the logarithm of the dispersion of counts, or of the std of values."""
        most = MOST_LOG_DISPERSION
        return (DISPERSION_STEPS * self.dispersion).clamp(-most, most)

    def encode(
        self,
        expression: Float[Tensor, "*B G"],
        gene_mask: Bool[Tensor, "*B G"] | None = None,
    ) -> tuple[Float[Tensor, "*B L"], Float[Tensor, "*B L"]]:
        """Return mean and std of the latent of each cell, not standardised."""
        if gene_mask is not None:
            expression = expression.masked_fill(~gene_mask, 0)
        mean, log_variance = self.encoder(expression).chunk(2, dim=-1)
        log_variance = log_variance.clamp(LEAST_LOG_VARIANCE, MOST_LOG_VARIANCE)
        return mean, (log_variance / 2).exp()

    def usual_depths(self, measured: Bool[Tensor, " G"]) -> tuple[float, float]:
        """Return the least and the largest usual total of a slice's cells over some genes."""
        offset = self.offset.double().cpu()
        # A depth is that over the genes that the style's slice measured.
        whole = offset.masked_fill(~self.measured.cpu(), -math.inf).logsumexp(-1, keepdim=True)
        shares = (offset - whole).exp()[:, measured.cpu()].sum(-1)
        totals = self.depth[:, 0].double().exp().cpu() * shares
        return float(totals.min()), float(totals.max())

    @torch.no_grad()
    def latents(
        self,
        expression: Float[Tensor, "*B G"],
        gene_mask: Bool[Tensor, "*B G"] | None = None,
        noise: Float[Tensor, "*B L"] | None = None,
    ) -> Float[Tensor, "*B L"]:
        """Return a latent of unit variance for each cell: sampled by the noise, or the mean."""
        with torch.autocast(expression.device.type, enabled=False):
            mean, std = self.encode(expression.float(), gene_mask)
            latent = mean if noise is None else mean + std * noise
            return ((latent - self.latent_mean) / self.latent_std).to(expression.dtype)

    @torch.no_grad()
    def denoise(
        self, noisy: Float[Tensor, "B N L"], time: Float[Tensor, " B"]
    ) -> Float[Tensor, "B N L"]:
        """Predict clean latents, cell by cell; `time` is that of each set."""
        with torch.autocast(noisy.device.type, enabled=False):
            of_cells = time.float()[:, None, None].expand(*noisy.shape[:2], 1)
            return self.niches.denoise_alone(noisy.float(), of_cells).to(noisy.dtype)

    def decode(self, latent: Float[Tensor, "*B L"]) -> Decoded:
        """Say what latents, not standardised, mean."""
        inner = self.decoder(latent)
        middle, log_std = self.depth_out(inner).chunk(2, dim=-1)
        depth = torch.cat([middle, log_std.clamp(LEAST_LOG_STD, MOST_LOG_STD)], dim=-1)
        return Decoded(self.genes_out(inner), self.nonzero_out(inner), depth)

    @torch.no_grad()
    def sample_types(self, latents: Float[Tensor, "*B L"], seed: int) -> Int64[np.ndarray, "*B"]:
        """Sample a cell type for each latent by its probability, so that rare types stay as rare.

        The largest logit with Gumbel noise is a sample of the softmax.
        """
        weight = self.type_weight.to(latents)
        logits = (latents @ weight[:, :-1].mT + weight[:, -1]).double().cpu().numpy()
        return (logits + np.random.default_rng(seed).gumbel(size=logits.shape)).argmax(-1)

    @torch.no_grad()
    def draw(self, latents: Float[Tensor, "*B L"], style: int, seed: int) -> Drawn:
        """Draw the expression of cells in the style of a slice."""
        random = np.random.default_rng(seed)
        flat = latents.to(self.mean).reshape(-1, self.num_latents)
        parts = [
            self._draw_some(part * self.latent_std + self.latent_mean, style, random)
            for part in torch.split(flat, max(DECODED // len(self.dispersion), 1))
        ]
        shape = (*latents.shape[:-1], -1)
        expression = np.concatenate([part.expression for part in parts]).reshape(shape)
        counts = [part.counts for part in parts if part.counts is not None]
        return Drawn(expression, np.concatenate(counts).reshape(shape) if counts else None)

    def _draw_some(
        self, latent: Float[Tensor, "N L"], style: int, random: np.random.Generator
    ) -> Drawn:
        decoded = self.decode(latent)
        mean, std = (part[style].double().cpu().numpy() for part in (self.mean, self.std))
        dispersion = self.log_dispersion.exp().double().cpu().numpy()
        if not bool(self.is_counts):
            chance = torch.sigmoid(decoded.nonzero + self.offset[style]).double().cpu().numpy()
            values = decoded.genes.double().cpu().numpy()
            values = values + dispersion * random.standard_normal(values.shape)
            is_zero = random.random(values.shape) >= chance
            absent = -mean / std
            if not bool(self.is_signed):
                values = np.maximum(values, absent)
            return Drawn(np.where(is_zero, absent, values).astype(np.float32), None)
        measured = self.measured[style]
        logits = decoded.genes + self.offset[style]
        whole = logits.masked_fill(~measured, -math.inf).logsumexp(-1, keepdim=True)
        share = (logits - whole).exp().double().cpu().numpy()
        middle, log_std = decoded.depth.double().cpu().numpy().T
        center, extent = self.depth[style].double().cpu().numpy()
        wanted = middle + np.exp(log_std) * random.standard_normal(len(middle))
        total = np.exp(np.clip(center + extent * wanted, 0, math.log(1e9)))
        counts = draw_counts(np.maximum(share * total[:, None], 1e-12), dispersion, random)
        summed = np.maximum(counts[:, measured.cpu().numpy()].sum(1, keepdims=True), 1)
        values = np.log1p(counts * (float(self.target[style]) / summed))
        return Drawn(((values - mean) / std).astype(np.float32), counts)


class LatentPart(nn.Module):
    """What the network does with noisy latents: the count model, and how cells learn of them.

    Parameters
    ----------
    num_genes, num_latents, d_model
        Genes, and widths of a latent and of a cell of the network.
    nu
        Exponent of the clock of expression.
    """

    def __init__(self, num_genes: int, num_latents: int, d_model: int, nu: float) -> None:
        super().__init__()
        self.nu = nu
        self.count_model = CountModel(num_genes, num_latents)
        self.embed = nn.Sequential(
            nn.Linear(2 * num_latents, d_model), nn.SiLU(), nn.Linear(d_model, d_model)
        )
        self.change = zero_linear(d_model, num_latents)

    def forward(
        self, noisy: Float[Tensor, "B N L"], time: Float[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B N L"], Float[Tensor, "B N D"]]:
        """Return what latents say by themselves, and embed both for sets without expression."""
        alone = self.count_model.denoise(noisy, time[:, 0] ** self.nu)
        embedded = self.embed(torch.cat([noisy, alone], dim=-1))
        return alone, embedded * (time[:, :1, None] > 0)

    def clean(
        self,
        alone: Float[Tensor, "B N L"],
        cells: Float[Tensor, "B N D"],
        node_mask: Bool[Tensor, "B N"] | None,
    ) -> Float[Tensor, "B N L"]:
        """Add what neighbours and positions say to what the cell's own latent does."""
        return without_padding(alone + self.change(cells), node_mask)


def draw_counts(
    rate: Float64[np.ndarray, "N G"],
    dispersion: Float64[np.ndarray, " G"],
    random: np.random.Generator,
) -> Int64[np.ndarray, "N G"]:
    """Draw negative binomial counts: P(k) = P(k - 1) (k - 1 + r) / k * m / (m + r), r dispersion.

    Small ones by inversion, since most are zero and cost no more; others as Poisson of Gamma.
    """
    chance = np.exp(-dispersion * np.log1p(rate / dispersion))  # of zero
    uniform = random.random(rate.shape)
    counts = np.zeros(rate.shape, np.int64)
    large = rate >= INVERTED_RATE
    if large.any():
        r = np.broadcast_to(dispersion, rate.shape)[large]
        counts[large] = random.poisson(rate[large] * random.gamma(r, 1 / r))
    cells, genes = np.nonzero((uniform > chance) & ~large)
    r, m = dispersion[genes], rate[cells, genes]
    ratio = m / (m + r)
    left, chance = (part[cells, genes] for part in (uniform, chance))
    left, k = left - chance, 0
    while len(cells):
        k += 1
        chance = chance * ((k - 1 + r) / k * ratio)
        counts[cells, genes] = k
        # Where rounding leaves no chance, the tail ends.
        on = (left > chance) & (chance > 0)
        left = left - chance
        cells, genes, r, ratio, chance, left = (
            part[on] for part in (cells, genes, r, ratio, chance, left)
        )
    return counts


def negative_binomial_loss(
    counts: Float[Tensor, "*B G"], rate: Float[Tensor, "*B G"], log_dispersion: Float[Tensor, " G"]
) -> Float[Tensor, "*B G"]:
    """Minus the log likelihood of counts, but for what depends on the counts alone."""
    dispersion = log_dispersion.exp()
    log_rate = rate.clamp(min=1e-12).log()
    both = torch.log(dispersion + rate)
    return (
        torch.lgamma(dispersion)
        - torch.lgamma(counts + dispersion)
        + dispersion * (both - log_dispersion)
        + counts * (both - log_rate)
    )


def value_loss(
    decoded: Decoded, values: Tensor, is_zero: Bool[Tensor, "*B G"], log_std: Float[Tensor, " G"]
) -> Float[Tensor, "*B G"]:
    """Minus the log likelihood of values that are zero by chance, and else Gaussian."""
    gaussian = 0.5 * ((values - decoded.genes) / log_std.exp()).square() + log_std
    chance = F.binary_cross_entropy_with_logits(
        decoded.nonzero, (~is_zero).to(values.dtype), reduction="none"
    )
    return chance + gaussian.masked_fill(is_zero, 0)
