"""What cells say by the genes that they share: cells of slices enter; features leave.

Training cells, reference cells and a query need not have measured the same genes. Values are
brought to a total over the genes that both sides have, and standardised within their slice, so that
a query is seen as training cells are. Beside a cell's own values stand those of its neighbours: in
expression space, and where positions are known, in space.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int, Int64
from scipy.spatial import cKDTree
from sklearn.decomposition import PCA

from alphastomics.attn_model.neighbourhood import smoothed_set
from alphastomics.diffusion_model.count_cells import unscaled
from alphastomics.generation.cells import InputCells
from alphastomics.preprocessing.schema import TARGET_SUM

SMOOTHING: dict[str, int] = {"rounds": 1, "neighbours": 15, "components": 30}
# Neighbours in space whose mean is a feature: near and wider surroundings.
SURROUNDINGS = (6, 20, 60)
# Principal components of each kind of feature that regressions see, and nearest cells.
COMPONENTS, NEAREST_COMPONENTS = 200, 50
# Cells that are smoothed together: of larger slices each part is a thinner version.
SMOOTHED_CELLS = 20_000
# Distances of so many cells to all others are held at a time.
BLOCK = 1_000
FOLDS = 5
SMALLEST, SMALLEST_SIZE = 1e-12, 1e-6


@dataclass(frozen=True)
class GeneCells:
    """Cells of one or more slices, in the unit that users know.

    Parameters
    ----------
    values
        Log-normalised expression, as before it was standardised; 0 where not measured.
    measured
        Genes that each slice measured.
    slice_id, slice_names
        The slice of each cell, and the slices' names.
    position
        Coordinates; NaN for cells without any.
    cell_type
        Names of the cell types, "unknown" where nobody knows.
    """

    values: Float32[np.ndarray, "N G"]
    measured: Bool[np.ndarray, "S G"]
    slice_id: Int64[np.ndarray, " N"]
    slice_names: list[str]
    position: Float64[np.ndarray, "N 3"]
    cell_type: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def take(self, rows: Int[np.ndarray, " M"]) -> "GeneCells":
        """Return some of the cells, with all slices."""
        return GeneCells(
            self.values[rows],
            self.measured,
            self.slice_id[rows],
            self.slice_names,
            self.position[rows],
            self.cell_type[rows],
        )

    @property
    def is_located(self) -> Bool[np.ndarray, " N"]:
        """Say which cells have a position."""
        return np.isfinite(self.position).all(1)


def gene_cells(cells: InputCells, num_genes: int, rows: np.ndarray | None = None) -> GeneCells:
    """Undo the standardising of cells, and widen them to more genes than they know."""
    rows = np.arange(len(cells.slice_id)) if rows is None else rows
    slice_id = cells.slice_id[rows]
    width = num_genes - cells.expression.shape[1]
    logs = unscaled(cells.expression[rows], cells.measured[slice_id], slice_id, cells.scaling)
    position = cells.anchors if cells.position is None else cells.position
    types = cells.cell_type
    return GeneCells(
        np.pad(logs.astype(np.float32), ((0, 0), (0, width))),
        np.pad(cells.measured, ((0, 0), (0, width))),
        slice_id,
        cells.slice_names,
        np.full((len(rows), 3), np.nan) if position is None else position[rows].astype(np.float64),
        np.full(len(rows), "unknown", object) if types is None else types[rows],
    )


def joined(parts: Sequence[GeneCells]) -> GeneCells:
    """Put the slices of several sources side by side."""
    before = np.cumsum([0, *(len(part.slice_names) for part in parts)])
    return GeneCells(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.measured for part in parts]),
        np.concatenate([part.slice_id + n for part, n in zip(parts, before, strict=False)]),
        [name for part in parts for name in part.slice_names],
        np.concatenate([part.position for part in parts]),
        np.concatenate([part.cell_type for part in parts]),
    )


class Totals(NamedTuple):
    """Values in units of what each cell has of some genes, and that total."""

    values: Float64[np.ndarray, "N G"]
    total: Float64[np.ndarray, " N"]


def by_shared_total(
    values: Float[np.ndarray, "N G"], shared: Bool[np.ndarray, " G"], *, is_log: bool
) -> Totals:
    """Bring each cell to a total of 1e4 over the shared genes, which all cells have.

    The total over all genes differs by panel. Values that are no logarithms of shares stay.
    """
    if not is_log:
        return Totals(values.astype(np.float64), np.full(len(values), TARGET_SUM))
    linear = np.expm1(values.astype(np.float64))
    total = linear[:, shared].sum(1)
    factor = np.where(total > SMALLEST, TARGET_SUM / np.maximum(total, SMALLEST), 0)
    return Totals(np.log1p(linear * factor[:, None]), total)


class Scaled(NamedTuple):
    """Values standardised within their slice, and mean and std of each slice (S, G)."""

    values: Float32[np.ndarray, "N G"]
    mean: Float64[np.ndarray, "S G"]
    std: Float64[np.ndarray, "S G"]


def scaled_within_slices(values: Float64[np.ndarray, "N G"], cells: GeneCells) -> Scaled:
    """Standardise each slice's genes; 0 where a gene was not measured."""
    shape = (len(cells.slice_names), values.shape[1])
    mean, std = np.zeros(shape), np.ones(shape)
    result = np.zeros(values.shape, np.float32)
    for number in np.unique(cells.slice_id):
        rows = cells.slice_id == number
        mean[number], deviation = values[rows].mean(0), values[rows].std(0)
        std[number] = np.where(deviation > SMALLEST, deviation, 1)
        result[rows] = (values[rows] - mean[number]) / std[number] * cells.measured[number]
    return Scaled(result, mean, std)


def feature_blocks(
    scaled: Float32[np.ndarray, "N F"], cells: GeneCells, *, spatial: bool
) -> list[Float32[np.ndarray, "N F"]]:
    """Return own values, those of neighbours in expression space, and of neighbours in space.

    Parameters
    ----------
    scaled
        Standardised values of the shared genes.
    cells
        The cells' slices and positions; those without a position have no surroundings: 0.
    spatial
        Whether surroundings are asked for.
    """
    kinds = 2 + (len(SURROUNDINGS) if spatial else 0)
    blocks = [scaled, *(np.zeros_like(scaled) for _ in range(kinds - 1))]
    for number in np.unique(cells.slice_id):
        rows = np.flatnonzero(cells.slice_id == number)
        order = np.random.default_rng(0).permutation(rows)
        for part in np.array_split(order, -(-len(order) // SMOOTHED_CELLS)):
            smoothed = smoothed_set(torch.from_numpy(scaled[part]), **SMOOTHING)
            blocks[1][part] = smoothed.numpy()
        located = rows[cells.is_located[rows]]
        if not spatial or len(located) < 2:
            continue
        most = min(max(SURROUNDINGS), len(located) - 1)
        near = cKDTree(cells.position[located]).query(cells.position[located], k=most + 1)[1]
        total = np.zeros((len(located), scaled.shape[1]), np.float32)
        for count, column in enumerate(near.T[1:], start=1):
            total += scaled[located[column]]
            for scale, block in zip(SURROUNDINGS, blocks[2:], strict=True):
                if count == min(scale, most):
                    block[located] = total / count
    for block in blocks[2:]:
        block /= np.maximum(block.std(0), SMALLEST_SIZE)
    return blocks


class Features(NamedTuple):
    """Leading components of each kind of feature: own, smoothed, then surroundings if any."""

    blocks: tuple[Float32[np.ndarray, "N C"], ...]

    def take(self, rows: np.ndarray) -> "Features":
        """Return those of some cells."""
        return Features(tuple(block[rows] for block in self.blocks))

    def leading(self, kinds: int, most: int) -> Float32[np.ndarray, "N H"]:
        """Return the first components of the first kinds of features, side by side."""
        return np.hstack([block[:, :most] for block in self.blocks[:kinds]])


def projected(
    known: list[Float32[np.ndarray, "N F"]], asked: list[Float32[np.ndarray, "M F"]]
) -> tuple[Features, Features]:
    """Project blocks of both sides onto the components of the known cells, of comparable size."""
    sides: tuple[list[np.ndarray], ...] = ([], [])
    for pair in zip(known, asked, strict=True):
        pca = PCA(min(COMPONENTS, *pair[0].shape), random_state=0).fit(pair[0])
        values = [pca.transform(part) for part in pair]
        size = max(float(values[0][:, 0].std()), SMALLEST_SIZE)
        for side, part in zip(sides, values, strict=True):
            side.append((part / size).astype(np.float32))
    return Features(tuple(sides[0])), Features(tuple(sides[1]))


class Both(NamedTuple):
    """Known cells and a query, by the genes that both measured.

    Attributes
    ----------
    known, query
        Features of both.
    scaled
        All genes of the known cells, standardised within their slices, with mean and std.
    factor
        Share of each query cell's total that the shared genes have.
    fold
        Which fold each known cell is left out with.
    """

    known: Features
    query: Features
    scaled: Scaled
    factor: Float64[np.ndarray, " N"]
    fold: Int64[np.ndarray, " M"]


def features_of_both(
    known: GeneCells, query: GeneCells, rng: np.random.Generator, *, is_log: bool
) -> Both:
    """Bring both sides to the same features; all slices of the query measured the same genes."""
    present = np.unique(known.slice_id)
    shared = query.measured[query.slice_id[0]] & known.measured[present].any(0)
    totals = [by_shared_total(cells.values, shared, is_log=is_log) for cells in (known, query)]
    scaled = [
        scaled_within_slices(part.values, cells)
        for part, cells in zip(totals, (known, query), strict=True)
    ]
    spatial = bool(known.is_located.any() and query.is_located.all())
    blocks = [
        feature_blocks(part.values[:, shared], cells, spatial=spatial)
        for part, cells in zip(scaled, (known, query), strict=True)
    ]
    names = {known.slice_names[number] for number in present}
    across = len(present) > 1 and not names & set(query.slice_names)
    # Of a new slice, no cell of its own is known: neither is one of a left-out cell's slice.
    group = np.searchsorted(present, known.slice_id) if across else rng.permutation(len(known))
    return Both(*projected(*blocks), scaled[0], totals[1].total / TARGET_SUM, group % FOLDS)


def nearest(
    known: Float32[np.ndarray, "N C"], asked: Float32[np.ndarray, "M C"], count: int
) -> Int64[np.ndarray, "M K"]:
    """Return the nearest known cells of each asked one, the nearest first."""
    points = torch.from_numpy(np.ascontiguousarray(known))
    parts = [
        torch.cdist(block, points).topk(min(count, len(known)), largest=False).indices
        for block in torch.split(torch.from_numpy(np.ascontiguousarray(asked)), BLOCK)
    ]
    return torch.cat(parts).numpy()
