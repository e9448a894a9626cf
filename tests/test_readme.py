"""The README: its five lines run exactly as they stand there, and both languages are in step."""

import re
from pathlib import Path

import anndata
import numpy as np
import pytest

from alphastomics.config import SimulationConfig
from alphastomics.simulate import write_tissue

ROOT = Path(__file__).parent.parent


def five_lines(name: str) -> str:
    result = re.search(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
    assert result is not None
    return result[1]


def test_both_readmes_show_the_same_five_lines():
    assert five_lines("README.md") == five_lines("README.zh-CN.md")
    assert len([line for line in five_lines("README.md").splitlines() if line]) == 5


def shape_of(name: str) -> dict[str, list[str]]:
    """What both languages must have alike: headings by level, commands, links, rows, pictures."""
    text = (ROOT / name).read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    links = re.findall(r"\]\(([^)]+)\)", prose)
    return {
        "headings": re.findall(r"^(#+) ", prose, re.MULTILINE),
        "commands": [
            re.sub(r"\s*#.*", "", block)
            for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        ],
        "links": [link for link in links if not link.startswith("README")],
        "inline code": sorted(re.findall(r"`([^`]+)`", prose)),
        "cells of the tables": [str(row.count("|")) for row in re.findall(r"^\|.*", prose, re.M)],
        "figures": re.findall(r"\d[\d.,]*\d", prose),
    }


@pytest.mark.parametrize("what", shape_of("README.md"))
def test_both_readmes_are_in_step(what: str):
    assert shape_of("README.md")[what] == shape_of("README.zh-CN.md")[what]


@pytest.fixture
def cells(tmp_path: Path) -> anndata.AnnData:
    """Two slices, and cells of a third without their positions, in the working folder."""
    write_tissue(SimulationConfig(cells=80, slices=3, genes=24), 5, tmp_path, overwrite=False)
    *known, last = (anndata.read_h5ad(path) for path in sorted(tmp_path.glob("*.h5ad")))
    anndata.concat(known).write_h5ad(tmp_path / "tissue.h5ad")
    last.obsm.clear()
    last.write_h5ad(tmp_path / "dissociated.h5ad")
    return last


@pytest.mark.usefixtures("quick_training")
def test_the_five_lines_predict_a_tissue(cells, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(five_lines("README.md"), names)
    predicted = names["cells"]
    assert list(predicted.obs_names) == list(cells.obs_names)
    assert predicted.obsm["spatial_pred"].shape == (80, 2)
    assert np.isfinite(predicted.obsm["spatial_pred"]).all()
    assert (predicted.obsm["spatial_std"] > 0).all()
