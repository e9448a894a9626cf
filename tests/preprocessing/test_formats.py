"""Input formats: a folder as an instrument writes it is read as the cells it was written of."""

import shutil
from typing import get_args

import anndata
import numpy as np
import pandas as pd
import pytest

from alphastomics.config import PreprocessingConfig
from alphastomics.config.data import InputFormat
from alphastomics.errors import InputError
from alphastomics.main import main
from alphastomics.preprocessing.cell_source import SourceOptions
from alphastomics.preprocessing.formats import xenium_matrix
from alphastomics.preprocessing.formats.columns import unique_genes
from alphastomics.preprocessing.formats.outlines import centroid_of
from alphastomics.preprocessing.formats.registry import FORMATS, opened_source
from alphastomics.preprocessing.formats.xenium_matrix import cell_names
from tests import vendor_folders as vendors
from tests.preprocessing.tissue import cells_of, metadata_of, refused, run

SPATIAL = {
    "xenium": vendors.write_xenium,
    "xenium_csv": lambda folder, cells: vendors.write_xenium(folder, cells, table="csv"),
    "merscope": vendors.write_merscope,
    "merscope_old": lambda folder, cells: vendors.write_merscope(folder, cells, old=True),
    "cosmx": vendors.write_cosmx,
    "cosmx_gz": lambda folder, cells: vendors.write_cosmx(folder, cells, suffix=".gz"),
    "visium_hd": vendors.write_visium_hd,
    "segmented": vendors.write_segmented,
}
PLAIN = {"log_normalize": False, "scale": False}


def read(path, **options) -> tuple[list[str], tuple[str, ...], np.ndarray, np.ndarray | None]:
    """Read all of an input through its source: names, genes, counts, positions."""
    with opened_source(path, SourceOptions(**options)) as source:
        source.verify()
        names = source.obs.names(0, source.num_cells).to_pylist()
        keys = source.position_keys
        position = source.positions(keys[0]).rows(0, source.num_cells) if keys else None
        return names, source.genes, source.expression.whole().toarray(), position


def require_equal(folder, cells: vendors.Cells, rows: pd.DataFrame) -> None:
    """Compare a processed folder with what the input was written of."""
    order = [metadata_of(folder)["genes"].index(gene) for gene in cells.genes]
    assert len(order) == len(metadata_of(folder)["genes"])
    np.testing.assert_array_equal(np.stack(rows["expression"])[:, order], cells.counts)
    np.testing.assert_allclose(np.stack(rows["position"])[:, :2], cells.position, rtol=1e-12)


@pytest.mark.parametrize("kind", SPATIAL)
def test_a_vendor_folder_becomes_shards_with_every_cell_once_and_no_control(tmp_path, kind):
    cells = vendors.some_cells()
    folder = SPATIAL[kind](tmp_path / "run", cells)
    run(folder, tmp_path / "out", **PLAIN, max_cells_per_file=7)
    rows = cells_of(tmp_path / "out")
    names = rows["obs_name"].tolist()
    if kind == "segmented":
        names = [cells.names[int(name.split("_")[1].split("-")[0]) - 1] for name in names]
    assert names == cells.names
    require_equal(tmp_path / "out", cells, rows)
    assert [record["name"] for record in metadata_of(tmp_path / "out")["slices"]] == ["run"]


@pytest.mark.parametrize("kind", SPATIAL)
def test_a_vendor_folder_is_normalised_as_the_same_cells_in_h5ad(tmp_path, kind):
    cells = vendors.some_cells(seed=3)
    SPATIAL[kind](tmp_path / "run", cells)
    names = pd.DataFrame(index=cells.names)
    data = anndata.AnnData(cells.counts, obs=names, var=pd.DataFrame(index=cells.genes))
    data.obsm["spatial"] = cells.position
    (tmp_path / "slices").mkdir()
    data.write_h5ad(tmp_path / "slices/run.h5ad")
    run(tmp_path / "run", tmp_path / "out")
    run(tmp_path / "slices", tmp_path / "same")
    here, there = (cells_of(tmp_path / name) for name in ("out", "same"))
    for column in ("expression", "position"):
        np.testing.assert_allclose(np.stack(here[column]), np.stack(there[column]), rtol=1e-12)
    assert here["split"].tolist() == there["split"].tolist()


@pytest.mark.parametrize("block", [1 << 22, 200])
def test_zipped_counts_of_a_xenium_run_are_read_gene_by_gene(tmp_path, monkeypatch, block):
    monkeypatch.setattr(xenium_matrix, "BLOCK_BYTES", block)
    cells = vendors.write_zipped_xenium(tmp_path / "run", vendors.some_cells())
    run(tmp_path / "run", tmp_path / "out", **PLAIN, max_cells_per_file=7)
    rows = cells_of(tmp_path / "out")
    assert rows["obs_name"].tolist() == cells.names
    require_equal(tmp_path / "out", cells, rows)


def test_the_three_forms_of_a_xenium_matrix_are_equal(tmp_path):
    cells = vendors.write_zipped_xenium(tmp_path / "zip", vendors.some_cells())
    vendors.write_xenium(tmp_path / "h5", cells)
    vendors.write_xenium(tmp_path / "mtx", cells)
    (tmp_path / "mtx/cell_feature_matrix.h5").unlink()
    vendors.write_mtx(tmp_path / "mtx/cell_feature_matrix", cells)
    names, genes, counts, position = read(tmp_path / "h5")
    for form in ("zip", "mtx"):
        found = read(tmp_path / form)
        assert (found[0], found[1]) == (names, genes)
        np.testing.assert_array_equal(found[2], counts)
        np.testing.assert_array_equal(found[3], position)


def test_names_of_xenium_cells_are_letters_for_hex_digits():
    assert cell_names(np.array([[992, 1], [0, 2]])) == ["aaaaadoa-1", "aaaaaaaa-2"]


def test_a_zipped_xenium_matrix_with_numbers_for_names(tmp_path):
    cells = vendors.some_cells()
    vendors.write_zipped_xenium(tmp_path / "run", cells)
    numbers = [str(int(number)) for number in vendors.xenium_names(cells)[1][:, 0]]
    table = pd.read_parquet(tmp_path / "run/cells.parquet")
    table["cell_id"] = [int(number) for number in numbers][::-1]
    table.to_parquet(tmp_path / "run/cells.parquet")
    assert read(tmp_path / "run")[0] == numbers


def test_folders_of_several_instruments_are_slices_of_one_dataset(tmp_path):
    cells = vendors.some_cells()
    vendors.write_xenium(tmp_path / "in/b.v2/outs", cells)
    vendors.write_merscope(tmp_path / "in/a", cells)
    run(tmp_path / "in", tmp_path / "out", **PLAIN)
    names = [record["name"] for record in metadata_of(tmp_path / "out")["slices"]]
    assert names == ["a", "b.v2/outs"]
    assert len(cells_of(tmp_path / "out")) == 60


def test_a_run_that_is_asked_for_again_is_recognised_by_the_files_that_are_read(tmp_path):
    folder = vendors.write_xenium(tmp_path / "run", vendors.some_cells())
    run(folder, tmp_path / "out")
    (folder / "morphology.ome.tif").write_bytes(b"an image, which is not read")
    assert run(folder, tmp_path / "out")["state"] == "was finished before"
    shutil.rmtree(folder)
    vendors.write_xenium(folder, vendors.some_cells(seed=1))
    with pytest.raises(InputError, match="run has changed"):
        run(folder, tmp_path / "out")


def test_a_table_is_chosen_beside_a_matrix_of_the_whole_run(tmp_path):
    cells = vendors.some_cells()
    vendors.write_visium_hd(tmp_path / "outs/binned_outputs/square_008um", cells)
    vendors.write_10x_h5(tmp_path / "outs/filtered_feature_bc_matrix.h5", cells, {})
    (tmp_path / "outs/spatial").mkdir()
    assert read(tmp_path / "outs")[0] == cells.names


def test_controls_are_counted_in_the_log(tmp_path, caplog):
    caplog.set_level("INFO")
    vendors.write_xenium(tmp_path / "in/x", vendors.some_cells())
    vendors.write_merscope(tmp_path / "in/m", vendors.some_cells())
    vendors.write_cosmx(tmp_path / "in/c", vendors.some_cells())
    run(tmp_path / "in", tmp_path / "out")
    assert "3 features that are no genes are left out (1 x Negative Control Codeword" in caplog.text
    assert "2 blank barcodes are left out" in caplog.text
    assert "3 negative and system control probes are left out" in caplog.text
    assert "pixels of 0.25 µm" in caplog.text


def test_columns_of_a_vendor_table_are_cell_types_in_the_order_of_the_matrix(tmp_path):
    folder = vendors.write_xenium(tmp_path / "run", vendors.some_cells())
    run(folder, tmp_path / "out", cell_type_key="segmentation_method")
    types = metadata_of(tmp_path / "out")["cell_types"]
    rows = cells_of(tmp_path / "out")
    expected = ["nucleus" if row % 3 else "boundary" for row in range(30)]
    assert [types[number] for number in rows["cell_type"]] == expected


def test_every_format_that_can_be_asked_for_has_a_reader():
    assert set(FORMATS) == set(get_args(InputFormat))


def write_tables(folder, cells: vendors.Cells) -> dict:
    """Write the same dissociated cells in every format without positions."""
    folder.mkdir()
    vendors.write_10x_h5(folder / "cells.h5", cells, {"CD3": "Antibody Capture"})
    frame = pd.DataFrame(cells.counts.astype(int), index=cells.names, columns=cells.genes)
    frame.insert(2, "kind", ["T", "B"] * 15)
    frame.to_csv(folder / "cells.csv")
    frame.to_csv(folder / "cells.csv.gz")
    frame.reset_index(names="barcode").to_parquet(folder / "cells.parquet")
    vendors.write_mtx(folder / "mtx", cells)
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["cells.h5", "cells.csv", "cells.csv.gz", "cells.parquet", "mtx"])
def test_dissociated_cells_are_read_from_any_container_and_have_no_position(tmp_path, name):
    cells = vendors.some_cells()
    names, genes, counts, position = read(write_tables(tmp_path / "in", cells)[name])
    assert (names, list(genes), position) == (cells.names, cells.genes, None)
    np.testing.assert_array_equal(counts, cells.counts)


@pytest.mark.parametrize("name", ["cells.h5", "mtx", "cells.parquet"])
def test_training_on_cells_without_positions_says_what_they_are_good_for(tmp_path, name):
    path = write_tables(tmp_path / "all", vendors.some_cells())[name]
    (tmp_path / "in").mkdir()
    path.rename(tmp_path / "in" / name)
    refused(tmp_path / "in", tmp_path / "out", name, "have no positions", "expr_to_pos")


def test_a_folder_of_matrix_market_files_is_told_from_an_unknown_one(tmp_path):
    folder = vendors.write_mtx(tmp_path / "mtx", vendors.some_cells())
    refused(folder, tmp_path / "out", "have no positions", "expr_to_pos")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_an_index_of_numbers_is_no_gene_and_a_repeated_label_no_name(tmp_path, suffix):
    cells = vendors.some_cells()
    frame = pd.DataFrame(cells.counts.astype(int), columns=cells.genes, index=range(5, 35))
    frame.insert(0, "cell_type", ["T", "B"] * 15)
    path = tmp_path / f"cells.{suffix}"
    frame.to_csv(path) if suffix == "csv" else frame.to_parquet(path, index=True)
    names, genes, counts, _ = read(path)
    assert list(genes) == cells.genes
    assert names == [str(number) for number in range(5, 35)]
    np.testing.assert_array_equal(counts, cells.counts)


def test_a_table_of_counts_copies_its_labels_and_no_gene_into_obs(tmp_path):
    paths = write_tables(tmp_path / "in", vendors.some_cells())
    for name in ("cells.csv", "cells.parquet"):
        with opened_source(paths[name], SourceOptions()) as source:
            assert set(source.to_anndata().obs.columns) <= {"kind", "barcode"}


@pytest.mark.parametrize("kind", ["xenium", "xenium_csv"])
def test_numbers_about_the_cells_are_copied_as_numbers_in_the_order_of_the_cells(tmp_path, kind):
    cells = vendors.some_cells()
    with opened_source(SPATIAL[kind](tmp_path / "run", cells), SourceOptions()) as source:
        obs = source.to_anndata().obs
    np.testing.assert_array_equal(obs["x_centroid"].to_numpy(np.float64), cells.position[:, 0])
    assert obs["x_centroid"].dtype.kind == "f"
    assert obs["segmentation_method"].dtype == "category"
    assert obs["cell_id"].tolist() == cells.names


def test_matrix_market_files_that_disagree_are_refused(tmp_path):
    folder = vendors.write_mtx(tmp_path / "mtx", vendors.some_cells())
    other = vendors.write_mtx(tmp_path / "other", vendors.some_cells(29))
    shutil.copy(other / "barcodes.tsv.gz", folder / "barcodes.tsv.gz")
    with pytest.raises(InputError, match="8 features x 30 barcodes"):
        read(folder)


def test_ranges_of_a_10x_file_are_the_rows_of_the_whole(tmp_path):
    cells = vendors.some_cells()
    vendors.write_10x_h5(tmp_path / "cells.h5", cells, {"CD3": "Antibody Capture"})
    with opened_source(tmp_path / "cells.h5", SourceOptions()) as source:
        assert source.expression.has_rows
        rows = source.expression.rows(11, 17).toarray()
    np.testing.assert_array_equal(rows, cells.counts[11:17])


def test_a_mistake_ends_in_one_line_and_status_2(tmp_path, capsys):
    folder = vendors.write_xenium(tmp_path / "run", vendors.some_cells())
    (folder / "cells.parquet").unlink()
    asked = ["preprocess", "--input_dir", str(folder), "--output_dir", str(tmp_path / "out")]
    assert main([*asked, "--format", "xenium"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "cells.parquet is missing" in said[0]
    assert main([*asked, "--format", "xenum"]) == 2
    assert "xenium" in capsys.readouterr().err


def test_gene_names_that_occur_again_are_numbered():
    assert unique_genes(["A", "B", "A", "A-1", "A"]) == ("A", "B", "A-2", "A-1", "A-3")


def test_the_centroid_of_a_polygon_is_that_of_its_area():
    house = np.array([[0, 0], [2, 0], [2, 2], [1, 3], [0, 2], [0, 0]], dtype=float) + 1e6
    # A square of area 4 about (1, 1) and a triangle of area 1 about (1, 7/3).
    np.testing.assert_allclose(centroid_of(house) - 1e6, [1, (4 * 1 + 7 / 3) / 5], rtol=1e-9)
    np.testing.assert_allclose(centroid_of(np.array([[1.0, 2.0], [3.0, 2.0]])), [2, 2])


def spatial_table(cells: vendors.Cells, regions: list[str]) -> anndata.AnnData:
    """Make a table as SpatialData holds it."""
    obs = pd.DataFrame({"region": pd.Categorical(regions)}, index=cells.names)
    data = anndata.AnnData(cells.counts, obs=obs, var=pd.DataFrame(index=cells.genes))
    data.obsm["spatial"] = cells.position
    data.uns["spatialdata_attrs"] = {"region": "cells", "region_key": "region"}
    return data


def test_a_table_of_a_spatialdata_store_is_chosen_by_its_name(tmp_path):
    pytest.importorskip("zarr")
    cells, few = vendors.some_cells(), vendors.some_cells(8)
    regions = ["left"] * 10 + ["right"] * 20
    tables = {"cells": spatial_table(cells, regions), "bins": spatial_table(few, ["all"] * 8)}
    store = vendors.write_spatialdata(tmp_path / "in/brain.zarr", tables)
    refused(tmp_path / "in", tmp_path / "out", str(store), "2 tables", "bins, cells", "--table")
    run(tmp_path / "in", tmp_path / "out", **PLAIN, table="cells")
    rows = cells_of(tmp_path / "out")
    assert [record["name"] for record in metadata_of(tmp_path / "out")["slices"]] == [
        "left",
        "right",
    ]
    by_name = rows.set_index("obs_name").loc[cells.names]
    require_equal(tmp_path / "out", cells, by_name)


def test_a_spatialdata_table_without_positions_says_how_to_get_them(tmp_path):
    pytest.importorskip("zarr")
    table = spatial_table(vendors.some_cells(), ["all"] * 30)
    del table.obsm["spatial"]
    vendors.write_spatialdata(tmp_path / "in/brain.zarr", {"cells": table})
    refused(tmp_path / "in", tmp_path / "out", "obsm['spatial'] is missing", "get_centroids")


def test_without_zarr_a_spatialdata_store_names_the_extra(tmp_path, monkeypatch):
    pytest.importorskip("zarr")
    table = spatial_table(vendors.some_cells(), ["all"] * 30)
    store = vendors.write_spatialdata(tmp_path / "brain.zarr", {"cells": table})
    monkeypatch.setitem(__import__("sys").modules, "zarr", None)
    with pytest.raises(InputError, match=r"alphastomics\[spatialdata\]"):
        read(store)


def test_settings_of_the_format_are_settings():
    assert PreprocessingConfig(format="cosmx", pixel_size=0.18).pixel_size == 0.18
