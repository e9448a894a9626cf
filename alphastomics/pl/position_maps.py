"""Predicted positions beside true ones, and how sure they are: AnnData enters, axes leave."""

from typing import Any

import numpy as np
from jaxtyping import Float64

from alphastomics.errors import InputError
from alphastomics.pl.axes import explain, panels, plot_cells, titled
from alphastomics.pl.cells import SLICE_KEY, Values, coordinates, known, slices, values_of

# The keys that `predict_positions` and `sample` write: tests compare them.
TRUE, PREDICTED, STD = "spatial", "spatial_pred", "spatial_std"
ANCHOR, RADIUS = "position_is_anchor", "position_radius_"
PREDICT_FIRST = "model.predict_positions(adata) writes obsm['spatial_pred']; others: pred_key=…"
LEAST_KNOWN = 3  # positions that say how a slice lies
BINS = 10


def positions(
    adata: Any,
    color: str | None = None,
    *,
    true_key: str = TRUE,
    pred_key: str = PREDICTED,
    slice_key: str | None = SLICE_KEY,
    ax: Any = None,
) -> np.ndarray:
    """Plot predicted positions beside true ones, a row for each slice.

    The prediction of each slice is rotated, mirrored where that fits better, and shifted onto the
    truth, as in the report: expression does not say in which orientation a slice lies. Predictions
    by anchors are in the frame of the truth and stay where they are.

    Parameters
    ----------
    adata
        Cells with predicted positions.
    color
        Column of obs, or a gene. None colours by the true x, so that each cell can be followed.
    true_key, pred_key
        Keys of obsm. Without obsm["spatial"] the prediction is plotted alone, as it is.
    slice_key
        Column of obs that names the slices; None makes all cells one slice.
    ax
        As many axes as there are panels, to plot into; None makes a figure.

    Returns
    -------
    numpy.ndarray
        Axes: slices in rows; true, predicted.
    """
    predicted, true = position_pair(adata, true_key, pred_key)
    parts = slices(adata, slice_key)
    values = None if true is None else Values("true x", true[:, 0])
    if color is not None:
        values = values_of(adata, color)
    shown = onto_truth(adata, predicted, true, parts, pred_key)
    kinds = {"predicted": shown} if true is None else {"true": true, "predicted": shown}
    axes = panels(len(parts), [shown.shape[1]] * len(kinds), ax, link=true is not None)
    for row, (name, rows) in zip(axes, parts.items(), strict=True):
        of_slice = None if values is None else values.of(rows)
        for panel, (kind, position) in zip(row, kinds.items(), strict=True):
            points = plot_cells(panel, position[rows], of_slice)
            titled(panel, name, kind)
        explain(list(row), points, of_slice)
    return axes


def uncertainty(
    adata: Any,
    *,
    true_key: str = TRUE,
    pred_key: str = PREDICTED,
    slice_key: str | None = SLICE_KEY,
    ax: Any = None,
) -> np.ndarray:
    """Plot how sure predicted positions are, and beside it how far off they were.

    Shown is the calibrated radius, obs["position_radius_…"], where there is one, and else the std
    of the samples, obsm["spatial_std"]. Where cells other than anchors have a true position, a
    second panel compares it with their error: cells below the line of a radius lie within it, and a
    std is right when the root mean square errors of cells of about the same std lie on the line.

    Parameters
    ----------
    adata, true_key, pred_key, slice_key, ax
        As for `positions`.

    Returns
    -------
    numpy.ndarray
        Axes: slices in rows; the map, and the errors where they are known.
    """
    predicted, true = position_pair(adata, true_key, pred_key)
    parts = slices(adata, slice_key)
    values, level = how_sure(adata)
    shown = onto_truth(adata, predicted, true, parts, pred_key)
    dims = shown.shape[1]
    scored = ~anchored(adata, pred_key) & (False if true is None else known(true))
    axes = panels(len(parts), [dims, 2] if scored.any() else [dims], ax)
    for row, (name, rows) in zip(axes, parts.items(), strict=True):
        points = plot_cells(row[0], shown[rows], values.of(rows), cmap="magma_r")
        titled(row[0], name, "predicted positions")
        explain([row[0]], points, values)
        counted = rows[scored[rows]]
        if true is not None and len(counted):
            error = np.linalg.norm(shown[counted] - true[counted], axis=1)
            plot_errors(row[1], error, values.of(counted), level)
        elif len(row) > 1:  # of another slice
            row[1].set_axis_off()
    return axes


def position_pair(
    adata: Any, true_key: str, pred_key: str
) -> tuple[Float64[np.ndarray, "N D"], Float64[np.ndarray, "N D"] | None]:
    """Return predicted and true positions; there need be no truth under the usual key."""
    predicted = coordinates(adata, pred_key, PREDICT_FIRST)
    if true_key == TRUE and true_key not in adata.obsm:
        return predicted, None
    true = coordinates(adata, true_key, "name the key of the true positions with true_key=…")
    if not known(true).any():
        return predicted, None
    if true.shape[1] != predicted.shape[1]:
        raise InputError(
            f"adata: obsm[{true_key!r}] has {true.shape[1]} columns and obsm[{pred_key!r}] "
            f"{predicted.shape[1]}; give keys of the same number of dimensions"
        )
    return predicted, true


def anchored(adata: Any, pred_key: str) -> np.ndarray:
    """Say which cells were anchors of the prediction."""
    if pred_key != PREDICTED or ANCHOR not in adata.obs:
        return np.zeros(adata.n_obs, dtype=bool)
    return adata.obs[ANCHOR].to_numpy(dtype=bool)


def onto_truth(
    adata: Any,
    predicted: Float64[np.ndarray, "N D"],
    true: Float64[np.ndarray, "N D"] | None,
    parts: dict[str, np.ndarray],
    pred_key: str,
) -> Float64[np.ndarray, "N D"]:
    """Move the prediction of each slice rigidly onto the cells whose true position is known."""
    if true is None or anchored(adata, pred_key).any():
        return predicted
    import torch

    from alphastomics.geometry import best_rotation

    shown = predicted.copy()
    for rows in parts.values():
        both = rows[known(true[rows]) & known(predicted[rows])]
        if len(both) < LEAST_KNOWN:
            continue
        centre, target = predicted[both].mean(axis=0), true[both].mean(axis=0)
        pair = (torch.from_numpy(part) for part in (predicted[both] - centre, true[both] - target))
        rotation = best_rotation(*pair, reflection=True).numpy()
        shown[rows] = (predicted[rows] - centre) @ rotation.T + target
    return shown


def how_sure(adata: Any) -> tuple[Values, float | None]:
    """Return the radius of each cell and its level, or the std of its samples."""
    radii = [str(name) for name in adata.obs if str(name).startswith(RADIUS)]
    if radii and np.isfinite(adata.obs[radii[0]].to_numpy(dtype=np.float64)).any():
        level = float(radii[0].removeprefix(RADIUS)) / 100
        values = adata.obs[radii[0]].to_numpy(dtype=np.float64)
        return Values(f"radius of {level:.0%}", values), level
    std = coordinates(adata, STD, "model.predict_positions(adata) writes it")
    return Values("std", np.linalg.norm(std, axis=1)), None


def plot_errors(
    axes: Any,
    error: Float64[np.ndarray, " N"],
    sure: Values,
    level: float | None,
) -> None:
    """Plot the error of each cell over its radius or std."""
    real = np.isfinite(sure.values) & np.isfinite(error)
    error, values = error[real], sure.values[real]
    axes.scatter(values, error, s=4, linewidths=0, alpha=0.4, rasterized=True)
    axes.axline((0, 0), slope=1, linestyle="--", color="black", linewidth=0.8)
    axes.set(xlabel=sure.label, ylabel="error")
    if level is not None:
        share = f"{np.mean(error <= values):.0%}" if len(error) else "none"
        titled(axes, f"{share} within the radius of {level:.0%}")
        return
    bins = [part for part in np.array_split(np.argsort(values, kind="stable"), BINS) if len(part)]
    squared = [[np.sqrt(np.mean(np.square(x[part]))) for part in bins] for x in (values, error)]
    axes.plot(*squared, "o-", color="tab:red", label=f"root mean square in {len(bins)} bins")
    axes.legend(frameon=False, fontsize="small")
    titled(axes, "error against std")
