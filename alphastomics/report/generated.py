"""A page of virtual sections alone: the file that `sample` wrote enters, `Findings` leave.

Cells that were made have no truth to be compared with: the page shows them, in 3D, and no score.
"""

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from jaxtyping import Float64, Int64
from scipy.sparse import issparse

from alphastomics.errors import InputError
from alphastomics.generation.cells import InputCells
from alphastomics.generation.notices import is_processed
from alphastomics.generation.virtual_sections import MODE
from alphastomics.preprocessing.anndata_file import SUFFIXES
from alphastomics.preprocessing.cell_source import SourceOptions
from alphastomics.preprocessing.subprocess_reader import in_subprocess
from alphastomics.report.findings import Findings

if TYPE_CHECKING:
    from anndata import AnnData

WHY = "the cells were made: there is no truth to compare with"
PARTS = ("predicted_position", "predicted", "path", "new", "scores", "curves", "inside", "std")


def read_virtual(path: Path, options: SourceOptions) -> "AnnData | None":
    """Read a file or a store if it holds virtual sections."""
    if path.suffix.lower() not in SUFFIXES or not path.exists() or is_processed(path):
        return None
    with in_subprocess(path, options) as source:
        return source.to_anndata() if source.generated_mode == MODE else None


def sections_by_z(
    name: np.ndarray, z: Float64[np.ndarray, " N"]
) -> tuple[list[str], Int64[np.ndarray, " N"]]:
    """Sort and number sections by z: by name, 110 would come before 50."""
    names, code = np.unique(name, return_inverse=True)
    order = np.argsort(np.bincount(code, z) / np.bincount(code), kind="stable")
    return [str(section) for section in names[order]], np.argsort(order)[code].astype(np.int64)


def virtual_findings(path: Path, data: "AnnData", unit: str) -> Findings:
    """Show the cells of virtual sections where they lie in space."""
    key = "spatial3d" if "spatial3d" in data.obsm else "spatial"
    if key not in data.obsm or np.shape(data.obsm[key])[1] != 3:
        raise InputError(f"{path}: virtual sections without obsm['spatial3d']: sample them again")
    values = data.layers.get("normalized", data.X)
    position = np.asarray(data.obsm[key], dtype=np.float64)
    names, slice_id = sections_by_z(data.obs["slice_id"].astype(str).to_numpy(), position[:, 2])
    types = data.obs.get("cell_type")
    cells = InputCells(
        expression=np.asarray(values.toarray() if issparse(values) else values, np.float32),
        position=position,
        cell_type=None if types is None else types.astype(str).to_numpy(dtype=object),
        slice_id=slice_id,
        obs_name=pa.array(data.obs_names.astype(str).tolist()),
        measured=np.ones((len(names), data.n_vars), dtype=bool),
        dims=3,
        slice_names=names,
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
