"""A page of virtual sections: the file that `sample` wrote enters; cells and no score leave."""

from pathlib import Path

import anndata
import numpy as np
import pytest

from alphastomics.config import Config
from alphastomics.errors import InputError
from alphastomics.io.spatialdata import write_spatialdata
from alphastomics.preprocessing.cell_source import SourceOptions
from alphastomics.report.commands import ReportRequest, write_report
from alphastomics.report.generated import read_virtual, virtual_findings
from alphastomics.report.prepare import page_data

CELLS = 40
SECTIONS_Z = (50.0, 70.0, 90.0, 110.0, 130.0)  # by name, 110 is the first


def virtual(**uns: object) -> anndata.AnnData:
    random = np.random.default_rng(0)
    number = CELLS * len(SECTIONS_Z)
    z = np.repeat(SECTIONS_Z, CELLS)
    data = anndata.AnnData(random.poisson(2, (number, 3)).astype(np.float32))
    data.layers["normalized"] = np.log1p(data.X)
    data.obs["slice_id"] = [f"virtual_{at:g}" for at in z]
    data.obs["cell_type"] = np.where(random.random(number) < 0.5, "A", "B")
    data.obsm["spatial"] = random.random((number, 2))
    data.obsm["spatial3d"] = np.column_stack([data.obsm["spatial"], z])
    data.uns["alphastomics"] = {"mode": "virtual_section", **uns}
    return data


@pytest.mark.parametrize("suffix", [".h5ad", ".zarr"])
def test_five_virtual_sections_are_shown_in_space_without_a_model(tmp_path: Path, suffix: str):
    path = tmp_path / f"virtual{suffix}"
    data = virtual()
    if suffix == ".h5ad":
        data.write_h5ad(path)
    else:
        names = sorted(data.obs["slice_id"].unique())
        slice_id = np.searchsorted(names, data.obs["slice_id"])
        write_spatialdata(path, data, data.obsm["spatial"], slice_id, names)
    again = read_virtual(path, SourceOptions())
    findings = virtual_findings(path, again, "µm")
    np.testing.assert_array_equal(findings.cells.position[:, 2], np.repeat(SECTIONS_Z, CELLS))
    np.testing.assert_array_equal(findings.cells.expression, again.layers["normalized"])
    page = page_data(findings, 0, [], 1000)
    assert page["generated"]
    assert page["dims"] == 3
    assert page["slices"] == [f"virtual_{z:g}" for z in SECTIONS_Z]
    np.testing.assert_array_equal(findings.cells.slice_id, np.repeat(np.arange(5), CELLS))
    assert page["types"] == ["A", "B"]
    assert page["scores"] is None
    target = tmp_path / "page.html"
    nowhere = tmp_path / "no.ckpt"
    request = ReportRequest(path, "test", genes=["1"])
    assert write_report(Config(), checkpoint=nowhere, request=request, target=target) == target
    assert '"generated":true' in target.read_text().replace(": ", ":")
    with pytest.raises(InputError, match="none of the checkpoint's 3 genes"):
        write_report(
            Config(),
            checkpoint=nowhere,
            request=ReportRequest(path, "test", genes=["9"]),
            target=target,
        )


def test_other_files_are_no_virtual_sections(tmp_path: Path):
    path = tmp_path / "cells.h5ad"
    virtual(mode="joint").write_h5ad(path)
    assert read_virtual(path, SourceOptions()) is None
    assert read_virtual(tmp_path / "none.h5ad", SourceOptions()) is None
    path.write_text("no HDF5")
    with pytest.raises(InputError, match="is not an HDF5 file"):
        read_virtual(path, SourceOptions())
    flat = virtual()
    del flat.obsm["spatial3d"]
    with pytest.raises(InputError, match="spatial3d"):
        virtual_findings(path, flat, "µm")
