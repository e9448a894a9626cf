"""Slices of a set enter; training and test cells, as every method of a task is given them, leave.

Sets and hidden cells are those of `benchmarks.defaults`; so are the values: each slice is read by
the package itself, log-normalised and standardised.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import anndata
import numpy as np
import torch

from alphastomics import AlphaSTomics
from alphastomics.api.setup import options_for, setup_for, write_cells
from alphastomics.attn_model.neighbourhood import (
    nearest_cells,
    neighbour_mean,
    principal_components,
)
from alphastomics.generation.cells import InputCells, read_processed, read_query, some_cells
from alphastomics.preprocessing.folder import DataFolder
from benchmarks.defaults import SETS, slices_of

# Inside the training data, for choosing how a method is called.
CHOSEN_ON = {"embryo2_z2 -> embryo2_z5": {"train": ["embryo2_z2"], "test": ["embryo2_z5"]}}
ALL_SETS: dict[str, dict[str, Any]] = SETS | CHOSEN_ON
NEIGHBOURS, COMPONENTS = 15, 30


class Split(NamedTuple):
    """Training and test cells of a set: as AnnData, and as the package reads them."""

    train: list[anndata.AnnData]
    test: list[anndata.AnnData]
    known: InputCells
    cells: InputCells
    settings: dict[str, Any]


def read_split(folder: Path, name: str, seed: int, *, hidden: bool = False) -> Split:
    """Read a set; with `hidden`, a fifth of each training slice is the test."""
    chosen = ALL_SETS[name]
    train, test = slices_of(folder, chosen, seed, hidden=hidden)
    settings = {"common_frame": True} if chosen.get("common_frame") else {}
    return split_of(train, test, settings, seed)


def split_of(
    train: list[anndata.AnnData], test: list[anndata.AnnData], settings: dict[str, Any], seed: int
) -> Split:
    """Read training slices as `train` does, and test slices as `predict_positions` does."""
    with tempfile.TemporaryDirectory() as scratch:
        model = AlphaSTomics(train, folder=Path(scratch) / "model", seed=seed, **settings)
        model.config = model._with_folders(model._asked)
        model._preprocess(overwrite=True)
        processed = Path(scratch) / "model" / "processed"
        metadata = DataFolder(processed).metadata()
        known = read_processed(processed, metadata.genes, "train")
        setup = setup_for(test[0], model.config, "test")
        options = options_for(model.config.data.preprocessing, [setup], model._dims)
        data = model.config.data.model_copy(update={"preprocessing": options})
        query = Path(scratch) / "query.h5ad"
        write_cells(query, anndata.concat(test, index_unique="-"), setup)
        config = model.config.model_copy(update={"data": data})
        cells = read_query(query, metadata.genes, metadata.normalization.model_dump(), config)
    return Split(train, test, known, replace(cells, common_frame=known.common_frame), settings)


def log_values(cells: InputCells) -> np.ndarray:
    """Return log-normalised values, before they were standardised."""
    if cells.scaling is None:
        return cells.expression
    mean, std = (part[cells.slice_id] for part in cells.scaling)
    return np.maximum(cells.expression * std + mean, 0).astype(np.float32)


def smoothed(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Average cells over their nearest neighbours in expression space, within each slice."""
    result = np.empty_like(values)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        inside = torch.from_numpy(np.ascontiguousarray(values[rows], dtype=np.float32))
        components = principal_components(inside, COMPONENTS)
        near = nearest_cells(components, min(NEIGHBOURS, len(rows)))
        result[rows] = neighbour_mean(inside, near).numpy()
    return result


def part_of(cells: InputCells, size: int, seed: int) -> np.ndarray:
    """Choose some cells of each slice, in order; of small slices all."""
    random = np.random.default_rng(seed)
    rows = [random.permutation(cells.rows_of(n))[:size] for n in range(len(cells.slice_names))]
    return np.sort(np.concatenate(rows))


def slice_cells(cells: InputCells, number: int) -> InputCells:
    """Return the cells of one slice."""
    return some_cells(cells, cells.rows_of(number))
