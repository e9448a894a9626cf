"""The findings as text: findings enter; Markdown and CSV leave."""

import csv
import io
import math
from collections.abc import Sequence

from benchmarks.ablation.figures import FIGURES
from benchmarks.ablation.findings import Findings, expectations, sentences
from benchmarks.ablation.runs import Run
from benchmarks.ablation.statistics import Difference, Summary

COLUMNS = 5  # configurations side by side; more do not fit a page
WHOLE_NUMBERS = ("parameters_total", "parameters_active")
# The first run of all also loads libraries and compiles kernels: a mean would blame it for that.
TIMES = ("ms_per_step", "seconds")


def shown(key: str, value: Summary) -> str:
    """Spell a figure: mean ± standard deviation over seeds; the median of times."""
    if not math.isfinite(value.mean):
        return "-"
    if key in WHOLE_NUMBERS:
        return f"{value.mean:,.0f}"
    if key == "feed_forward_share":
        return f"{100 * value.mean:.1f} %"
    if key in TIMES:
        return f"{value.median:.4g}"
    spread = f" ± {value.deviation:.2g}" if math.isfinite(value.deviation) else ""
    return f"{value.mean:.4g}{spread}"


def rows_of(findings: Findings, names: Sequence[str]) -> list[list[str]]:
    """Lay figures out, one a row; those that no configuration has are left out."""
    rows = []
    for figure in FIGURES:
        found = [findings.summaries[name][figure.key] for name in names]
        if any(math.isfinite(value.mean) for value in found):
            arrow = {"lower": " ↓", "higher": " ↑", None: ""}[figure.better]
            rows.append([figure.title + arrow, *(shown(figure.key, value) for value in found)])
    return rows


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown; a bar in a name stays text."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def tables_of(findings: Findings) -> str:
    """Write all figures, some configurations at a time, the reference in each table."""
    others = [name for name in findings.names if name != findings.reference]
    parts = []
    for start in range(0, max(len(others), 1), COLUMNS):
        names = [findings.reference, *others[start : start + COLUMNS]]
        parts.append(markdown_table(["", *names], rows_of(findings, names)))
    return "\n\n".join(parts)


def markdown(findings: Findings, heading: Sequence[str]) -> str:
    """Write the whole report: what was run, the figures, what differs, what was once expected."""
    parts = [
        "# Configurations compared",
        "\n".join(f"- {line}" for line in heading),
        "## Figures",
        "Mean ± standard deviation over seeds (times: the median). ↓ lower is better, ↑ higher. "
        "Places and expression are point estimates for cells that training has not seen.",
        tables_of(findings),
        "## What is larger than the noise",
        "Change against the reference, seed by seed, with its 95 % interval: in per cent, or in "
        "points (hundredths) for scores that may be near 0.",
        "\n".join(f"- {line}" for line in sentences(findings)),
    ]
    rows = expectations(findings)
    if rows:
        header = ["configuration", "figure", "once expected", "measured", ""]
        parts += [
            "## What was once expected",
            "Announced by the project's origin before anything was measured.",
            markdown_table(header, rows),
        ]
    return "\n\n".join(parts) + "\n"


def csv_text(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Write CSV; what is not known stays empty."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow(
            ["" if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in row]
        )
    return target.getvalue()


def runs_csv(runs: Sequence[Run]) -> str:
    """Write the figures of each run."""
    keys = [figure.key for figure in FIGURES]
    rows = [[run.configuration, run.seed, *(run.figures[key] for key in keys)] for run in runs]
    return csv_text(["configuration", "seed", *keys], rows)


def curves_csv(runs: Sequence[Run]) -> str:
    """Write the losses of each run."""
    rows = [[run.configuration, run.seed, *point] for run in runs for point in run.curves]
    return csv_text(["configuration", "seed", "name", "step", "value"], rows)


def differences_csv(findings: Findings) -> str:
    """Write each configuration's change against the reference."""
    return csv_text(Difference._fields, findings.differences)
