"""From slices of counts to new cells with counts: the fit, the samples, and what scanpy takes."""

from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import pytest
import torch

from alphastomics import AlphaSTomics
from alphastomics.config.auto import with_settings
from alphastomics.config.file import parse_document
from alphastomics.diffusion_model.count_fit import fit_count_model
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.train import make_module
from alphastomics.errors import InputError
from alphastomics.main import main
from alphastomics.preprocessing.batch_loader import create_dataloaders

QUICK = {
    "model": {"d_model": 16, "n_heads": 2, "n_layers": 1},
    "training": {"max_epochs": 2, "position_head_updates": 5},
    "expression": {"updates": 200},
}


def two_programs(*, seed: int = 0, volume: bool = False, cells: int = 400) -> anndata.AnnData:
    """Return cells of two kinds, left and right, with genes that go together in each."""
    random = np.random.default_rng(seed)
    position = random.random((cells, 2)) * 100
    kind = (position[:, 0] > 50).astype(int)
    rate = np.full((2, 20), 1.0)
    rate[0, :8], rate[1, 8:16] = 8.0, 8.0
    depth = random.lognormal(0, 0.4, (cells, 1))
    values = random.poisson(rate[kind] * depth).astype(np.float32)
    if volume:
        values = random.gamma(2.0, 1.0, values.shape).astype(np.float32) * (values > 0)
    data = anndata.AnnData(values)
    data.var_names = [f"g{number}" for number in range(20)]
    data.obs["slice_id"] = "one"
    data.obsm["spatial"] = position
    return data


@pytest.fixture(scope="module")
def model() -> AlphaSTomics:
    return AlphaSTomics(two_programs(), QUICK, seed=0).train()


@pytest.mark.parametrize(("factor", "genes", "said"), [(1, 20, ""), (1, 8, ""), (9, 20, "reduce")])
def test_a_query_of_another_depth_is_said(model, factor, genes, said, caplog):
    # Fewer genes have fewer counts: that is no other depth.
    query = two_programs(seed=2)[:, :genes].copy()
    if factor > 1:
        query.X = np.random.default_rng(0).poisson(query.X * factor).astype(np.float32)
    model.predict_positions(query)
    assert ("counts a cell" in caplog.text) == bool(said)
    assert said in caplog.text


def test_the_order_of_cells_does_not_make_another_depth(model, caplog):
    query = two_programs(seed=2, cells=2500)
    few = np.arange(2500) < 1000
    query.X[few] = np.random.default_rng(0).binomial(query.X[few].astype(int), 0.1)
    model.predict_positions(query)
    assert "counts a cell" not in caplog.text


def test_new_cells_have_counts_like_the_real_ones(model):
    real, new = two_programs(seed=1), model.generate(400, seed=3)
    counts = np.asarray(new.X)
    assert (counts == np.rint(counts)).all()
    assert counts.min() == 0
    np.testing.assert_array_equal(new.obs["total_counts"], counts.sum(1))
    assert 0.8 < np.median(counts.sum(1)) / np.median(real.X.sum(1)) < 1.25
    zeros = [(values == 0).mean() for values in (counts, real.X)]
    assert abs(zeros[0] - zeros[1]) < 0.05
    # Genes of a kind of cell go together: shuffled ones would not.
    together, apart = (
        np.corrcoef(np.asarray(new.layers["normalized"]).T)[:8, columns].mean()
        for columns in (slice(0, 8), slice(8, 16))
    )
    assert together > 0.2
    assert apart < 0


def test_scanpy_takes_new_cells_as_it_takes_real_ones(model):
    import scanpy as sc

    new = model.generate(200, seed=4)
    expected = np.asarray(new.layers["normalized"])
    sc.pp.normalize_total(new, target_sum=1e4)
    sc.pp.log1p(new)
    np.testing.assert_allclose(new.X, expected, rtol=1e-5)
    sc.pp.pca(new, n_comps=5)
    sc.pp.neighbors(new, n_neighbors=10)
    sc.tl.leiden(new, flavor="igraph", n_iterations=2, directed=False, random_state=0)
    # Two programs, left and right: a cluster lies on one side.
    sides = new.obsm["spatial"][:, 0] > 0
    shares = [sides[new.obs["leiden"] == name].mean() for name in new.obs["leiden"].cat.categories]
    assert min(shares) < 0.2
    assert max(shares) > 0.8


def test_squidpy_takes_new_cells_as_it_takes_real_ones(model):
    squidpy = pytest.importorskip("squidpy", reason="squidpy is not installed")
    new = model.generate(200, seed=4)
    new.obs["side"] = pd.Categorical(np.where(new.obsm["spatial"][:, 0] > 0, "right", "left"))
    squidpy.gr.spatial_neighbors_knn(new, n_neighs=6)
    squidpy.gr.nhood_enrichment(new, cluster_key="side", seed=0, n_jobs=1, show_progress_bar=False)
    score = new.uns["side_nhood_enrichment"]["zscore"]
    assert score[0, 0] > 2 > score[0, 1]


def test_the_same_seed_gives_the_same_counts(model):
    first, again, other = (np.asarray(model.generate(50, seed=seed).X) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_a_saved_model_samples_what_it_sampled(model, tmp_path: Path):
    model.save(tmp_path / "model")
    again = AlphaSTomics.load(tmp_path / "model")
    new = [np.asarray(each.generate(40, seed=5).X) for each in (model, again)]
    np.testing.assert_array_equal(*new)


def test_values_that_are_no_counts_are_said_to_be_none(caplog):
    with caplog.at_level("INFO"):
        model = AlphaSTomics(two_programs(volume=True), QUICK, seed=0).train()
    assert "no counts" in caplog.text
    new = model.generate(50, seed=0)
    assert "total_counts" not in new.obs
    # As they were, not standardised: none is below zero, and as large as the real ones.
    values, real = np.asarray(new.X), np.log1p(two_programs(volume=True).X)
    assert values.min() > -1e-3
    assert 0.5 < values.max() / np.log1p(1e4 * real.max()) < 2
    np.testing.assert_array_equal(new.layers["normalized"], new.X)


def test_expected_expression_comes_as_counts_per_ten_thousand_too(model):
    query = two_programs(seed=3, cells=100)
    model.predict_expression(query)
    rate = query.layers["generated_rate"]
    assert (rate >= 0).all()
    counts = query.X / query.X.sum(1, keepdims=True) * 1e4
    assert 0.6 < np.median(rate.sum(1)) / np.median(counts.sum(1)) < 1.2
    assert np.corrcoef(rate.mean(0), counts.mean(0))[0, 1] > 0.9


@pytest.mark.parametrize("estimator", ["mean", "sample"])
def test_genes_without_a_count_in_the_query_have_the_unit_of_a_training_slice(model, estimator):
    rates = []
    for emptied in (0, 6, 20):
        query = two_programs(seed=3, cells=100)
        query.X[:, :emptied] = 0
        model.predict_expression(query, estimator=estimator, seed=0)
        rates.append(query.layers["generated_rate"].mean(0))
    # They would be about 1 in the unit of a slice that has none.
    np.testing.assert_allclose(rates[1][:6], rates[0][:6], rtol=0.5)
    np.testing.assert_allclose(rates[2].sum(), rates[0].sum(), rtol=0.5)


@pytest.mark.parametrize("genes", [1, 2])
def test_one_gene_or_two_are_trained_on_and_scored(genes):
    data = two_programs(cells=150)[:, :genes].copy()
    model = AlphaSTomics(data, QUICK, seed=0).train()
    scores = model.evaluate(two_programs(seed=1, cells=150)[:, :genes].copy())
    assert scores is not None
    assert np.asarray(model.generate(30, seed=0).X).shape == (30, genes)


def test_values_below_zero_stay_below_zero(caplog):
    data = two_programs(cells=200)
    values = np.log1p(data.X)
    data.X = values - values.mean(0)
    with caplog.at_level("INFO"):
        settings = {**QUICK, "data": {"preprocessing": {"log_normalize": False, "scale": False}}}
        model = AlphaSTomics(data, settings, seed=0).train()
    assert "no counts" in caplog.text
    new = np.asarray(model.generate(100, seed=0).X)
    assert 0.2 < (new < 0).mean() < 0.8


def test_a_single_step_draws_counts_too(model):
    new = model.generate(30, seed=0, num_steps=1)
    assert np.asarray(new.X).sum() > 0


def test_a_trainer_of_ones_own_is_told_that_nothing_was_fitted():
    document = {**QUICK, "expression": {"space": "latent"}}
    module = AlphaSTomicsModule(document, 20)
    with pytest.raises(InputError, match="with a Trainer of your own"):
        module.require_count_model()


def test_genes_can_still_be_diffused_themselves(caplog):
    settings = {**QUICK, "expression": {"space": "genes"}}
    model = AlphaSTomics(two_programs(cells=100), settings, seed=0).train()
    assert "total_counts" not in model.generate(20, seed=0).obs
    assert "X of the new cells is standardised" in caplog.text
    query = two_programs(seed=3, cells=50)
    query.X[:, :6] = 0
    model.predict_expression(query)
    rate = query.layers["generated_rate"]
    assert np.isnan(rate[:, :6]).all()
    assert np.isfinite(rate[:, 6:]).all()


def test_a_gene_list_and_panels_leave_new_cells_in_the_units_of_the_real_ones(tmp_path: Path):
    """Cells are normalised over all their genes; one slice lacks genes that the other has."""
    for number, genes in enumerate((slice(0, 20), slice(0, 12))):
        data = two_programs(seed=number, cells=300)[:, genes].copy()
        data.obs["slice_id"] = f"s{number}"
        data.write_h5ad(tmp_path / f"s{number}.h5ad")
    (tmp_path / "genes.txt").write_text("\n".join(f"g{number}" for number in range(4, 16)))
    words = ["--input_dir", tmp_path, "--gene_list_file", tmp_path / "genes.txt"]
    assert main(["preprocess", *map(str, words), "--output_dir", str(tmp_path / "done")]) == 0
    config = parse_document({**QUICK, "training": {"batch_size": 64}}, "settings")
    config = with_settings(config, {"expression.space": "latent", "expression.updates": 100})
    loader, *_ = create_dataloaders(tmp_path / "done", batch_size=64)
    module = make_module(config, loader)
    fit_count_model(module, loader, config, torch.device("cpu"))
    model = module.average.count_model
    assert model is not None
    assert (model.target[:2] < 9_000).all()
    # Genes 12 to 15, which the second slice lacks, have the mean and share of the first.
    torch.testing.assert_close(model.mean[1, 8:], model.mean[0, 8:])
    torch.testing.assert_close(model.offset[1, 8:], model.offset[0, 8:])
    new = model.draw(torch.randn(500, 32), 0, 0).expression
    assert np.abs(new.mean(0)).max() < 0.6  # standardised as the slice is


@pytest.mark.parametrize("volume", [False, True])
def test_genes_that_nothing_measured_are_said_and_are_zero_in_new_cells(
    tmp_path: Path, capsys, volume: bool
):
    data = two_programs(cells=300, volume=volume)
    (tmp_path / "slices").mkdir()
    data.write_h5ad(tmp_path / "slices/one.h5ad")
    (tmp_path / "genes.txt").write_text("\n".join(["absent", *data.var_names, "neither"]))
    words = ["--input_dir", tmp_path / "slices", "--gene_list_file", tmp_path / "genes.txt"]
    assert main(["preprocess", *map(str, words), "--output_dir", str(tmp_path / "done")]) == 0
    said = capsys.readouterr().err
    assert "2 of the 22 listed genes are measured by no input (first 'absent', 'neither')" in said
    config = parse_document({**QUICK, "training": {"batch_size": 64}}, "settings")
    config = with_settings(config, {"expression.space": "latent", "expression.updates": 20})
    loader, *_ = create_dataloaders(tmp_path / "done", batch_size=64)
    module = make_module(config, loader)
    fit_count_model(module, loader, config, torch.device("cpu"))
    model = module.average.count_model
    assert model is not None
    new = model.draw(torch.randn(500, 32), 0, 0)
    assert (new.expression[:, [0, -1]] == 0).all()
    assert (new.expression[:, 1:-1].std(0) > 0).all()
    if not volume:
        assert (new.counts[:, [0, -1]] == 0).all()
        assert (new.counts[:, 1:-1].sum(0) > 0).all()


def test_a_resumed_run_knows_its_styles(model):
    module = model._trained().module
    assert module.style_names == ["one"]
    module.on_load_checkpoint({"alphastomics": {"styles": ["other"]}})
    assert module.style_names == ["other"]
    module.on_load_checkpoint({"alphastomics": {"styles": ["one"]}})


def test_the_fit_is_a_pure_function_of_cells_and_seed(tmp_path: Path):
    (tmp_path / "slices").mkdir()
    two_programs(cells=120).write_h5ad(tmp_path / "slices/one.h5ad")
    words = ["--input_dir", tmp_path / "slices", "--output_dir", tmp_path / "processed"]
    assert main(["preprocess", *map(str, words)]) == 0
    settings = {
        **QUICK,
        "training": {"batch_size": 32},
        "expression": {"space": "latent", "updates": 10},
        "data": {"processed_data_dir": str(tmp_path / "processed")},
    }
    config = parse_document(settings, "settings")
    weights = []
    for _ in range(2):
        loader, *_ = create_dataloaders(tmp_path / "processed", batch_size=32)
        torch.manual_seed(0)  # of the weights that it starts from
        module = make_module(config, loader)
        fit_count_model(module, loader, config, torch.device("cpu"))
        assert module.average.count_model is not None
        weights.append(module.average.count_model.state_dict())
        assert module.style_names == ["one"]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
