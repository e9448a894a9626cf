"""The notebook: the same results as the command line, under documented keys; and how it says no."""

import json
import logging
import warnings
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from scipy.sparse import csc_matrix

import alphastomics
from alphastomics import AlphaSTomics
from alphastomics.api.notebook import score_frame
from alphastomics.errors import InputError
from alphastomics.main import main
from tests.api.conftest import TINY
from tests.vendor_folders import some_cells, write_xenium


def run(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


@pytest.fixture(scope="module")
def by_commands(slice_files: Path, tmp_path_factory) -> Path:
    """The same data, settings and seed, by the command line."""
    folder = tmp_path_factory.mktemp("commands")
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(TINY))
    options = ["--config", config]
    run("preprocess", "--input_dir", slice_files, "--output_dir", folder / "processed", *options)
    run("train", "--data_dir", folder / "processed", "--output_dir", folder, *options)
    return folder


def checkpoint(by_commands: Path) -> Path:
    report = json.loads((by_commands / "alphastomics/report.json").read_text())
    return Path(report["best_checkpoint"])


def sampled(by_commands: Path, source: Path, target: Path, mode: str) -> anndata.AnnData:
    words = ["--checkpoint", checkpoint(by_commands), "--config", by_commands / "config.yaml"]
    words += ["--input_data", source, "--sample_mode", mode, "--output", target]
    run("sample", *words)
    return anndata.read_h5ad(target)


def test_the_weights_are_those_of_the_command_line(by_commands: Path, model: AlphaSTomics):
    theirs = AlphaSTomics.load(checkpoint(by_commands))
    mine, other = (one._trained().module.average.state_dict() for one in (model, theirs))
    assert all(torch.equal(mine[name], other[name]) for name in other)
    assert theirs.genes == model.genes
    logged = pd.read_csv(by_commands / "alphastomics/metrics.csv")
    pd.testing.assert_frame_equal(model.logged, logged)
    assert "val/loss" in set(model.history["name"])
    assert set(model.history["name"].str.split("/").str[0]) <= {"train", "val"}


@pytest.mark.parametrize("mode", ["expr_to_pos", "pos_to_expr"])
def test_predictions_and_keys_are_those_of_sample(
    mode, by_commands, model, slices, slice_files, tmp_path
):
    expected = sampled(by_commands, slice_files / "slice_0.h5ad", tmp_path / "made.h5ad", mode)
    adata = slices[0]
    verb = model.predict_positions if mode == "expr_to_pos" else model.predict_expression
    returned = verb(adata)
    # anndata 0.13 counts X among the layers, by the name None.
    new = {"obsm": set(expected.obsm) - {"spatial"}, "layers": set(expected.layers) - {None}}
    for position, keys in new.items():
        assert set(getattr(adata, position)) == set(getattr(expected, position))
        for key in keys:
            np.testing.assert_array_equal(
                getattr(adata, position)[key], getattr(expected, position)[key]
            )
    assert adata.uns["alphastomics"].keys() == expected.uns["alphastomics"].keys()
    if mode == "expr_to_pos":
        np.testing.assert_array_equal(returned, adata.obsm["spatial_pred"])
    else:
        columns = [model.genes.index(gene) for gene in adata.var_names]
        np.testing.assert_array_equal(returned[:, columns], adata.layers["generated"])


def test_a_second_prediction_keeps_what_the_first_one_stored(model, slices):
    adata = slices[0]
    model.predict_positions(adata, reference=slices[1])
    first = dict(adata.uns["alphastomics"]["expr_to_pos"])
    assert "frame" in first
    model.predict_expression(adata)
    assert adata.uns["alphastomics"]["mode"] == "pos_to_expr"
    kept = adata.uns["alphastomics"]["expr_to_pos"]
    assert kept.keys() == first.keys()
    np.testing.assert_array_equal(kept["frame"]["rotation"], first["frame"]["rotation"])


def test_positions_come_in_the_frame_of_a_reference_as_by_sample(
    by_commands, model, slices, slice_files, tmp_path
):
    words = ["--checkpoint", checkpoint(by_commands), "--config", by_commands / "config.yaml"]
    words += ["--input_data", slice_files / "slice_0.h5ad", "--sample_mode", "expr_to_pos"]
    words += ["--reference", slice_files / "slice_1.h5ad", "--output", tmp_path / "out.h5ad"]
    run("sample", *words)
    expected = anndata.read_h5ad(tmp_path / "out.h5ad")
    slices[1].obsm["there"] = slices[1].obsm.pop("spatial")
    with pytest.raises(InputError, match="reference: has no coordinates"):
        model.predict_positions(slices[0], reference=slices[1])
    AlphaSTomics.setup_anndata(slices[1], position_key="there")
    generated = model.predict_positions(slices[0], reference=slices[1])
    np.testing.assert_array_equal(generated, expected.obsm["spatial_pred"])
    rotation = slices[0].uns["alphastomics"]["frame"]["rotation"]
    np.testing.assert_array_equal(rotation, expected.uns["alphastomics"]["frame"]["rotation"])


def test_new_tissue_is_that_of_sample(by_commands: Path, model: AlphaSTomics, tmp_path: Path):
    words = ["--checkpoint", checkpoint(by_commands), "--config", by_commands / "config.yaml"]
    run("sample", *words, "--num_cells", 40, "--num_slices", 2, "--output", tmp_path / "new.h5ad")
    expected = anndata.read_h5ad(tmp_path / "new.h5ad")
    generated = model.generate(40, num_slices=2)
    np.testing.assert_array_equal(generated.X, expected.X)
    np.testing.assert_array_equal(generated.obsm["spatial_pred"], expected.obsm["spatial_pred"])
    assert list(generated.obs["slice_id"]) == list(expected.obs["slice_id"])
    assert list(generated.var_names) == model.genes


def test_scores_are_those_of_test(by_commands: Path, model: AlphaSTomics, slices, tmp_path):
    words = ["--checkpoint", checkpoint(by_commands), "--config", by_commands / "config.yaml"]
    processed = by_commands / "processed"
    run(
        "test", *words, "--data_dir", processed, "--split", "train", "--output", tmp_path / "s.json"
    )
    scores = model.evaluate(slices[1])
    assert set(scores.columns.levels[0]) == set(json.loads((tmp_path / "s.json").read_text()))
    assert {"alphastomics", "shuffled", "class centroid oracle"} <= set(scores["expr_to_pos"])
    run(
        "test",
        *words,
        "--input_data",
        written(slices[1], tmp_path),
        "--output",
        tmp_path / "t.json",
    )
    pd.testing.assert_frame_equal(
        scores, score_frame(json.loads((tmp_path / "t.json").read_text()))
    )


def written(adata: anndata.AnnData, folder: Path) -> Path:
    adata.write_h5ad(folder / "cells.h5ad")
    return folder / "cells.h5ad"


@pytest.mark.parametrize("mode", ["auto", "latent", "encoder", "transformer", "all_layers"])
def test_embeddings_are_those_of_extract(mode, by_commands, model, slices, slice_files, tmp_path):
    words = ["--checkpoint", checkpoint(by_commands), "--config", by_commands / "config.yaml"]
    words += ["--input_data", slice_files / "slice_0.h5ad", "--output", tmp_path / "e.h5ad"]
    run("extract", *words, "--extract_mode", mode)
    expected = anndata.read_h5ad(tmp_path / "e.h5ad")
    adata = slices[0]
    generated = model.get_latent_representation(adata, mode=mode)
    assert set(adata.obsm) == set(expected.obsm)
    for key in expected.obsm:
        np.testing.assert_array_equal(adata.obsm[key], expected.obsm[key])
    first = adata.obsm["X_alphastomics_0" if mode == "all_layers" else "X_alphastomics"]
    np.testing.assert_array_equal(generated[:, 0] if mode == "all_layers" else generated, first)
    assert len(model._trained().module.average.trunk.layers) == 2


def test_an_embedding_of_dissociated_cells_is_of_expression_alone(model, slices):
    predicted = model.get_latent_representation(slices[0]).copy()
    del slices[0].obsm["spatial"]
    alone = model.get_latent_representation(slices[0])
    assert alone.shape == predicted.shape
    assert np.isfinite(alone).all()
    assert not np.array_equal(alone, predicted)
    with pytest.raises(InputError, match="one of: auto, latent, niche, encoder, transformer, all"):
        model.get_latent_representation(slices[1], mode="decoder")


def test_another_seed_gives_another_sample_and_the_same_seed_the_same(model, slices):
    one, two, other = (
        model.predict_positions(slices[0], seed=seed, estimator="sample") for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, other)


def test_the_notebooks_own_random_states_are_left_alone(slices):
    states = []
    for train in (False, True):
        np.random.seed(1)  # noqa: NPY002 - the state that users have
        torch.manual_seed(1)
        if train:
            AlphaSTomics(slices, TINY).train(1)
        states.append((np.random.rand(), float(torch.rand(()))))  # noqa: NPY002
    assert states[0] == states[1]


def test_where_the_counts_stand_makes_no_difference(model, slices, tmp_path):
    """A view, another storage, a layer, other names of columns and keys: the same cells."""
    plain = slices[0]
    expected = model.predict_positions(plain.copy())
    moved = anndata.concat([plain, slices[1]], join="outer", merge="first", fill_value=0)
    moved = moved[:90, plain.var_names].copy()
    moved.layers["counts"] = csc_matrix(moved.X)
    moved.X = np.zeros(moved.shape, np.float32)
    moved.obs["section"] = pd.Categorical(plain.obs["slice_id"], categories=["9", "slice_0", "x"])
    del moved.obs["slice_id"]
    AlphaSTomics.setup_anndata(moved, slice_key="section", layer="counts")
    plain.write_h5ad(tmp_path / "plain.h5ad")
    forms = {
        "on the disk": anndata.read_h5ad(tmp_path / "plain.h5ad", backed="r"),
        "a view": anndata.concat([plain, plain], index_unique="-")[:90],
        "dense": anndata.AnnData(plain.X.toarray(), obs=plain.obs, var=plain.var),
        "another layer and column": moved,
    }
    for name, adata in forms.items():
        np.testing.assert_array_equal(model.predict_positions(adata), expected, err_msg=name)
        assert adata.obsm["spatial_pred"].shape == (90, 2)
        assert not adata.is_view


def test_a_view_can_be_set_up_and_its_parent_stays(slices):
    view = slices[0][:50]
    AlphaSTomics.setup_anndata(view, cell_type_key="cell_type")
    assert view.uns["alphastomics_setup"] == {
        "position_key": "spatial",
        "cell_type_key": "cell_type",
    }
    assert "alphastomics_setup" not in slices[0].uns
    assert AlphaSTomics(view, TINY, batch_size=32).train(1).genes == sorted(view.var_names)


def test_slices_are_predicted_one_by_one_whatever_the_order_of_cells(model, slices):
    both = anndata.concat(slices, join="inner")
    order = np.random.default_rng(0).permutation(both.n_obs)
    generated = model.predict_positions(both[order].copy())
    for name in both.obs["slice_id"].unique():
        rows = (both.obs["slice_id"].to_numpy() == name)[order]
        np.testing.assert_allclose(generated[rows].mean(0), 0, atol=1e-2)
        assert generated[rows].std() > 0


def test_genes_too_few_and_too_many_are_aligned_by_name(model, slices):
    adata = slices[0]
    fewer = adata[:, adata.var_names[:10]].copy()
    model.predict_expression(fewer)
    assert fewer.layers["generated"].shape == (90, 10)
    extra = anndata.AnnData(np.ones((90, 1), np.float32), var=pd.DataFrame(index=["Unknown1"]))
    extra.obs_names = adata.obs_names
    more = anndata.concat([adata, extra], axis=1, merge="first")
    more.obsm["spatial"] = adata.obsm["spatial"]
    model.predict_expression(more)
    column = list(more.var_names).index("Unknown1")
    assert np.isnan(more.layers["generated"][:, column]).all()
    assert np.isfinite(np.delete(more.layers["generated"], column, axis=1)).all()


def test_expression_at_bare_coordinates_is_a_new_anndata(model, slices):
    position = slices[0].obsm["spatial"].astype(np.float32)
    generated = model.predict_expression(position)
    assert list(generated.var_names) == model.genes
    np.testing.assert_array_equal(generated.obsm["spatial"], position)
    np.testing.assert_array_equal(generated.X, generated.layers["generated"])
    assert (generated.layers["generated_std"] >= 0).all()
    # Bare coordinates are of no training slice's frame, and so of a slice unknown to the model.
    slices[0].obs["slice_id"] = "another"
    np.testing.assert_array_equal(generated.X, model.predict_expression(slices[0]))


def test_results_survive_a_file(model, slices, tmp_path):
    AlphaSTomics.setup_anndata(slices[0], cell_type_key="cell_type")
    model.predict_positions(slices[0])
    again = anndata.read_h5ad(written(slices[0], tmp_path))
    assert list(again.uns["alphastomics"]["genes"]) == model.genes
    expected = slices[0].obsm["spatial_pred"]
    np.testing.assert_array_equal(model.predict_positions(again), expected)


def test_3d_slices_are_known_by_their_columns(slices):
    for number, adata in enumerate(slices):
        height = np.random.default_rng(number).normal(0, 200, (90, 1))
        adata.obsm["spatial"] = np.hstack([adata.obsm["spatial"], height])
    model = AlphaSTomics(slices, TINY).train(1)
    cells = slices[0].copy()
    del cells.obsm["spatial"]
    assert model.predict_positions(cells).shape == (90, 3)


def test_one_anndata_with_several_slices_is_the_same_as_a_list(model, slices):
    joined = anndata.concat(slices, join="outer", merge="first", fill_value=0)
    with pytest.raises(InputError, match="not trained yet"):
        AlphaSTomics(joined, TINY).predict_positions(joined)
    one = AlphaSTomics(joined, TINY)
    assert one.train(1) is one
    assert len(one.genes) == len(model.genes)


def test_a_folder_keeps_the_run_and_training_goes_on(slices, tmp_path):
    position = tmp_path / "mine"
    AlphaSTomics(slices, TINY, folder=position).train(1)
    assert (position / "processed/metadata.json").is_file()
    again = AlphaSTomics(slices, TINY, folder=position)
    with pytest.raises(InputError, match="holds a run already"):
        again.train(1)
    again.train(3, resume=True)
    assert again.history["epoch"].max() == 2
    again.train(1, overwrite=True)
    assert again.history["epoch"].max() == 0


def test_a_temporary_folder_goes_with_its_model(slices):
    model = AlphaSTomics(slices, TINY)
    position = model._folder
    assert position.is_dir()
    del model
    assert not position.exists()


def test_importing_the_package_offers_the_class_and_no_more():
    assert "AlphaSTomics" in dir(alphastomics)
    with pytest.raises(AttributeError, match="no attribute 'AlphaSTomix'"):
        _ = alphastomics.AlphaSTomix


def test_ctrl_c_in_training_is_the_notebooks_own_interrupt(slices, monkeypatch):
    def interrupted(*_arguments):
        raise SystemExit(130)

    monkeypatch.setattr("alphastomics.api.model.fit", interrupted)
    with pytest.raises(KeyboardInterrupt, match="resume=True"):
        AlphaSTomics(slices, TINY).train()


def test_the_library_says_nothing_by_itself(model, slices, capsys):
    logging.getLogger("alphastomics").setLevel(logging.WARNING)
    model.predict_positions(slices[0])
    assert capsys.readouterr() == ("", "")


def test_training_in_a_notebook_warns_of_nothing_that_is_not_the_users(slices, tmp_path):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        AlphaSTomics(slices, TINY, folder=tmp_path).train(max_epochs=1)
    said = [str(warning.message) for warning in heard]
    # anndata 0.13 meets pandas 3: their own business.
    assert [text for text in said if not text.startswith("The 'future.infer_string' option")] == []


def test_a_folder_of_an_instrument_is_trained_on_as_its_cells_are(tmp_path):
    cells = some_cells(60, 8)
    folder = write_xenium(tmp_path / "run", cells)
    obs = pd.DataFrame(index=cells.names)
    plain = anndata.AnnData(cells.counts, obs=obs, var=pd.DataFrame(index=cells.genes))
    plain.obsm["spatial"] = cells.position
    plain.layers["counts"] = plain.X.copy()
    plain.X = plain.X * 0.5  # the layer of counts comes first, as in the commands
    data = {"preprocessing": {"train_ratio": 0.8, "val_ratio": 0.1}, "loading": {"num_workers": 0}}
    settings = {**TINY, "data": data}
    by_path, in_memory = (AlphaSTomics(given, settings).train(1) for given in (folder, plain))
    query = anndata.AnnData(cells.counts, obs=obs, var=plain.var)
    np.testing.assert_array_equal(
        by_path.predict_positions(query.copy()), in_memory.predict_positions(query.copy())
    )
    with pytest.raises(InputError, match="no such file"):
        AlphaSTomics(str(tmp_path / "nowhere.h5ad"))
