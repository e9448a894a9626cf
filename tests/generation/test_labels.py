"""Cell types of a query: against plain calculations, and calibrated on cells never seen."""

from pathlib import Path

import anndata
import numpy as np
import pytest

from alphastomics.generation.labels import (
    best_temperature,
    logistic,
    mixture_weights,
    predict_labels,
    tempered,
)
from alphastomics.main import main
from tests.generation.conftest import checkpoint
from tests.generation.test_impute import tissue


def test_mixture_weights_are_the_best_of_a_grid(rng):
    likelihood = rng.uniform(0.05, 0.9, (2, 400)) ** np.array([[1], [2]])
    grid = np.linspace(0, 1, 1001)
    plain = grid[
        np.argmax([np.log(w * likelihood[0] + (1 - w) * likelihood[1]).sum() for w in grid])
    ]
    assert mixture_weights(likelihood)[0] == pytest.approx(plain, abs=0.01)


def test_a_temperature_undoes_too_much_confidence(rng):
    logits = rng.normal(size=(4000, 3))
    chance = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    types = (rng.random((4000, 1)) > chance.cumsum(1)).sum(1)
    assert best_temperature(tempered(chance, 0.5), types) == pytest.approx(2, rel=0.1)
    np.testing.assert_allclose(tempered(chance, 1.0), chance)


def test_a_type_that_a_fold_lacks_has_no_probability_there(rng):
    values = rng.normal(size=(30, 4)).astype(np.float32)
    types = np.repeat([0, 2], 15)
    found = logistic(values, values, types, 3, 1.0)
    assert (found[:, 1] == 0).all()
    np.testing.assert_allclose(found.sum(1), 1)


def test_types_are_predicted_as_well_as_said_with_calibrated_probabilities(rng):
    known, query = tissue(rng, 600), tissue(rng, 500, name="b")
    # A fifth of the labels is wrong: nobody can be surer than that.
    wrong = rng.random(600) < 0.2
    known.cell_type[wrong] = rng.choice(["x", "y", "z"], wrong.sum())
    known.cell_type[:40] = "unknown"
    mixed = rng.random(500) < 0.2
    true = np.where(mixed, rng.choice(["x", "y", "z"], 500), query.cell_type)
    found = predict_labels(known, query, 0, is_log=True)
    assert found.names == ["x", "y", "z"]
    np.testing.assert_allclose(found.probability.sum(1), 1, atol=1e-6)
    right = np.array(found.names)[found.probability.argmax(1)] == true
    assert right.mean() > 0.7
    assert found.expected_accuracy == pytest.approx(right.mean(), abs=0.07)
    assert found.probability.max(1).mean() == pytest.approx(right.mean(), abs=0.07)


def test_the_command_writes_types_beside_what_the_query_has(workspace: Path, tmp_path: Path):
    source, target = workspace / "slices/slice_1.h5ad", tmp_path / "labelled.h5ad"
    words = ["sample", "--checkpoint", checkpoint(workspace), "--sample_mode", "label"]
    words += ["--input_data", source, "--output", target]
    assert main(list(map(str, words))) == 0
    made, query = anndata.read_h5ad(target), anndata.read_h5ad(source)
    assert set(query.obs) | {"cell_type_pred", "cell_type_probability"} <= set(made.obs)
    chance = made.obsm["cell_type_probabilities"]
    names = np.array(made.uns["cell_type_probabilities"]["names"])
    np.testing.assert_allclose(chance.sum(1), 1, atol=1e-5)
    assert (names[chance.argmax(1)] == made.obs["cell_type_pred"].astype(str)).all()
    np.testing.assert_allclose(made.obs["cell_type_probability"], chance.max(1), atol=1e-6)
    assert (
        made.obs["cell_type_pred"].astype(str) == query.obs["cell_type"].astype(str)
    ).mean() > 0.25  # of 14 types


def test_genes_are_not_asked_for_with_labels(workspace: Path, capsys):
    words = ["sample", "--checkpoint", checkpoint(workspace), "--sample_mode", "label"]
    words += ["--input_data", workspace / "slices/slice_1.h5ad", "--genes", "A"]
    assert main(list(map(str, words))) == 2
    assert "--sample_mode impute" in capsys.readouterr().err
