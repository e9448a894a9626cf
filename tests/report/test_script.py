"""The page's script without a browser: every part is drawn, in plain numbers, and can be saved."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from alphastomics.generation.radii import Radii
from alphastomics.report.findings import ObsColumn
from alphastomics.report.page import SCRIPTS
from alphastomics.report.prepare import page_data
from tests.report.tissue import make_cells, make_findings

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="Node.js is not installed")
HERE = Path(__file__).parent
REPORT = HERE.parents[1] / "alphastomics" / "report"


def shown(findings, folder: Path) -> dict:
    """Run the page's script; return what it put on the page."""
    (folder / "data.json").write_text(json.dumps(page_data(findings, 1, [], 1000)))
    scripts = [str(REPORT / name) for name in SCRIPTS]
    command = [NODE, str(HERE / "stub.js"), str(folder / "data.json"), *scripts]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    result = json.loads(done.stdout)
    assert result["failures"] == []
    return result


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> dict:
    cells = make_cells(240)
    columns = [
        ObsColumn("region", ["cortex", "thalamus"], np.arange(240.0) % 2),
        ObsColumn("depth", None, np.linspace(0, 5, 240)),
    ]
    findings = replace(make_findings(cells), columns=columns)
    predicted = replace(findings.predicted_position, error=findings.predicted_position.error * 1000)
    return shown(replace(findings, predicted_position=predicted), tmp_path_factory.mktemp("script"))


def test_every_part_is_drawn_and_can_be_saved(page):
    assert page["drawn"] >= 10
    formats = {one["format"] for one in page["saved"]}
    assert formats == {"png", "svg"}
    assert len(page["saved"]) >= 10


def test_columns_of_obs_can_be_chosen_as_colours(page):
    assert {"region", "depth", "Cell type", "Error", "Std of the samples"} <= set(page["options"])


def test_errors_have_a_unit_plain_numbers_and_a_line_for_each_type(page):
    text = page["text"]["errors"]
    assert "Median error by cell type" in text
    assert "Neuron" in text
    assert "µm" in text
    assert "e+" not in text
    assert "data units" not in json.dumps(page["text"])


def test_the_maps_of_error_and_std_have_a_scale_each(page):
    text = page["text"]["errors"]
    assert "Error: distance from the true position (µm)" in text
    assert "Std of the samples (µm)" in text
    assert "is not calibrated" in text


def test_cells_without_types_are_coloured_by_clusters(tmp_path):
    page = shown(make_findings(make_cells(240, types=False)), tmp_path)
    assert "Cluster" in page["options"]
    assert "k-means clusters" in page["note"]
    assert "Median error by cluster" in page["text"]["errors"]


def test_calibrated_radii_stand_where_the_std_would(tmp_path):
    findings = make_findings(make_cells(240))
    radii = Radii(np.linspace(20, 60, 240), 0.9, "held out: slice b")
    predicted = replace(
        findings.predicted_position, radii=radii, coverage=((0.5, 0.45), (0.9, 0.93))
    )
    page = shown(replace(findings, predicted_position=predicted), tmp_path)
    text = page["text"]["errors"]
    assert "Radius that holds 90 % of the cells (µm)" in text
    assert "Radii are calibrated by held out: slice b." in text
    assert "is not calibrated" not in text
    assert "Std of the samples" not in text
    assert "Radius that holds 90 % of the cells" in page["options"]
