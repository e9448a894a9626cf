"""The synthetic tissue: its truth is as stated, and it is worth learning."""

import json
from itertools import pairwise
from pathlib import Path

import anndata
import numpy as np
import pytest
from numpy.random import default_rng
from scipy import sparse
from scipy.spatial.distance import cdist
from sklearn.neural_network import MLPRegressor

from alphastomics.config import SimulationConfig
from alphastomics.errors import InputError
from alphastomics.io.files import partial_of
from alphastomics.simulate import (
    DROPOUT,
    GenePanel,
    is_tissue,
    sample_counts,
    simulate,
    simulate_slice,
    type_names,
    write_tissue,
)

SMALL = SimulationConfig(cells=300, slices=3, genes=40)


def with_(settings: SimulationConfig, **changes) -> SimulationConfig:
    return settings.model_copy(update=changes)


def same_slice(one: anndata.AnnData, other: anndata.AnnData) -> bool:
    return (
        (one.X != other.X).nnz == 0
        and np.array_equal(one.obsm["spatial"], other.obsm["spatial"])
        and one.obs.equals(other.obs)
        and one.var.equals(other.var)
    )


def test_a_slice_comes_as_real_data_comes():
    data = simulate_slice(SMALL, 1, 0)
    assert sparse.isspmatrix_csr(data.X)
    assert data.X.dtype == np.float32
    assert np.array_equal(data.X.data, np.round(data.X.data))
    assert data.X.data.min() > 0
    assert data.obsm["spatial"].shape == (300, 2)
    assert data.obsm["spatial"].dtype == np.float32
    assert data.var_names.is_unique
    assert data.obs_names.is_unique
    assert set(data.obs["cell_type"].cat.categories) == set(type_names())
    assert set(data.obs["slice_id"]) == {"slice_0"}


@pytest.mark.parametrize("dims", [2, 3])
def test_the_stated_pose_takes_a_slice_into_the_volume(dims: int):
    data = simulate_slice(with_(SMALL, dims=dims), 1, 2)
    rotation, translation = (data.uns["simulation"][key] for key in ("rotation", "translation"))
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-12)
    spatial = data.obsm["spatial"]
    flat = np.pad(spatial, ((0, 0), (0, 3 - dims)))
    # A 2D section keeps no height: what is left over is half its thickness at most.
    error = np.linalg.norm(flat @ rotation.T + translation - data.obsm["body"], axis=1)
    assert error.max() <= (5.0 if dims == 2 else 0.0) + 1e-3


def test_every_cell_lies_in_the_tissue():
    for data in simulate(with_(SMALL, dims=3), 5):
        assert is_tissue(data.obsm["body"].astype(float)).mean() > 0.99


def test_slabs_of_a_3d_volume_do_not_overlap():
    z_values = [data.obsm["spatial"][:, 2] for data in simulate(with_(SMALL, dims=3), 1)]
    assert all(lower.max() <= upper.min() for lower, upper in pairwise(z_values))


def test_counts_are_negative_binomial_with_the_stated_dropout():
    genes, cells, mu, theta = 3, 200_000, np.array([0.5, 2.0, 8.0]), np.array([1.0, 4.0, 10.0])
    panel = GenePanel(
        names=["a", "b", "c"],
        role=["housekeeping"] * 3,
        marker_of=[""] * 3,
        base=np.log(mu),
        fold=np.zeros((1, genes)),
        dispersion=theta,
        frequency=np.zeros((genes, 1, 3)),
        phase=np.zeros((genes, 1)),
        amplitude=np.zeros(genes),
    )
    counts = sample_counts(panel, np.tile(np.log(mu), (cells, 1)), default_rng(0)).astype(float)
    kept = 1 - DROPOUT * np.exp(-mu)
    second_moment = kept * (mu + mu**2 / theta + mu**2)
    np.testing.assert_allclose(counts.mean(0), kept * mu, rtol=0.02)
    np.testing.assert_allclose(counts.var(0), second_moment - (kept * mu) ** 2, rtol=0.03)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path):
    first = write_tissue(SMALL, 7, tmp_path / "one", overwrite=False)
    second = write_tissue(SMALL, 7, tmp_path / "two", overwrite=False)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_another_seed_gives_another_tissue():
    assert not same_slice(simulate_slice(SMALL, 7, 0), simulate_slice(SMALL, 8, 0))


def test_a_slice_does_not_depend_on_the_others():
    assert same_slice(list(simulate(SMALL, 3))[1], simulate_slice(SMALL, 3, 1))


def test_panels_differ_by_slice_and_leave_the_counts_alone():
    whole = simulate_slice(SMALL, 3, 0)
    parts = list(simulate(with_(SMALL, panel_share=0.5), 3))
    assert [part.n_vars for part in parts] == [20, 20, 20]
    assert set(parts[0].var_names) != set(parts[1].var_names)
    assert (whole[:, parts[0].var_names].X != parts[0].X).nnz == 0


def test_an_interrupted_tissue_is_finished_not_redone(tmp_path: Path):
    paths = write_tissue(SMALL, 7, tmp_path, overwrite=False)
    wanted = [path.read_bytes() for path in paths]
    kept = paths[0].stat().st_mtime_ns
    paths[1].unlink()
    partial_of(tmp_path / "slice_1.h5ad").write_bytes(b"half")
    write_tissue(SMALL, 7, tmp_path, overwrite=False)
    assert [path.read_bytes() for path in paths] == wanted
    assert paths[0].stat().st_mtime_ns == kept
    assert sorted(path.name for path in tmp_path.iterdir())[0] == "simulation.json"


def test_another_tissue_in_the_folder_is_refused_unless_overwrite(tmp_path: Path):
    write_tissue(SMALL, 7, tmp_path, overwrite=False)
    with pytest.raises(InputError, match=r"holds \d+ \.h5ad files of other settings .*--overwrite"):
        write_tissue(SMALL, 8, tmp_path, overwrite=False)
    paths = write_tissue(with_(SMALL, slices=2), 8, tmp_path, overwrite=True)
    assert sorted(tmp_path.glob("*.h5ad")) == paths


def test_the_command_writes_what_the_settings_say(tmp_path: Path, run_cli):
    done = run_cli("simulate", "--output_dir", "out", "--cells", 50, "--slices", 2, "--genes", 30)
    assert done.returncode == 0
    assert done.stdout.split() == ["out/slice_0.h5ad", "out/slice_1.h5ad"]
    data = anndata.read_h5ad(tmp_path / "out/slice_1.h5ad")
    assert data.shape == (50, 30)
    assert json.loads((tmp_path / "out/simulation.json").read_text())["seed"] == 42


def standardised(data: anndata.AnnData) -> np.ndarray:
    counts = data.X.toarray()
    values = np.log1p(1e4 * counts / counts.sum(1, keepdims=True).clip(1))
    return (values - values.mean(0)) / (values.std(0) + 1e-6)


def distance_correlation(true: np.ndarray, predicted: np.ndarray) -> float:
    return float(np.corrcoef(cdist(true, true).ravel(), cdist(predicted, predicted).ravel())[0, 1])


def test_position_can_be_learnt_from_expression_on_a_held_out_slice():
    settings = with_(SMALL, cells=1500, slices=3, genes=150, common_frame=True)
    below, held_out, above = simulate(settings, 11)
    seen = (below, above)
    model = MLPRegressor(
        hidden_layer_sizes=(32,), early_stopping=True, max_iter=200, random_state=0
    )
    model.fit(
        np.concatenate([standardised(data) for data in seen]),
        np.concatenate([data.obsm["spatial"] for data in seen]) / 500,
    )
    true = held_out.obsm["spatial"][:800]
    predicted = model.predict(standardised(held_out))[:800] * 500
    shuffled = default_rng(0).permutation(predicted)
    assert distance_correlation(true, predicted) > 0.5
    assert abs(distance_correlation(true, shuffled)) < 0.1


def test_expression_can_be_learnt_from_position_within_a_slice():
    data = simulate_slice(with_(SMALL, cells=2000, genes=100), 11, 1)
    values, position = standardised(data), data.obsm["spatial"]
    seen, hidden = np.arange(0, 1600), np.arange(1600, 2000)
    nearest = np.argsort(cdist(position[hidden], position[seen]), axis=1)[:, :20]
    predicted = values[seen][nearest].mean(1)
    by_gene = [
        np.corrcoef(predicted[:, gene], values[hidden, gene])[0, 1]
        for gene, role in enumerate(data.var["role"])
        if role != "housekeeping"
    ]
    # Counts of one cell are mostly noise; by chance the mean over 85 genes lies within 0.02 of 0.
    assert np.mean(by_gene) > 0.12
