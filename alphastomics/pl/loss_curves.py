"""The training history: a model, or its table, enters; axes with a panel for each loss leave."""

from typing import Any

import numpy as np
import pandas as pd

from alphastomics.errors import InputError
from alphastomics.pl.axes import panels, titled

# The terms of the loss and what they are of, in the order of the panels.
TITLES = {
    "loss": "total loss",
    "position": "predicted positions",
    "expression": "predicted expression",
    "masked": "hidden expression",
    "balance": "use of experts",
}
COLUMNS = {"step", "name", "value"}
LABELS = ("training", "validation")


def names_of(term: str) -> tuple[str, str]:
    """Return what a term is logged as, in training and in validation."""
    return f"train/{term}", f"val/{term}"


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
        Axes: one row, the total loss first. Terms that are 0 throughout are left out.
    """
    table = model if isinstance(model, pd.DataFrame) else getattr(model, "history", None)
    if not isinstance(table, pd.DataFrame) or not set(table.columns) >= COLUMNS:
        raise InputError(
            "model: expected a trained model, or a table with the columns step, name and value, "
            f"got {type(model).__name__}"
        )
    curves = dict(tuple(table.groupby("name", sort=False)))
    terms = [
        term
        for term in TITLES
        if any((curves[name]["value"] != 0).any() for name in names_of(term) if name in curves)
    ]
    if not terms:
        raise InputError("model: no losses were logged; train it, or load the folder of its run")
    axes = panels(1, [2] * len(terms), ax)
    for panel, name in zip(axes[0], terms, strict=True):
        # One step's loss depends on the times it sampled: dots for steps, a line for validations.
        for logged, style, label in zip(names_of(name), (".", "o-"), LABELS, strict=True):
            if logged in curves:
                points = curves[logged]
                panel.plot(points["step"], points["value"], style, markersize=3, label=label)
        panel.set(xlabel="step")
        titled(panel, TITLES[name])
    axes[0, 0].set_ylabel("loss")
    axes[0, 0].legend(frameon=False, fontsize="small")
    return axes[0]
