"""Run every notebook of docs/notebooks from top to bottom, and store what it shows.

python docs/make_notebooks.py [NAME ...]
"""

import base64
import io
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).parent.parent
SECONDS = 900  # for a cell
PROGRESS = re.compile(r"\d%\||updates/s|cells/s|\d+ cells in [\d.]+ s$")
COLOURS, MOST_PIXELS = 96, 900  # of a picture, so that notebooks stay small


def smaller(png: str) -> str:
    """Make a picture, as base64, small enough for a repository."""
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    picture.thumbnail((MOST_PIXELS, MOST_PIXELS))
    written = io.BytesIO()
    picture.quantize(COLOURS).save(written, "png", optimize=True)
    return base64.b64encode(written.getvalue()).decode()


def without_progress(outputs: list[Any]) -> list[Any]:
    """Leave out progress bars, and join the parts that a stream came in."""
    kept: list[Any] = []
    for output in outputs:
        if output["output_type"] != "stream":
            kept.append(output)
        elif kept and kept[-1].get("name") == output["name"]:
            kept[-1]["text"] += output["text"]
        else:
            kept.append(output)
    for output in kept:
        if output["output_type"] == "stream":
            lines = re.split(r"[\r\n]+", output["text"])
            lines = [line for line in lines if line.strip() and not PROGRESS.search(line)]
            output["text"] = "".join(f"{line}\n" for line in lines)
    return [output for output in kept if output.get("text", True)]


def make_small(notebook: Any) -> None:
    """Keep of the outputs what a reader needs: small pictures, no progress, no times."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        cell.outputs = without_progress(cell.outputs)
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                data["image/png"] = smaller(data["image/png"])


def run(path: Path) -> None:
    """Run a notebook in an empty folder, and write it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="alphastomics-notebook-") as scratch:
        resources = {"metadata": {"path": scratch}}
        NotebookClient(notebook, timeout=SECONDS, resources=resources).execute()
    make_small(notebook)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def main() -> None:
    """Run the notebooks that are named, or all."""
    # This source, and the program of this environment, are what the notebooks use.
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    names = sys.argv[1:] or [path.stem for path in (ROOT / "docs/notebooks").glob("*.ipynb")]
    for name in sorted(names):
        path = ROOT / "docs" / "notebooks" / f"{name}.ipynb"
        run(path)
        sys.stdout.write(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB\n")


if __name__ == "__main__":
    main()
