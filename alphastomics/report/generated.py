"""A page of virtual sections alone: the file that `sample` wrote enters, `Findings` leave.

Cells that were made have no truth to be compared with: the page shows them, in 3D, and no score.
"""

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from scipy.sparse import issparse

from alphastomics.errors import InputError
from alphastomics.generation.cells import InputCells
from alphastomics.generation.virtual_sections import MODE
from alphastomics.preprocessing.anndata_file import SUFFIXES, read_whole
from alphastomics.report.findings import Findings

if TYPE_CHECKING:
    from anndata import AnnData

WHY = "the cells were made: there is no truth to compare with"
PARTS = ("predicted_position", "predicted", "path", "new", "scores", "curves", "inside", "std")


def read_virtual(path: Path) -> "AnnData | None":
    """Read a file if it holds virtual sections."""
    if path.suffix.lower() not in SUFFIXES or not path.is_file():
        return None
    import h5py

    if not h5py.is_hdf5(path):
        return None
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            mode: Any = file.get("uns/alphastomics/mode")
            if mode is None or mode[()] != MODE.encode():
                return None
    except OSError:  # damaged: said by the reader of cells, as for any other file
        return None
    return read_whole(path)


def virtual_findings(path: Path, data: "AnnData", unit: str) -> Findings:
    """Show the cells of virtual sections where they lie in space."""
    key = "spatial3d" if "spatial3d" in data.obsm else "spatial"
    if key not in data.obsm or np.shape(data.obsm[key])[1] != 3:
        raise InputError(f"{path}: virtual sections without obsm['spatial3d']: sample them again")
    values = data.layers.get("normalized", data.X)
    slices = data.obs["slice_id"].astype("category").cat
    types = data.obs.get("cell_type")
    cells = InputCells(
        expression=np.asarray(values.toarray() if issparse(values) else values, np.float32),
        position=np.asarray(data.obsm[key], dtype=np.float64),
        cell_type=None if types is None else types.astype(str).to_numpy(dtype=object),
        slice_id=slices.codes.to_numpy().astype(np.int64),
        obs_name=pa.array(data.obs_names.astype(str).tolist()),
        measured=np.ones((len(slices.categories), data.n_vars), dtype=bool),
        dims=3,
        slice_names=[str(name) for name in slices.categories],
        common_frame=True,
    )
    facts: Mapping[str, str] = {
        "Cells": f"{data.n_obs:,}",
        "Virtual sections": str(len(cells.slice_names)),
        "Genes": f"{data.n_vars:,}",
        "Data": path.name,
        "Made": date.today().isoformat(),
    }
    return Findings(
        path.stem,
        list(facts.items()),
        cells,
        list(data.var_names),
        missing=dict.fromkeys(PARTS, WHY),
        unit=unit,
        is_generated=True,
    )
