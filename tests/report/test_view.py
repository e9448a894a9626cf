"""A view beside a page: what Vitessce shows of the store that the page is about."""

import json
import warnings
from pathlib import Path

import anndata
import numpy as np
import pytest

from alphastomics.config import PreprocessingConfig
from alphastomics.io.spatialdata import write_spatialdata
from alphastomics.main import main
from alphastomics.report.view import write_view_beside
from tests.report.test_commands import QUICK, home

__all__ = ["home"]
pytest.importorskip("zarr")


def write_store(store: Path, data: anndata.AnnData, kind: str) -> None:
    store.parent.mkdir()
    if kind == "spatialdata":
        slices = np.zeros(data.n_obs, np.int64)
        write_spatialdata(store, data, data.obsm["spatial"], slices, ["one"])
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Writing zarr v2 data")
        data.write_zarr(store)


def file_of(view: Path) -> dict:
    (file,) = json.loads(view.read_text())["datasets"][0]["files"]
    return file


def test_a_page_about_a_store_has_a_view_of_it_beside_it(home: Path, tmp_path: Path, capsys):
    store, page = tmp_path / "data/my slice.zarr", tmp_path / "pages/slice.html"
    write_store(store, anndata.read_h5ad(home / "h5/slice_0.h5ad"), "spatialdata")
    page.parent.mkdir()
    words = ["report", home / "expr_to_pos", "--input_data", store, "--output", page, *QUICK]
    assert main(list(map(str, words))) == 0
    assert page.is_file()
    file = file_of(tmp_path / "pages/slice.html.vitessce.json")
    # From the folder that holds both, which is the one to serve.
    assert file["url"] == "http://localhost:8000/data/my%20slice.zarr/tables/table"
    assert file["options"]["obsEmbedding"][0]["path"] == "obsm/spatial"
    assert "cell_type" in {group["name"] for group in file["options"]["obsSets"]}
    said = capsys.readouterr().err
    assert f"http-server {tmp_path} " in said
    assert "url=http://localhost:8000/pages/slice.html.vitessce.json" in said
    page.unlink()
    assert main(list(map(str, words))) == 2  # the view is there


def test_a_view_of_a_plain_store_shows_predicted_positions_where_there_are_some(tmp_path: Path):
    data = anndata.AnnData(np.ones((4, 2), np.float32))
    data.obsm["spatial"] = np.zeros((4, 2))
    for name in ("spatial", "spatial_pred"):
        data.obsm[name] = np.zeros((4, 2))
        store, page = tmp_path / name / "a.zarr", tmp_path / name / "page.html"
        write_store(store, data, "anndata")
        write_view_beside(page, store, PreprocessingConfig())
        file = file_of(page.with_name("page.html.vitessce.json"))
        assert file["url"] == "http://localhost:8000/a.zarr"
        assert file["options"]["obsEmbedding"][0]["path"] == f"obsm/{name}"
        assert "obsSets" not in file["options"]
