"""The page: findings and runs enter, one HTML file leaves that needs no network."""

import html
from collections.abc import Sequence

from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from benchmarks.ablation.drawing import forests, loss_curves
from benchmarks.ablation.findings import Findings, expectations, sentences
from benchmarks.ablation.runs import Run
from benchmarks.ablation.tables import rows_of

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 14px; } th, td { padding: .25rem .7rem; }
td { border-top: 1px solid #ddd; font-variant-numeric: tabular-nums; } th { text-align: left; }
.wide { overflow-x: auto; }
"""


def render(findings: Findings, runs: Sequence[Run], heading: Sequence[str]) -> str:
    """Write the page; every name in it is text."""
    parts = [
        "<h1>Configurations compared</h1>",
        bullets(heading),
        "<h2>What is larger than the noise</h2>",
        bullets(sentences(findings)),
        *map(embedded, forests(findings)),
        "<p>Dots: mean change against the reference over seeds; bars: 95 % interval of paired "
        "runs. Green is better, orange worse, grey within the noise.</p>",
        "<h2>Figures</h2>",
        table(["", *findings.names], rows_of(findings, findings.names)),
        "<p>Mean ± standard deviation over seeds; times are medians.</p>",
    ]
    rows = expectations(findings)
    if rows:
        header = ["configuration", "figure", "once expected", "measured", ""]
        parts += ["<h2>What was once expected</h2>", table(header, rows)]
    parts += ["<h2>Losses</h2>", *map(embedded, loss_curves(findings, runs))]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Configurations compared</title><style>{STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head>\n"
        f"<body>{body}</body></html>\n"
    )


def embedded(figure: Figure) -> str:
    """Write a figure as markup that the page's own script draws."""
    markup: str = figure.to_html(full_html=False, include_plotlyjs=False)
    return markup


def bullets(lines: Sequence[str]) -> str:
    """Write a list."""
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
