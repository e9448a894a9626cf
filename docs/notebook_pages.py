"""Notebooks of docs/notebooks: cells and what they show enter; pages of the site leave."""

import base64
import json
from pathlib import Path
from typing import Any, NamedTuple

NOTEBOOKS = Path(__file__).parent / "notebooks"


class Page(NamedTuple):
    """A page of the site, and its pictures by the names that it shows them under."""

    text: str
    pictures: dict[str, bytes]


def cells_of(path: Path) -> list[dict[str, Any]]:
    """Read the cells of a notebook."""
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return cells


def joined(text: str | list[str]) -> str:
    """Return a text that a notebook may hold as lines."""
    return text if isinstance(text, str) else "".join(text)


def page_of(path: Path) -> Page:
    """Make a page of a notebook: its text, its code, and what that shows."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in cells_of(path):
        source = joined(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode(joined(data["image/png"]))
                parts.append(f"![What the code plots]({name})")
            else:
                shown = joined(output.get("text", "") or data.get("text/plain", ""))
                parts.append(f"```text\n{shown.rstrip()}\n```")
    own = f"[This page as a notebook]({path.name})"
    return Page("\n\n".join([*parts, own]) + "\n", pictures)
