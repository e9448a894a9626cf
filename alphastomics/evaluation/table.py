"""Scores as text: {mode: {method: {metric: value}}} enters, a table for a terminal leaves.

Metrics are rows, methods columns; the best of each row is marked. Oracles, and real tissue
(as it is, or shuffled) have seen the truth: they are shown, but not marked.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from textwrap import wrap

from alphastomics.evaluation.methods import SHUFFLED, competes
from alphastomics.evaluation.registry import metric_named

Scores = Mapping[str, Mapping[str, Mapping[str, float]]]

NAME_WIDTH, COLUMN_WIDTH, MARK = 28, 13, "*"
# Share of the way from chance to a perfect score: what is below it is chance itself.
LEAST_GAIN = 0.02


def best_method(name: str, methods: Mapping[str, Mapping[str, float]]) -> str | None:
    """Name the best method of a metric.

    There is none where fewer than two have it, or where the best is no better than chance.
    """
    metric = metric_named(name)
    if metric.better == "unknown":
        return None
    ranks = {
        method: metric.rank(values[name])
        for method, values in methods.items()
        if name in values and math.isfinite(values[name]) and competes(method)
    }
    best = min(ranks, key=ranks.__getitem__) if len(ranks) > 1 else None
    chance = methods.get(SHUFFLED, {}).get(name, math.nan)
    if best is not None and math.isfinite(chance):
        worst, ideal = metric.rank(chance), metric.rank(metric.ideal)
        if worst - ranks[best] <= LEAST_GAIN * (worst - ideal):
            return None
    return best


def bar_end(name: str, methods: Mapping[str, Mapping[str, float]]) -> float:
    """Return the value that fills a bar: 1 where that is the bound, else the largest of all."""
    if metric_named(name).bounded:
        return 1.0
    sizes = [abs(values[name]) for values in methods.values() if name in values]
    return max([value for value in sizes if math.isfinite(value)], default=1.0) or 1.0


def score_table(scores: Scores) -> str:
    """Lay scores out, a table for each mode."""
    parts = [_mode_table(mode, methods) for mode, methods in scores.items()]
    words = (
        f"{MARK} best, if better than shuffled; oracles, and real or shuffled tissue, stand aside"
    )
    return "\n\n".join([*parts, words])


def _mode_table(mode: str, methods: Mapping[str, Mapping[str, float]]) -> str:
    metrics = list(dict.fromkeys(metric for values in methods.values() for metric in values))
    lines = _header(mode, list(methods))
    for metric in metrics:
        best = best_method(metric, methods)
        cells = [_cell(values.get(metric), name == best) for name, values in methods.items()]
        lines.append(f"{metric:<{NAME_WIDTH}}" + "".join(cells))
    return "\n".join(lines)


def _cell(value: float | None, is_best: bool) -> str:  # noqa: FBT001 - one of two parts of a cell
    if value is None:
        return " " * COLUMN_WIDTH
    shown = f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"
    shown = shown if len(shown) < COLUMN_WIDTH else f"{value:.4g}"
    return f"{shown:>{COLUMN_WIDTH - 1}}{MARK if is_best else ' '}"


def _header(mode: str, methods: Sequence[str]) -> list[str]:
    """Break the methods' names into lines that fit their columns, and end with the mode's line."""
    names = [wrap(name, COLUMN_WIDTH - 1, break_long_words=False) for name in methods]
    levels = [*zip_longest(*map(reversed, names), fillvalue="")][::-1]
    first = [""] * (len(levels) - 1) + [mode]
    lines = [
        f"{word:<{NAME_WIDTH}}{''.join(f'{part:>{COLUMN_WIDTH - 1}} ' for part in level)}".rstrip()
        for word, level in zip(first, levels, strict=True)
    ]
    return [*lines, "-" * (NAME_WIDTH + COLUMN_WIDTH * len(methods))]
