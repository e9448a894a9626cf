"""Embeddings of a file: every cell keeps its row, and the rest of the file stays as it was."""

import json
import warnings
from pathlib import Path

import anndata
import numpy as np
import pytest
import torch

from alphastomics.config import Config
from alphastomics.diffusion_model.checkpoint import load_module
from alphastomics.diffusion_model.run_folder import RunFolder
from alphastomics.diffusion_model.train import TrainRequest, train
from alphastomics.extract.folder import embedding
from alphastomics.extract.h5ad import batch_of_set, moments_of
from alphastomics.generation.cells import read_query
from alphastomics.main import main
from alphastomics.preprocessing.normalize import standardized
from alphastomics.preprocessing.query_fit import opened_query
from tests.diffusion_model.conftest import tiny_config
from tests.test_extract import processed_tissue

LAYERS, WIDTH = 2, 16


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return processed_tissue(tmp_path_factory.mktemp("tissue"), layout="slice")


@pytest.fixture(scope="module")
def checkpoint(data: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(tiny_config(data, folder, training={"max_epochs": 1}), TrainRequest())
    return RunFolder(folder / "alphastomics").last


@pytest.fixture
def run(checkpoint: Path, tmp_path: Path, monkeypatch, capsys):
    """Run `extract` in an empty folder; return its status and what it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def start(*arguments: object) -> tuple[int, str]:
        status = main(["extract", "--checkpoint", str(checkpoint), *map(str, arguments)])
        said = capsys.readouterr()
        return status, said.err if status else said.out

    return start


@pytest.fixture
def two_slices(data: Path, tmp_path: Path) -> Path:
    """One file of two slices, whose cells are mixed."""
    parts = [anndata.read_h5ad(data.parent / f"slices/slice_{n}.h5ad") for n in (0, 1)]
    both = anndata.concat(parts, join="outer", label="slice_id", keys=["one", "two"])
    order = np.random.default_rng(0).permutation(both.n_obs)
    both[order].copy().write_h5ad(tmp_path / "both.h5ad")
    return tmp_path / "both.h5ad"


def expected(checkpoint: Path, path: Path, mode: str, slice_number: int) -> np.ndarray:
    """Embed a slice of a file as one set, read whole."""
    module, genes = load_module(checkpoint)
    cells = read_query(path, genes, module.normalization, Config())
    rows = cells.rows_of(slice_number)
    batch = batch_of_set(cells.expression[rows], cells.position[rows], cells.measured[slice_number])
    return embedding(module, batch, mode)[0].numpy()


@pytest.mark.parametrize("mode", ["encoder", "transformer"])
def test_each_cell_keeps_its_row_and_has_the_embedding_of_its_slice(
    run, checkpoint, two_slices, mode
):
    status, said = run("--input_data", two_slices, "--extract_mode", mode, "--batch_size", 100)
    assert status == 0
    before, after = (anndata.read_h5ad(p) for p in (two_slices, json.loads(said)["output"]))
    assert json.loads(said)["output"].endswith("both_embedded.h5ad")
    assert list(after.obs_names) == list(before.obs_names)
    np.testing.assert_array_equal(after.X.toarray(), before.X.toarray())
    for number, name in enumerate(["one", "two"]):
        rows = np.flatnonzero(after.obs["slice_id"] == name)
        result = after.obsm["X_alphastomics"][rows]
        np.testing.assert_allclose(
            result, expected(checkpoint, two_slices, mode, number), atol=1e-5
        )


def test_a_file_read_in_ranges_is_normalised_as_one_read_whole(checkpoint, two_slices, monkeypatch):
    monkeypatch.setattr("alphastomics.extract.h5ad.ROWS_AT_A_TIME", 17)
    module, genes = load_module(checkpoint)
    whole = read_query(two_slices, genes, module.normalization, Config())
    options = Config().data.preprocessing
    with opened_query(two_slices, genes, module.normalization, options, 17) as query:
        moments = moments_of(query)
        for row in (0, 50, 139):
            cell = query.reader.read(query.form, row, row + 1)
            one = standardized(cell.sparse, moments[cell.slice_id[0]], query.measured)
            np.testing.assert_allclose(one[0], whole.expression[row], atol=1e-5)


def test_ranges_and_columnwise_files_give_every_cell_its_row(
    run, two_slices, monkeypatch, tmp_path
):
    columns = anndata.read_h5ad(two_slices)
    columns.X = columns.X.tocsc()
    columns.write_h5ad(tmp_path / "columns.h5ad")
    monkeypatch.setattr("alphastomics.extract.h5ad.ROWS_AT_A_TIME", 50)
    for source in (two_slices, tmp_path / "columns.h5ad"):
        status, _ = run("--input_data", source, "--output", f"{source.stem}_out.h5ad")
        assert status == 0
    one, two = (anndata.read_h5ad(f"{n}_out.h5ad") for n in ("both", "columns"))
    result = one.obsm["X_alphastomics"]
    assert len(np.unique(result, axis=0)) == one.n_obs
    np.testing.assert_allclose(result, two.obsm["X_alphastomics"], atol=1e-6)


def test_a_zarr_store_is_embedded_like_a_file(run, two_slices, tmp_path):
    pytest.importorskip("zarr")
    before = anndata.read_h5ad(two_slices)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before.write_zarr(tmp_path / "store.zarr")
    status, said = run("--input_data", tmp_path / "store.zarr")
    assert status == 0, said
    assert json.loads(said)["output"].endswith("store_embedded.h5ad")
    assert run("--input_data", two_slices)[0] == 0
    after, of_file = (anndata.read_h5ad(f"{n}_embedded.h5ad") for n in ("store", "both"))
    assert after.obs.equals(of_file.obs)
    np.testing.assert_array_equal(after.X.toarray(), before.X.toarray())
    np.testing.assert_allclose(*(data.obsm["X_alphastomics"] for data in (after, of_file)))


def test_all_layers_have_a_matrix_each_and_replace_what_was_there(run, two_slices):
    first = anndata.read_h5ad(two_slices)
    first.obsm["X_alphastomics"] = np.zeros((first.n_obs, 3))
    first.write_h5ad(two_slices)
    arguments = ["--input_data", two_slices, "--output", two_slices]
    status, said = run(*arguments, "--extract_mode", "all_layers")
    assert status == 2
    assert "--overwrite" in said
    status, said = run(*arguments, "--extract_mode", "all_layers", "--overwrite")
    assert status == 0
    after = anndata.read_h5ad(two_slices)
    keys = [f"X_alphastomics_{layer}" for layer in range(LAYERS + 1)]
    assert json.loads(said)["keys"] == keys
    assert sorted(key for key in after.obsm if key.startswith("X_")) == keys
    assert {after.obsm[key].shape for key in keys} == {(first.n_obs, WIDTH)}


def test_a_processed_folder_becomes_an_h5ad_with_its_labels(run, data):
    for kind in ("npz", "h5ad"):
        assert run("--data_dir", data, "--format", kind)[0] == 0
    generated = anndata.read_h5ad("embeddings.h5ad")
    with np.load("embeddings.npz") as plain:
        np.testing.assert_array_equal(generated.obsm["X_alphastomics"], plain["embedding"])
        assert list(generated.obs_names) == plain["obs_name"].tolist()
        assert (
            generated.obs["slice_id"].tolist() == plain["slice_names"][plain["slice_id"]].tolist()
        )
        assert generated.obs["split"].tolist() == plain["split_names"][plain["split"]].tolist()


def test_dissociated_cells_are_embedded_by_expression_alone(run, two_slices, tmp_path):
    data = anndata.read_h5ad(two_slices)
    generated = []
    for name, shift in (("near.h5ad", 0.0), ("far.h5ad", 100.0)):
        data.obsm["elsewhere"] = data.obsm.pop("spatial") if shift == 0 else np.ones((len(data), 2))
        data.write_h5ad(tmp_path / name)
        assert run("--input_data", name)[0] == 0
        generated.append(anndata.read_h5ad(tmp_path / f"{name[:-5]}_embedded.h5ad"))
    result = generated[0].obsm["X_alphastomics"]
    assert np.isfinite(result).all()
    assert np.ptp(result, axis=0).max() > 0
    np.testing.assert_array_equal(result, generated[1].obsm["X_alphastomics"])


def test_a_file_that_cannot_be_embedded_gets_one_line_and_leaves_nothing(run, two_slices, tmp_path):
    data = anndata.read_h5ad(two_slices)
    data[:1].write_h5ad(tmp_path / "one.h5ad")
    strange = data.copy()
    strange.var_names = [f"Other{n}" for n in range(data.n_vars)]
    strange.write_h5ad(tmp_path / "strange.h5ad")
    torch.save({}, tmp_path / "in.pt")
    mistakes = {
        ("one.h5ad",): "at least 2",
        ("strange.h5ad",): "none of the",
        ("in.pt",): "is a file of no known format",
        ("none.h5ad",): "no such file",
        ("none.zarr",): "no such file",
        ("both.h5ad", "--format", "npz"): "it is h5ad",
        ("both.h5ad", "--output", "o.npz"): "must end in .h5ad",
        ("both.h5ad", "--max_samples", "5"): "embedded whole",
        ("both.h5ad", "--data_dir", "x"): "not allowed with",
    }
    before = sorted(tmp_path.iterdir())
    for line, words in mistakes.items():
        status, said = run("--input_data", *line)
        assert status == 2
        assert said.count("\n") == 1
        assert words in said
        assert sorted(tmp_path.iterdir()) == before
