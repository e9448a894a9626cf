"""A newcomer's three commands: an instrument's folder enters, a report leaves."""

import json

import numpy as np
import pytest

from alphastomics.main import main
from tests.vendor_folders import Cells, write_xenium


@pytest.fixture
def xenium_run(tmp_path):
    """Write a run of 200 cells whose genes depend on where a cell lies."""
    rng = np.random.default_rng(0)
    position = rng.uniform(0, 1000, (200, 2))
    centres = rng.uniform(0, 1000, (20, 2))
    near = np.exp(-(((position[:, None] - centres) / 300) ** 2).sum(-1))
    counts = rng.poisson(1 + 8 * near).astype(np.float32)
    names = [f"cell{number:03d}-1" for number in range(200)]
    cells = Cells(names, [f"Gene{number}" for number in range(20)], counts, position)
    return write_xenium(tmp_path / "xenium_run", cells)


@pytest.mark.usefixtures("quick_training")
def test_from_a_xenium_folder_to_a_report_in_three_commands(
    xenium_run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for line in (
        "preprocess --input_dir xenium_run/ --output_dir processed_xenium/",
        "train --data_dir processed_xenium/ --exp_name mine",
        "report outputs/mine",
    ):
        status = main(line.split())
        said = capsys.readouterr()
        assert status == 0, said.err
    page = tmp_path / "outputs/mine/report.html"
    assert said.out.strip() == "outputs/mine/report.html"
    assert '<script id="report-data" type="application/json">' in page.read_text()
    metadata = json.loads((tmp_path / "processed_xenium/metadata.json").read_text())
    assert sum(split["cells"] for split in metadata["splits"].values()) == 200
