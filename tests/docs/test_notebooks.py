"""Notebooks: every cell runs, what they show is stored, small and of no machine, and is a page."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, page_blocks, site_pages

pytest.importorskip("matplotlib")

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
MOST_BYTES = 300_000
# Numbers of the notebooks -> numbers for seconds.
SMALLER = {
    r"cells=\d+": "cells=60",
    r"genes=60": "genes=24",
    r"n=200": "n=30",
    r'"d_model": \d+': '"d_model": 16',
    r'"position_head_updates": \d+': '"position_head_updates": 5',
    r'"updates": \d+': '"updates": 5',
}
NAMES = [path.stem for path in NOTEBOOKS]


def cells_of(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def code_of(path: Path) -> str:
    return "\n".join("".join(cell["source"]) for cell in cells_of(path, "code"))


def runnable(source: str) -> str:
    """A notebook's code as Python: lines for a shell become calls."""
    for old, new in SMALLER.items():
        source = re.sub(old, new, source)
    return re.sub(
        r"^!(.*)$", lambda match: f"run_line({shlex.split(match[1])})", source, flags=re.MULTILINE
    )


# Whatever matplotlib says of fonts and backends is no matter of ours.
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_every_cell_of_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    names = {"run_line": page_blocks.run_line}
    for cell in cells_of(path, "code"):
        exec(compile(runnable("".join(cell["source"])), f"<{cell['id']}>", "exec"), names)
        plt.close("all")


def test_what_is_made_smaller_is_in_the_notebooks():
    everything = "\n".join(map(code_of, NOTEBOOKS))
    assert [old for old in SMALLER if not re.search(old, everything)] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_what_a_notebook_shows_is_stored_small_and_of_no_machine(path):
    assert path.stat().st_size < MOST_BYTES
    code = cells_of(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    kinds = {output["output_type"] for output in outputs}
    assert kinds <= {"stream", "display_data", "execute_result"}
    texts = [json.dumps({**output, "data": {}}) for output in outputs]
    texts += [json.dumps(output.get("data", {}).get("text/plain", "")) for output in outputs]
    assert [text for text in texts if re.search(r"/(?:tmp|home|root|work|usr)/", text)] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_ends_with_the_reader_s_own_data(path):
    last = json.loads(path.read_text())["cells"][-1]
    assert last["cell_type"] == "markdown"
    assert "".join(last["source"]).startswith("## Your own data")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_the_page_of_a_notebook_shows_its_pictures(path):
    page, pictures = site_pages.page_of(path)
    assert pictures
    assert re.findall(r"\]\((\w+\.png)\)", page) == list(pictures)
    assert all(picture.startswith(b"\x89PNG") for picture in pictures.values())
    assert all("".join(cell["source"]) in page for cell in cells_of(path, "code"))
