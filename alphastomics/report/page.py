"""The page itself: data enter, one HTML file leaves that needs no network and runs no data.

Everything that comes from data is JSON in a block that the browser does not run, with `<`, `>`, `&`
and the line ends of JavaScript spelled as escapes; the script puts it on the page as text.
"""

import html
import json
import re
from importlib.resources import files
from typing import Any

from alphastomics import __version__

PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
SCRIPTS = ("plots.js", "tissues.js", "report.js")


def script_json(value: Any) -> str:
    """Spell JSON so that nothing in it can end or open an element of the page."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda match: ESCAPES[match[0]], text)


def resource(name: str) -> str:
    """Read a file that lies beside this one."""
    return (files("alphastomics.report") / name).read_text(encoding="utf-8")


def plotly_script() -> str:
    """Return plotly.js, from the installed package."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def render(data: dict[str, Any]) -> str:
    """Put data, style and scripts into the template, each once, whatever they contain."""
    parts = {
        "title": html.escape(str(data["title"])),
        "version": html.escape(__version__),
        "style": resource("report.css"),
        "plotly": plotly_script(),
        "script": "\n".join(resource(name) for name in SCRIPTS),
        "data": script_json(data),
    }
    for name in ("plotly", "script", "style"):
        assert "</script" not in parts[name].lower()
    return PLACEHOLDER.sub(lambda match: parts[match[1]], resource("report.html"))
