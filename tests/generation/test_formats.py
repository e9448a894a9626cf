"""Queries in other formats: `sample`, `test` and `extract` read them as the same cells in h5ad."""

import anndata
import numpy as np
import pytest

from alphastomics.main import main
from tests.generation.conftest import checkpoint
from tests.vendor_folders import Cells, write_10x_h5, write_merscope, write_xenium


@pytest.fixture
def cells(workspace) -> Cells:
    """The first training slice, as whole cells to be written in other formats."""
    data = anndata.read_h5ad(workspace / "slices/slice_0.h5ad")
    position = np.asarray(data.obsm["spatial"])
    return Cells(list(data.obs_names), list(data.var_names), data.X.toarray(), position)


@pytest.fixture
def run(workspace, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def start(command: str, *words: object) -> tuple[int, str]:
        asked = [command, "--checkpoint", checkpoint(workspace), *words]
        status = main(list(map(str, asked)))
        return status, capsys.readouterr().err

    return start


def sampled(run, source, output, *words) -> anndata.AnnData:
    words = ("--sample_mode", "expr_to_pos", "--num_steps", 2, "--num_samples", 1, *words)
    status, said = run("sample", "--input_data", source, "--output", output, *words)
    assert status == 0, said
    return anndata.read_h5ad(output)


@pytest.mark.parametrize("kind", ["xenium", "merscope", "10x"])
def test_positions_are_those_of_the_same_cells_in_h5ad(run, workspace, tmp_path, cells, kind):
    source = tmp_path / "run"
    if kind == "10x":
        source = tmp_path / "cells.h5"
        write_10x_h5(source, cells, {"CD3": "Antibody Capture"})
    else:
        {"xenium": write_xenium, "merscope": write_merscope}[kind](source, cells)
    expected = sampled(run, workspace / "slices/slice_0.h5ad", "a.h5ad")
    result = sampled(run, source, "b.h5ad", "--format", kind)
    assert list(result.obs_names) == cells.names
    assert list(result.var_names) == cells.genes
    np.testing.assert_array_equal(result.X.toarray(), cells.counts)
    assert ("spatial" in result.obsm) == (kind != "10x")
    # The order in which a CSV has its cells changes the last digit at most.
    np.testing.assert_allclose(
        result.obsm["spatial_pred"], expected.obsm["spatial_pred"], rtol=1e-4, atol=1e-3
    )


def test_scores_of_a_folder_are_those_of_the_file(run, workspace, tmp_path, cells):
    folder = write_xenium(tmp_path / "slice_0", cells)  # baselines leave out a slice by its name
    words = ("--no_report", "--num_steps", 2, "--num_samples", 1)
    assert run("test", "--input_data", folder, "--output", "a.json", *words)[0] == 0
    source = workspace / "slices/slice_0.h5ad"
    assert run("test", "--input_data", source, "--output", "b.json", *words)[0] == 0
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


def test_embeddings_of_a_folder_are_written_with_its_cells(run, workspace, tmp_path, cells):
    folder = write_xenium(tmp_path / "run", cells)
    status, said = run("extract", "--input_data", folder, "--input_format", "xenium")
    assert status == 0, said
    source = workspace / "slices/slice_0.h5ad"
    assert run("extract", "--input_data", source, "--output", tmp_path / "b.h5ad")[0] == 0
    result, expected = (anndata.read_h5ad(name) for name in ("run_embedded.h5ad", "b.h5ad"))
    np.testing.assert_array_equal(result.obsm["X_alphastomics"], expected.obsm["X_alphastomics"])
    np.testing.assert_array_equal(result.obsm["spatial"], cells.position)


def test_a_file_of_no_known_format_is_refused_in_one_line(run, tmp_path):
    (tmp_path / "cells.txt").write_text("cells")
    status, said = run("sample", "--input_data", tmp_path / "cells.txt")
    assert status == 2
    assert len(said.strip().splitlines()) == 1
    assert "is a file of no known format" in said


@pytest.mark.parametrize("words", [(), ("--format", "merscope")])
def test_a_run_that_lacks_a_file_is_refused_by_the_name_of_the_file(run, tmp_path, cells, words):
    folder = write_merscope(tmp_path / "run", cells)
    (folder / "cell_by_gene.csv").unlink()
    status, said = run("sample", "--input_data", folder, *words)
    assert status == 2
    assert len(said.strip().splitlines()) == 1
    assert f"{folder}: the table of counts is missing" in said
