"""The atlas frame: generated places and what is known of the frame enter, places in it leave.

Generated tissue has a random frame. Some cells whose places in the frame are known
fix it: landmarks by name, or the cells of a reference slice. Umeyama (1991): the R, c and b that
minimise sum_i |c R p_i + b - q_i|^2; c is 1 unless the tissue may grow or shrink.
"""

import csv
import logging
import math
from collections.abc import Callable, Sequence
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


class Transform(NamedTuple):
    """From where a slice was generated to the frame: q = scale * rotation @ p + shift."""

    rotation: Float64[np.ndarray, "3 3"]
    scale: float
    shift: Float64[np.ndarray, " 3"]

    def apply(self, position: Float[np.ndarray, "N 3"]) -> Float64[np.ndarray, "N 3"]:
        """Bring places into the frame."""
        return self.scale * position @ self.rotation.T + self.shift

    def rotation_std(self, spread: Float[np.ndarray, "N 3"]) -> Float64[np.ndarray, "N 3"]:
        """Bring the spread of each axis into the frame, axes taken as independent."""
        return self.scale * np.sqrt(np.square(spread, dtype=np.float64) @ self.rotation.T**2)


@dataclass(frozen=True)
class KnownPositions:
    """Known places of some cells of a slice: which cells, and where.

    Expected places lie nearer to the middle than true ones do: where they are no measure of size,
    `radius` is that of the tissue (root mean square distance from its centre).
    """

    rows: Int64[np.ndarray, " M"]
    position: Float64[np.ndarray, "M 3"]
    radius: float | None = None


class FrameFit(NamedTuple):
    """How a slice was brought into the frame, and how well its known places were met."""

    slice_name: str
    known: str
    num_known: int
    rms: float
    transform: Transform


@dataclass(frozen=True)
class Landmarks:
    """Places of named cells, and whether the frame is a plane."""

    source: Path
    place: dict[str, tuple[float, ...]]
    dims: int


@dataclass(frozen=True)
class Reference:
    """A slice that lies in the frame."""

    source: Path
    cells: InputCells


def read_landmarks(path: Path) -> Landmarks:
    """Read a CSV of cell name, x, y and, in space, z; a first line of words is a header."""
    require_file(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file) if any(field.strip() for field in line)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a CSV file of text") from error
    if lines and len(lines[0]) in (3, 4) and not _is_number(lines[0][1]):
        lines = lines[1:]
    if not lines:
        raise InputError(f"{path}: has no landmarks; expected lines of: cell name, x, y[, z]")
    width = len(lines[0])
    place: dict[str, tuple[float, ...]] = {}
    for number, line in enumerate(lines, start=1):
        values = line[1:]
        if len(line) != width or width not in (3, 4) or not all(map(_is_number, values)):
            raise InputError(
                f"{path}: landmark {number}: expected cell name, x, y[, z], with numbers for the "
                f"place and as many columns in each line; got {','.join(line)!r}"
            )
        name = line[0].strip()
        if name in place:
            raise InputError(f"{path}: cell {name!r} is there twice; keep one of the places")
        place[name] = tuple(float(value) for value in values)
    return Landmarks(path, place, width - 1)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def into_frame(
    cells: InputCells,
    made: Generated,
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
        raise InputError(f"{frame.source}: has no z, but the generated tissue is a body: add it")
    found, kind = _known_places(cells, made, frame, by_name=by_name)
    start, spread = made.position.astype(np.float64), made.position_std.copy()
    start[:, cells.dims :] = 0
    position = made.position.astype(np.float64)  # a frame may lie far from its origin
    framed = []
    for number, name in enumerate(cells.slice_names):
        rows = cells.rows_of(number)
        known = found[number]
        where = f"{frame.source}: slice {name}"
        _require_a_frame(known.position, where, dims, cells.dims, reflection=reflection)
        moving = start[known.rows]
        fit = fitted(moving, known, dims=dims, scale=scale, reflection=reflection, where=where)
        off = fit.apply(moving) - known.position
        rms = float(np.sqrt((off**2).sum(1).mean()))
        framed.append(FrameFit(name, kind, len(known.rows), rms, fit))
        position[rows] = fit.apply(start[rows])
        spread[rows] = fit.rotation_std(made.position_std[rows])
        logger.info("%s: %d %s, met to %.4g", where, len(known.rows), kind, rms)
    made = replace(made, position=position, position_std=spread)
    return replace(cells, dims=dims), made, framed


def _known_places(
    cells: InputCells, made: Generated, frame: Landmarks | Reference, *, by_name: bool
) -> tuple[list[KnownPositions], str]:
    """Find the known places of each slice, and say what kind they are."""
    numbers = range(len(cells.slice_names))
    if isinstance(frame, Landmarks):
        _require_names(frame, cells.names)
        named = _named_places(cells, frame.place)
        return [named(number) for number in numbers], "landmarks"
    reference = frame.cells
    assert reference.position is not None
    own_names = not are_row_numbers(cells.names) and not are_row_numbers(reference.names)
    common = set(cells.names) & set(reference.names) if by_name and own_names else set()
    if common:
        place = {
            name: tuple(at)
            for name, at in zip(reference.names, reference.position.tolist(), strict=True)
            if name in common
        }
        named = _named_places(cells, place)
        return [named(number) for number in numbers], "cells in common"
    return [
        expected_positions(cells, made, number, frame) for number in numbers
    ], "cells by expression kNN"


def are_row_numbers(names: Sequence[str]) -> bool:
    """Tell names that only count rows, as pandas and our own files have them, from cells' own.

    Those of a split are some of the numbers of a whole data set, so that they may be sparse.
    """
    if not all(name.isdecimal() for name in names):
        return False
    return max(map(int, names), default=0) < ROW_NUMBERS_PER_CELL * max(len(names), 1)


def _require_names(frame: Landmarks, names: Sequence[str]) -> None:
    unknown = [name for name in frame.place if name not in set(names)]
    if unknown:
        raise InputError(
            f"{frame.source}: {len(unknown)} of {len(frame.place)} landmarks name no cell of the "
            f"input (first: {', '.join(map(repr, unknown[:SHOWN_NAMES]))}; the input's first cell "
            f"is {names[0]!r})"
        )


def _named_places(
    cells: InputCells, place: dict[str, tuple[float, ...]]
) -> Callable[[int], KnownPositions]:
    names = np.array(cells.names, dtype=object)

    def of_slice(number: int) -> KnownPositions:
        rows = np.array(
            [row for row in cells.rows_of(number) if names[row] in place], dtype=np.int64
        )
        at = np.zeros((len(rows), 3))
        for line, row in enumerate(rows):
            found = place[names[row]]
            at[line, : len(found)] = found
        return KnownPositions(rows, at)

    return of_slice


def expected_positions(
    cells: InputCells, made: Generated, number: int, frame: Reference
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
    _, near = tree.query(pca.transform(made.expression[rows][:, genes]), k=list(range(1, k + 1)))
    place = reference.position.astype(np.float64)[near].mean(1)
    return KnownPositions(rows, place, radius_of(reference.position))


def radius_of(position: Float[np.ndarray, "N K"]) -> float:
    """Root mean square distance of cells from their centre."""
    centred = position.astype(np.float64) - position.mean(0, dtype=np.float64)
    return float(np.sqrt((centred**2).sum(1).mean()))


def _require_a_frame(
    position: Float64[np.ndarray, "M 3"], where: str, dims: int, flat: int, *, reflection: bool
) -> None:
    """Refuse known places that leave the tissue free to turn."""
    needed = 3 if flat == 3 and reflection else 2
    if len(position) <= needed:
        raise InputError(
            f"{where}: {len(position)} known place(s); at least {needed + 1} fix a frame in {dims}D"
        )
    spread = np.linalg.svd(position - position.mean(0), compute_uv=False)
    if spread[needed - 1] <= LEAST_EXTENT * spread[0]:
        in_line = spread[1] <= LEAST_EXTENT * spread[0]
        raise InputError(
            f"{where}: its {len(position)} known places lie on one {'line' if in_line else 'plane'}"
            "; add some beside it"
        )


def fitted(
    moving: Float64[np.ndarray, "M 3"],
    known: KnownPositions,
    *,
    dims: int,
    scale: bool,
    reflection: bool,
    where: str,
) -> Transform:
    """Fit the transform that brings `moving` nearest to the known places."""
    centre_p, centre_q = moving.mean(0), known.position.mean(0)
    p, q = (moving - centre_p)[:, :dims], (known.position - centre_q)[:, :dims]
    power = float((p**2).sum())
    if power == 0:
        raise InputError(f"{where}: all cells with known places were generated at one place")
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
