"""One input, every entry point: commands and the notebook read the same cells, or refuse them."""

import anndata
import numpy as np
import pandas as pd
import pytest

from alphastomics import AlphaSTomics
from alphastomics.api.settings import updated
from alphastomics.api.setup import with_files_read
from alphastomics.config import Config, PreprocessingConfig
from alphastomics.errors import InputError
from alphastomics.generation.cells import Blank, blank_cells
from alphastomics.generation.known_positions import anchors_of_csv
from alphastomics.preprocessing.query_fit import opened_query
from tests import vendor_folders as vendors
from tests.preprocessing.test_formats import SPATIAL, read, spatial_table
from tests.preprocessing.test_usual_keys import stereoseq
from tests.preprocessing.tissue import cells_of, make_slice, metadata_of, refused, run, write

ROW_NUMBERS = ["", "Unnamed: 0", "index"]


@pytest.mark.parametrize("kind", ["merscope", "cosmx"])
@pytest.mark.parametrize("name", [*ROW_NUMBERS, "slide_ID_numeric", "total_counts"])
def test_numbers_about_a_cell_are_no_genes(tmp_path, caplog, kind, name):
    caplog.set_level("INFO")
    cells = vendors.some_cells()
    folder = SPATIAL[kind](tmp_path / "run", cells)
    path = next(path for key in ("by_gene", "exprMat") for path in folder.glob(f"*{key}*"))
    table = pd.read_csv(path)
    table.insert(0 if name in ROW_NUMBERS else 2, name, np.arange(len(table)))
    table.to_csv(path, index=False)
    _, genes, counts, _ = read(folder)
    assert list(genes) == list(cells.genes)
    np.testing.assert_array_equal(counts, cells.counts)
    run(folder, tmp_path / "out")
    assert f"columns that are no genes are left out: {name or 'one without a name'}" in caplog.text


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_numbers_about_a_cell_are_no_genes_of_a_table_either(tmp_path, suffix):
    cells = vendors.some_cells()
    table = pd.DataFrame(cells.counts, columns=list(cells.genes))
    table.insert(0, "cell_id", np.arange(len(table)) + 10_000)
    table["x"], table["n_counts"] = 1.5, cells.counts.sum(1)
    path = tmp_path / f"cells{suffix}"
    table.to_csv(path, index=False) if suffix == ".csv" else table.to_parquet(path)
    assert list(read(path)[1]) == list(cells.genes)


def test_tables_of_other_cells_are_refused_as_a_query_and_in_the_notebook(tmp_path):
    folder = vendors.write_merscope(tmp_path / "run", vendors.some_cells())
    path = folder / "cell_by_gene.csv"
    path.write_text(path.read_text().replace("cell003", "other003"))
    words = "'other003-1' is not in cell_metadata.csv"
    genes = list(vendors.some_cells().genes)
    with (
        pytest.raises(InputError, match=words),
        opened_query(folder, genes, None, PreprocessingConfig()),
    ):
        pass
    with pytest.raises(InputError, match=words):
        AlphaSTomics(str(folder))


def test_a_foreign_table_of_the_name_of_an_instrument_stops_nothing(tmp_path):
    cells = vendors.some_cells()
    vendors.write_xenium(tmp_path / "in/run", cells)
    (tmp_path / "in/other").mkdir()
    (tmp_path / "in/other/cells.csv").write_bytes("id,größe\n1,2\n".encode("latin-1"))
    (tmp_path / "in/other/cell_metadata.csv").write_bytes(b"a\rb\r1\r")
    (tmp_path / "in/run/._old.h5ad").write_bytes(b"")
    run(tmp_path / "in", tmp_path / "out")
    assert len(cells_of(tmp_path / "out")) == len(cells.names)


def test_line_ends_of_old_macs_are_refused_in_one_line(tmp_path):
    folder = vendors.write_merscope(tmp_path / "run", vendors.some_cells())
    path = folder / "cell_metadata.csv"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r"))
    refused(folder, tmp_path / "out", "cell_metadata.csv", "header")


def test_the_notebook_finds_coordinates_and_regions_where_the_commands_do(tmp_path):
    data = stereoseq(bin_type="cell_bins")
    data.write_h5ad(tmp_path / "stereo.h5ad")
    slices = AlphaSTomics([make_slice(seed=1), str(tmp_path / "stereo.h5ad")])
    assert [setup.position_key for setup in slices._setups.values()] == ["spatial", "spatial"]
    np.testing.assert_array_equal(
        slices._data["adata[1]"].obsm["spatial"], data.obs[["x", "y"]].to_numpy()
    )
    cells = vendors.some_cells()
    regions = [f"s{number % 2}" for number in range(len(cells.names))]
    store = vendors.write_spatialdata(tmp_path / "st.zarr", {"t": spatial_table(cells, regions)})
    part = AlphaSTomics(str(store))
    key = part._setups["adata"].slice_key
    assert sorted(part._data["adata"].obs[key].unique()) == ["s0", "s1"]


def test_the_notebook_refuses_what_the_commands_refuse():
    data = make_slice()
    columns = data.copy()
    columns.obs["x"], columns.obs["y"] = data.obsm["spatial"].T
    del columns.obsm["spatial"]
    with pytest.raises(InputError, match=r"adata\[1\]: obs\['x'\] and obs\['y'\] may be coord"):
        AlphaSTomics([data, columns])
    flat = make_slice(seed=2)
    flat.obsm["spatial"] = np.insert(flat.obsm["spatial"], 2, 7.0, axis=1)
    with pytest.raises(InputError, match="z is 7 for every cell, which is no third dimension"):
        AlphaSTomics([flat, flat.copy()])
    assert AlphaSTomics([flat, flat.copy()], position_is_3d=True)._dims == 3


def test_a_pixel_size_is_not_given_to_files_and_to_objects(tmp_path):
    data = make_slice()
    path = write(tmp_path / "in", one=data) / "one.h5ad"
    with pytest.raises(InputError, match=r"pixel_size: converts files, and not adata\[0\]"):
        AlphaSTomics([data, str(path)], pixel_size=0.5)


def test_embeddings_of_dissociated_cells_make_no_slices_of_their_samples(tmp_path):
    loose = make_slice(seed=1)
    del loose.obsm["spatial"]
    loose.obs["sample_id"] = pd.Categorical(["left", "right"] * 20)
    for number in range(2):
        folder = write(tmp_path / f"in{number}", loose=loose, one=make_slice())
        run(folder, tmp_path / f"out{number}")
        names = [record["name"] for record in metadata_of(tmp_path / f"out{number}")["references"]]
        assert names == ["loose"]
        with opened_query(
            folder / "loose.h5ad", list(loose.var_names), None, PreprocessingConfig()
        ) as query:
            assert query.reader.slices == ("loose",)
        loose.obsm["X_umap"] = np.zeros((40, 2))


def test_dissociated_cells_have_no_unit_beside_slices_in_pixels(tmp_path):
    cells = vendors.some_cells()
    vendors.write_cosmx(tmp_path / "in/run", cells, scale=False)
    loose = anndata.AnnData(cells.counts, var=pd.DataFrame(index=list(cells.genes)))
    loose.write_h5ad(tmp_path / "in/loose.h5ad")
    run(tmp_path / "in", tmp_path / "out", pixel_size=vendors.PIXEL_UM)
    position = np.stack(cells_of(tmp_path / "out")["position"].dropna())[:, :2]
    assert np.nanmin(position) == pytest.approx(cells.position.min())
    assert np.nanmax(position) == pytest.approx(cells.position.max())
    paths = {"a": str(tmp_path / "in/run"), "b": str(tmp_path / "in/loose.h5ad")}
    read_cells = with_files_read(paths, updated(None, {"pixel_size": vendors.PIXEL_UM}))
    np.testing.assert_allclose(read_cells["a"].obsm["spatial"], cells.position, rtol=1e-12)


def test_anchors_of_a_table_are_converted_as_those_of_other_files(tmp_path):
    path = tmp_path / "known.csv"
    path.write_text("name,x,y,z\ncell_1,10,20,30\n")
    cells = blank_cells(Blank(5), 4, dims=3)
    path.write_text(f"name,x,y,z\n{cells.names[1]},10,20,30\n")
    for size, expected in ((None, [10, 20, 30]), (0.5, [5, 10, 30])):
        anchors = anchors_of_csv(cells, path, size).anchors
        assert anchors is not None
        np.testing.assert_array_equal(anchors[1], expected)
        assert np.isnan(np.delete(anchors, 1, axis=0)).all()
    assert Config().data.preprocessing.pixel_size is None
