"""Anchors that are too few, or fix no frame: what is refused when, and what is not written."""

import logging
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import pytest

from alphastomics.errors import InputError
from alphastomics.generation.commands import sample
from alphastomics.generation.commands import test as score
from tests.generation.conftest import QUICK, SETTINGS, checkpoint
from tests.generation.test_anchors import placed, with_some


def read(workspace: Path) -> anndata.AnnData:
    return anndata.read_h5ad(workspace / "slices/slice_0.h5ad")


@pytest.mark.parametrize(("number", "level"), [(10, 0.9), (60, 0.99)])
def test_too_few_anchors_write_no_radius_and_the_record_says_why(
    workspace, tmp_path, monkeypatch, number, level
):
    sampling = QUICK.model_copy(update={"radius_level": level})
    monkeypatch.setattr("tests.generation.test_anchors.QUICK", sampling)
    data, known, _ = with_some(read(workspace), number)
    data.obs["position_radius_90"] = 1.0  # of an earlier prediction
    result = placed(workspace, data, tmp_path)
    assert not [name for name in result.obs if name.startswith("position_radius")]
    np.testing.assert_array_equal(result.obs["position_is_anchor"], known)
    record = result.uns["alphastomics"]["expr_to_pos"]
    assert "radius_calibrated_by" not in record
    assert "radius_level" not in record
    assert not record["spatial_std_calibrated"]
    assert (
        f"too few anchors for a radius that holds {100 * level:g} %" in record["spatial_std_note"]
    )


@pytest.mark.parametrize("shape", ["two", "line", "point"])
@pytest.mark.parametrize("command", [sample, score])
def test_anchors_that_fix_no_frame_are_refused_before_anything_is_sampled(
    workspace, tmp_path, caplog, shape, command
):
    query = read(workspace)
    query.write_h5ad(tmp_path / "query.h5ad")
    number = 2 if shape == "two" else 8
    step = {"two": 3.0, "line": 3.0, "point": 0.0}[shape]
    table = pd.DataFrame({"x": 5.0 + step * np.arange(number), "y": 7.0})
    table.set_index(query.obs_names[:number]).to_csv(tmp_path / "known.csv")
    paths = {"input_data": tmp_path / "query.h5ad", "checkpoint": checkpoint(workspace)}
    paths |= {"output": tmp_path / "out.json", "anchors": str(tmp_path / "known.csv")}
    more = {}
    if command is sample:
        paths["output"], more = tmp_path / "out.h5ad", {"overwrite": True}
    sampling = QUICK.model_copy(update={"mode": "expr_to_pos"})
    config = SETTINGS.model_copy(update={"sampling": sampling})
    words = {"two": "2 known position", "line": "on one line", "point": "on one point"}[shape]
    with caplog.at_level(logging.INFO), pytest.raises(InputError, match=words):
        command(config, split="test", **paths, **more)
    assert "steps in" not in caplog.text
