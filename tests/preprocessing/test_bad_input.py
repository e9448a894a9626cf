"""Bad input: one line with file, field and remedy; nothing half-written."""

import errno
import logging
import os
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
from scipy.sparse import csr_matrix

from alphastomics.config import PreprocessingConfig
from alphastomics.errors import InputError
from alphastomics.preprocessing.commands import stage1, stage2
from alphastomics.preprocessing.folder import DataFolder
from tests.preprocessing.tissue import files_in, make_slice, metadata_of, refused, run, write


def with_x(values: np.ndarray) -> object:
    data = make_slice(*values.shape)
    data.X = values.astype(np.float32)
    return data


def test_a_folder_without_slices(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/notes.txt").touch()
    refused(tmp_path / "in", tmp_path / "out", "in: there is no .h5ad file")
    refused(tmp_path / "absent", tmp_path / "out", "absent: there is no such folder")


def test_an_output_folder_among_the_slices_is_pointed_out(tmp_path, caplog):
    source = write(tmp_path / "in", one=make_slice())
    run(source, tmp_path / "out")
    assert "--output_dir outside --input_dir" not in caplog.text
    run(source, source / "out")
    assert f"{source / 'out'}: lies in --input_dir {source}" in caplog.text


def test_an_output_folder_that_would_be_read_as_a_slice_is_refused(tmp_path):
    source = write(tmp_path / "in", one=make_slice())
    refused(source, source / "out.zarr", "the next run would read it as a slice")


def test_a_missing_obsm_key_names_the_keys_there_are(tmp_path):
    source = write(tmp_path / "in", one=make_slice())
    refused(source, tmp_path / "out", "one.h5ad", "obsm['X_xy']", "spatial", position_key="X_xy")


@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("is_3d", [False, True])
def test_positions_with_one_or_four_columns(tmp_path, columns, is_3d):
    source = write(tmp_path / "in", one=make_slice(dims=columns))
    refused(
        source,
        tmp_path / "out",
        "one.h5ad: obsm['spatial']",
        f"{columns} columns",
        position_is_3d=is_3d,
    )


def test_two_and_three_dimensions_are_not_mistaken_for_each_other(tmp_path):
    flat = write(tmp_path / "flat", one=make_slice(dims=2))
    level = make_slice(dims=3)
    level.obsm["spatial"][:, 2] = 0  # the same z for all cells is no third dimension
    levels = write(tmp_path / "level", one=level, two=level)
    mixed = write(tmp_path / "mixed", one=make_slice(dims=2), two=make_slice(dims=3))
    deep = write(tmp_path / "deep", one=make_slice(dims=3))
    refused(flat, tmp_path / "out", "leave out --position_is_3d", position_is_3d=True)
    refused(levels, tmp_path / "out", "give --position_is_3d")
    refused(mixed, tmp_path / "out", "two.h5ad", "give --position_is_3d")
    refused(deep, tmp_path / "out", "give --position_is_3d", position_is_3d=False)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_positions_that_are_no_numbers(tmp_path, bad):
    data = make_slice()
    data.obsm["spatial"][7, 1] = bad
    refused(
        write(tmp_path / "in", one=data), tmp_path / "out", "one.h5ad: obsm['spatial']", "row 7"
    )


@pytest.mark.parametrize("form", ["csr", "csc", "dense"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_expression_that_is_no_number_even_in_the_last_chunk_of_the_last_file(tmp_path, form, bad):
    data = make_slice(form="dense")
    data.X[38, 2] = bad
    data.X = {"csr": csr_matrix, "csc": lambda x: csr_matrix(x).tocsc(), "dense": np.asarray}[form](
        data.X
    )
    source = write(tmp_path / "in", one=make_slice(), two=data)
    refused(source, tmp_path / "out", "two.h5ad: X has NaN or infinite", max_cells_per_file=5)


def test_negative_values_where_a_logarithm_is_asked(tmp_path):
    data = make_slice(form="dense")
    data.X[11, 0] = -1
    source = write(tmp_path / "in", one=data)
    refused(source, tmp_path / "out", "one.h5ad: X has negative", "row 11", "--skip-log-normalize")
    run(source, tmp_path / "skipped", log_normalize=False)


def test_values_that_look_normalised_are_said(tmp_path, caplog):
    data = make_slice(form="dense")
    data.X = np.log1p(data.X)
    source = write(tmp_path / "in", one=data)
    with caplog.at_level(logging.WARNING):
        run(source, tmp_path / "out")
    number = int((data.X % 1 != 0).sum())
    assert f"one.h5ad: X: {number:,} values are not whole numbers" in caplog.text
    assert "if that was done before, give --skip-log-normalize" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        run(source, tmp_path / "skipped", log_normalize=False)
    assert "whole numbers" not in caplog.text


def test_duplicate_genes(tmp_path):
    data = make_slice(genes=["a", "b", "c", "b"])
    source = write(tmp_path / "in", one=data)
    refused(source, tmp_path / "out", "one.h5ad: var_names has 1 duplicate", "'b'")


def test_genes_that_differ_in_case_only_get_a_hint(tmp_path, caplog):
    source = write(tmp_path / "in", one=make_slice(genes=["Actb"]), two=make_slice(genes=["ACTB"]))
    with caplog.at_level(logging.WARNING):
        run(source, tmp_path / "out")
    assert "upper and lower case only" in caplog.text
    assert metadata_of(tmp_path / "out")["genes"] == ["ACTB", "Actb"]


def test_no_overlap_with_the_gene_list(tmp_path):
    source = write(tmp_path / "in", one=make_slice(genes=["Actb", "Gapdh"]))
    listed = tmp_path / "genes.txt"
    listed.write_text("ENSG1\n")
    refused(
        source, tmp_path / "out", "one.h5ad: none of the 1 listed genes", "'ENSG1'", genes=listed
    )
    listed.write_text("ACTB\nGAPDH\n")
    refused(source, tmp_path / "out", "2 agree when upper and lower case", genes=listed)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"a\nb\na\n", "1 duplicate gene (first 'a')"),
        (b"\xff\xfe\x00a", "not UTF-8"),
    ],
)
def test_gene_lists_that_cannot_be_meant(tmp_path, content, words):
    source = write(tmp_path / "in", one=make_slice())
    listed = tmp_path / "genes.txt"
    listed.write_bytes(content)
    refused(source, tmp_path / "out", "genes.txt", words, genes=listed)
    refused(source, tmp_path / "out", "no such gene list", genes=tmp_path / "absent.txt")


def test_cells_without_counts_are_kept_and_said(tmp_path, caplog):
    data = with_x(np.ones((10, 3)))
    data.X[4:6] = 0
    with caplog.at_level(logging.WARNING):
        run(write(tmp_path / "in", one=data), tmp_path / "out")
    assert "one.h5ad: X: 2 cells have zero counts; they are kept" in caplog.text
    assert sum(s["cells"] for s in metadata_of(tmp_path / "out")["splits"].values()) == 10


def test_an_empty_slice(tmp_path):
    source = write(tmp_path / "in", one=make_slice(), two=make_slice(cells=0))
    refused(source, tmp_path / "out", "two.h5ad: X is empty (0 cells x 12 genes)")


def test_slices_that_are_not_named_for_every_cell(tmp_path):
    data = make_slice(slices=["a", "b"])
    data.obs.loc[data.obs_names[3], "slice_id"] = np.nan
    source = write(tmp_path / "in", one=data)
    refused(source, tmp_path / "out", "one.h5ad: obs['slice_id'] is missing", "row 3")


def test_a_cell_type_column_that_no_file_has(tmp_path):
    source = write(tmp_path / "in", one=make_slice())
    refused(source, tmp_path / "out", "one.h5ad: obs['kind'] is missing", cell_type_key="kind")


def test_stage1_needs_a_gene_list(tmp_path):
    source = write(tmp_path / "in", one=make_slice())
    with pytest.raises(InputError, match="--gene_list_file"):
        stage1(
            PreprocessingConfig(),
            input_dir=source,
            output_dir=tmp_path / "out",
            gene_list_file=None,
            overwrite=False,
            scheduler=None,
        )


def test_gene_lists_that_differ_between_datasets_show_where(tmp_path):
    source = write(tmp_path / "in", one=make_slice(genes=["a", "b", "c"]))
    for name, listed in {"first": "a\nb\n", "second": "a\nc\n", "third": "b\na\n"}.items():
        (tmp_path / f"{name}.txt").write_text(listed)
        stage1(
            PreprocessingConfig(),
            input_dir=source,
            output_dir=tmp_path / name,
            gene_list_file=tmp_path / f"{name}.txt",
            overwrite=False,
            scheduler=None,
        )

    def merging(*names: str) -> None:
        stage2(
            PreprocessingConfig(),
            input_dirs=[tmp_path / name for name in names],
            output_dir=tmp_path / "out",
            seed=0,
            overwrite=False,
            scheduler=None,
        )

    with pytest.raises(InputError, match=r"second: .*first: 'b'; only in the second: 'c'"):
        merging("first", "second")
    with pytest.raises(InputError, match="the order differs from gene 0: 'a' and 'b'"):
        merging("first", "third")
    with pytest.raises(InputError, match="named twice"):
        merging("first", "first")
    with pytest.raises(InputError, match=r"in: there is no dataset\.json"):
        merging("in")
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_cannot_be_made(tmp_path):
    source = write(tmp_path / "in", one=make_slice())
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="a file is in the way"):
        run(source, tmp_path / "file")
    with pytest.raises(InputError, match="a file is in the way"):
        run(source, tmp_path / "file/below")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_output_folder(tmp_path):
    source = write(tmp_path / "in", one=make_slice())
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(PermissionError) as caught:
        run(source, tmp_path / "locked/out")
    assert "locked" in str(caught.value)


def test_a_foreign_output_folder_is_left_alone(tmp_path):
    source = write(tmp_path / "in", one=make_slice())
    (tmp_path / "out/data").mkdir(parents=True)
    (tmp_path / "out/data/mine.txt").write_text("precious")
    with pytest.raises(InputError, match="was not written by this command"):
        run(source, tmp_path / "out")
    assert (tmp_path / "out/data/mine.txt").read_text() == "precious"


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from tests.preprocessing.tissue import run
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    run(Path(sys.argv[1]), Path(sys.argv[2]))
except OSError as error:
    print(error.errno, error.filename)
"""


def test_a_disk_that_runs_full_names_the_file_and_leaves_only_whole_ones(tmp_path):
    """A limit on the size of files, of a few sizes, stands in for a full disk."""
    source = write(tmp_path / "in", one=make_slice(400, 200), two=make_slice(300, 200))
    run(source, tmp_path / "whole")
    for limit in (4_000, 100_000, 200_000):
        target = tmp_path / str(limit)
        command = [sys.executable, "-c", FULL_DISK, str(source), str(target), str(limit)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        number, _, name = done.stdout.strip().partition(" ")
        assert int(number) == errno.EFBIG, done.stderr[-500:]
        assert name.startswith(str(target))
        assert not [path for path in files_in(target) if path.endswith(".partial")]
        assert not (target / "metadata.json").exists()
        run(source, target)
        assert metadata_of(target) == metadata_of(tmp_path / "whole")
        shutil.rmtree(target)


def test_a_truncated_part_of_stage1_is_refused_by_stage2(tmp_path):
    source = write(tmp_path / "in", one=make_slice())
    (tmp_path / "genes.txt").write_text("g001\n")
    stage1(
        PreprocessingConfig(),
        input_dir=source,
        output_dir=tmp_path / "stage1",
        gene_list_file=tmp_path / "genes.txt",
        overwrite=False,
        scheduler=None,
    )
    part = next((tmp_path / "stage1").glob("*.arrow"))
    part.write_bytes(part.read_bytes()[:-40])
    with pytest.raises(InputError, match=r"part-.*sha256 differs"):
        stage2(
            PreprocessingConfig(),
            input_dirs=[tmp_path / "stage1"],
            output_dir=tmp_path / "out",
            seed=0,
            overwrite=False,
            scheduler=None,
        )
    assert not (tmp_path / "out").exists()


def test_labels_are_not_needed_in_every_file(tmp_path, caplog):
    source = write(tmp_path / "in", one=make_slice(types=["a"]), two=make_slice())
    with caplog.at_level(logging.WARNING):
        run(source, tmp_path / "out", cell_type_key="cell_type")
    assert "1 file without obs['cell_type'] (" in caplog.text


def test_a_table_of_text_is_no_expression(tmp_path):
    source = write(tmp_path / "in", one=make_slice())
    with h5py.File(source / "one.h5ad", "r+") as file:
        del file["X"]
    refused(source, tmp_path / "out", "one.h5ad: X is missing")
    with h5py.File(source / "one.h5ad", "r+") as file:
        file["X"] = np.array([[b"a"] * 12] * 40)
    refused(source, tmp_path / "out", "one.h5ad: X has shape (40, 12) and type |S1")


@pytest.mark.parametrize(
    "where", ["./processed", "../processed", "data/processed", "outputs/x", "here/x", "~/x", "x"]
)
def test_a_missing_folder_that_looks_local_is_never_looked_for_on_the_network(
    where, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(DataFolder, "_open", lambda *_: pytest.fail("asked the network"))
    with pytest.raises(InputError, match="run `alphastomics preprocess`"):
        DataFolder(where)
