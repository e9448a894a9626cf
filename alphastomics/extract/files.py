"""Files of embeddings: rows that wait on the disk, and what is known of each, enter; a file leaves.

`.npz`, `.pt` and `.h5` hold the same names; `.h5ad` has them where AnnData has its own.
"""

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import torch
from jaxtyping import Float32

Column = np.ndarray | list[str] | str
BLOCK_ROWS = 4096
OBSM_KEY = "X_alphastomics"


def write_npz(path: Path, rows: np.ndarray, content: dict[str, Column]) -> None:
    """Write a zip of plain arrays: `numpy.load` reads it without pickles."""
    arrays = {
        name: column if isinstance(column, np.ndarray) else np.array(column, dtype=np.str_)
        for name, column in content.items()
    }
    # numpy writes a mapped array in blocks, and an entry of the zip without its date.
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, embedding=rows, **arrays)


def write_pt(path: Path, rows: np.ndarray, content: dict[str, Column]) -> None:
    """Write tensors and plain data: `torch.load(..., weights_only=True)` reads them."""
    plain = {
        name: torch.from_numpy(column) if isinstance(column, np.ndarray) else column
        for name, column in {"embedding": rows, **content}.items()
    }
    # torch writes the name of a path into the file, and ours holds the process id.
    with path.open("wb") as file:
        torch.save(plain, file)


def write_h5(path: Path, rows: np.ndarray, content: dict[str, Column]) -> None:
    """Write one data set for each name; text is UTF-8."""
    with h5py.File(path, "w") as file:
        target = file.create_dataset("embedding", rows.shape, np.float32)
        for start in range(0, len(rows), BLOCK_ROWS):
            target[start : start + BLOCK_ROWS] = rows[start : start + BLOCK_ROWS]
        for name, column in content.items():
            kind = column.dtype if isinstance(column, np.ndarray) else h5py.string_dtype()
            file.create_dataset(name, data=column, dtype=kind)


def write_h5ad(path: Path, rows: np.ndarray, content: dict[str, Column]) -> None:
    """Write an AnnData without X: labels in `obs`, the embedding in `obsm`."""
    import pandas as pd
    from anndata import AnnData
    from anndata.io import write_elem

    obs = pd.DataFrame(index=pd.Index(content["obs_name"], dtype=object))
    obs["cell_id"] = content["cell_id"]
    for name in ("slice_id", "cell_type", "split"):
        names = content["slice_names" if name == "slice_id" else f"{name}_names"]
        codes = content[name]
        assert isinstance(names, list)
        assert isinstance(codes, np.ndarray)
        if names:
            obs[name] = pd.Categorical.from_codes(codes, pd.Index(names, dtype=object))
    with h5py.File(path, "w") as file:
        write_elem(file, "/", AnnData(obs=obs, uns={OBSM_KEY: content["extract_mode"]}))
        write_obsm(file, rows)


def stored(path: Path, shape: tuple[int, ...]) -> Float32[np.ndarray, "N *L D"]:
    """View the rows of a file without reading them."""
    # Copy on write: torch wants memory that it could write to, and the file stays as it is.
    return np.memmap(path, np.float32, mode="c", shape=shape)


def obsm_of(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Name embeddings as in `obsm`, whose arrays are matrices: of all layers, each has its own."""
    if rows.ndim == 2:
        return {OBSM_KEY: rows}
    return {f"{OBSM_KEY}_{layer}": rows[:, layer] for layer in range(rows.shape[1])}


def write_obsm(file: h5py.File, rows: np.ndarray) -> list[str]:
    """Write embeddings into an open AnnData file, block by block; return their keys."""
    obsm = file["obsm"]
    layers = obsm_of(rows)
    for old in [key for key in obsm if key == OBSM_KEY or key.startswith(f"{OBSM_KEY}_")]:
        del obsm[old]
    for key, values in layers.items():
        target = obsm.create_dataset(key, values.shape, np.float32)
        target.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
        for start in range(0, len(values), BLOCK_ROWS):
            target[start : start + BLOCK_ROWS] = values[start : start + BLOCK_ROWS]
    return list(layers)


WRITERS: dict[str, Callable[[Path, np.ndarray, dict[str, Column]], None]] = {
    ".npz": write_npz,
    ".pt": write_pt,
    ".h5": write_h5,
    ".h5ad": write_h5ad,
}
