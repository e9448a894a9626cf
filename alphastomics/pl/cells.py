"""What a picture shows of cells: an AnnData and keys enter, checked arrays leave."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float64, Int64

from alphastomics.errors import InputError

SLICE_KEY = "slice_id"


@dataclass(frozen=True)
class Values:
    """One value for each cell.

    `names` are the groups that `values` are numbers of (NaN: of none), None for quantities;
    `palette` has the colours that an AnnData brings for them.
    """

    label: str
    values: Float64[np.ndarray, " N"]
    names: list[str] | None = None
    palette: list[str] | None = None

    def of(self, rows: Int64[np.ndarray, " M"]) -> "Values":
        """Keep some of the cells."""
        return Values(self.label, self.values[rows], self.names, self.palette)


def refused(slot: str, key: object, present: Any, advice: str) -> InputError:
    """Make the refusal of a key that an AnnData does not have."""
    # anndata 0.13 counts X among the layers, by the name None.
    there = ", ".join(str(name) for name in present if name is not None) or "none"
    return InputError(f"adata: {slot}[{key!r}] is missing (there: {there}); {advice}")


def coordinates(adata: Any, key: str, advice: str) -> Float64[np.ndarray, "N D"]:
    """Return the coordinates under a key of obsm; those of a cell may all be NaN."""
    if key not in adata.obsm:
        raise refused("obsm", key, adata.obsm, advice)
    try:
        position = np.asarray(adata.obsm[key], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"adata: obsm[{key!r}] does not hold numbers; {advice}") from error
    if position.ndim != 2 or position.shape[1] not in (2, 3):
        raise InputError(
            f"adata: obsm[{key!r}] has shape {position.shape}, not (cells, 2) or (cells, 3); "
            f"{advice}"
        )
    return position


def known(position: Float64[np.ndarray, "N D"]) -> Bool[np.ndarray, " N"]:
    """Say which cells have coordinates."""
    return np.isfinite(position).all(axis=1)


def slices(adata: Any, key: str | None) -> dict[str, Int64[np.ndarray, " M"]]:
    """Return the rows of each slice; all cells are one without a key, or a column of that name.

    A column that is not the usual one must be there.
    """
    if key is None or (key == SLICE_KEY and key not in adata.obs):
        return {"": np.arange(adata.n_obs)}
    if key not in adata.obs:
        raise refused("obs", key, adata.obs, "name the column of the slices with slice_key=…")
    names = adata.obs[key].astype(str).to_numpy()
    return {str(name): np.flatnonzero(names == name) for name in pd.unique(names)}


def values_of(adata: Any, color: str) -> Values:
    """Return what cells are coloured by: a column of obs, or the values in X of a gene."""
    if color in adata.obs:
        return column_values(adata, color)
    if color in adata.var_names:
        return Values(color, gene_values(adata.X, adata.var_names.get_loc(color)))
    raise InputError(
        f"adata: color {color!r} is neither a column of obs nor a gene (columns: "
        f"{', '.join(map(str, adata.obs)) or 'none'}; first gene: {adata.var_names[0]!r})"
    )


def column_values(adata: Any, color: str) -> Values:
    """Return a column of obs: numbers as they are, everything else as groups."""
    column = adata.obs[color]
    if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column):
        return Values(color, column.to_numpy(dtype=np.float64, na_value=np.nan))
    groups = column.astype("category").cat
    names = [str(name) for name in groups.categories]
    codes = groups.codes.to_numpy(dtype=np.float64)
    palette = adata.uns.get(f"{color}_colors")
    if palette is None or len(palette) < len(names):
        palette = None
    else:
        palette = [str(colour) for colour in palette]
    return Values(color, np.where(codes < 0, np.nan, codes), names, palette)


def gene_values(matrix: Any, column: int) -> Float64[np.ndarray, " N"]:
    """Return one column of a dense or sparse matrix."""
    if matrix is None:
        raise InputError("adata: X is missing; name a layer, or a column of obs")
    values = matrix[:, [column]]
    dense = values.toarray() if hasattr(values, "toarray") else np.asarray(values)
    return dense.ravel().astype(np.float64)
