"""Tissue, generated or measured, in the plane and in space: AnnData enters, axes leave."""

from typing import Any

import numpy as np

from alphastomics.errors import InputError
from alphastomics.pl.axes import ends_of, explain, panels, plot_cells, titled
from alphastomics.pl.cells import SLICE_KEY, Values, coordinates, slices, values_of

CELL_TYPE = "cell_type"
POSITION_ADVICE = "name the key of the positions with position_key=…"


def tissue(
    adata: Any,
    color: str | None = None,
    *,
    position_key: str = "spatial",
    slice_key: str | None = SLICE_KEY,
    ax: Any = None,
) -> np.ndarray:
    """Plot each slice in the plane, by x and y.

    Parameters
    ----------
    adata
        Cells with positions, such as those of `model.generate`.
    color
        Column of obs, or a gene; None is obs["cell_type"] where there is one.
    position_key
        Key of obsm with the positions.
    slice_key
        Column of obs that names the slices; None makes all cells one slice.
    ax
        As many axes as there are slices, to plot into; None makes a figure.

    Returns
    -------
    numpy.ndarray
        Axes: one row, an axes for each slice.
    """
    position = coordinates(adata, position_key, POSITION_ADVICE)[:, :2]
    values = usual_values(adata, color)
    parts = slices(adata, slice_key)
    axes = panels(1, [2] * len(parts), ax)[0]
    points = None
    for panel, (name, rows) in zip(axes, parts.items(), strict=True):
        of_slice = None if values is None else values.of(rows)
        points = plot_cells(panel, position[rows], of_slice, ends=shared_ends(values))
        titled(panel, name)
    explain(list(axes), points, values)
    return axes


def volume(
    adata: Any,
    color: str | None = None,
    *,
    position_key: str | None = None,
    ax: Any = None,
) -> Any:
    """Plot all cells in space, each axis to scale.

    Parameters
    ----------
    adata
        Cells with positions in 3D: aligned or virtual sections, or a 3D volume.
    color
        Column of obs, or a gene; None is obs["cell_type"] where there is one.
    position_key
        Key of obsm with the positions, three columns; None is "spatial3d" where there is one, and
        else "spatial".
    ax
        Axes made with projection="3d", to plot into; None makes a figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes; `view_init(elev, azim)` rotates them.
    """
    if position_key is None:
        position_key = "spatial3d" if "spatial3d" in adata.obsm else "spatial"
    position = coordinates(adata, position_key, POSITION_ADVICE)
    if position.shape[1] != 3:
        raise InputError(
            f"adata: obsm[{position_key!r}] has {position.shape[1]} columns, and a volume needs 3; "
            "pl.tissue plots planar slices"
        )
    values = usual_values(adata, color)
    axes = panels(1, [3], ax)[0, 0]
    points = plot_cells(axes, position, values)
    axes.set(xlabel="x", ylabel="y", zlabel="z")
    explain([axes], points, values)
    return axes


def usual_values(adata: Any, color: str | None) -> Values | None:
    """Return what cells are coloured by: their type, where nothing else is asked for."""
    if color is None and CELL_TYPE not in adata.obs:
        return None
    return values_of(adata, color or CELL_TYPE)


def shared_ends(values: Values | None) -> tuple[float, float] | None:
    """Return ends of the colour scale that hold for all slices; None for groups."""
    return None if values is None or values.names is not None else ends_of(values.values)
