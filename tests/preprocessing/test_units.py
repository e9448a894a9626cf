"""Units of AnnData: pixels become micrometres where the user says how large they are."""

import anndata
import numpy as np
import pandas as pd
import pytest

from alphastomics.api.settings import updated
from alphastomics.api.setup import with_files_read
from alphastomics.config import PreprocessingConfig
from alphastomics.errors import InputError
from alphastomics.main import main
from alphastomics.preprocessing.query_fit import opened_query
from tests import vendor_folders as vendors
from tests.preprocessing.test_formats import spatial_table
from tests.preprocessing.test_usual_keys import position_of, stereoseq
from tests.preprocessing.tissue import make_slice, refused, run, write


def in_pixels(size: float = 0.25, **options) -> anndata.AnnData:
    """Make a slice as scanpy keeps one of Visium HD, with the scale of its image."""
    data = make_slice(**options)
    data.uns["spatial"] = {"brain": {"scalefactors": {"microns_per_pixel": size}}}
    return data


def store_of(folder, data: anndata.AnnData):
    """Write a SpatialData store with one table."""
    folder.mkdir()
    cells = vendors.Cells(
        list(data.obs_names), list(data.var_names), data.X.toarray(), data.obsm["spatial"]
    )
    table = spatial_table(cells, ["all"] * len(cells.names))
    table.uns.update(data.uns)
    vendors.write_spatialdata(folder / "one.zarr", {"cells": table})
    return folder


WRITERS = {
    "h5ad": lambda folder, data: write(folder, one=data),
    "spatialdata": store_of,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_pixels_stay_as_stored_with_a_warning_until_their_size_is_given(tmp_path, caplog, kind):
    caplog.set_level("INFO")
    data = in_pixels()
    folder = WRITERS[kind](tmp_path / "in", data)
    run(folder, tmp_path / "stored")
    np.testing.assert_array_equal(position_of(tmp_path / "stored")[:, :2], data.obsm["spatial"])
    (said,) = (line for line in caplog.messages if "look like pixels" in line)
    assert "microns_per_pixel 0.25" in said
    assert "--pixel_size 0.25 converts them to µm" in said
    caplog.clear()
    run(folder, tmp_path / "um", pixel_size=0.5)
    position = position_of(tmp_path / "um")[:, :2]
    np.testing.assert_allclose(position, data.obsm["spatial"] * 0.5, rtol=1e-12)
    assert "look like pixels" not in caplog.text
    assert sum("x and y are converted from pixels of 0.5 µm" in x for x in caplog.messages) == 1


def test_coordinates_of_which_nothing_is_known_are_said_to_be_taken_as_micrometres(
    tmp_path, caplog
):
    caplog.set_level("INFO")
    run(write(tmp_path / "in", a=make_slice(), b=make_slice(seed=1)), tmp_path / "out")
    (said,) = (line for line in caplog.messages if "--pixel_size" in line)
    assert said.startswith("coordinates of 2 AnnData inputs are taken as stored, as µm")
    caplog.clear()
    run(write(tmp_path / "single", a=make_slice()), tmp_path / "other")
    assert "coordinates of 1 AnnData input are taken as stored" in caplog.text


def test_the_same_warning_of_several_files_is_one_line(tmp_path, caplog):
    run(write(tmp_path / "in", a=in_pixels(), b=in_pixels(seed=1)), tmp_path / "out")
    (said,) = (line for line in caplog.messages if "look like pixels" in line)
    assert "a.h5ad and 1 more: " in said


@pytest.mark.parametrize("in_obsm", [False, True])
def test_nanoballs_of_stereoseq_are_pointed_out_and_converted(tmp_path, caplog, in_obsm):
    data = stereoseq(bin_type="cell_bins")
    if in_obsm:
        data.obsm["spatial"] = data.obs[["x", "y"]].to_numpy()
    run(write(tmp_path / "in", one=data), tmp_path / "out")
    assert "DNA nanoballs of 0.5 µm" in caplog.text
    assert "--pixel_size 0.5" in caplog.text
    run(tmp_path / "in", tmp_path / "um", pixel_size=0.5)
    expected = np.stack([np.arange(40), np.arange(40) * 3], axis=1) * 0.5
    np.testing.assert_array_equal(position_of(tmp_path / "um")[:, :2], expected)


def test_a_pixel_has_no_z(tmp_path):
    data = make_slice(dims=3)
    run(write(tmp_path / "in", one=data), tmp_path / "out", pixel_size=0.5)
    expected = data.obsm["spatial"] * [0.5, 0.5, 1]
    np.testing.assert_allclose(position_of(tmp_path / "out"), expected, rtol=1e-12)


def test_scales_that_are_no_numbers_say_nothing(tmp_path, caplog):
    data = in_pixels(size="unknown")
    data.uns["spatial"]["other"] = {"scalefactors": {"tissue_hires_scalef": 0.1}}
    other = make_slice(seed=1)
    other.uns["spatial"] = np.ones(3)
    run(write(tmp_path / "in", one=data, two=other), tmp_path / "out")
    assert "look like pixels" not in caplog.text


def test_a_query_is_converted_as_training_slices_are(tmp_path, caplog):
    data = in_pixels()
    path = write(tmp_path / "in", one=data) / "one.h5ad"
    genes = list(data.var_names)
    for size in (None, 0.25):
        with opened_query(path, genes, None, PreprocessingConfig(pixel_size=size)) as query:
            rows = query.reader.positions("spatial").rows(0, 40)
        np.testing.assert_allclose(rows, data.obsm["spatial"] * (size or 1), rtol=1e-12)
    assert sum("look like pixels" in line for line in caplog.messages) == 1
    del data.obsm["spatial"]
    loose = write(tmp_path / "loose", one=data) / "one.h5ad"
    with opened_query(loose, genes, None, PreprocessingConfig(pixel_size=0.5)):
        assert "has no positions: --pixel_size is not used" in caplog.text


def test_the_notebook_has_them_in_micrometres(tmp_path, caplog):
    data = in_pixels()
    path = write(tmp_path / "in", one=data) / "one.h5ad"
    config = updated(None, {"pixel_size": 0.25})
    cells = with_files_read({"adata": path}, config)
    position = cells["adata"].obsm["spatial"]
    np.testing.assert_allclose(position, data.obsm["spatial"] * 0.25, rtol=1e-12)
    with pytest.raises(InputError, match=r"--table: .*has no tables"):
        with_files_read({"adata": path}, updated(None, {"table": "nope"}))
    with_files_read({"adata": data}, config)
    assert "pixel_size: counts with the path of a file or folder: not used" in caplog.text


def test_one_pixel_size_is_not_given_to_folders_in_pixels_and_to_other_files(tmp_path):
    cells = vendors.some_cells()
    folder = write(tmp_path / "in", one=make_slice())
    vendors.write_cosmx(folder / "run", cells)
    words = ("--pixel_size: converts", "one.h5ad", "cosmx", "stage2")
    refused(folder, tmp_path / "out", *words, pixel_size=0.5)


UNUSED = [
    ("xenium", "table", "nope", "(xenium) has no tables to choose from"),
    ("xenium", "pixel_size", "0.5", "(xenium) has no positions in pixels"),
    ("merscope", "pixel_size", "0.5", "(merscope) has no positions in pixels"),
    ("cosmx", "table", "nope", "(cosmx) has no tables to choose from"),
    ("visium_hd", "table", "square_008um", "(visium_hd) has no tables to choose from"),
    ("h5ad", "table", "nope", "(h5ad) has no tables to choose from"),
]


@pytest.mark.parametrize(("kind", "flag", "value", "words"), UNUSED)
def test_a_flag_that_no_input_uses_is_refused_in_one_line(
    tmp_path, capsys, kind, flag, value, words
):
    folder = tmp_path / "in/run"
    if kind == "h5ad":
        write(folder, one=make_slice())
    else:
        getattr(vendors, f"write_{kind}")(folder, vendors.some_cells())
    asked = ["preprocess", "--input_dir", tmp_path / "in", "--output_dir", tmp_path / "out"]
    assert main(list(map(str, [*asked, f"--{flag}", value]))) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert f"--{flag}: " in said
    assert words in said
    assert not (tmp_path / "out").exists()


def test_a_flag_that_some_inputs_use_gets_one_line_of_warning(tmp_path, caplog):
    cells = vendors.some_cells()
    vendors.write_cosmx(tmp_path / "in/a", cells, scale=False)
    vendors.write_xenium(tmp_path / "in/b", cells)
    run(tmp_path / "in", tmp_path / "out", pixel_size=vendors.PIXEL_UM)
    (said,) = (line for line in caplog.messages if "--pixel_size" in line)
    assert "not used for 1 of 2 inputs" in said
    assert "in/b, xenium" in said


def test_a_table_may_be_named_by_its_own_path_and_by_the_flag(tmp_path):
    folder = vendors.write_visium_hd(tmp_path / "square_008um", vendors.some_cells())
    run(folder, tmp_path / "out", table="square_008um")
    refused(folder, tmp_path / "no", "--table", "square_008um", table="square_016um")


def test_counts_beside_slices_that_are_not_read_are_named_in_one_line(tmp_path, caplog):
    cells = vendors.some_cells()
    folder = write(tmp_path / "in", one=make_slice())
    run(folder, tmp_path / "before")
    assert "not read" not in caplog.text
    vendors.write_10x_h5(folder / "counts.h5", cells, {})
    vendors.write_mtx(folder / "mtx", cells)
    pd.DataFrame(cells.counts).to_csv(folder / "counts.csv")
    run(folder, folder / "processed")  # its shards are Parquet files, too
    run(folder, tmp_path / "after")
    said = [line for line in caplog.messages if "are not read" in line]
    assert len(said) == 2
    assert said[0] == said[1]
    assert said[0].startswith("3 files or folders")
    for name in ("counts.h5", "counts.csv", "mtx"):
        assert str(folder / name) in said[0]
    assert "save them as .h5ad beside the slices" in said[0]
