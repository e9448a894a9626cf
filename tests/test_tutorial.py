"""The tutorial: every block of it runs, on a smaller tissue, and its pictures can be drawn."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("matplotlib")

DOCS = Path(__file__).parent.parent / "docs"
MOST_BYTES = 150_000
# Numbers of the page -> numbers for seconds.
SMALLER = {
    "--cells 400 --slices 5 --genes 60": "--cells 80 --slices 5 --genes 24",
    "--num_cells 800": "--num_cells 40",
    "model.generate(800)": "model.generate(40)",
}


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("make_pictures")


# Whatever matplotlib says of fonts and backends is no matter of ours.
@pytest.mark.filterwarnings("default:::matplotlib")
@pytest.mark.usefixtures("quick_training")
def test_every_block_of_the_tutorial_runs_and_gives_its_pictures(script, tmp_path):
    page = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    names = script.run_blocks(page, tmp_path, SMALLER)
    for name in ("scores", "held_out_scores"):
        assert set(names[name].columns.levels[0]) >= {"expr_to_pos", "pos_to_expr"}
    assert names["tissue"].n_obs == 40
    drawn = script.draw(tmp_path, tmp_path / "pictures")
    shown = set(re.findall(r"\]\(pictures/([\w.]+)\)", page))
    assert {path.name for path in drawn} == shown
    for name in shown:
        assert (DOCS / "pictures" / name).is_file()


def test_pictures_are_small():
    sizes = {path.name: path.stat().st_size for path in (DOCS / "pictures").iterdir()}
    assert sizes
    assert max(sizes.values()) < MOST_BYTES
