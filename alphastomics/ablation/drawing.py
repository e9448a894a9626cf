"""Figures as SVG: findings and losses enter, pictures that need nothing else leave.

Written by hand, so that a machine with a GPU and little else can draw them.
"""

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from alphastomics.ablation.configurations import COMPARED
from alphastomics.ablation.findings import TITLES, Findings
from alphastomics.ablation.runs import CURVES, Run

# Okabe and Ito's colours, which colour-blind readers tell apart; further ones are turned hues.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
SHOWN = ("expression_mse", "distance_mse", "val_loss", "knn_preservation", "cluster_ari")
VERDICT_COLOURS = {"better": "#009e73", "worse": "#d55e00", "within the noise": "#999999"}
WIDTH, ROW, MARGIN = 340, 22, 150
CURVE_WIDTH, CURVE_HEIGHT, PAD = 460, 300, 46
BINS = 40
Number = int | float  # a checker of types does not take a whole number for a float


class Axis(NamedTuple):
    """A straight scale from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: Number) -> float:
        """Return the pixel of a value; what lies outside ends at the edge."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def colour(number: int) -> str:
    """Return the colour of a configuration."""
    if number < len(COLOURS):
        return COLOURS[number]
    return f"hsl({(137 * number) % 360} 60% 45%)"


def text(x: Number, y: Number, words: str, anchor: str = "start", size: int = 12) -> str:
    """Write words, whatever they contain."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
        f"{html.escape(words)}</text>"
    )


def line(x1: Number, y1: Number, x2: Number, y2: Number, stroke: str, width: Number = 1) -> str:
    """Draw a straight line."""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{stroke}" stroke-width="{width}"/>'
    )


def svg(width: Number, height: Number, parts: Sequence[str], label: str) -> str:
    """Wrap shapes into a picture."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" role="img" aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
    )


def forests(findings: Findings) -> list[str]:
    """Draw the change of each configuration with its interval, a picture for each figure."""
    keys = [figure.key for figure in COMPARED if figure.key in SHOWN]
    return [picture for key in keys if (picture := forest(findings, key))]


def forest(findings: Findings, key: str) -> str | None:
    """Draw one figure's changes; None without any."""
    found = [one for one in findings.differences if one.figure == key]
    if not found:
        return None
    edges = [
        abs(value)
        for one in found
        for value in (one.change, one.low, one.high)
        if math.isfinite(value)
    ]
    reach = 1.1 * max([*edges, 1e-6])
    axis = Axis(-reach, reach, MARGIN, MARGIN + WIDTH)
    bottom = 30 + ROW * len(found)
    parts = [
        text(0, 16, f"{TITLES[key]}, change in {found[0].unit}", size=13),
        line(axis(0), 26, axis(0), bottom, "#666666"),
    ]
    for number, one in enumerate(found):
        y = 40 + ROW * number
        stroke = VERDICT_COLOURS[one.verdict]
        parts += [
            text(MARGIN - 8, y + 4, one.configuration[:24], "end"),
            # Too few seeds have no interval.
            *(
                [line(axis(one.low), y, axis(one.high), y, stroke, 2)]
                if one.high < math.inf
                else []
            ),
            f'<circle cx="{axis(one.change):.1f}" cy="{y}" r="4" fill="{stroke}"/>',
        ]
    ticks = (-reach / 1.1, 0.0, reach / 1.1)
    parts += [text(axis(tick), bottom + 16, f"{tick:+.3g}", "middle", 11) for tick in ticks]
    return svg(MARGIN + WIDTH + 20, bottom + 24, parts, f"Change of {TITLES[key]}")


def averaged(runs: Sequence[Run], name: str) -> list[tuple[float, float, float, float]]:
    """Return step, mean, least and largest loss over seeds; many steps are put together in bins."""
    points = [(step, value) for run in runs for curve, step, value in run.curves if curve == name]
    if not points:
        return []
    steps, values = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    edges = np.linspace(steps.min(), steps.max() + 1, min(BINS, len(np.unique(steps))) + 1)
    bins = np.digitize(steps, edges)
    # Each run's own mean within a bin first: the band is that of seeds, not of steps.
    owners = np.array([run.seed for run in runs for curve, *_ in run.curves if curve == name])
    found = []
    for number in np.unique(bins):
        inside = bins == number
        means = [
            float(values[inside & (owners == owner)].mean()) for owner in np.unique(owners[inside])
        ]
        mean = sum(means) / len(means)
        found.append((float(steps[inside].mean()), mean, min(means), max(means)))
    return found


def loss_curves(findings: Findings, runs: Sequence[Run]) -> list[str]:
    """Draw the losses of all configurations: mean over seeds, with the band from least to most."""
    titles = dict(zip(CURVES, ("Training loss", "Validation loss"), strict=True))
    pictures = []
    for name, title in titles.items():
        found = {
            one: averaged([run for run in runs if run.configuration == one], name)
            for one in findings.names
        }
        found = {one: points for one, points in found.items() if points}
        if found:
            pictures.append(curve_picture(found, findings.names, title))
    return pictures


def curve_picture(
    found: dict[str, list[tuple[float, float, float, float]]], names: list[str], title: str
) -> str:
    """Draw one kind of loss on a logarithmic scale, with its legend."""
    steps = [point[0] for points in found.values() for point in points]
    logs = [log(value) for points in found.values() for point in points for value in point[2:]]
    across = Axis(min(steps), max(max(steps), min(steps) + 1), PAD, CURVE_WIDTH - 8)
    low, high = min(logs), max(max(logs), min(logs) + 1e-3)
    up = Axis(low, high, CURVE_HEIGHT - PAD, 30)
    parts = [text(0, 16, f"{title} (logarithmic), by step", size=13)]
    for share in (0.0, 0.5, 1.0):
        level = low + share * (high - low)
        parts += [
            line(PAD, up(level), CURVE_WIDTH - 8, up(level), "#dddddd"),
            text(PAD - 5, up(level) + 4, f"{math.exp(level):.3g}", "end", 11),
        ]
    for step in (min(steps), max(steps)):
        parts.append(text(across(step), CURVE_HEIGHT - PAD + 16, f"{step:.0f}", "middle", 11))
    for number, name in enumerate(names):
        points = found.get(name, [])
        band = [(across(x), up(log(top))) for x, _, _, top in points]
        band += [(across(x), up(log(bottom))) for x, _, bottom, _ in reversed(points)]
        middle = [(across(x), up(log(mean))) for x, mean, _, _ in points]
        paint = colour(number)
        parts += [
            f'<polygon points="{joined(band)}" fill="{paint}" opacity="0.12"/>',
            f'<polyline points="{joined(middle)}" fill="none" stroke="{paint}" stroke-width="2"/>',
            text(CURVE_WIDTH, 40 + 16 * number, f"— {name}").replace(
                "<text", f'<text fill="{paint}"'
            ),
        ]
    height = max(CURVE_HEIGHT, 60 + 16 * len(names))
    return svg(CURVE_WIDTH + 230, height, parts, title)


def log(value: Number) -> float:
    """Return a logarithm, for losses that may be 0."""
    return math.log(max(value, 1e-12))


def joined(points: Sequence[tuple[float, float]]) -> str:
    """Spell points for SVG."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
