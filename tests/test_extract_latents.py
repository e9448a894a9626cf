"""Latents as embeddings: a cell's own, and those around it, from folders, files and notebooks."""

import logging
from pathlib import Path

import anndata
import numpy as np
import pytest
import torch

from alphastomics.diffusion_model.checkpoint import load_module
from alphastomics.diffusion_model.run_folder import RunFolder
from alphastomics.diffusion_model.train import TrainRequest, train
from alphastomics.extract import latents
from alphastomics.extract.latents import NEIGHBOURS, WEIGHT, add_surroundings, training_scale
from alphastomics.main import main
from tests.diffusion_model.conftest import tiny_config
from tests.test_extract import cells_of, processed_tissue, read


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return processed_tissue(tmp_path_factory.mktemp("tissue"), layout="slice")


def checkpoint_of(data: Path, folder: Path, **expression) -> Path:
    training = {"max_epochs": 1}
    loading = {"set_size": 32, "set_draw": "patch"}
    sections = {"training": training, "expression": expression, "data": {"loading": loading}}
    train(tiny_config(data, folder, **sections), TrainRequest())
    return RunFolder(folder / "alphastomics").last


@pytest.fixture(scope="module")
def checkpoint(data: Path, tmp_path_factory) -> Path:
    return checkpoint_of(data, tmp_path_factory.mktemp("runs"), space="latent", updates=10)


@pytest.fixture(scope="module")
def without_latents(data: Path, tmp_path_factory) -> Path:
    return checkpoint_of(data, tmp_path_factory.mktemp("plain"), space="genes")


@pytest.fixture
def extract(tmp_path: Path, monkeypatch, capsys):
    """Run `extract` in an empty folder; return its status and what it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def start(checkpoint: Path, *arguments: object) -> tuple[int, str]:
        status = main(["extract", "--checkpoint", str(checkpoint), *map(str, arguments)])
        said = capsys.readouterr()
        return status, said.err if status else said.out + said.err

    return start


def log_values(path: Path, genes: list[str]) -> np.ndarray:
    """Normalise the counts of a file to 1e4 and take log(1 + x), gene by gene of the model."""
    cells = anndata.read_h5ad(path)
    counts = np.asarray(cells.X.toarray(), dtype=np.float64)
    logs = np.log1p(counts / counts.sum(1, keepdims=True) * 1e4)
    columns = {gene: logs[:, number] for number, gene in enumerate(cells.var_names)}
    return np.stack([columns.get(gene, np.full(len(logs), np.nan)) for gene in genes], axis=1)


def own_latents(checkpoint: Path, path: Path) -> np.ndarray:
    """Embed the cells of a file by the mean and std of the training slices."""
    module, genes = load_module(checkpoint)
    model = module.average.count_model
    logs = log_values(path, genes)
    mean, std = (part.double().numpy().mean(0) for part in (model.mean, model.std))
    values = torch.tensor(np.nan_to_num((logs - mean) / std), dtype=torch.float32)
    measured = torch.tensor(np.isfinite(logs))
    return model.latents(values, measured).numpy()


def around(values: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Average the values of each cell's nearest cells, one cell after the other."""
    means = np.zeros_like(values)
    for cell, here in enumerate(position):
        distance = ((position - here) ** 2).sum(1)
        distance[cell] = np.inf
        means[cell] = WEIGHT * values[np.argsort(distance, kind="stable")[:NEIGHBOURS]].mean(0)
    return means


@pytest.mark.parametrize("mode", ["latent", "niche"])
def test_a_file_gets_latents_on_the_scale_of_training_and_the_means_around(
    extract, checkpoint, data, mode
):
    path = data.parent / "slices/slice_1.h5ad"
    arguments = ["--input_data", path, "--extract_mode", mode, "--output", "o.h5ad"]
    assert extract(checkpoint, *arguments)[0] == 0
    cells = anndata.read_h5ad("o.h5ad")
    result, wanted = cells.obsm["X_alphastomics"], own_latents(checkpoint, path)
    if mode == "niche":
        wanted = np.hstack([wanted, around(wanted, cells.obsm["spatial"])])
    np.testing.assert_allclose(result, wanted, atol=1e-4)


def test_a_folder_gets_the_same_as_its_files(extract, checkpoint, data):
    assert extract(checkpoint, "--data_dir", data)[0] == 0
    result, cells = read("embeddings.npz"), cells_of(data)
    assert result["extract_mode"] == "niche"
    for number in range(3):
        path = data.parent / f"slices/slice_{number}.h5ad"
        rows = np.flatnonzero(result["slice_id"] == number)
        names = anndata.read_h5ad(path).obs_names
        order = names.get_indexer([result["obs_name"][row] for row in rows])
        own = own_latents(checkpoint, path)[order]
        wanted = np.hstack([own, around(own, cells["position"][rows])])
        np.testing.assert_allclose(result["embedding"][rows], wanted, atol=1e-4)


def test_fewer_cells_of_a_folder_have_the_neighbours_of_all(extract, checkpoint, data):
    extract(checkpoint, "--data_dir", data, "--output", "all.npz")
    extract(checkpoint, "--data_dir", data, "--output", "some.npz", "--max_samples", 50)
    every, some = read("all.npz"), read("some.npz")
    assert len(some["cell_id"]) == 50
    np.testing.assert_array_equal(every["embedding"][some["cell_id"]], some["embedding"])


def test_a_latent_depends_on_no_other_cell_and_on_no_position(extract, checkpoint, data, tmp_path):
    whole = anndata.read_h5ad(data.parent / "slices/slice_0.h5ad")
    few = whole[whole.obs["cell_type"] != whole.obs["cell_type"].iloc[0]].copy()
    alone = whole.copy()
    del alone.obsm["spatial"]
    results = {}
    for name, cells in (("whole", whole), ("few", few), ("alone", alone)):
        cells.write_h5ad(tmp_path / f"{name}.h5ad")
        arguments = ["--input_data", f"{name}.h5ad", "--extract_mode", "latent"]
        assert extract(checkpoint, *arguments)[0] == 0
        results[name] = anndata.read_h5ad(f"{name}_embedded.h5ad").obsm["X_alphastomics"]
    rows = whole.obs_names.get_indexer(few.obs_names)
    np.testing.assert_allclose(results["whole"][rows], results["few"], atol=1e-5)
    np.testing.assert_array_equal(results["whole"], results["alone"])


def test_dissociated_cells_have_surroundings_of_zero(extract, checkpoint, data, tmp_path):
    path = data.parent / "slices/slice_0.h5ad"
    cells = anndata.read_h5ad(path)
    del cells.obsm["spatial"]
    cells.write_h5ad(tmp_path / "dissociated.h5ad")
    status, said = extract(checkpoint, "--input_data", "dissociated.h5ad")
    assert status == 0
    assert '"extract_mode": "niche"' in said
    result = anndata.read_h5ad("dissociated_embedded.h5ad").obsm["X_alphastomics"]
    own, surroundings = np.split(result, 2, axis=1)
    np.testing.assert_allclose(own, own_latents(checkpoint, path), atol=1e-4)
    assert not surroundings.any()


def test_auto_is_the_encoder_of_a_model_without_latents_and_says_so(extract, without_latents, data):
    status, said = extract(without_latents, "--data_dir", data)
    assert status == 0
    assert '"extract_mode": "encoder"' in said
    assert "no count model: cells are embedded by its encoder" in said
    again = ["--data_dir", data, "--overwrite"]
    for mode in ("latent", "niche"):
        status, said = extract(without_latents, *again, "--extract_mode", mode)
        assert (status, said.count("\n")) == (2, 1)
        assert f"extract_mode {mode}: the model has no count model" in said


def test_slices_of_another_assay_keep_their_own_scale(checkpoint, caplog):
    module, genes = load_module(checkpoint)
    model = module.average.count_model
    mean, std = (part.double().numpy().mean(0) for part in (model.mean, model.std))
    shifted = np.stack([mean, mean + 0.2 * std, mean + 2 * std])
    measured = np.ones(shifted.shape, dtype=bool)
    widths = np.stack([std, 2 * std, 2 * std])
    with caplog.at_level(logging.INFO):
        scale = training_scale(module, shifted, widths, measured, ["a", "b", "c"])
    wanted = np.array([[1.0, 0.0], [2.0, 0.2], [1.0, 0.0]])
    np.testing.assert_allclose(scale.factor, np.tile(wanted[:, :1], len(genes)), atol=1e-5)
    np.testing.assert_allclose(scale.offset, np.tile(wanted[:, 1:], len(genes)), atol=1e-5)
    assert "c: its genes are 2.0 stds from those of training" in caplog.text
    # A gene that was not measured has no mean of its own.
    shifted[2], measured[2] = mean + 2 * std, False
    shifted[2, 0], measured[2, 0] = mean[0], True
    assert training_scale(module, shifted, widths, measured, ["a", "b", "c"]).factor[2, 0] == 2


def test_neighbours_are_of_the_slice_and_have_a_position(tmp_path):
    values = np.arange(14, dtype=np.float32).reshape(7, 2)
    # Two cells on one point; one far away; one without a position; another slice; one alone.
    position = np.array([[0, 0], [0, 0], [9, 0], [np.nan, 0], [0, 0], [0, 1], [5, 5]], float)
    position = np.pad(position, ((0, 0), (0, 1)))
    slice_id = np.array([0, 0, 0, 0, 1, 1, 2])
    (tmp_path / "rows").write_bytes(values.tobytes())
    shape = add_surroundings(tmp_path / "rows", (7, 2), position, slice_id, tmp_path / "both")
    assert shape == (7, 4)
    assert not (tmp_path / "rows").exists()
    result = np.fromfile(tmp_path / "both", np.float32).reshape(shape)
    np.testing.assert_array_equal(result[:, :2], values)
    means = [(1, 2), (0, 2), (0, 1), (), (5,), (4,), ()]
    wanted = [WEIGHT * values[list(rows)].mean(0) if rows else np.zeros(2) for rows in means]
    np.testing.assert_allclose(result[:, 2:], wanted, atol=1e-5)


def test_many_cells_on_one_point_are_no_neighbours_of_themselves(monkeypatch):
    monkeypatch.setattr(latents, "NEIGHBOURS", 2)
    values = np.eye(6, dtype=np.float32)
    ((_, means),) = latents.means_around(values, np.zeros((6, 3)))
    assert np.allclose(np.count_nonzero(means, axis=1), 2)
    assert not means[np.arange(6), np.arange(6)].any()
