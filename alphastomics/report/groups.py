"""Groups of cells to colour and to sum up by: types, clusters and columns of `obs` enter and leave.

Where the data have no cell types, k-means clusters of expression stand in for them.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int64
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA

from alphastomics.generation.cells import InputCells
from alphastomics.preprocessing.anndata_file import SUFFIXES, Frame, is_group
from alphastomics.preprocessing.cell_source import SourceOptions
from alphastomics.preprocessing.subprocess_reader import in_subprocess
from alphastomics.report.findings import ObsColumn

NUM_CLUSTERS, LEAST_PER_CLUSTER, FITTED_CELLS, COMPONENTS = 8, 10, 20_000, 20
MOST_COLUMNS, MOST_NAMES = 30, 40
UNKNOWN = "unknown"


class Groups(NamedTuple):
    """What kind of groups there are, their names, and the number of each cell's."""

    kind: str
    names: list[str]
    codes: Int64[np.ndarray, " N"]


def groups_of(cells: InputCells, seed: int) -> Groups | None:
    """Return the cell types, or clusters where there are none; None for too few cells."""
    if cells.cell_type is not None:
        return Groups("Cell type", *by_frequency(cells.cell_type.astype(str)))
    return clusters_of(cells.expression, seed)


def by_frequency(labels: np.ndarray) -> tuple[list[str], Int64[np.ndarray, " N"]]:
    """Give each label a number, the most frequent first."""
    names, number, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return [str(name) for name in names[order]], rank[number]


def clusters_of(expression: Float32[np.ndarray, "N G"], seed: int) -> Groups | None:
    """Cluster cells by expression: k-means in principal components, fitted to some of them."""
    number = min(NUM_CLUSTERS, len(expression) // LEAST_PER_CLUSTER)
    if number < 2:
        return None
    random = np.random.default_rng(seed)
    few = expression[np.sort(random.permutation(len(expression))[:FITTED_CELLS])]
    pca = PCA(min(COMPONENTS, *few.shape), random_state=seed).fit(few)
    means = KMeans(number, n_init=3, random_state=seed).fit(pca.transform(few))
    labels = means.predict(pca.transform(expression))
    names, codes = by_frequency(labels.astype(str))
    return Groups("Cluster", [f"cluster {rank + 1}" for rank in range(len(names))], codes)


def error_by_group(
    groups: Groups | None,
    error: Float[np.ndarray, " N"],
    std: Float[np.ndarray, " N"] | None,
) -> list[dict[str, Any]] | None:
    """Median error, and median std, of each group; the largest error first."""
    if groups is None:
        return None
    medians = []
    for code, name in enumerate(groups.names):
        rows = groups.codes == code
        if rows.any():
            median_std = None if std is None else float(np.median(std[rows]))
            median = float(np.median(error[rows]))
            cells = int(rows.sum())
            medians.append({"name": name, "cells": cells, "error": median, "std": median_std})
    return sorted(medians, key=lambda group: -group["error"])


def obs_columns(path: Path, num_cells: int, options: SourceOptions) -> list[ObsColumn]:
    """Read the columns of `obs` that can be colours: a few names, or numbers."""
    if path.suffix not in SUFFIXES:
        return []
    columns: list[ObsColumn] = []
    with in_subprocess(path, options) as source:
        obs = source.obs
        if not isinstance(obs, Frame):
            return []
        for name in obs.columns:
            element = obs.group[name]
            column = None
            if is_numeric(element, num_cells):
                column = number_column(name, np.asarray(element[...], dtype=np.float64))
            if column is None:
                codes, names = obs.labels(name, 0, num_cells)
                column = name_column(name, codes, [str(value) for value in names.to_pylist()])
            if column is not None and len(columns) < MOST_COLUMNS:
                columns.append(column)
    return columns


def is_numeric(element: Any, num_cells: int) -> bool:
    """Tell a plain array of numbers from categories and texts."""
    if is_group(element) or "categories" in element.attrs:
        return False
    return element.dtype.kind in "iuf" and tuple(element.shape) == (num_cells,)


def number_column(name: str, values: Float[np.ndarray, " N"]) -> ObsColumn | None:
    """Keep numbers that differ; few whole ones are names, as of clusters."""
    real = np.isfinite(values)
    if not real.any() or np.ptp(values[real]) == 0:
        return None
    whole = bool((values[real] == np.round(values[real])).all())
    if whole and len(np.unique(values[real])) <= MOST_NAMES:
        return None
    return ObsColumn(name, None, np.where(real, values, np.nan))


def name_column(name: str, codes: np.ndarray, names: list[str]) -> ObsColumn | None:
    """Keep a column of at least two and not too many names; what is missing is a name, too."""
    used = np.unique(codes)
    if not 2 <= len(used) <= MOST_NAMES:
        return None
    labels = np.array([*names, UNKNOWN], dtype=object)[codes]
    known, numbers = by_frequency(labels.astype(str))
    return ObsColumn(name, known, numbers.astype(np.float64))
