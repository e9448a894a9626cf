"""SpatialData stores: what was generated enters; a table, shapes and a view of both leave."""

import json
import struct
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from scipy.sparse import issparse

from alphastomics.errors import InputError
from alphastomics.io.spatialdata import (
    circles,
    element_names,
    require_store,
    write_spatialdata,
)
from alphastomics.io.vitessce import view_configuration, view_path
from alphastomics.main import main
from alphastomics.preprocessing.cell_source import SourceOptions
from alphastomics.preprocessing.formats.registry import opened_source
from tests.generation.conftest import SETTINGS, checkpoint
from tests.generation.test_generation import run_sample

pytest.importorskip("zarr")
SLICES = ["left side", "right/side"]


def table(cells: int = 30) -> anndata.AnnData:
    """Return cells with counts, positions and a column that SpatialData itself likes to use."""
    random = np.random.default_rng(0)
    obs = pd.DataFrame({"region": "cortex"}, index=[f"cell {number}" for number in range(cells)])
    data = anndata.AnnData(random.poisson(2, (cells, 4)).astype(np.float32), obs=obs)
    data.obsm["spatial"] = random.random((cells, 2)) * 100
    return data


def write(path: Path, data: anndata.AnnData) -> None:
    slices = np.repeat(np.arange(2), [data.n_obs - 10, 10])
    write_spatialdata(path, data, data.obsm["spatial"], slices, SLICES)


def points_of(path: Path) -> np.ndarray:
    """Read well-known binary by hand: byte order, kind, coordinates."""
    rows = pq.read_table(path).column("geometry").to_pylist()
    dims = (len(rows[0]) - 5) // 8
    parts = [struct.unpack(f"<BI{dims}d", row) for row in rows]
    assert {part[:2] for part in parts} == {(1, {2: 1, 3: 1001}[dims])}
    return np.array([part[2:] for part in parts])


def test_predicted_cells_come_back_through_the_reader(workspace: Path, tmp_path: Path):
    target = tmp_path / "predicted.zarr"
    summary = run_sample(workspace, workspace / "slices/slice_1.h5ad", target)
    assert summary["output"] == str(target)
    source = anndata.read_h5ad(workspace / "slices/slice_1.h5ad")
    with opened_source(target, SourceOptions.of(SETTINGS.data.preprocessing)) as cells:
        again = cells.to_anndata()
    assert list(again.obs_names) == list(source.obs_names)
    assert (again.X != source.X).nnz == 0
    (shapes,) = (target / "shapes").glob("*/shapes.parquet")
    np.testing.assert_allclose(points_of(shapes), again.obsm["spatial_pred"])
    assert again.uns["alphastomics"]["mode"] == "expr_to_pos"
    view = json.loads((tmp_path / "predicted.vitessce.json").read_text())
    paths = view["datasets"][0]["files"][0]["options"]
    assert paths["obsEmbedding"][0]["path"] == "obsm/spatial_pred"
    assert {"path": "obs/cell_type", "name": "cell_type"} in paths["obsSets"]


def annotated(workspace: Path, source: Path, target: Path, mode: str) -> int:
    """Impute or label the cells of a file."""
    words = ["sample", "--checkpoint", checkpoint(workspace), "--sample_mode", mode]
    return main(list(map(str, [*words, "--input_data", source, "--output", target])))


@pytest.mark.parametrize("mode", ["label", "impute"])
def test_annotated_cells_are_written_as_a_store_with_its_view(
    workspace: Path, tmp_path: Path, mode
):
    query = anndata.read_h5ad(workspace / "slices/slice_0.h5ad")[:, 4:].copy()
    query.write_h5ad(tmp_path / "panel.h5ad")
    target = tmp_path / "made.zarr"
    assert annotated(workspace, tmp_path / "panel.h5ad", target, mode) == 0
    assert annotated(workspace, tmp_path / "panel.h5ad", target.with_suffix(".h5ad"), mode) == 0
    plain = anndata.read_h5ad(tmp_path / "made.h5ad")
    with opened_source(target, SourceOptions()) as cells:
        again = cells.to_anndata()
    values = [data.X.toarray() if issparse(data.X) else data.X for data in (again, plain)]
    np.testing.assert_array_equal(*values)
    assert set(plain.obs) <= set(again.obs)
    (shapes,) = (target / "shapes").glob("*/shapes.parquet")
    np.testing.assert_allclose(points_of(shapes), query.obsm["spatial"])
    view = json.loads((tmp_path / "made.vitessce.json").read_text())
    paths = view["datasets"][0]["files"][0]["options"]
    assert paths["obsEmbedding"][0]["path"] == "obsm/spatial"
    groups = {group["path"] for group in paths["obsSets"]}
    assert ("obs/cell_type_pred" in groups) == (mode == "label")


def test_a_store_of_annotated_cells_needs_positions_and_the_extra(
    workspace: Path, tmp_path: Path, monkeypatch, capsys
):
    query = anndata.read_h5ad(workspace / "slices/slice_0.h5ad")
    del query.obsm["spatial"]
    query.write_h5ad(tmp_path / "loose.h5ad")
    target = tmp_path / "made.zarr"
    assert annotated(workspace, tmp_path / "loose.h5ad", target, "label") == 2
    assert "at their positions" in capsys.readouterr().err
    assert annotated(workspace, tmp_path / "loose.h5ad", tmp_path / "made.pt", "label") == 2
    assert "ends in .h5ad or .zarr" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "zarr", None)
    assert annotated(workspace, workspace / "slices/slice_0.h5ad", target, "label") == 2
    assert "alphastomics[spatialdata]" in capsys.readouterr().err
    assert not target.exists()


def test_each_slice_is_an_element_whose_cells_the_table_names(tmp_path: Path):
    data = table()
    write(tmp_path / "cells.zarr", data)
    shapes = tmp_path / "cells.zarr/shapes"
    assert sorted(path.name for path in shapes.iterdir() if path.is_dir()) == [
        "left_side",
        "right_side",
    ]
    again = anndata.read_zarr(tmp_path / "cells.zarr/tables/table")
    for name in ("left_side", "right_side"):
        rows = again.obs["shapes_region"] == name
        points = points_of(shapes / name / "shapes.parquet")
        instance = again.obs["shapes_instance"][rows]
        np.testing.assert_allclose(points[instance], data.obsm["spatial"][rows])
    assert set(again.obs["region"]) == {"cortex"}
    with opened_source(tmp_path / "cells.zarr", SourceOptions()) as cells:
        assert cells.slice_keys == ("shapes_region",)


def test_circles_have_half_the_distance_of_nearest_cells_and_a_z_in_3d():
    grid = np.stack(np.meshgrid(*[np.arange(3.0)] * 3), axis=-1).reshape(-1, 3) * 8
    table = circles(grid)
    assert set(table.column("radius").to_pylist()) == {4.0}
    geo = json.loads(table.schema.metadata[b"geo"])
    assert geo["columns"]["geometry"]["geometry_types"] == ["Point Z"]
    assert set(circles(grid[:1]).column("radius").to_pylist()) == {0.5}
    assert set(circles(np.zeros((3, 2))).column("radius").to_pylist()) == {1.0}


def test_names_of_elements_are_plain_and_differ():
    assert element_names(["a b", "a/b", "A_B", ".x", "/"]) == [
        "a_b",
        "a_b_2",
        "A_B_3",
        "x",
        "cells",
    ]


def test_a_store_is_whole_or_absent(tmp_path: Path, monkeypatch):
    path = tmp_path / "cells.zarr"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(pq, "write_table", full)
        with pytest.raises(OSError, match="No space"):
            write(path, table())
        assert not list(tmp_path.iterdir())
    write(path, table(40))
    with monkeypatch.context() as patched:
        patched.setattr(pq, "write_table", full)
        with pytest.raises(OSError, match="No space"):
            write(path, table())
    assert anndata.read_zarr(path / "tables/table").n_obs == 40
    write(path, table())
    assert anndata.read_zarr(path / "tables/table").n_obs == 30
    assert list(tmp_path.iterdir()) == [path]


def test_only_a_store_is_replaced_and_only_if_asked(workspace: Path, tmp_path: Path):
    path = tmp_path / "mine.zarr"
    path.mkdir()
    (path / "thesis.txt").write_text("all of it")
    source = workspace / "slices/slice_1.h5ad"
    with pytest.raises(InputError, match="no Zarr store"):
        run_sample(workspace, source, path, overwrite=True)
    (path / "thesis.txt").unlink()
    path.rmdir()
    run_sample(workspace, source, path)
    with pytest.raises(InputError, match="--overwrite"):
        run_sample(workspace, source, path)
    view_path(path).write_text("{}")
    run_sample(workspace, source, path, overwrite=True)
    assert json.loads(view_path(path).read_text())["name"] == "mine.zarr"
    with pytest.raises(InputError, match="no folder"):
        run_sample(workspace, source, tmp_path / "none/a.zarr")


def test_without_zarr_the_extra_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zarr", None)
    with pytest.raises(InputError, match=r"alphastomics\[spatialdata\]"):
        require_store(tmp_path / "a.zarr", overwrite=False)


def test_the_view_is_a_configuration_of_vitessce():
    view = view_configuration("a.zarr", "a.zarr/tables/table", "spatial", ["cell_type"])
    # What the documented schema requires: https://vitessce.io/docs/view-config-json/
    assert {"name", "version", "datasets", "coordinationSpace", "layout", "initStrategy"} <= set(
        view
    )
    (dataset,) = view["datasets"]
    (file,) = dataset["files"]
    assert file["fileType"] == "anndata.zarr"
    assert file["url"].endswith("/a.zarr/tables/table")
    space = view["coordinationSpace"]
    assert space["dataset"] == {"A": dataset["uid"]}
    (embedding,) = file["options"]["obsEmbedding"]
    assert space["embeddingType"]["A"] == embedding["embeddingType"]
    taken = np.zeros((12, 12), dtype=int)
    for part in view["layout"]:
        assert all(scope in space[kind] for kind, scope in part["coordinationScopes"].items())
        taken[part["y"] : part["y"] + part["h"], part["x"] : part["x"] + part["w"]] += 1
    assert (taken == 1).all()
    assert [part["component"] for part in view["layout"]] == [
        "scatterplot",
        "featureList",
        "obsSets",
    ]
    plain = view_configuration("a b.zarr", "a b.zarr", "spatial", [])
    assert plain["datasets"][0]["files"][0]["url"].endswith("/a%20b.zarr")
    assert "obsSets" not in plain["datasets"][0]["files"][0]["options"]


def test_spatialdata_itself_reads_the_store(tmp_path: Path):
    spatialdata = pytest.importorskip("spatialdata")
    data = table()
    write(tmp_path / "cells.zarr", data)
    again = spatialdata.read_zarr(tmp_path / "cells.zarr")
    assert set(again.shapes) == {"left_side", "right_side"}
    _, joined = spatialdata.join_spatialelement_table(
        sdata=again, spatial_element_names=["right_side"], table_name="table", how="left"
    )
    assert list(joined.obs_names) == list(data.obs_names[-10:])
