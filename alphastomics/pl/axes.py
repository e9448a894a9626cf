"""Panels of a figure and what is in them: cells enter, axes with coloured points leave."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Float64

from alphastomics.errors import InputError
from alphastomics.pl.cells import Values

PANEL_INCHES, LARGER_IN_SPACE = 3.2, 1.5
MISSING = "lightgrey"  # cells without a value
PLAIN = "tab:blue"
ENDS = (1, 99)  # percentiles: outliers must not take the colours from the rest
# Points that fill a panel: area in pt^2 of all of them, and the bounds of one.
AREA, SMALLEST, LARGEST = 20_000, 0.3, 20.0
LEGEND_ROWS = 20


def panels(rows: int, dims: Sequence[int], ax: Any, *, link: bool = False) -> np.ndarray:
    """Return rows of panels: new axes, or those that the caller gave.

    Parameters
    ----------
    rows
        Rows of panels.
    dims
        For each column 2, or 3 for axes in space.
    ax
        None, one Axes for one panel, or as many as there are panels.
    link
        Planar panels of a row share their limits.
    """
    import matplotlib.pyplot as plt

    columns = len(dims)
    if ax is not None:
        given = np.array(ax, dtype=object).reshape(-1)
        if given.size != rows * columns:
            raise InputError(
                f"ax: {rows * columns} panels are plotted, got {given.size} axes; give as many, "
                "or none"
            )
        if any(d == 3 and a.name != "3d" for d, a in zip([*dims] * rows, given, strict=True)):
            raise InputError('ax: cells in 3D need axes made with projection="3d"')
        return given.reshape(rows, columns)
    inches = PANEL_INCHES * (LARGER_IN_SPACE if 3 in dims else 1)
    size = (inches * columns + 1, inches * rows)
    figure = plt.figure(figsize=size, layout="constrained")
    axes = np.empty((rows, columns), dtype=object)
    for row in range(rows):
        for column, d in enumerate(dims):
            first = axes[row, 0] if link and d == 2 else None
            style = {"projection": "3d"} if d == 3 else {"sharex": first, "sharey": first}
            number = row * columns + column + 1
            axes[row, column] = figure.add_subplot(rows, columns, number, **style)
    return axes


def palette_of(values: Values) -> list[Any]:
    """Return a colour for each group: those of the AnnData, or ones that differ.

    The latter follow the sorted names: another order of the groups changes no colour.
    """
    assert values.names is not None
    if values.palette is not None:
        return values.palette
    import matplotlib

    rank = np.argsort(np.argsort(values.names))
    for name, number in (("tab10", 10), ("tab20", 20)):
        if len(rank) <= number:
            return list(matplotlib.colormaps[name](rank))
    return list(matplotlib.colormaps["turbo"](rank / (len(rank) - 1)))


def ends_of(values: Float64[np.ndarray, " N"]) -> tuple[float, float]:
    """Return the values that the ends of the colour scale stand for."""
    real = values[np.isfinite(values)]
    low, high = (float(end) for end in np.percentile(real, ENDS)) if len(real) else (0.0, 1.0)
    return low, high if high > low else low + 1.0


def plot_cells(
    axes: Any,
    position: Float[np.ndarray, "N D"],
    values: Values | None,
    *,
    ends: tuple[float, float] | None = None,
    cmap: str = "viridis",
) -> Any:
    """Plot cells as points, in their order, without ticks; return the collection of points.

    Parameters
    ----------
    axes
        Where to plot.
    position
        Coordinates; cells whose coordinates are NaN are not seen.
    values
        What they are coloured by; None is one colour.
    ends
        Ends of the colour scale of quantities; None takes percentiles of these cells.
    cmap
        Colours of quantities.
    """
    size = float(np.clip(AREA / max(len(position), 1), SMALLEST, LARGEST))
    style: dict[str, Any] = {"s": size, "linewidths": 0, "rasterized": True}
    if values is None:
        style["color"] = PLAIN
    elif values.names is not None:
        import matplotlib.colors

        colours = matplotlib.colors.to_rgba_array([*palette_of(values), MISSING])
        # -1, the last one: cells of no group.
        style["c"] = colours[np.nan_to_num(values.values, nan=-1).astype(int)]
    else:
        import matplotlib

        low, high = ends or ends_of(values.values)
        scale = matplotlib.colormaps[cmap].with_extremes(bad=MISSING)
        style |= {"c": values.values, "cmap": scale, "vmin": low, "vmax": high}
        style["plotnonfinite"] = True
    if position.shape[1] == 3:
        style.pop("plotnonfinite", None)
        style["depthshade"] = False
    points = axes.scatter(*position.T, **style)
    axes.set_aspect("equal")
    axes.set(xticks=[], yticks=[], **({"zticks": []} if position.shape[1] == 3 else {}))
    return points


def explain(axes: Sequence[Any], points: Any, values: Values | None) -> None:
    """Say what the colours of panels mean: a legend beside the last, or a colour bar."""
    if values is None:
        return
    last = axes[-1]
    if values.names is None:
        last.figure.colorbar(points, ax=list(axes), shrink=0.7, label=values.label)
        return
    import matplotlib.lines

    handles = [
        matplotlib.lines.Line2D([], [], marker="o", linestyle="", color=colour, label=name)
        for name, colour in zip(values.names, palette_of(values), strict=False)
    ]
    last.legend(
        handles=handles,
        title=values.label,
        loc="center left",
        bbox_to_anchor=(1.25 if last.name == "3d" else 1.02, 0.5),
        ncols=-(-len(handles) // LEGEND_ROWS),
        frameon=False,
        fontsize="small",
    )


def titled(axes: Any, *parts: str) -> None:
    """Write a title of the parts that are not empty."""
    axes.set_title(", ".join(part for part in parts if part), fontsize="medium")
