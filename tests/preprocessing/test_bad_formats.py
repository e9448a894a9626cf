"""Vendor folders that cannot be read: each is refused in one line that says what to do."""

import shutil

import anndata
import numpy as np
import pandas as pd
import pytest

from alphastomics.errors import InputError
from alphastomics.generation.notices import is_processed
from alphastomics.main import main
from alphastomics.preprocessing.cell_source import SourceOptions
from alphastomics.preprocessing.formats.registry import format_of
from tests import vendor_folders as vendors
from tests.preprocessing.test_formats import SPATIAL, read
from tests.preprocessing.tissue import cells_of, metadata_of, refused, run

# Either of both marks a run.
KEY_OF_XENIUM = "cell_feature_matrix.h5 experiment.xenium"
MISSING = [
    ("xenium", "cells.parquet", "cells.parquet is missing"),
    ("xenium", "cell_feature_matrix.h5", "cell_feature_matrix.h5 is missing"),
    ("merscope", "cell_metadata.csv", "the table of cells is missing"),
    ("cosmx", "Slide1_metadata_file.csv", "the table of cells is missing"),
    ("visium_hd", "spatial/scalefactors_json.json", "scalefactors_json.json is missing"),
    ("visium_hd", "filtered_feature_bc_matrix.h5", "filtered_feature_bc_matrix.h5 is missing"),
    ("merscope", "cell_by_gene.csv", "the table of counts is missing"),
    ("cosmx", "Slide1_exprMat_file.csv", "the table of counts is missing"),
    ("cosmx_gz", "Slide1_exprMat_file.csv.gz", "the table of counts is missing"),
    ("visium_hd", "spatial/tissue_positions.parquet", "tissue_positions.parquet is missing"),
    ("segmented", "filtered_feature_cell_matrix.h5", "filtered_feature_cell_matrix.h5 is missing"),
    ("xenium", KEY_OF_XENIUM, "cell_feature_matrix.h5 is missing"),
    ("xenium_csv", KEY_OF_XENIUM, "cell_feature_matrix.h5 is missing"),
    ("segmented", "cell_segmentations.geojson", "cell_segmentations.geojson is missing"),
]


def without(folder, names: str):
    """Remove files of a run."""
    for name in names.split():
        (folder / name).unlink()
    return folder


def format_named(kind: str) -> str:
    return {"segmented": "visium_hd"}.get(kind, kind.split("_")[0] if kind != "visium_hd" else kind)


@pytest.mark.parametrize(("kind", "name", "words"), MISSING)
def test_a_missing_file_is_named(tmp_path, kind, name, words):
    folder = without(SPATIAL[kind](tmp_path / "run", vendors.some_cells()), name)
    refused(folder, tmp_path / "out", str(folder), words)
    refused(folder, tmp_path / "out", str(folder), words, format=format_named(kind))
    # As `sample --input_data` reads it: no processed folder, with --format and without.
    assert not is_processed(folder)
    for options in ({}, {"format": format_named(kind)}):
        with pytest.raises(InputError, match=words):
            read(folder, **options)


@pytest.mark.parametrize(("kind", "name", "words"), MISSING)
def test_a_run_without_a_file_is_refused_among_others(tmp_path, kind, name, words, capsys):
    SPATIAL[kind](tmp_path / "in/a", vendors.some_cells())
    folder = without(SPATIAL[kind](tmp_path / "in/b", vendors.some_cells()), name)
    asked = ["--input_dir", str(tmp_path / "in"), "--output_dir", str(tmp_path / "out")]
    assert main(["preprocess", *asked]) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert str(folder) in said
    assert words in said
    assert not (tmp_path / "out").exists()


def test_a_table_of_the_name_of_an_instrument_alone_is_no_run(tmp_path):
    for name in ("cell_metadata.csv", "cells.csv.gz"):
        vendors.write_csv(tmp_path / name, {"cell_id": ["a"], "age": [3]})
    (tmp_path / "cells.csv").touch()
    assert format_of(tmp_path, SourceOptions(), missing_ok=True) is None


def test_the_output_of_visium_is_told_from_that_of_visium_hd(tmp_path):
    folder = vendors.write_visium_hd(tmp_path / "run", vendors.some_cells())
    without(folder, "spatial/tissue_positions.parquet")
    (folder / "spatial/tissue_positions.csv").write_text("barcode\n")
    refused(folder, tmp_path / "out", "tissue_positions.csv", "not of Visium HD", ".h5ad")


def test_a_damaged_zip_of_a_xenium_run_is_named(tmp_path):
    vendors.write_zipped_xenium(tmp_path / "run", vendors.some_cells())
    path = tmp_path / "run/cell_feature_matrix.zarr.zip"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(tmp_path / "run", tmp_path / "out", str(path), "is damaged or was cut short")
    path.write_bytes(b"")
    refused(tmp_path / "run", tmp_path / "out", str(path), "is damaged or was cut short")


def test_counts_of_a_zip_beyond_the_cells_of_a_xenium_run_are_refused(tmp_path):
    cells = vendors.some_cells()
    vendors.write_zipped_xenium(tmp_path / "run", cells, listed=len(cells.names) - 1)
    table = tmp_path / "run/cells.parquet"
    pd.read_parquet(table)[1:].to_parquet(table)  # its rows are in the opposite order
    refused(tmp_path / "run", tmp_path / "out", "a cell beyond the 29 listed")


RENAMED = [
    ("merscope", "cell_metadata.csv", "center_x", "expected the column center_x"),
    ("cosmx", "Slide1_metadata_file.csv", "CenterX_global_px", "expected the column CenterX_glob"),
    ("cosmx", "Slide1_exprMat_file.csv", "cell_ID", "expected the column cell_ID"),
]


@pytest.mark.parametrize(("kind", "name", "column", "words"), RENAMED)
def test_columns_of_another_version_are_named(tmp_path, kind, name, column, words):
    folder = SPATIAL[kind](tmp_path / "run", vendors.some_cells())
    path = folder / name
    path.write_text(path.read_text().replace(column, "renamed"))
    refused(folder, tmp_path / "out", str(path), words, "another software version")


def test_pixels_without_a_scale_are_refused_until_the_user_says_it(tmp_path):
    cells = vendors.some_cells()
    cosmx = vendors.write_cosmx(tmp_path / "cosmx", cells, scale=False)
    visium = vendors.write_visium_hd(tmp_path / "visium", cells, scale=False)
    refused(cosmx, tmp_path / "out", "pixels", "--pixel_size")
    refused(visium, tmp_path / "out", "microns_per_pixel is missing", "--pixel_size")
    for folder in (cosmx, visium):
        position = read(folder, pixel_size=vendors.PIXEL_UM)[3]
        np.testing.assert_array_equal(position, cells.position)


def test_cells_that_only_one_of_two_tables_has_are_refused(tmp_path):
    folder = vendors.write_merscope(tmp_path / "run", vendors.some_cells())
    path = folder / "cell_metadata.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]) + "\n")
    refused(folder, tmp_path / "out", "cell029-1", "not in cell_metadata.csv")
    path.write_text("\n".join([*lines, lines[-1].replace("cell029", "cell999")]) + "\n")
    refused(folder, tmp_path / "out", "cell999-1", "has no row")
    path.write_text("\n".join([*lines, lines[-1]]) + "\n")
    refused(folder, tmp_path / "out", "cell029-1", "more than once")


def test_cells_of_a_xenium_table_without_counts_are_refused(tmp_path):
    folder = vendors.write_xenium(tmp_path / "run", vendors.some_cells())
    other = vendors.write_xenium(tmp_path / "other", vendors.some_cells(32))
    shutil.copy(other / "cells.parquet", folder / "cells.parquet")
    words = ("cells.parquet", "2 of its 32 cells are not in cell_feature_matrix.h5", "cell031-1")
    refused(folder, tmp_path / "out", *words)


def test_a_column_without_a_name_is_described(tmp_path):
    folder = vendors.write_merscope(tmp_path / "run", vendors.some_cells())
    (folder / "cell_by_gene.csv").write_text("a,b\n1,2\n")
    refused(folder, tmp_path / "out", "cell or EntityID or cell_id or one without a name")


def test_a_matrix_of_another_run_is_refused(tmp_path):
    folder = vendors.write_xenium(tmp_path / "run", vendors.some_cells())
    other = vendors.some_cells(name="other")
    vendors.write_10x_h5(folder / "cell_feature_matrix.h5", other, vendors.XENIUM_CONTROLS)
    refused(folder, tmp_path / "out", "30 of its 30 cells are not in cells.parquet", "other000-1")


@pytest.mark.parametrize("text", ["abc", "", "nan", "inf"])
def test_a_count_that_is_no_number_is_refused(tmp_path, text):
    folder = vendors.write_merscope(tmp_path / "run", vendors.some_cells())
    path = folder / "cell_by_gene.csv"
    lines = path.read_text().splitlines()
    fields = lines[5].split(",")
    lines[5] = ",".join([*fields[:2], text, *fields[3:]])
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=r"cell_by_gene\.csv") as caught:
        run(folder, tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_a_table_that_was_cut_short_is_refused(tmp_path):
    folder = vendors.write_cosmx(tmp_path / "run", vendors.some_cells(), suffix=".gz")
    path = folder / "Slide1_exprMat_file.csv.gz"
    path.write_bytes(path.read_bytes()[:-40])
    refused(folder, tmp_path / "out", str(path))


def test_bin_sizes_of_one_tissue_are_never_read_together(tmp_path):
    cells = vendors.some_cells()
    outs = tmp_path / "outs"
    vendors.write_visium_hd(outs / "binned_outputs/square_008um", cells)
    vendors.write_visium_hd(outs / "binned_outputs/square_016um", vendors.some_cells(9))
    vendors.write_segmented(outs / "segmented_outputs", cells)
    refused(outs, tmp_path / "out", "3 tables", "square_008um, square_016um, segmented_outputs")
    refused(outs, tmp_path / "out", "no table 'square_002um'", table="square_002um")
    run(outs, tmp_path / "out", table="square_016um")
    assert len(cells_of(tmp_path / "out")) == 9


def test_an_unknown_folder_says_what_is_known(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("nothing")
    refused(tmp_path / "run", tmp_path / "out", "no folder of an instrument", "xenium", "cosmx")
    with pytest.raises(InputError, match="is a folder of no known format"):
        read(tmp_path / "run")


def test_a_format_that_is_insisted_on_is_the_only_one_that_is_searched(tmp_path):
    cells = vendors.some_cells()
    vendors.write_merscope(tmp_path / "in/a", cells)
    vendors.write_xenium(tmp_path / "in/b", cells)
    run(tmp_path / "in", tmp_path / "out", format="xenium")
    assert [record["file"] for record in metadata_of(tmp_path / "out")["slices"]] == ["b"]
    refused(tmp_path / "in/a", tmp_path / "other", "--format xenium", format="xenium")


def test_tables_beside_h5ad_files_do_not_hide_them_and_are_named(tmp_path, caplog):
    folder = vendors.write_merscope(tmp_path / "in", vendors.some_cells())
    names = pd.DataFrame(index=["a", "b", "c"])
    data = anndata.AnnData(np.ones((3, 2), np.float32), obs=names)
    data.obsm["spatial"] = np.eye(3, 2)
    data.write_h5ad(folder / "slice.h5ad")
    with caplog.at_level("WARNING"):
        run(folder, tmp_path / "out")
    assert len(cells_of(tmp_path / "out")) == 3
    assert "slice.h5ad in it is read, and not the merscope output beside it" in caplog.text
