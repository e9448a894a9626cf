"""Run every notebook of docs/notebooks from top to bottom, and store what it shows.

python docs/make_notebooks.py [NAME ...]
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
SECONDS = 900  # for a cell


def run(path: Path) -> None:
    """Run a notebook in an empty folder, and write it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="alphastomics-notebook-") as scratch:
        resources = {"metadata": {"path": scratch}}
        NotebookClient(notebook, timeout=SECONDS, resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when a cell ran is no result
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
