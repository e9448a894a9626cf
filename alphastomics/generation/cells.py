"""Cells to generate for: an .h5ad, a .pt or a processed folder enters, `InputCells` leave.

Expression is brought to what the checkpoint was trained on: its genes, its normalisation.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from scipy.sparse import csr_array

from alphastomics.config import Config
from alphastomics.diffusion_model.bounds import MOST_PICKLED_CELLS
from alphastomics.diffusion_model.checkpoint import load_plain
from alphastomics.errors import InputError
from alphastomics.io.files import require_file
from alphastomics.preprocessing.anndata_file import Expression, Frame, Positions
from alphastomics.preprocessing.folder import DataFolder
from alphastomics.preprocessing.genes import align, require_unique
from alphastomics.preprocessing.inspection import SLICE_KEY, slice_codes, slice_names
from alphastomics.preprocessing.normalize import (
    log_normalized,
    moments_of_sparse,
    standard_deviation,
)
from alphastomics.preprocessing.query_fit import check_genes, needs_normalizing
from alphastomics.preprocessing.schema import Metadata
from alphastomics.preprocessing.shard_reader import ShardReader
from alphastomics.preprocessing.subprocess_reader import in_subprocess

logger = logging.getLogger(__name__)

LEAST_CELLS = 2
BLOCK_ROWS = 4096
SHOWN = 5  # names in a message


@dataclass(frozen=True)
class InputCells:
    """Cells of one or more slices.

    Parameters
    ----------
    expression
        Values as in training; 0 for genes that were not measured.
    measured
        Genes that each slice measured.
    position
        Coordinates in the user's units, with 0 for the height of 2D slices; None without any.
    dims
        2 for planar slices, 3 for volumes.
    slice_id, slice_names
        The slice of each cell, and the slices' names.
    names
        The cells' names, in the order of the input.
    cell_type
        Cell types, where they are known.
    common_frame
        Whether positions of other slices can be compared with these.
    """

    expression: Float32[np.ndarray, "N G"]
    measured: Bool[np.ndarray, "S G"]
    position: Float[np.ndarray, "N 3"] | None
    dims: int
    slice_id: Int64[np.ndarray, " N"]
    slice_names: list[str]
    names: list[str]
    cell_type: np.ndarray | None
    common_frame: bool = False

    def rows_of(self, number: int) -> Int64[np.ndarray, " M"]:
        """Return the cells of a slice."""
        return np.flatnonzero(self.slice_id == number)


def some_cells(cells: InputCells, chosen: np.ndarray) -> InputCells:
    """Return some of the cells, with the slices that they are of."""
    present, codes = np.unique(cells.slice_id[chosen], return_inverse=True)
    return replace(
        cells,
        expression=cells.expression[chosen],
        measured=cells.measured[present],
        position=None if cells.position is None else cells.position[chosen],
        slice_id=codes.astype(np.int64),
        slice_names=[cells.slice_names[number] for number in present],
        names=[cells.names[row] for row in chosen],
        cell_type=None if cells.cell_type is None else cells.cell_type[chosen],
    )


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
        np.zeros((total, num_genes), np.float32),
        np.ones((blank.num_slices, num_genes), dtype=bool),
        None,
        dims,
        np.repeat(np.arange(blank.num_slices, dtype=np.int64), blank.num_cells),
        [f"generated_{number}" for number in range(blank.num_slices)],
        [f"cell_{number}" for number in range(total)],
        None,
    )


def read_h5ad(
    path: Path, genes: Sequence[str], normalization: dict[str, Any], config: Config
) -> InputCells:
    """Read an AnnData file: align its genes, normalise as in training; it may lack coordinates."""
    settings = config.data.preprocessing
    with in_subprocess(path) as root:
        obs, var = Frame(path, root, "obs"), Frame(path, root, "var")
        cells, file_genes = len(obs), var.names(0, len(var)).to_pylist()
        require_enough(cells, path)
        require_unique(file_genes, f"{path}: var_names", "make them unique and save the file again")
        alignment = align(file_genes, genes, path)
        counts = Expression(path, root, cells, len(file_genes)).whole()
        position = read_positions(path, root, settings.position_key, cells)
        names = obs.names(0, cells).to_pylist()
        slices = slice_names(obs, cells) if SLICE_KEY in obs.columns else (path.stem,)
        codes = np.zeros(cells, dtype=np.int64)
        if SLICE_KEY in obs.columns:
            codes = slice_codes(obs, slices, 0, cells)
        labels = read_labels(obs, settings.cell_type_key, cells, path)
        has_log1p = "uns" in root and "log1p" in root["uns"]
    if normalization["log_normalize"] and needs_normalizing(
        counts,
        path,
        has_log1p=has_log1p,
        asked=settings.log_normalize,
        as_it_is=bool(normalization.get("fractions")),
    ):
        counts = log_normalized(counts)
    check_genes(len(genes) - len(alignment.missing()), genes, path)
    values = alignment.apply(counts)
    measured = np.ones(len(genes), dtype=bool)
    measured[alignment.missing()] = False
    expression = scaled(values, codes, len(slices)) if normalization["scale"] else values.toarray()
    expression[:, ~measured] = 0
    return InputCells(
        expression.astype(np.float32),
        np.tile(measured, (len(slices), 1)),
        None if position is None else np.pad(position, ((0, 0), (0, 3 - position.shape[1]))),
        (3 if settings.position_is_3d else 2) if position is None else position.shape[1],
        codes,
        list(slices),
        names,
        labels,
    )


def read_positions(
    path: Path, root: Any, key: str, cells: int
) -> Float64[np.ndarray, "N C"] | None:
    """Read coordinates where there are any: dissociated cells have none."""
    if "obsm" not in root or key not in root["obsm"]:
        return None
    positions = Positions(path, root, key, cells)
    if positions.columns not in (2, 3):
        raise InputError(f"{path}: obsm[{key!r}] has {positions.columns} columns, not 2 or 3")
    return positions.rows(0, cells)


def read_labels(obs: Frame, key: str | None, cells: int, path: Path) -> np.ndarray | None:
    """Read the cell types, if asked for."""
    if key is None:
        return None
    if key not in obs.columns:
        raise InputError(
            f"{path}: obs[{key!r}] is missing (columns: {', '.join(obs.columns) or 'none'}); "
            "name the cell types with --cell_type_key, or leave it out"
        )
    codes, names = obs.labels(key, 0, cells)
    words = np.array([*names.to_pylist(), "unknown"], dtype=object)
    return words[codes]


def scaled(
    values: csr_array, slice_id: Int64[np.ndarray, " N"], num_slices: int
) -> Float32[np.ndarray, "N G"]:
    """Standardise each gene within its slice, as preprocessing does."""
    dense = values.toarray().astype(np.float32, copy=False)
    for number in range(num_slices):
        rows = np.flatnonzero(slice_id == number)
        moments = moments_of_sparse(values[rows])
        deviation = standard_deviation(moments)
        # A block at a time: float64 takes twice the memory of the whole.
        for block in np.array_split(rows, max(len(rows) // BLOCK_ROWS, 1)):
            dense[block] = (dense[block].astype(np.float64) - moments.mean) / deviation
    return dense


def require_enough(cells: int, where: object) -> None:
    """Refuse inputs that make no tissue."""
    if cells < LEAST_CELLS:
        raise InputError(f"{where}: {cells} cell(s); at least {LEAST_CELLS} are needed")


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
    rows = np.flatnonzero(np.isin(cells.slice_id, kept))
    return InputCells(
        cells.expression[rows],
        cells.measured[kept],
        None if cells.position is None else cells.position[rows],
        cells.dims,
        np.searchsorted(kept, cells.slice_id[rows]).astype(np.int64),
        [cells.slice_names[number] for number in kept],
        [cells.names[row] for row in rows],
        None if cells.cell_type is None else cells.cell_type[rows],
    )


def centred(cells: InputCells, known: InputCells | None) -> tuple[InputCells, InputCells | None]:
    """Move all positions by one vector to the origin, where float32 has all its digits.

    Scores compare positions with one another; where the origin lies is nothing to them.
    """
    if cells.position is None:
        return cells, known
    origin = cells.position.mean(0, dtype=np.float64)
    parts = [cells] if known is None or known.position is None else [cells, known]
    moved = [replace(part, position=part.position - origin) for part in parts]
    return moved[0], moved[1] if len(moved) > 1 else known


def read_processed(where: Path, genes: Sequence[str], split: str) -> InputCells:
    """Read the cells of one split of a processed folder, slice by slice."""
    folder = DataFolder(where)
    metadata = folder.metadata()
    if metadata.genes != list(genes):
        raise InputError(
            f"{where}: its genes are not the checkpoint's; preprocess with the checkpoint's list"
        )
    reader = ShardReader(folder, metadata, split, verify=True)
    tables = [reader.read(piece) for piece in reader.pieces]
    require_split(metadata, split, where)
    cell_type, types = np.concatenate([table.cell_type for table in tables]), metadata.cell_types
    slice_id = np.concatenate([table.slice_id for table in tables]).astype(np.int64)
    present, codes = np.unique(slice_id, return_inverse=True)
    return InputCells(
        np.concatenate([reader.dense(table) for table in tables]),
        reader.measured_genes[reader.panel_of_slice[present]],
        np.concatenate([table.position for table in tables]),
        2 if all(metadata.slices[number].z is not None for number in present) else 3,
        codes.astype(np.int64),
        [metadata.slices[number].name for number in present],
        unique_names(
            [name for piece in reader.pieces for name in reader.names(piece)[1].to_pylist()],
            [metadata.slices[number].name for number in slice_id],
        ),
        None if types is None else np.array([*types, "unknown"], dtype=object)[cell_type],
        metadata.has_common_frame,
    )


def require_split(metadata: Metadata, split: str, where: Path) -> None:
    """Refuse a split that makes no tissue, and say what to use instead."""
    cells = metadata.splits[split].cells
    if cells < LEAST_CELLS:
        others = [name for name, record in metadata.splits.items() if record.cells >= LEAST_CELLS]
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
    return InputCells(
        values.detach().numpy(),
        np.ones((1, num_genes), dtype=bool),
        None
        if coordinates is None
        else np.pad(coordinates, ((0, 0), (0, 3 - coordinates.shape[1]))),
        3 if coordinates is not None and coordinates.shape[1] == 3 else 2,
        np.zeros(cells, dtype=np.int64),
        [path.stem],
        [str(number) for number in range(cells)],
        None,
    )


def not_plain(value: torch.Tensor) -> bool:
    """Tell a tensor without numbers of its own, or with rounded ones, from a plain one."""
    return value.is_meta or value.is_quantized


def require_tensors(path: Path, parts: dict[str, Any]) -> None:
    """Refuse what is no matrix of finite numbers."""
    for name, value in parts.items():
        if value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.ndim != 2:
            raise InputError(f"{path}: {name}: expected a tensor with one row a cell")
        if value.layout != torch.strided or value.is_complex() or not_plain(value):
            raise InputError(f"{path}: {name}: expected a dense tensor of real numbers")
        if not bool(torch.isfinite(value.float()).all()):
            raise InputError(f"{path}: {name} has NaN or infinite values as float32")
