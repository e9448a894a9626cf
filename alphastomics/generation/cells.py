"""Cells to generate for: a file or folder of cells, or a processed one, enters; cells leave.

Expression is brought to what the checkpoint was trained on: its genes, its normalisation.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int, Int64

from alphastomics.config import Config
from alphastomics.diffusion_model.bounds import MOST_PICKLED_CELLS
from alphastomics.diffusion_model.checkpoint import load_plain
from alphastomics.errors import InputError
from alphastomics.io.files import require_file
from alphastomics.preprocessing.cell_table import CellTable, joined_tables
from alphastomics.preprocessing.folder import DataFolder
from alphastomics.preprocessing.normalize import moments_of_sparse, standard_deviation, standardized
from alphastomics.preprocessing.query_fit import (
    LEAST_CELLS,
    num_empty,
    opened_query,
    require_enough,
)
from alphastomics.preprocessing.schema import REFERENCE, SPLITS, Metadata
from alphastomics.preprocessing.shard_reader import Scaling, ShardReader

logger = logging.getLogger(__name__)

SHOWN = 5  # names in a message
# Positions that belong to no named slice: those of a single training slice's frame.
BARE_POSITIONS = "positions"


@dataclass(frozen=True, kw_only=True)
class InputCells(CellTable):
    """Cells of one or more slices, dense, and what is known of the slices.

    Parameters
    ----------
    expression
        Values as in training; 0 for genes that were not measured.
    position
        Coordinates in the user's units, with 0 for the height of 2D slices; None without any.
    cell_type
        Names of the cell types, where they are known.
    measured
        Genes that each slice measured.
    dims
        2 for planar slices, 3 for volumes.
    slice_names
        The slices' names.
    common_frame
        Whether positions of other slices can be compared with these.
    scaling
        What each slice was standardised by; None where it was not, or nobody knows.
    origin
        What was subtracted from the user's positions.
    anchors
        Positions of cells that are known beside those that are asked for; NaN for the others.
    num_empty
        Cells of the file that have no count of the model's genes.
    """

    # A query may lack what training cells have.
    position: Float[np.ndarray, "N 3"] | None  # type: ignore[assignment]
    cell_type: np.ndarray | None  # type: ignore[assignment]
    cell_id: Int64[np.ndarray, " N"] | None = None  # type: ignore[assignment]
    measured: Bool[np.ndarray, "S G"]
    dims: int
    slice_names: list[str]
    common_frame: bool = False
    scaling: Scaling | None = None
    origin: Float64[np.ndarray, " 3"] | None = None
    anchors: Float64[np.ndarray, "N 3"] | None = None
    num_empty: int = 0

    @cached_property
    def names(self) -> list[str]:
        """Return the cells' names, in the order of the input."""
        assert self.obs_name is not None
        return list(self.obs_name.to_pylist())


def some_cells(cells: InputCells, chosen: np.ndarray) -> InputCells:
    """Return some of the cells, with the slices that they are of."""
    taken = replace(cells, anchors=None).take(chosen)  # anchors are taken below
    present, codes = np.unique(taken.slice_id, return_inverse=True)
    return replace(
        taken,
        measured=cells.measured[present],
        slice_id=codes.astype(np.int64),
        slice_names=[cells.slice_names[number] for number in present],
        scaling=rows_of_scaling(cells.scaling, present),
        anchors=None if cells.anchors is None else cells.anchors[chosen],
    )


def rows_of_scaling(scaling: Scaling | None, slices: np.ndarray) -> Scaling | None:
    """Return what some slices were standardised by."""
    return None if scaling is None else Scaling(scaling.mean[slices], scaling.std[slices])


def unit_of(cells: InputCells, number: int) -> Scaling | None:
    """Return what a slice was standardised by, if anybody knows."""
    return None if cells.scaling is None else Scaling(*(part[number] for part in cells.scaling))


def in_unit(
    cells: InputCells, rows: Int64[np.ndarray, " M"], unit: Scaling | None
) -> Float32[np.ndarray, "M G"]:
    """Return expression standardised as another slice is: else the value of zero tells them apart.

    Nothing is changed where nobody knows what one of both was standardised by.
    """
    values = cells.expression[rows]
    if unit is None or cells.scaling is None:
        return values
    mean, std = (part[cells.slice_id[rows]] for part in cells.scaling)
    # Genes that a slice did not measure have no scale.
    known = (std > 0) & (unit.std > 0)
    moved = (values * std + mean - unit.mean) / np.where(unit.std > 0, unit.std, 1)
    return np.where(known, moved, values).astype(np.float32)


def joined_slices(parts: list[np.ndarray | None], cells: InputCells) -> np.ndarray | None:
    """Put what was kept of each slice in the order of the cells; None where a slice has none."""
    if any(part is None for part in parts):
        return None
    joined = np.concatenate([part for part in parts if part is not None])
    order = np.concatenate([cells.rows_of(number) for number in range(len(parts))])
    whole = np.empty_like(joined)
    whole[order] = joined
    return whole


class Blank(NamedTuple):
    """New tissue to make from nothing: cells in a slice, and slices."""

    num_cells: int
    num_slices: int = 1


def blank_cells(blank: Blank, num_genes: int, *, dims: int) -> InputCells:
    """Make cells of which nothing is known, for `joint` to fill.

    Parameters
    ----------
    blank
        How many cells and slices.
    num_genes
        The checkpoint's genes.
    dims
        2 lays each generated slice into the plane; 3 leaves it as a 3D volume.
    """
    require_enough(blank.num_cells, "--num_cells")
    total = blank.num_cells * blank.num_slices
    return InputCells(
        expression=np.zeros((total, num_genes), np.float32),
        position=None,
        cell_type=None,
        slice_id=np.repeat(np.arange(blank.num_slices, dtype=np.int64), blank.num_cells),
        obs_name=pa.array([f"cell_{number}" for number in range(total)]),
        measured=np.ones((blank.num_slices, num_genes), dtype=bool),
        dims=dims,
        slice_names=[f"generated_{number}" for number in range(blank.num_slices)],
    )


def read_query(
    path: Path,
    genes: Sequence[str],
    normalization: dict[str, Any] | None,
    config: Config,
    *,
    checks_genes: bool = True,
) -> InputCells:
    """Read cells of any format: align genes, normalise as in training; they may lack positions.

    Where some have one and others NaN, those that have one are anchors. With `checks_genes`, cells
    that lack many of the genes are said to.
    """
    options = config.data.preprocessing
    opened = opened_query(
        path, genes, normalization, options, partial=True, checks_genes=checks_genes
    )
    with opened as query:
        reader, types = query.reader, query.form.cell_types
        key = options.cell_type_key
        if key is not None and key not in reader.obs.columns:
            raise InputError(
                f"{path}: obs[{key!r}] is missing (columns: "
                f"{', '.join(reader.obs.columns) or 'none'}); name the cell types with "
                "--cell_type_key, or leave it out"
            )
        cells = reader.read(query.form, 0, reader.num_cells)
        slices = list(reader.slices)
    expression = np.empty(cells.sparse.shape, np.float32)
    scaling = Scaling(*(np.zeros((len(slices), expression.shape[1])) for _ in range(2)))
    for number in range(len(slices)):
        rows = cells.rows_of(number)
        values = cells.sparse[rows]
        moments = moments_of_sparse(values) if query.scale else None
        expression[rows] = standardized(values, moments, query.measured)
        if moments is not None:
            scaling.mean[number], scaling.std[number] = moments.mean, standard_deviation(moments)
    unknown = np.isnan(cells.position).any(1)
    return InputCells(
        expression=expression,
        position=cells.position if query.dims and not unknown.any() else None,
        anchors=cells.position if query.dims and unknown.any() and not unknown.all() else None,
        cell_type=None if key is None else labels_of(cells.cell_type, types),
        slice_id=cells.slice_id,
        cell_id=cells.cell_id,
        obs_name=cells.obs_name,
        measured=np.tile(query.measured, (len(slices), 1)),
        dims=query.dims or (3 if options.position_is_3d else 2),
        slice_names=slices,
        scaling=scaling if query.scale else None,
        num_empty=num_empty(cells.sparse),
    )


def require_all_positions(cells: InputCells, what: object) -> None:
    """Refuse cells without coordinates, or some of which have none."""
    if cells.anchors is not None and cells.position is None:
        missing = int(np.isnan(cells.anchors).any(1).sum())
        raise InputError(f"{what}: {missing} of its cells have no position (NaN): leave them out")
    if cells.position is None:
        raise InputError(
            f"{what}: has no positions to score against; if they are stored under another key of "
            "obsm, name it with --set data.preprocessing.position_key=KEY"
        )


def labels_of(numbers: Int[np.ndarray, " N"], names: Sequence[str]) -> np.ndarray:
    """Return the names of cell types; the number -1 is of none that is known."""
    return np.array([*names, "unknown"], dtype=object)[numbers]


def with_enough_cells(cells: InputCells, least: int, what: str) -> InputCells:
    """Leave out slices that are too small to be scored, and name them; `what` is scored."""
    sizes = np.bincount(cells.slice_id, minlength=len(cells.slice_names))
    kept = np.flatnonzero(sizes >= least)
    small = [cells.slice_names[number] for number in np.flatnonzero(sizes < least)]
    if not small:
        return cells
    shown = ", ".join(small[:SHOWN]) + (", …" if len(small) > SHOWN else "")
    if not len(kept):
        raise InputError(
            f"{what}: has {sizes.sum()} cells in {len(sizes)} slice(s), the largest of "
            f"{sizes.max()}, but a score needs a slice of at least {least} cells: score another "
            "split (--split train or validation) or a whole slice (--input_data SLICE.h5ad), or "
            "preprocess again with a larger test share (a smaller --train_ratio)"
        )
    logger.warning(
        "%d slices have fewer than %d cells, and are not scored: %s", len(small), least, shown
    )
    return some_cells(cells, np.flatnonzero(np.isin(cells.slice_id, kept)))


def centred(cells: InputCells, known: InputCells | None) -> tuple[InputCells, InputCells | None]:
    """Move all positions by one vector to the origin, where float32 has all its digits.

    Scores compare positions with one another; where the origin lies is nothing to them.
    """
    if cells.position is None:
        return cells, known
    origin = cells.position.mean(0, dtype=np.float64)
    parts = [cells] if known is None or known.position is None else [cells, known]
    moved = [
        replace(
            part,
            position=part.position - origin,
            origin=origin,
            anchors=None if part.anchors is None else part.anchors - origin,
        )
        for part in parts
    ]
    return moved[0], moved[1] if len(moved) > 1 else known


def read_processed(where: Path, genes: Sequence[str], split: str | None) -> InputCells:
    """Read the cells of one split of a processed folder, or of all (None), slice by slice.

    All are those with positions; dissociated cells are read where their split is named.
    """
    folder = DataFolder(where)
    metadata = folder.metadata()
    if metadata.genes != list(genes):
        raise InputError(
            f"{where}: its genes are not the checkpoint's; preprocess with the checkpoint's list"
        )
    is_dissociated = split == REFERENCE
    if split is not None and not is_dissociated:
        require_split(metadata, split, where)
    splits = SPLITS if split is None else (split,)
    readers = [ShardReader(folder, metadata, name, verify=True) for name in splits]
    pieces = [(reader, piece) for reader in readers for piece in reader.pieces]
    table = joined_tables([reader.read(piece) for reader, piece in pieces])
    names = [name for reader, piece in pieces for name in reader.names(piece)[1].to_pylist()]
    reader = readers[0]
    of_slices = [record.name for record in metadata.records]
    present, codes = np.unique(table.slice_id, return_inverse=True)
    types = metadata.cell_types
    # What is Arrow's own memory is copied: torch wants it writable.
    expression, position = (
        np.require(part, requirements="W") for part in (reader.dense(table), table.position)
    )
    return InputCells(
        expression=expression,
        position=None if is_dissociated else position,
        cell_type=None if types is None else labels_of(table.cell_type, types),
        slice_id=codes.astype(np.int64),
        cell_id=table.cell_id,
        obs_name=pa.array(unique_names(names, [of_slices[number] for number in table.slice_id])),
        measured=reader.measured_genes[reader.panel_of_slice[present]],
        dims=2 if is_dissociated or all(metadata.slices[n].z is not None for n in present) else 3,
        slice_names=[of_slices[number] for number in present],
        common_frame=metadata.has_common_frame,
        scaling=rows_of_scaling(reader.scaling, present),
    )


def require_split(metadata: Metadata, split: str, where: Path) -> None:
    """Refuse a split that makes no tissue, and say what to use instead."""
    cells = metadata.splits[split].cells
    if cells < LEAST_CELLS:
        others = [name for name in SPLITS if metadata.splits[name].cells >= LEAST_CELLS]
        raise InputError(
            f"{where}: its {split} split has {cells} cell(s), at least {LEAST_CELLS} are needed: "
            f"give slices of your own with --input_data, or --split {' or '.join(others)}"
        )


def unique_names(names: list[str], slices: list[str]) -> list[str]:
    """Return the names of cells, with their slice's where two slices use the same one."""
    if len(set(names)) == len(names):
        return names
    return [f"{where}:{name}" for where, name in zip(slices, names, strict=True)]


def read_pt(path: Path, num_genes: int) -> InputCells:
    """Read tensors `expression` (N, G) and `positions` (N, 2 or 3), normalised as in training."""
    require_file(path)
    kind = "a file of tensors, saved by torch.save({'expression': …}, path)"
    content = load_plain(path, kind, MOST_PICKLED_CELLS)
    if not isinstance(content, dict) or not {"expression", "positions"} & set(content):
        raise InputError(f"{path}: expected a dict with 'expression' or 'positions'")
    expression, position = content.get("expression"), content.get("positions")
    if expression is None and position is None:
        raise InputError(f"{path}: neither 'expression' nor 'positions' is a tensor")
    require_tensors(path, {"expression": expression, "positions": position})
    cells = next(len(part) for part in (expression, position) if part is not None)
    require_enough(cells, path)
    if expression is not None and expression.shape != (cells, num_genes):
        raise InputError(
            f"{path}: expression has shape {tuple(expression.shape)}, expected "
            f"({cells}, {num_genes}): the checkpoint's genes"
        )
    if position is not None and position.shape not in ((cells, 2), (cells, 3)):
        raise InputError(f"{path}: positions have shape {tuple(position.shape)}, not (N, 2 or 3)")
    values = torch.zeros(cells, num_genes) if expression is None else expression.float()
    coordinates = None if position is None else position.detach().double().numpy()
    if coordinates is not None:
        coordinates = np.pad(coordinates, ((0, 0), (0, 3 - coordinates.shape[1])))
    return InputCells(
        expression=values.detach().numpy(),
        position=coordinates,
        cell_type=None,
        slice_id=np.zeros(cells, dtype=np.int64),
        obs_name=pa.array([str(number) for number in range(cells)]),
        measured=np.ones((1, num_genes), dtype=bool),
        dims=3 if position is not None and position.shape[1] == 3 else 2,
        slice_names=[path.stem],
    )


def require_tensors(path: Path, parts: dict[str, Any]) -> None:
    """Refuse what is no matrix of finite numbers."""
    for name, value in parts.items():
        if value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.ndim != 2:
            raise InputError(f"{path}: {name}: expected a tensor with one row a cell")
        # Without numbers of its own, or with rounded ones.
        odd = value.is_meta or value.is_quantized or value.is_complex()
        if odd or value.layout != torch.strided:
            raise InputError(f"{path}: {name}: expected a dense tensor of real numbers")
        if not bool(torch.isfinite(value.float()).all()):
            raise InputError(f"{path}: {name} has NaN or infinite values as float32")
