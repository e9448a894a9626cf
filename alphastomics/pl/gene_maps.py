"""Maps of genes, true and predicted: AnnData enters, axes leave."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64
from scipy.sparse import csr_array

from alphastomics.errors import InputError
from alphastomics.pl.axes import explain, panels, plot_cells, titled
from alphastomics.pl.cells import SLICE_KEY, Values, coordinates, gene_values, refused, slices
from alphastomics.preprocessing.normalize import log_normalized

GENERATED = "generated"  # the key that `predict_expression` and `sample` write: a test compares


def genes(
    adata: Any,
    genes: str | Sequence[str],
    *,
    position_key: str = "spatial",
    true_layer: str | None = None,
    pred_layer: str = GENERATED,
    slice_key: str | None = SLICE_KEY,
    ax: Any = None,
) -> np.ndarray:
    """Plot maps of genes: what was measured, and beside it what was predicted.

    Counts are log-normalised for the picture. The two panels have colour scales of their own,
    since predictions are on the scale of training; the title has their Pearson r. Without
    predictions under `pred_layer`, and for a gene that was not predicted (NaN), only what was
    measured is plotted; cells without a value are grey.

    Parameters
    ----------
    adata
        Cells with positions, and with expression that was predicted there.
    genes
        A gene, or several.
    position_key
        Key of obsm with the positions.
    true_layer
        Layer of what was measured; None is X.
    pred_layer
        Layer of what was predicted.
    slice_key
        Column of obs that names the slices; None makes all cells one slice.
    ax
        As many axes as there are panels, to plot into; None makes a figure.

    Returns
    -------
    numpy.ndarray
        Axes: genes in rows; for each slice measured, predicted.
    """
    wanted = [genes] if isinstance(genes, str) else list(genes)
    columns = gene_columns(adata, wanted)
    position = coordinates(adata, position_key, "name it with position_key=…")
    parts = slices(adata, slice_key)
    tables = {"measured": shown_values(adata, true_layer)}
    if pred_layer != GENERATED or pred_layer in adata.layers:
        tables["predicted"] = shown_values(adata, pred_layer)
    axes = panels(len(wanted), [position.shape[1]] * (len(tables) * len(parts)), ax)
    for row, gene, column in zip(axes, wanted, columns, strict=True):
        panel = iter(row)
        for name, rows in parts.items():
            pair: list[Values] = []
            for kind, table in tables.items():
                values = Values(gene, gene_values(table, column)[rows])
                pair.append(values)
                axes_of_kind = next(panel)
                points = plot_cells(axes_of_kind, position[rows], values)
                agreement = pearson(*(v.values for v in pair)) if len(pair) == 2 else ""
                titled(axes_of_kind, gene, name, kind, agreement)
                explain([axes_of_kind], points, Values("", values.values))
    return axes


def gene_columns(adata: Any, wanted: Sequence[str]) -> list[int]:
    """Return the columns of genes."""
    if not wanted:
        raise InputError("genes: the list is empty; name at least one of adata.var_names")
    for gene in wanted:
        if gene not in adata.var_names:
            raise InputError(
                f"genes: {gene!r} is not in adata.var_names ({adata.n_vars} genes, the first is "
                f"{adata.var_names[0]!r})"
            )
    return [int(adata.var_names.get_loc(gene)) for gene in wanted]


def shown_values(adata: Any, layer: str | None) -> Any:
    """Return X or a layer; counts are brought to the same total and log-transformed."""
    if layer is not None and layer not in adata.layers:
        raise refused("layers", layer, adata.layers, "name another layer")
    values = adata.X if layer is None else adata.layers[layer]
    if values is None:
        raise InputError("adata: X is missing; name the layer of what was measured: true_layer=…")
    stored = np.asarray(values.data if hasattr(values, "toarray") else values)
    real = stored[np.isfinite(stored)]
    if (real < 0).any() or (real != np.round(real)).any():
        return values
    dense = values.toarray() if hasattr(values, "toarray") else np.asarray(values)
    filled = csr_array(np.nan_to_num(dense).astype(np.float32))
    return np.where(np.isfinite(dense), log_normalized(filled).toarray(), np.nan)


def pearson(measured: Float64[np.ndarray, " N"], predicted: Float64[np.ndarray, " N"]) -> str:
    """Say how far two maps agree; nothing where one of them is constant, or not there."""
    real = np.isfinite(measured) & np.isfinite(predicted)
    if real.sum() < 2 or np.ptp(measured[real]) == 0 or np.ptp(predicted[real]) == 0:
        return ""
    return f"r {np.corrcoef(measured[real], predicted[real])[0, 1]:.2f}"
