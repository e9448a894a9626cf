"""Figures of a comparison: findings and losses enter, plotly figures leave."""

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from benchmarks.ablation.figures import COMPARED
from benchmarks.ablation.findings import TITLES, Findings
from benchmarks.ablation.runs import CURVES, Run

# Okabe and Ito's colours, which colour-blind readers tell apart; further ones are rotated hues.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
SHOWN = ("expression_mse", "distance_mse", "val_loss", "knn_preservation", "cluster_ari")
VERDICT_COLOURS = {"better": "#009e73", "worse": "#d55e00", "within the noise": "#999999"}
BINS = 40
Curve = list[tuple[float, float, float, float]]


def forests(findings: Findings) -> list[go.Figure]:
    """Draw the change of each configuration with its interval, a figure for each metric."""
    keys = [figure.key for figure in COMPARED if figure.key in SHOWN]
    return [figure for key in keys if (figure := forest(findings, key))]


def forest(findings: Findings, key: str) -> go.Figure | None:
    """Draw the changes of one metric; None without any."""
    changes = [change for change in findings.differences if change.figure == key]
    if not changes:
        return None
    figure = go.Figure(
        go.Scatter(
            x=[change.change for change in changes],
            y=[change.configuration for change in changes],
            mode="markers",
            marker={"size": 9, "color": [VERDICT_COLOURS[change.verdict] for change in changes]},
            # Too few seeds have no interval.
            error_x={
                "symmetric": False,
                "array": [_arm(change.high - change.change) for change in changes],
                "arrayminus": [_arm(change.change - change.low) for change in changes],
            },
        )
    )
    figure.add_vline(x=0, line_color="#666666")
    figure.update_layout(
        title=f"{TITLES[key]}, change in {changes[0].unit}",
        height=150 + 26 * len(changes),
        yaxis={"autorange": "reversed"},
        template="plotly_white",
    )
    return figure


def _arm(length: float) -> float:
    return length if math.isfinite(length) else 0.0


def averaged(runs: Sequence[Run], name: str) -> Curve:
    """Return step, mean, least and largest loss over seeds; many steps are put together in bins."""
    points = [(step, value) for run in runs for curve, step, value in run.curves if curve == name]
    if not points:
        return []
    steps, values = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    edges = np.linspace(steps.min(), steps.max() + 1, min(BINS, len(np.unique(steps))) + 1)
    bins = np.digitize(steps, edges)
    # Each run's own mean within a bin first: the band is that of seeds, not of steps.
    owners = np.array([run.seed for run in runs for curve, *_ in run.curves if curve == name])
    curve = []
    for number in np.unique(bins):
        inside = bins == number
        means = [
            float(values[inside & (owners == owner)].mean()) for owner in np.unique(owners[inside])
        ]
        mean = sum(means) / len(means)
        curve.append((float(steps[inside].mean()), mean, min(means), max(means)))
    return curve


def loss_curves(findings: Findings, runs: Sequence[Run]) -> list[go.Figure]:
    """Draw the losses of all configurations: mean over seeds, with the band from least to most."""
    titles = dict(zip(CURVES, ("Training loss", "Validation loss"), strict=True))
    figures = []
    for key, title in titles.items():
        curves = {
            name: averaged([run for run in runs if run.configuration == name], key)
            for name in findings.names
        }
        if any(curves.values()):
            figures.append(curve_figure(curves, title))
    return figures


def curve_figure(curves: dict[str, Curve], title: str) -> go.Figure:
    """Draw one kind of loss on a logarithmic scale."""
    figure = go.Figure()
    for number, (name, points) in enumerate(curves.items()):
        if not points:
            continue
        steps, mean, low, high = (list(column) for column in zip(*points, strict=True))
        colour = (
            COLOURS[number] if number < len(COLOURS) else f"hsl({(137 * number) % 360}, 60%, 45%)"
        )
        figure.add_scatter(x=steps, y=mean, name=name, line_color=colour, legendgroup=name)
        figure.add_scatter(
            x=[*steps, *reversed(steps)],
            y=[*high, *reversed(low)],
            fill="toself",
            opacity=0.15,
            line={"width": 0},
            fillcolor=colour,
            legendgroup=name,
            showlegend=False,
            hoverinfo="skip",
        )
    figure.update_layout(
        title=title, xaxis_title="step", yaxis_type="log", height=420, template="plotly_white"
    )
    return figure
