"""Genes that a slice did not measure: cells that measured them enter; values with a std leave.

Means of the nearest cells in expression space and ridge regressions on the shared genes, on those
of neighbours in expression space and in space, are combined with weights fitted, gene by gene, to
training cells whose genes were hidden in the same way and whose fold was left out (stacking,
Wolpert 1992). What is left there says how far off each value may be. Without training cells the
count model says what it expects, and how much that varies.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64

from alphastomics.attn_model.count_model import CountModel
from alphastomics.generation.gene_features import (
    COMPONENTS,
    NEAREST_COMPONENTS,
    Features,
    GeneCells,
    Scaled,
    by_shared_total,
    features_of_both,
    nearest,
)
from alphastomics.generation.spatial_context import stacking_weights
from alphastomics.preprocessing.schema import TARGET_SUM

NEIGHBOURS = (5, 15, 50, 150)
PENALTIES = (10.0, 30.0, 100.0, 300.0, 1e3, 3e3)
# Cells that the regressions are fitted to: more change little.
FIT_CELLS = 20_000
# Numbers of all columns that are held at a time: 1 GB.
HELD = 2**27
# Share of the mean squared error that no cell is below.
LEAST_VARIANCE = 0.05
LEVEL = 0.9
# Samples of the count model, whose mean and std are taken.
SAMPLES = 32
SMALLEST = 1e-12


class Imputed(NamedTuple):
    """Imputed genes of some cells.

    Attributes
    ----------
    values, std
        Log-normalised expression in the unit of the query, and how far off it is, as a std.
    expected_r
        Correlation of each gene with the truth, over left-out cells; NaN where nobody knows.
    interval
        Stds that hold 90 % of the left-out cells, gene by gene; NaN where nobody knows.
    """

    values: Float64[np.ndarray, "N G"]
    std: Float64[np.ndarray, "N G"]
    expected_r: Float64[np.ndarray, " G"]
    interval: Float64[np.ndarray, " G"]

    @classmethod
    def empty(cls, cells: int, genes: int) -> "Imputed":
        """Return arrays to be filled."""
        shapes = ((cells, genes), (cells, genes), (genes,), (genes,))
        return cls(*(np.full(shape, np.nan) for shape in shapes))


def impute(
    known: GeneCells, query: GeneCells, asked: Int64[np.ndarray, " G"], seed: int, *, is_log: bool
) -> Imputed:
    """Predict genes that none of the query's slices measured.

    Parameters
    ----------
    known
        Training and reference cells; each gene is learned from those that measured it.
    query
        Cells whose slices all measured the same genes.
    asked
        Numbers of the genes to predict, each measured by a slice of known cells.
    seed
        Seed of the folds, and of the choice of cells where there are very many.
    is_log
        Whether values are logarithms of shares, as `log1p` after `normalize_total` makes them.
    """
    rng = np.random.default_rng(seed)
    whole = Imputed.empty(len(query), len(asked))
    measuring = known.measured[:, asked].T
    for slices in np.unique(measuring, axis=0):
        group = np.flatnonzero((measuring == slices).all(1))
        chosen = rng.permutation(np.flatnonzero(slices[known.slice_id]))[:FIT_CELLS]
        around = known.take(np.sort(chosen))
        fit = GeneRegression(around, query, asked[group], rng, is_log=is_log)
        for part, values in zip(whole, fit.predict(), strict=True):
            part[..., group] = values
    return whole


class GeneRegression:
    """Predicts the genes of a query from cells that measured these genes, all of them.

    Parameters
    ----------
    known, query, asked, is_log
        As `impute` has them.
    rng
        Decides the folds.
    """

    def __init__(
        self,
        known: GeneCells,
        query: GeneCells,
        asked: Int64[np.ndarray, " G"],
        rng: np.random.Generator,
        *,
        is_log: bool,
    ) -> None:
        self.both = features_of_both(known, query, rng, is_log=is_log)
        self.target = self.both.scaled.values[:, asked].astype(np.float64)
        self.unit = mean_unit(self.both.scaled, known, asked)
        self.is_log = is_log

    def predict(self) -> Imputed:
        """Return what the combination says of the query, gene by gene, and how far off it is."""
        known, query, _, factor, fold = self.both
        folds = [fold == number for number in np.unique(fold)]
        # The same scales in all folds: at most half of the cells that the smallest is fitted to.
        fewest = min(int((~out).sum()) for out in folds)
        scales = [k for k in NEIGHBOURS if k <= fewest // 2] or [1]
        inside = [Columns(known.take(~out), known.take(out), scales) for out in folds]
        whole = Columns(known, query, scales)
        held = max(len(fold), len(factor)) * whole.number
        parts = np.array_split(self.target, -(-self.target.shape[1] * held // HELD), axis=1)
        results = []
        for target in parts:
            left_out = np.empty((whole.number, *target.shape))
            for out, columns in zip(folds, inside, strict=True):
                left_out[:, out] = columns.predict(target[~out])
            results.append(combined(left_out, whole.predict(target), target))
        joined = Imputed(*(np.concatenate(part, axis=-1) for part in zip(*results, strict=True)))
        return in_unit_of_query(joined, *self.unit, factor, is_log=self.is_log)


def mean_unit(
    scaled: Scaled, known: GeneCells, asked: Int64[np.ndarray, " G"]
) -> tuple[Float64[np.ndarray, " G"], Float64[np.ndarray, " G"]]:
    """Return mean and std of genes, averaged over the slices with the weight of their cells."""
    weight = np.bincount(known.slice_id, minlength=len(known.slice_names)) / len(known)
    return weight @ scaled.mean[:, asked], weight @ scaled.std[:, asked]


def in_unit_of_query(
    result: Imputed,
    mean: Float64[np.ndarray, " G"],
    std: Float64[np.ndarray, " G"],
    factor: Float64[np.ndarray, " N"],
    *,
    is_log: bool,
) -> Imputed:
    """Bring standardised values to log1p of shares of each cell's total, over all of its genes.

    Standardised are shares of the total of the shared genes, which is `factor` of that of all.
    """
    values, error = result.values * std + mean, result.std * std
    if is_log:
        linear = np.expm1(np.maximum(values, 0))
        scale = factor[:, None]
        values, error = (
            np.log1p(linear * scale),
            error * scale * (linear + 1) / (1 + linear * scale),
        )
    return result._replace(values=values, std=error)


class Columns:
    """Predictors that are fitted to known cells, and what they say of others: a column each.

    Parameters
    ----------
    known, asked
        Features of the cells that are fitted to, and of those that are predicted.
    scales
        Numbers of nearest cells.
    """

    def __init__(self, known: Features, asked: Features, scales: list[int]) -> None:
        self.scales, most = scales, max(scales)
        spaces = [[side.leading(n, NEAREST_COMPONENTS) for side in (known, asked)] for n in (1, 2)]
        self.near = [nearest(ours, theirs, most) for ours, theirs in spaces]
        kinds = sorted({1, 2, len(known.blocks)})
        self.ridges = [
            Ridge(*(side.leading(n, COMPONENTS) for side in (known, asked))) for n in kinds
        ]
        self.number = len(self.near) * len(self.scales) + len(self.ridges)

    def predict(self, target: Float64[np.ndarray, "M G"]) -> Float64[np.ndarray, "K N G"]:
        """Return every predictor's values of the asked cells, from those of the known ones."""
        columns = []
        for near in self.near:
            total = np.zeros((len(near), target.shape[1]))
            for count, cells in enumerate(near.T, start=1):
                total += target[cells]
                if count in self.scales:
                    columns.append(total / count)
        return np.stack([*columns, *(ridge.predict(target) for ridge in self.ridges)])


class Ridge:
    """Ridge regression of many genes on the same features; the penalty by leave-one-out error.

    With the eigenvectors V and values l of X^T X, a left-out cell's residual is r / (1 - h), where
    h is its leverage, the sum of (x V)^2 / (l + penalty).
    """

    def __init__(
        self, known: Float32[np.ndarray, "M F"], asked: Float32[np.ndarray, "N F"]
    ) -> None:
        middle = known.mean(0, dtype=np.float64)
        values = known - middle
        self.size, vectors = np.linalg.eigh(values.T @ values)
        self.known, self.asked = values @ vectors, (asked - middle) @ vectors

    def predict(self, target: Float64[np.ndarray, "M G"]) -> Float64[np.ndarray, "N G"]:
        """Return predicted values of the asked cells."""
        usual = target.mean(0)
        moment = self.known.T @ (target - usual)

        def error(penalty: float) -> float:
            shrunk = self.size + penalty
            leverage = np.minimum((self.known**2 / shrunk).sum(1), 1 - SMALLEST)
            left = target - usual - self.known @ (moment / shrunk[:, None])
            return float(((left / (1 - leverage)[:, None]) ** 2).sum())

        best = min(PENALTIES, key=error)
        return self.asked @ (moment / (self.size + best)[:, None]) + usual


def combined(
    left_out: Float64[np.ndarray, "K M G"],
    asked: Float64[np.ndarray, "K N G"],
    target: Float64[np.ndarray, "M G"],
) -> Imputed:
    """Add up the columns with each gene's weights; say what this leaves of left-out cells.

    The squared error is a + b (prediction - its least value), fitted with a and b of at least 0:
    counts vary more where more is expected.
    """
    everywhere = np.ones(target.shape, dtype=bool)
    weights = stacking_weights(list(left_out), target, everywhere, np.zeros(target.shape[1]))
    ours, theirs = (np.einsum("kg,kng->ng", weights, part) for part in (left_out, asked))
    error = target - ours
    low = ours.min(0)
    constant, slope = fitted_line(ours - low, error**2)
    least = LEAST_VARIANCE * (error**2).mean(0) + SMALLEST
    inner, outer = (
        np.sqrt(np.maximum(constant + slope * np.maximum(values - low, 0), least))
        for values in (ours, theirs)
    )
    interval = np.quantile(np.abs(error) / inner, LEVEL, axis=0)
    return Imputed(theirs, outer, correlation(ours, target), interval)


def fitted_line(
    x: Float64[np.ndarray, "N G"], y: Float64[np.ndarray, "N G"]
) -> tuple[Float64[np.ndarray, " G"], Float64[np.ndarray, " G"]]:
    """Return constant and slope of least squares, neither below 0, column by column."""
    centred = x - x.mean(0)
    variance = np.maximum((centred**2).sum(0), SMALLEST)
    slope = (centred * y).sum(0) / variance
    constant = y.mean(0) - slope * x.mean(0)
    through_zero = (x * y).sum(0) / np.maximum((x**2).sum(0), SMALLEST)
    slope = np.where(slope < 0, 0, np.where(constant < 0, through_zero, slope))
    return np.where(slope > 0, np.maximum(constant, 0), y.mean(0)), slope


def correlation(
    first: Float64[np.ndarray, "N G"], second: Float64[np.ndarray, "N G"]
) -> Float64[np.ndarray, " G"]:
    """Return Pearson's r of each column; 0 where one of both does not vary."""
    a, b = first - first.mean(0), second - second.mean(0)
    size = np.sqrt((a**2).sum(0) * (b**2).sum(0))
    return np.where(size > SMALLEST, (a * b).sum(0) / np.maximum(size, SMALLEST), 0)


@torch.no_grad()
def impute_by_counts(
    model: CountModel,
    scaled: Float32[np.ndarray, "N M"],
    query: GeneCells,
    asked: Int64[np.ndarray, " G"],
    seed: int,
    *,
    is_log: bool,
) -> Imputed:
    """Predict genes of the model as mean and std of what its count model samples.

    Parameters
    ----------
    model
        The fitted count model.
    scaled
        Standardised expression of the query, of the model's genes.
    query, asked, seed, is_log
        As `impute` has them; of the genes those that the model knows.
    """
    shared = query.measured[query.slice_id[0]][: scaled.shape[1]]
    device = model.latent_mean.device
    values = torch.from_numpy(scaled).to(device)
    mask = torch.from_numpy(shared).to(device).expand(values.shape)
    generator = torch.Generator().manual_seed(seed)
    total = by_shared_total(query.values[:, : len(shared)], shared, is_log=is_log).total
    factor = total / TARGET_SUM
    sums = np.zeros((2, len(scaled), len(asked)))
    for sample in range(SAMPLES):
        noise = torch.randn((len(values), model.num_latents), generator=generator).to(device)
        style = sample % len(model.mean)
        drawn = model.draw(model.latents(values, mask, noise), style, seed + sample).expression
        mean, std = (part[style].double().cpu().numpy() for part in (model.mean, model.std))
        logs = by_shared_total(drawn * std + mean, shared, is_log=is_log).values[:, asked]
        if is_log:
            logs = np.log1p(np.expm1(np.maximum(logs, 0)) * factor[:, None])
        sums += np.stack([logs, logs**2])
    mean, square = sums / SAMPLES
    unknown = np.full(len(asked), np.nan)
    std = np.sqrt(np.maximum(square - mean**2, 0) * SAMPLES / (SAMPLES - 1))
    return Imputed(mean, std, unknown, unknown)
