"""Curves of the losses: the metrics.csv of a run enters, what the page draws leaves."""

import csv
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from alphastomics.diffusion_model.step import TERM_NAMES
from alphastomics.report.findings import Curve
from alphastomics.report.packing import numbers

CURVE_POINTS = 1000
LOGGED_LOSSES = {f"{part}/{term}" for part in ("train", "val") for term in TERM_NAMES}


def read_curves(path: Path) -> dict[str, Curve]:
    """Read what a run logged: {name: curve}."""
    points: dict[str, list[tuple[float, float]]] = {}
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for row in csv.DictReader(file):
            # The last line of a run that was killed may be half a line.
            with suppress(KeyError, TypeError, ValueError):
                point = float(row["step"]), float(row["value"])
                points.setdefault(row["name"], []).append(point)
    return {
        name: Curve(*(np.array(column) for column in zip(*curve, strict=True)))
        for name, curve in points.items()
    }


def curve_data(curves: dict[str, Curve]) -> dict[str, Any]:
    """Thin the logged curves of the losses to what a screen shows."""
    thinned = {}
    for name, curve in curves.items():
        if name not in LOGGED_LOSSES:
            continue
        picks = np.unique(np.linspace(0, len(curve.step) - 1, CURVE_POINTS).astype(int))
        thinned[name] = {"step": numbers(curve.step[picks]), "value": numbers(curve.value[picks])}
    return thinned
