"""The findings: finished runs enter; summaries, differences and sentences leave."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.ablation.configurations import BASELINE
from benchmarks.ablation.figures import COMPARED, FIGURES
from benchmarks.ablation.runs import Run
from benchmarks.ablation.statistics import (
    LEAST_SEEDS,
    LEVEL,
    Difference,
    Summary,
    compare,
    expectation,
    summary,
)

TITLES = {figure.key: figure.title for figure in FIGURES}


@dataclass(frozen=True)
class Findings:
    """All that a comparison found.

    Parameters
    ----------
    names
        The configurations, in order.
    reference
        The one that the others are compared with.
    seeds
        The seeds that all of them have.
    summaries
        {configuration: {figure: mean and spread}}.
    differences
        Each configuration against the reference, in each figure.
    """

    names: list[str]
    reference: str
    seeds: list[int]
    summaries: dict[str, dict[str, Summary]]
    differences: list[Difference]


def conclude(runs: Sequence[Run], reference: str) -> Findings:
    """Sum up all runs, and compare each configuration with the reference."""
    names = list(dict.fromkeys(run.configuration for run in runs))
    figures = {
        name: {
            figure.key: {
                run.seed: run.figures[figure.key] for run in runs if run.configuration == name
            }
            for figure in FIGURES
        }
        for name in names
    }
    summaries = {
        name: {key: summary(list(values.values())) for key, values in found.items()}
        for name, found in figures.items()
    }
    differences = [
        found
        for name in names
        if name != reference
        for figure in COMPARED
        if (
            found := compare(
                name, figure, figures[name][figure.key], figures[reference][figure.key]
            )
        )
    ]
    seeds = list(dict.fromkeys(run.seed for run in runs))
    return Findings(names, reference, seeds, summaries, differences)


def change(found: Difference) -> str:
    """Spell a difference with its interval, where there is one."""
    words = f"{found.change:+.1f} {found.unit}"
    return f"{words} [{found.low:+.1f}, {found.high:+.1f}]" if math.isfinite(found.low) else words


def sentences(findings: Findings) -> list[str]:
    """Say which differences are larger than the noise, configuration by configuration."""
    if len(findings.seeds) < LEAST_SEEDS:
        return [
            f"{len(findings.seeds)} seed(s): no difference can be told from noise with fewer than "
            f"{LEAST_SEEDS}; add some to --seeds."
        ]
    lines = []
    for name in findings.names:
        if name == findings.reference:
            continue
        mine = [found for found in findings.differences if found.configuration == name]
        parts = [
            f"{word} in {listed}"
            for word in ("better", "worse")
            if (listed := ", ".join(named(one) for one in mine if one.verdict == word))
        ]
        quiet = sum(one.verdict == "within the noise" for one in mine)
        told = "; ".join(parts) if parts else "no difference is larger than the noise"
        rest = f" ({quiet} of {len(mine)} figures are within it)" if parts else ""
        lines.append(f"{name} against {findings.reference}: {told}{rest}.")
    number = len(findings.differences)
    by_chance = (1 - LEVEL) * number
    lines.append(
        f"{number} comparisons were made at the {LEVEL:.0%} level, each over "
        f"{len(findings.seeds)} seeds: about {by_chance:.0f} of them would seem larger than the "
        "noise by chance alone."
    )
    return lines


def named(found: Difference) -> str:
    """Name a figure with its change."""
    return f"{TITLES[found.figure]} {change(found)}"


def expectations(findings: Findings) -> list[tuple[str, str, str, str, str]]:
    """Set what was once expected beside what was measured: name, figure, both, and the verdict.

    It was expected of changes against the baseline, and of no others.
    """
    rows: list[tuple[str, str, str, str, str]] = []
    if findings.reference != BASELINE:
        return rows
    for found in findings.differences:
        once = expectation(found)
        if once is not None:
            low, high, words = once
            told = words if len(findings.seeds) >= LEAST_SEEDS else "undecided: too few seeds"
            expected = f"{high:+.0f} to {low:+.0f} %"
            row = found.configuration, TITLES[found.figure], expected, change(found), told
            rows.append(row)
    return rows
