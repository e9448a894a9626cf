"""Cells of a query whose positions are known: a file, a column or a table enters, anchors leave."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from alphastomics.errors import InputError
from alphastomics.generation.cells import InputCells
from alphastomics.generation.frame import are_row_numbers, read_landmarks, require_names

logger = logging.getLogger(__name__)

COLUMNS = ("x", "y", "z")


def anchors_of_csv(cells: InputCells, path: Path, pixel_size: float | None) -> InputCells:
    """Take known positions from a CSV of cell name, x, y and, in space, z.

    As those of other files, x and y are in pixels where the size of one is given.
    """
    landmarks = read_landmarks(path, "anchor")
    positions = landmarks.positions
    if pixel_size is not None:
        logger.info("%s: x and y are converted from pixels of %.6g µm", path, pixel_size)
        positions = {
            name: (x * pixel_size, y * pixel_size, *z) for name, (x, y, *z) in positions.items()
        }
    return anchors_by_name(cells, positions, landmarks.dims, str(path))


def anchors_of_cells(cells: InputCells, known: InputCells, source: str) -> InputCells:
    """Take known positions from other cells of the same names."""
    position = known.anchors if known.position is None else known.position
    if position is None:
        raise InputError(f"{source}: has no coordinates; anchors are cells whose position is known")
    counted = are_row_numbers(known.names) and are_row_numbers(cells.names)
    if counted and len(known.names) != len(cells.names):
        raise InputError(
            f"{source}: its cells are named by their row, as the input's are, and would be taken "
            "for others: give both the cells' own names (obs_names)"
        )
    require_once(known.names, source)
    by_name = {
        name: tuple(at[: known.dims])
        for name, at in zip(known.names, position.tolist(), strict=True)
        if np.isfinite(at).all()
    }
    shared = len(set(by_name) & set(cells.names))
    if 0 < shared < len(by_name):
        raise InputError(
            f"{source}: {shared} of its {len(by_name)} cells with a position are cells of the "
            "input by name, the others are not: leave the others out to take these as anchors, or "
            "give all of them other names (obs_names) to take them as a reference section"
        )
    return anchors_by_name(cells, by_name, known.dims, source)


def anchors_by_name(
    cells: InputCells, positions: Mapping[str, Sequence[float]], dims: int, source: str
) -> InputCells:
    """Make anchors of the cells that are named."""
    require_names(source, "anchors", positions, cells.names)
    require_once([name for name in cells.names if name in positions], "the input")
    at = np.full((len(cells.names), 3), np.nan)
    for row, name in enumerate(cells.names):
        if name in positions:
            at[row] = 0
            at[row, :dims] = positions[name]
    return replace(cells, anchors=at, dims=dims)


def anchors_of_column(cells: InputCells, obs: Any, column: str) -> InputCells:
    """Make anchors of the cells that a column of obs marks as true."""
    if column not in obs:
        columns = ", ".join(map(str, obs.columns)) or "none"
        raise InputError(
            f"--anchors {column}: neither a file nor a column of obs (columns: {columns}); give a "
            "CSV of cell name, x, y[, z], an .h5ad of cells with positions, or a column of "
            "True and False"
        )
    marks = obs[column]
    if marks.dtype not in (bool, "boolean") or marks.isna().any():
        raise InputError(f"--anchors {column}: obs[{column!r}] is not a column of True and False")
    marks = marks.astype(bool)
    if not marks.any():
        raise InputError(f"--anchors {column}: obs[{column!r}] marks no cell")
    position = cells.anchors if cells.position is None else cells.position
    if position is None:
        raise InputError(f"--anchors {column}: the input has no coordinates for them")
    at = np.where(marks.to_numpy()[:, None], position.astype(np.float64), np.nan)
    lacking = np.flatnonzero(marks.to_numpy() & np.isnan(at).any(1))
    if len(lacking):
        raise InputError(
            f"--anchors {column}: {len(lacking)} of the cells it marks have no position (first: "
            f"{cells.names[lacking[0]]!r})"
        )
    return replace(cells, anchors=at)


def anchors_of_table(cells: InputCells, table: Any) -> InputCells:
    """Take known positions from a table with columns x, y and, in space, z, indexed by cells."""
    dims = sum(name in table for name in COLUMNS)
    if not {"x", "y"} <= set(table.columns):
        raise InputError("anchors: expected a table with the columns x, y and, in space, z")
    try:
        values = table[list(COLUMNS[:dims])].to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise InputError("anchors: coordinates are numbers; the table holds others") from error
    values = finite_rows(values)
    names = [str(name) for name in table.index]
    require_once(names, "anchors")
    return anchors_by_name(cells, dict(zip(names, values.tolist(), strict=True)), dims, "anchors")


def require_once(names: Sequence[str], source: str) -> None:
    """Refuse names of anchors that stand for two cells."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InputError(f"{source}: cell {name!r} is there twice; anchors need unique names")
        seen.add(name)


def finite_rows(values: Float64[np.ndarray, "N D"]) -> Float64[np.ndarray, "N D"]:
    """Refuse coordinates that are missing."""
    bad = np.flatnonzero(~np.isfinite(values).all(1))
    if len(bad):
        raise InputError(f"anchors: row {bad[0]} has NaN or infinite coordinates")
    return values


def known_in_slice(cells: InputCells, known: InputCells, source: str) -> InputCells:
    """Make known cells those around the positions of a slice that expression is predicted at."""
    if known.position is None:
        raise InputError(f"{source}: has no coordinates; known cells lie among the positions asked")
    if len(cells.slice_names) == len(known.slice_names) == 1:
        return replace(known, slice_names=cells.slice_names)
    lacking = set(cells.slice_names) - set(known.slice_names)
    if lacking:
        raise InputError(f"{source}: has no cells of slice {sorted(lacking)[0]} of the input")
    return known
