"""The training history: a model, or its table, enters; axes with a panel for each loss leave."""

from typing import Any

import numpy as np
import pandas as pd

from alphastomics.errors import InputError
from alphastomics.pl.axes import panels, titled

# The terms of the loss and what they are of, in the order of the panels; others follow by name.
TITLES = {
    "loss": "total loss",
    "position": "predicted positions",
    "expression": "predicted expression",
    "masked": "hidden expression",
    "balance": "use of experts",
}
COLUMNS = {"step", "name", "value"}


def history(model: Any, *, ax: Any = None) -> np.ndarray:
    """Plot the losses of training and validation over the steps, a panel for each task.

    Parameters
    ----------
    model
        A trained model, its `history`, or the table of a run's metrics.csv.
    ax
        As many axes as there are panels, to plot into; None makes a figure.

    Returns
    -------
    numpy.ndarray
        Axes: one row, the total loss first.
    """
    table = model if isinstance(model, pd.DataFrame) else getattr(model, "history", None)
    if not isinstance(table, pd.DataFrame) or not set(table.columns) >= COLUMNS:
        raise InputError(
            "model: expected a trained model, or a table with the columns step, name and value, "
            f"got {type(model).__name__}"
        )
    curves = {
        tuple(str(name).split("/")): points
        for name, points in table.groupby("name", sort=False)
        if str(name).startswith(("train/", "val/")) and str(name).count("/") == 1
    }
    logged = {term for _, term in curves}
    terms = [*filter(logged.__contains__, TITLES), *sorted(logged - set(TITLES))]
    if not terms:
        raise InputError("model: no losses were logged; train it, or load the folder of its run")
    axes = panels(1, [2] * len(terms), ax)
    for panel, name in zip(axes[0], terms, strict=True):
        # One step's loss depends on the times it sampled: dots for steps, a line for validations.
        for part, style, label in (("train", ".", "training"), ("val", "o-", "validation")):
            if (part, name) in curves:
                points = curves[part, name]
                panel.plot(points["step"], points["value"], style, markersize=3, label=label)
        panel.set(xlabel="step")
        titled(panel, TITLES.get(name, name))
    axes[0, 0].set_ylabel("loss")
    axes[0, 0].legend(frameon=False, fontsize="small")
    return axes[0]
