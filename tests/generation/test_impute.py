"""Genes that a slice did not measure: against a plain calculation, the truth, and bad input."""

from dataclasses import replace
from pathlib import Path

import anndata
import numpy as np
import pytest
from scipy.sparse import csr_array

from alphastomics.generation.gene_features import (
    GeneCells,
    by_shared_total,
    feature_blocks,
    features_of_both,
    scaled_within_slices,
)
from alphastomics.generation.impute import (
    Imputed,
    Ridge,
    combined,
    fitted_line,
    impute,
    in_unit_of_query,
)
from alphastomics.main import main
from alphastomics.preprocessing.normalize import log_normalized
from tests.generation.conftest import checkpoint


def tissue(rng: np.random.Generator, cells: int, genes: int = 30, name: str = "a") -> GeneCells:
    """Counts of cells of three kinds in stripes, with a depth of their own, log-normalised."""
    position = np.hstack([rng.uniform(0, 10, (cells, 2)), np.zeros((cells, 1))])
    kind = (position[:, 0] // 3.4).astype(int)
    profile = np.random.default_rng(9).gamma(0.7, 1, (3, genes))
    rate = profile[kind] * rng.gamma(8, 1, (cells, 1))
    counts = rng.poisson(rate) + (rng.random((cells, genes)) < 0.02)
    counts[:, 0] += 1
    return GeneCells(
        np.log1p(counts / counts.sum(1, keepdims=True) * 1e4).astype(np.float32),
        np.ones((1, genes), dtype=bool),
        np.zeros(cells, np.int64),
        [name],
        position,
        np.array(["x", "y", "z"], dtype=object)[kind],
    )


def without(cells: GeneCells, genes: list[int]) -> GeneCells:
    """Hide genes: the others are all that was measured."""
    measured = cells.measured.copy()
    measured[:, genes] = False
    shown = by_shared_total(cells.values, measured[0], is_log=True).values * measured[0]
    return replace(cells, values=shown.astype(np.float32), measured=measured)


HIDDEN = [3, 7, 11, 20]


def test_a_total_over_shared_genes_is_that_of_the_same_counts_without_the_others(rng):
    counts = rng.poisson(3, (20, 8)).astype(float) + 1
    shared = np.arange(8) < 5
    whole = np.log1p(counts / counts.sum(1, keepdims=True) * 1e4)
    alone = np.log1p(counts[:, :5] / counts[:, :5].sum(1, keepdims=True) * 1e4)
    found = by_shared_total(whole, shared, is_log=True)
    np.testing.assert_allclose(found.values[:, :5], alone, rtol=1e-9)
    np.testing.assert_allclose(found.total, 1e4 * counts[:, :5].sum(1) / counts.sum(1), rtol=1e-9)


def test_surroundings_are_the_plain_mean_over_the_nearest_cells_of_the_slice(rng):
    cells = tissue(rng, 80)
    values = scaled_within_slices(cells.values.astype(float), cells).values
    near = feature_blocks(values, cells, spatial=True)[2]
    distance = np.linalg.norm(cells.position[:, None] - cells.position[None], axis=2)
    plain = np.stack([values[np.argsort(row)[1:7]].mean(0) for row in distance])
    np.testing.assert_allclose(near, plain / plain.std(0), atol=1e-4)


def test_ridge_with_a_penalty_is_the_solution_of_the_normal_equations(rng, monkeypatch):
    monkeypatch.setattr("alphastomics.generation.impute.PENALTIES", (10.0,))
    x, y = rng.normal(size=(40, 5)).astype(np.float32), rng.normal(size=(40, 2))
    asked = rng.normal(size=(7, 5)).astype(np.float32)
    c, target = x - x.mean(0), y - y.mean(0)
    weights = np.linalg.solve(c.T @ c + 10 * np.eye(5), c.T @ target)
    plain = (asked - x.mean(0)) @ weights + y.mean(0)
    np.testing.assert_allclose(Ridge(x, asked).predict(y), plain, atol=1e-5)


def test_a_line_of_squared_errors_is_never_below_zero(rng):
    x = np.abs(rng.normal(size=(500, 3)))
    y = np.stack([2 + 3 * x[:, 0], 4 - x[:, 1], x[:, 2] - 0.1], axis=1)
    constant, slope = fitted_line(x, y)
    np.testing.assert_allclose([constant[0], slope[0]], [2, 3])
    np.testing.assert_allclose([constant[1], slope[1]], [y[:, 1].mean(), 0])
    assert constant[2] == 0
    assert slope[2] > 0


def test_hidden_genes_are_predicted_as_well_as_said_and_within_the_intervals(rng):
    known, query = tissue(rng, 900), tissue(rng, 600, name="b")
    hidden = without(query, HIDDEN)
    found = impute(known, hidden, np.array(HIDDEN), 0, is_log=True)
    # The unit of the query: shares of what it measured.
    true = by_shared_total(query.values, hidden.measured[0], is_log=True).values[:, HIDDEN]
    r = np.array([np.corrcoef(found.values[:, g], true[:, g])[0, 1] for g in range(4)])
    assert r.mean() > 0.5
    np.testing.assert_allclose(found.expected_r, r, atol=0.12)
    inside = (np.abs(found.values - true) <= found.interval * found.std).mean(0)
    assert (np.abs(inside - 0.9) < 0.06).all()
    ratio = np.sqrt(((found.values - true) ** 2).mean(0) / (found.std**2).mean(0))
    assert (np.abs(ratio - 1) < 0.25).all()


def test_a_gene_that_one_slice_measured_is_learned_from_it_alone(rng):
    first, second = tissue(rng, 300, name="a"), tissue(rng, 300, name="b")
    second.measured[:, 3] = False
    second.values[:, 3] = 0
    both = GeneCells(
        *(np.concatenate([getattr(first, n), getattr(second, n)]) for n in ("values", "measured")),
        np.repeat([0, 1], 300),
        ["a", "b"],
        *(
            np.concatenate([getattr(first, n), getattr(second, n)])
            for n in ("position", "cell_type")
        ),
    )
    query = without(tissue(rng, 100, name="c"), [3])
    alone = impute(first, query, np.array([3]), 0, is_log=True)
    found = impute(both, query, np.array([3]), 0, is_log=True)
    np.testing.assert_allclose(found.values, alone.values)


def test_the_order_of_the_query_changes_nothing(rng):
    known, query = tissue(rng, 300), without(tissue(rng, 150, name="b"), HIDDEN)
    order = rng.permutation(150)
    first = impute(known, query, np.array(HIDDEN), 0, is_log=True)
    second = impute(known, query.take(order), np.array(HIDDEN), 0, is_log=True)
    np.testing.assert_allclose(first.values[order], second.values, atol=1e-3)


def test_cells_of_other_slices_are_left_out_together(rng):
    slices = [tissue(rng, 60, name=name) for name in "abc"]
    known = GeneCells(
        *(np.concatenate([getattr(s, n) for s in slices]) for n in ("values", "measured")),
        np.repeat([0, 1, 2], 60),
        list("abc"),
        *(np.concatenate([getattr(s, n) for s in slices]) for n in ("position", "cell_type")),
    )
    generator = np.random.default_rng(0)
    new = features_of_both(known, tissue(rng, 50, name="d"), generator, is_log=True)
    assert (new.fold == known.slice_id).all()
    same = features_of_both(known, tissue(rng, 50, name="b"), generator, is_log=True)
    assert len(np.unique(same.fold[:60])) == 5


def test_a_query_with_more_genes_has_imputed_ones_in_the_unit_of_its_own_total():
    found = Imputed(np.zeros((1, 1)), np.ones((1, 1)), np.zeros(1), np.zeros(1))
    mean, std = np.log1p([200.0]), np.array([0.1])
    moved = in_unit_of_query(found, mean, std, np.array([0.5]), is_log=True)
    np.testing.assert_allclose(moved.values, np.log1p([[100.0]]))
    # 200 grows by the factor e^0.1, and so does nearly log1p.
    np.testing.assert_allclose(moved.std, 0.1 * 0.5 * 201 / 101)


def test_the_combination_of_one_right_column_and_noise_is_the_right_one(rng):
    target = rng.normal(size=(2000, 2))
    left_out = np.stack([target, rng.normal(size=target.shape)])
    found = combined(left_out, left_out[:, :50], target)
    np.testing.assert_allclose(found.values, target[:50], atol=0.02)
    assert (found.expected_r > 0.999).all()


@pytest.fixture
def panel(workspace: Path, tmp_path: Path) -> Path:
    """A slice of the tissue that lacks some genes of the model."""
    data = anndata.read_h5ad(workspace / "slices/slice_0.h5ad")
    data[:, 4:].copy().write_h5ad(tmp_path / "panel.h5ad")
    return tmp_path / "panel.h5ad"


def call(workspace: Path, query: Path, *words: object) -> list[str]:
    flags = ["--checkpoint", checkpoint(workspace), "--input_data", query]
    return list(map(str, ["sample", *flags, "--sample_mode", "impute", *words]))


def test_the_command_adds_the_genes_and_keeps_the_measured_ones(workspace, panel, capsys):
    assert main(call(workspace, panel)) == 0
    made = anndata.read_h5ad(panel.with_name("panel_generated.h5ad"))
    query = anndata.read_h5ad(panel)
    assert list(made.obs_names) == list(query.obs_names)
    assert set(query.var_names) <= set(made.var_names)
    own = made[:, query.var_names]
    plain = log_normalized(csr_array(query.X)).toarray()
    np.testing.assert_allclose(own.layers["imputed"], plain, atol=1e-4)
    assert (own.layers["imputed_std"] == 0).all()
    new = made[:, ~made.var["measured"]]
    assert new.n_vars > 0
    assert (new.layers["imputed_std"] > 0).all()
    assert np.isfinite(made.X).all()
    assert new.var["expected_r"].between(-1, 1).all()
    assert "spatial" in made.obsm


def test_the_genes_that_are_asked_for_are_those_that_come(workspace, panel, tmp_path):
    names = sorted(set(anndata.read_h5ad(workspace / "slices/slice_0.h5ad").var_names[:4]))
    target = tmp_path / "made.h5ad"
    assert main(call(workspace, panel, "--output", target, "--genes", *names[:2])) == 0
    assert list(anndata.read_h5ad(target).var_names) == names[:2]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--genes", "Nowhere"], "not among the"),
        (["--num_cells", "9"], "--input_data"),
        (["--output", "made.pt"], "ends in .h5ad"),
        (["--anchors", "known.csv"], "does not count with --sample_mode impute"),
        (["--reference", "nowhere.h5ad"], "no such file"),
        (["--data_dir", "nowhere"], "is no processed folder"),
    ],
)
def test_what_cannot_be_imputed_is_refused_in_one_line(
    workspace, panel, flags, words, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main(call(workspace, panel, *flags)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert words in said
    assert sorted(tmp_path.iterdir()) == before


def test_a_query_that_measured_all_of_it_has_nothing_to_impute(workspace, panel, capsys):
    gene = anndata.read_h5ad(panel).var_names[0]
    assert main(call(workspace, panel, "--genes", gene)) == 2
    assert "nothing to impute" in capsys.readouterr().err


def test_impute_is_no_mode_of_training(workspace, tmp_path, capsys):
    words = ["train", "--data_dir", workspace / "processed", "--training_mode", "impute"]
    assert main(list(map(str, words))) == 2
    assert "training_mode" in capsys.readouterr().err
