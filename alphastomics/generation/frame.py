"""The atlas frame: generated positions and what is known of the frame enter, positions in it leave.

Generated tissue is centred in the training frame. Cells whose positions in another one are known
fix that one: landmarks by name, or the cells of a reference slice. Umeyama (1991): the R, c and b
that minimise sum_i |c R p_i + b - q_i|^2; c is 1 unless the tissue may grow or shrink.
"""

import csv
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from scipy.spatial import cKDTree
from sklearn.decomposition import PCA

from alphastomics.errors import InputError
from alphastomics.generation.cells import InputCells
from alphastomics.generation.generate import Generated
from alphastomics.geometry import best_rotation
from alphastomics.io.files import require_file

logger = logging.getLogger(__name__)

NEIGHBOURS, COMPONENTS = 10, 50  # of a cell in the reference's expression
LEAST_EXTENT = 1e-3  # of the second axis over the first: less is a line, of the third: a plane
SHOWN_NAMES = 3
ROW_NUMBERS_PER_CELL = 100  # a file holds at least this share of the cells that it counts
ROUNDING = 1e-9  # of the largest coordinate: nothing smaller is an extent
MISSING_WORDS = {"", "na", "n/a", "<na>", "null", "none"}  # what tables write for no number


class Transform(NamedTuple):
    """From where a slice was generated to the frame: q = scale * rotation @ p + shift."""

    rotation: Float64[np.ndarray, "3 3"]
    scale: float
    shift: Float64[np.ndarray, " 3"]

    def apply(self, position: Float[np.ndarray, "N 3"]) -> Float64[np.ndarray, "N 3"]:
        """Bring positions into the frame."""
        return self.scale * position @ self.rotation.T + self.shift

    def rotation_std(self, std: Float[np.ndarray, "N 3"]) -> Float64[np.ndarray, "N 3"]:
        """Bring the std of each axis into the frame, axes taken as independent."""
        return self.scale * np.sqrt(np.square(std, dtype=np.float64) @ self.rotation.T**2)


@dataclass(frozen=True)
class KnownPositions:
    """Known positions of some cells of a slice: which cells, and where.

    Expected positions lie nearer to the middle than true ones do: where they do not measure the
    size, `radius` is that of the tissue (root mean square distance from its centre).
    """

    rows: Int64[np.ndarray, " M"]
    position: Float64[np.ndarray, "M 3"]
    radius: float | None = None


class FrameFit(NamedTuple):
    """How a slice was brought into the frame, and how well its known positions were met."""

    slice_name: str
    known: str
    num_known: int
    rms: float
    transform: Transform


@dataclass(frozen=True)
class Landmarks:
    """Positions of named cells, and whether the frame is a plane."""

    source: Path
    positions: dict[str, tuple[float, ...]]
    dims: int


@dataclass(frozen=True)
class Reference:
    """A slice that lies in the frame."""

    source: Path
    cells: InputCells


def read_landmarks(path: Path, what: str = "landmark") -> Landmarks:
    """Read a CSV of cell name, x, y and, in space, z.

    A first line is a header where all of its coordinates are words: one that lacks a number is a
    cell whose position is not whole.
    """
    require_file(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file) if any(field.strip() for field in line)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a CSV file of text") from error
    if lines and len(lines[0]) in (3, 4) and all(map(_is_word, lines[0][1:])):
        lines = lines[1:]
    if not lines:
        raise InputError(f"{path}: has no {what}s; expected lines of: cell name, x, y[, z]")
    width = len(lines[0])
    positions: dict[str, tuple[float, ...]] = {}
    for number, line in enumerate(lines, start=1):
        values = line[1:]
        if len(line) != width or width not in (3, 4) or not all(map(_is_number, values)):
            raise InputError(
                f"{path}: {what} {number}: expected cell name, x, y[, z], with numbers for the "
                f"position and as many columns in each line; got {','.join(line)!r}"
            )
        name = line[0].strip()
        if name in positions:
            raise InputError(f"{path}: cell {name!r} is there twice; keep one of its positions")
        positions[name] = tuple(float(value) for value in values)
    return Landmarks(path, positions, width - 1)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _is_word(text: str) -> bool:
    """Tell the name of a column from a number, from nan and from what stands for no number."""
    if text.strip().casefold() in MISSING_WORDS:
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False


def into_frame(
    cells: InputCells,
    generated: Generated,
    frame: Landmarks | Reference,
    *,
    by_name: bool,
    scale: bool,
    reflection: bool,
) -> tuple[InputCells, Generated, list[FrameFit]]:
    """Bring every slice into the frame, each by itself.

    Parameters
    ----------
    cells, made
        The cells, and what was generated for them.
    frame
        What is known of the frame.
    by_name
        Whether the cells' names are the user's own, and may be looked up in a reference.
    scale
        Let a slice grow or shrink as a whole.
    reflection
        Allow its mirror image: generation does not tell the two apart.
    """
    dims = frame.dims if isinstance(frame, Landmarks) else frame.cells.dims
    if cells.dims > dims:
        raise InputError(
            f"{frame.source}: has no z, but the generated tissue is a 3D volume: add it"
        )
    known_rows, kind = _known_positions(cells, generated, frame, by_name=by_name)
    start, std = generated.position.astype(np.float64), generated.position_std.copy()
    start[:, cells.dims :] = 0
    position = generated.position.astype(np.float64)  # a frame may lie far from its origin
    fits = []
    for number, name in enumerate(cells.slice_names):
        rows = cells.rows_of(number)
        known = known_rows[number]
        where = f"{frame.source}: slice {name}"
        require_a_frame(known.position, where, dims, cells.dims, reflection=reflection)
        moving = start[known.rows]
        fit = fitted(moving, known, dims=dims, scale=scale, reflection=reflection, where=where)
        off = fit.apply(moving) - known.position
        rms = float(np.sqrt((off**2).sum(1).mean()))
        fits.append(FrameFit(name, kind, len(known.rows), rms, fit))
        position[rows] = fit.apply(start[rows])
        std[rows] = fit.rotation_std(generated.position_std[rows])
        logger.info("%s: %d %s, met to %.4g", where, len(known.rows), kind, rms)
    generated = replace(generated, position=position, position_std=std)
    return replace(cells, dims=dims), generated, fits


def _known_positions(
    cells: InputCells, generated: Generated, frame: Landmarks | Reference, *, by_name: bool
) -> tuple[list[KnownPositions], str]:
    """Find the known positions of each slice, and say what kind they are."""
    numbers = range(len(cells.slice_names))
    if isinstance(frame, Landmarks):
        require_names(str(frame.source), "landmarks", frame.positions, cells.names)
        return [_named_positions(cells, number, frame.positions) for number in numbers], "landmarks"
    reference = frame.cells
    assert reference.position is not None
    own_names = not are_row_numbers(cells.names) and not are_row_numbers(reference.names)
    common = set(cells.names) & set(reference.names) if by_name and own_names else set()
    if common:
        position_of = {
            name: tuple(at)
            for name, at in zip(reference.names, reference.position.tolist(), strict=True)
            if name in common
        }
        named = [_named_positions(cells, number, position_of) for number in numbers]
        return named, "cells in common"
    return [
        expected_positions(cells, generated, number, frame) for number in numbers
    ], "cells by expression kNN"


def are_row_numbers(names: Sequence[str]) -> bool:
    """Tell names that only count rows, as pandas and our own files have them, from cells' own.

    Those of a split are some of the numbers of a whole data set, so that they may be sparse.
    """
    if not all(name.isdecimal() for name in names):
        return False
    return max(map(int, names), default=0) < ROW_NUMBERS_PER_CELL * max(len(names), 1)


def require_names(
    source: str, what: str, positions: Mapping[str, object], names: Sequence[str]
) -> None:
    """Refuse known positions of cells that are not there."""
    there = set(names)
    unknown = [name for name in positions if name not in there]
    if unknown:
        raise InputError(
            f"{source}: {len(unknown)} of {len(positions)} {what} name no cell of the input "
            f"(first: {', '.join(map(repr, unknown[:SHOWN_NAMES]))}; the input's first cell is "
            f"{names[0]!r})"
        )


def _named_positions(
    cells: InputCells, number: int, position_of: dict[str, tuple[float, ...]]
) -> KnownPositions:
    """Look up the cells of a slice by their names."""
    rows = [row for row in cells.rows_of(number) if cells.names[row] in position_of]
    at = np.zeros((len(rows), 3))
    for line, row in enumerate(rows):
        coordinates = position_of[cells.names[row]]
        at[line, : len(coordinates)] = coordinates
    return KnownPositions(np.array(rows, dtype=np.int64), at)


def expected_positions(
    cells: InputCells, generated: Generated, number: int, frame: Reference
) -> KnownPositions:
    """Expect each cell where, on average, its ten nearest reference cells by expression lie."""
    reference = frame.cells
    assert reference.position is not None
    rows = cells.rows_of(number)
    genes = cells.measured[number] & reference.measured.all(0)
    if not genes.any():
        raise InputError(f"{frame.source}: shares no gene with slice {cells.slice_names[number]}")
    known = reference.expression[:, genes]
    components = min(COMPONENTS, *known.shape)
    pca = PCA(components, random_state=0).fit(known)
    tree = cKDTree(pca.transform(known))
    k = min(NEIGHBOURS, len(known))
    _, near = tree.query(
        pca.transform(generated.expression[rows][:, genes]), k=list(range(1, k + 1))
    )
    expected = reference.position.astype(np.float64)[near].mean(1)
    return KnownPositions(rows, expected, radius_of(reference.position))


def radius_of(position: Float[np.ndarray, "N K"]) -> float:
    """Root mean square distance of cells from their centre."""
    centred = position.astype(np.float64) - position.mean(0, dtype=np.float64)
    return float(np.sqrt((centred**2).sum(1).mean()))


def require_a_frame(
    position: Float64[np.ndarray, "M 3"],
    where: str,
    dims: int,
    generated_dims: int,
    *,
    reflection: bool,
) -> None:
    """Refuse known positions that leave the tissue free to rotate."""
    needed = 3 if generated_dims == 3 and reflection else 2
    if len(position) <= needed:
        raise InputError(
            f"{where}: {len(position)} known position(s); at least {needed + 1} fix a frame "
            f"in {dims}D"
        )
    extent = np.linalg.svd(position - position.mean(0), compute_uv=False)
    if extent[0] <= ROUNDING * np.abs(position).max():
        raise InputError(
            f"{where}: its {len(position)} known positions lie on one point; add some beside it"
        )
    if extent[needed - 1] <= LEAST_EXTENT * extent[0]:
        in_line = extent[1] <= LEAST_EXTENT * extent[0]
        raise InputError(
            f"{where}: its {len(position)} known positions lie on one "
            f"{'line' if in_line else 'plane'}; add some beside it"
        )


def spans(position: Float64[np.ndarray, "M 3"], axes: int) -> bool:
    """Say whether positions extend along so many axes."""
    extent = np.linalg.svd(position - position.mean(0), compute_uv=False)
    if len(extent) < axes or extent[0] <= ROUNDING * np.abs(position).max():
        return False
    return bool(extent[axes - 1] > LEAST_EXTENT * extent[0])


def fitted(
    moving: Float64[np.ndarray, "M 3"],
    known: KnownPositions,
    *,
    dims: int,
    scale: bool,
    reflection: bool,
    where: str,
) -> Transform:
    """Fit the transform that brings `moving` nearest to the known positions."""
    centre_p, centre_q = moving.mean(0), known.position.mean(0)
    p, q = (moving - centre_p)[:, :dims], (known.position - centre_q)[:, :dims]
    power = float((p**2).sum())
    if power == 0:
        raise InputError(f"{where}: all cells with known positions were generated at one position")
    rotation = np.eye(3)
    rotation[:dims, :dims] = best_rotation(
        torch.from_numpy(p), torch.from_numpy(q), reflection=reflection
    ).numpy()
    size = 1.0
    if scale and known.radius is not None:
        size = known.radius / radius_of(moving)
    elif scale:
        size = float((p @ rotation[:dims, :dims].T * q).sum() / power)
    return Transform(rotation, size, centre_q - size * rotation @ centre_p)
