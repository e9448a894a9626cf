"""Dissociated cells beside slices: what a training learns of them, and what it must not."""

import json
from pathlib import Path

import anndata
import numpy as np
import pytest
import torch

from alphastomics import AlphaSTomics
from alphastomics.config.auto import with_settings
from alphastomics.config.file import parse_document
from alphastomics.diffusion_model.count_fit import fit_count_model
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.train import TrainRequest, make_module, train
from alphastomics.errors import InputError
from alphastomics.generation.annotation import SAY_ENOUGH, impute_panel, label_query
from alphastomics.generation.gene_features import GeneCells, joined
from alphastomics.generation.impute import impute
from alphastomics.generation.known_cells import Gathered
from alphastomics.generation.labels import predict_labels
from alphastomics.main import main
from alphastomics.preprocessing.batch_loader import create_dataloaders
from tests.diffusion_model.conftest import tiny_config
from tests.generation.test_impute import tissue, without
from tests.test_generated_counts import QUICK, two_programs

PANEL = 14  # genes that slices measure, of 20; 8 to 15 go together
LATER = [14, 15]  # of these, the ones that only dissociated cells measure
SETTINGS = {**QUICK, "expression": {"updates": 20}, "distributed": {"devices": 0}}
# What a model of both learns of positions before its network is trained.
OF_POSITIONS = ("position_head", "slice_rotation", "position_scale")


def section(seed: int = 0, cells: int = 400) -> anndata.AnnData:
    return two_programs(seed=seed, cells=cells)[:, :PANEL].copy()


def loose(cells: int = 400, *, scale: float = 1.0) -> anndata.AnnData:
    """Dissociated cells with all genes, a type of their own, and one gene that is caught twice."""
    data = two_programs(seed=7, cells=cells)
    data.obs["cell_type"] = np.where(data.obsm["spatial"][:, 0] > 50, "right kind", "left kind")
    data.X[:, 0] = np.rint(data.X[:, 0] * scale)
    data.obs_names = [f"loose_{number}" for number in range(cells)]
    del data.obsm["spatial"], data.obs["slice_id"]
    return data


def processed(tmp_path: Path, *, name: str = "in", **data: anndata.AnnData) -> Path:
    """Preprocess slices and dissociated cells with the list of all genes."""
    folder = tmp_path / name
    folder.mkdir()
    for key, cells in data.items():
        cells.write_h5ad(folder / f"{key}.h5ad")
    genes = tmp_path / "genes.txt"
    genes.write_text("\n".join(f"g{number}" for number in range(20)))
    words = ["preprocess", "--input_dir", folder, "--output_dir", tmp_path / f"{name}-done"]
    words += ["--gene_list_file", genes, "--train_ratio", "1", "--val_ratio", "0"]
    words += ["--cell_type_key", "cell_type"] if "loose" in data else []
    assert main(list(map(str, words))) == 0
    return tmp_path / f"{name}-done"


def fitted(folder: Path, updates: int = 150):
    """Fit the count model of a fresh network to a processed folder."""
    config = parse_document({**QUICK, "training": {"batch_size": 64}}, "settings")
    config = with_settings(config, {"expression.space": "latent", "expression.updates": updates})
    loader, *_ = create_dataloaders(folder, batch_size=64)
    torch.manual_seed(0)
    module = make_module(config, loader)
    fit_count_model(module, loader, config, torch.device("cpu"))
    return module


def test_the_count_model_learns_genes_and_types_that_only_dissociated_cells_have(tmp_path):
    folder = processed(tmp_path, one=section(), loose=loose(scale=2.0))
    module = fitted(folder)
    model = module.average.count_model
    assert module.type_names == ["left kind", "right kind"]
    assert module.style_names == ["one"]
    truth = two_programs(seed=3)
    loader, *_ = create_dataloaders(folder, batch_size=64)
    scaled = loader.reader.scaling
    logs = np.log1p(truth.X[:, :PANEL] / truth.X[:, :PANEL].sum(1, keepdims=True) * 1e4)
    values = np.zeros((400, 20), np.float32)
    values[:, :PANEL] = (logs - scaled.mean[0, :PANEL]) / scaled.std[0, :PANEL]
    latent = model.latents(torch.from_numpy(values), model.measured[0].expand(400, 20))
    drawn = model.draw(latent.repeat(8, 1), 0, 0).counts.reshape(8, 400, 20).mean(0)
    kind = truth.obsm["spatial"][:, 0] > 50
    for gene in LATER:  # the unmeasured ones of the right kind: 8 counts against 1
        ours, real = (
            counts[kind, gene].mean() / counts[~kind, gene].mean() for counts in (drawn, truth.X)
        )
        assert 0.5 < ours / real < 2
        # As many as the genes that slices measured say.
        assert 0.6 < drawn[:, gene].mean() / truth.X[:, gene].mean() < 1.6
    types = np.array(module.type_names)[model.sample_types(latent, 0)]
    assert (types == np.where(kind, "right kind", "left kind")).mean() > 0.9


def test_dissociated_values_of_another_kind_are_left_out_of_the_fit_and_named(tmp_path, capsys):
    alone = fitted(processed(tmp_path, one=section(cells=150)), updates=10)
    odd = loose(150)
    odd.X = np.random.default_rng(0).gamma(2.0, 1.0, odd.shape).astype(np.float32)
    both = fitted(processed(tmp_path, name="odd", one=section(cells=150), loose=odd), updates=10)
    said = capsys.readouterr().err
    assert "the 150 dissociated cells hold values above zero, the slices counts" in said
    weights = [module.average.count_model.state_dict() for module in (alone, both)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("mode", ["expr_to_pos", "joint"])
def test_what_is_learned_of_positions_is_the_same_with_dissociated_cells(tmp_path, mode):
    folders = {
        "alone": processed(tmp_path, one=section(cells=150), two=section(1, 150)),
        "both": processed(
            tmp_path, name="more", one=section(cells=150), two=section(1, 150), zoo=loose(90)
        ),
    }
    weights = []
    for name, folder in folders.items():
        config = tiny_config(
            folder,
            tmp_path / "runs",
            training={"mode": mode, "batch_size": 50},
            expression={"updates": 5},
            model={"smoothing_rounds": 1},
            diffusion={"position_frame": "registered"},
            logging={"exp_name": name},
        )
        summary = train(config, TrainRequest())
        weights.append(torch.load(summary["last_checkpoint"], weights_only=True)["state_dict"])
    assert weights[0].keys() == weights[1].keys()
    compared = [
        name
        for name in weights[0]
        if mode == "expr_to_pos" or any(part in name for part in OF_POSITIONS)
    ]
    assert len(compared) > len(OF_POSITIONS)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in compared)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """A processed folder with dissociated cells, and a model trained on it."""
    home = tmp_path_factory.mktemp("dissociated")
    folder = processed(home, one=section(), two=section(1), loose=loose())
    config = tiny_config(folder, home / "runs", expression={"updates": 20})
    train(config, TrainRequest())
    section(2, 200).write_h5ad(home / "query.h5ad")
    return home


def sampled(home: Path, mode: str, target: Path, *flags: str) -> anndata.AnnData:
    [run] = (home / "runs").iterdir()
    words = ["sample", "--checkpoint", run, "--input_data", home / "query.h5ad"]
    words += ["--sample_mode", mode, "--output", target, *flags]
    assert main(list(map(str, words))) == 0
    return anndata.read_h5ad(target)


def test_a_gene_that_only_dissociated_training_cells_measured_is_imputed(workspace, tmp_path):
    made = sampled(workspace, "impute", tmp_path / "made.h5ad", "--genes", "g14", "g15")
    truth = two_programs(seed=2, cells=200).X
    logs = np.log1p(truth / truth[:, :PANEL].sum(1, keepdims=True) * 1e4)
    for column, gene in enumerate(LATER):
        assert np.corrcoef(made.X[:, column], logs[:, gene])[0, 1] > 0.5
        assert made.X[:, column].mean() == pytest.approx(logs[:, gene].mean(), rel=0.3)
    assert (
        "1200 known cells, 400 of them dissociated" in made.uns["alphastomics"]["impute"]["method"]
    )


def test_types_that_only_dissociated_training_cells_have_are_predicted(workspace, tmp_path):
    made = sampled(workspace, "label", tmp_path / "made.h5ad")
    kind = two_programs(seed=2, cells=200).obsm["spatial"][:, 0] > 50
    expected = np.where(kind, "right kind", "left kind")
    assert (made.obs["cell_type_pred"].astype(str) == expected).mean() > 0.9


def test_embeddings_of_the_training_folder_say_that_dissociated_cells_are_left_out(
    workspace, tmp_path, capsys
):
    [run] = (workspace / "runs").iterdir()
    words = ["extract", "--checkpoint", run, "--data_dir", workspace / "in-done"]
    words += ["--output", tmp_path / "embeddings.npz", "--extract_mode", "encoder"]
    assert main(list(map(str, words))) == 0
    assert "the 400 dissociated cells of its split 'reference' are left out" in (
        capsys.readouterr().err
    )
    with np.load(tmp_path / "embeddings.npz") as content:
        assert content["cell_id"].tolist() == list(range(800))


def known_cells(cells: int) -> tuple[GeneCells, GeneCells, GeneCells]:
    """Return cells of slices, dissociated ones, and a query that lacks genes 3, 7, 11 and 20."""
    rng = np.random.default_rng(0)
    slices = without(tissue(rng, cells, name="train"), [3, 7])
    others = tissue(rng, 150, name="reference: r")
    others.position[:] = np.nan
    return slices, others, without(tissue(rng, 60, name="query"), [3, 7, 11, 20])


def gathered(slices: GeneCells, others: GeneCells | None, query: GeneCells) -> Gathered:
    names = [str(number) for number in range(30)]
    return Gathered(names, None, query, slices, others, is_log=True)


@pytest.mark.parametrize("cells", [120, SAY_ENOUGH])
def test_dissociated_cells_add_to_few_cells_of_slices_and_not_to_many(cells):
    slices, others, query = known_cells(cells)
    asked = np.array([3, 7, 11, 20])
    both = impute_panel(gathered(slices, others, query), query, asked, 0)
    alone = impute_panel(gathered(slices, None, query), query, asked[2:], 0)
    assert np.array_equal(alone.values, both.values[:, 2:]) == (cells == SAY_ENOUGH)
    expected = impute(joined([slices, others]), query, asked[:2], 0, is_log=True)
    if cells == SAY_ENOUGH:  # else all four genes are fitted together
        np.testing.assert_array_equal(both.values[:, :2], expected.values)
    module = AlphaSTomicsModule({"model": {"d_model": 16, "n_heads": 2, "n_layers": 1}}, 30)
    labels = label_query(module, gathered(slices, others, query), 0).probability
    source = slices if cells == SAY_ENOUGH else joined([slices, others])
    expected_labels = predict_labels(source, query, 0, is_log=True).probability
    np.testing.assert_array_equal(labels, expected_labels)


def test_a_notebook_takes_dissociated_cells_beside_slices(tmp_path):
    typed = section(cells=200)
    typed.obs["cell_type"] = "kind"
    model = AlphaSTomics([loose(120), typed], SETTINGS, folder=tmp_path / "run").train()
    assert model.genes == sorted(f"g{number}" for number in range(PANEL))
    [plan] = (tmp_path / "run").glob("*/plan.json")
    assert json.loads(plan.read_text())["dissociated_cells"] == 120
    assert model.predict_positions(section(4, 60)).shape == (60, 2)
    made = model.impute(section(4, 60)[:, 2:].copy(), genes=["g0"])
    assert np.isfinite(made.X).all()


def test_dissociated_cells_alone_are_refused_wherever_they_are_given(tmp_path, capsys):
    with pytest.raises(
        InputError, match=r"^adata: without coordinates; training needs them"
    ) as one:
        AlphaSTomics(loose(20))
    with pytest.raises(InputError, match=r"^adata\[0\]: without coordinates") as two:
        AlphaSTomics([loose(20), loose(30)])
    assert all("\n" not in str(error.value) for error in (one, two))
    (tmp_path / "in").mkdir()
    loose(20).write_h5ad(tmp_path / "in/cells.h5ad")
    words = ["preprocess", "--input_dir", tmp_path / "in", "--output_dir", tmp_path / "out"]
    assert main(list(map(str, words))) == 2
    [said] = [line for line in capsys.readouterr().err.splitlines() if "stage 1" not in line]
    for word in ("cells.h5ad", "no positions", "--position_key", "--reference"):
        assert word in said
    assert not (tmp_path / "out").exists()
