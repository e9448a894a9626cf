"""The notebook's verbs for genes and types that cells lack, with and without a reference."""

import anndata
import numpy as np
import pytest

from alphastomics.errors import InputError
from alphastomics.generation import known_cells
from alphastomics.main import main


def test_impute_adds_genes_and_gives_the_numbers_of_the_command(model, slices, tmp_path):
    query = slices[0][:, 3:].copy()
    made = model.impute(query)
    assert list(made.var_names) == model.genes
    assert np.array_equal(made.obsm["spatial"], query.obsm["spatial"])
    assert "imputed" not in query.layers
    model.save(tmp_path / "model")
    query.write_h5ad(tmp_path / "query.h5ad")
    words = ["sample", "--checkpoint", tmp_path / "model", "--sample_mode", "impute"]
    words += ["--input_data", tmp_path / "query.h5ad", "--data_dir", model._folder / "processed"]
    assert main(list(map(str, words))) == 0
    again = anndata.read_h5ad(tmp_path / "query_generated.h5ad")
    np.testing.assert_allclose(again.X, made.X, atol=1e-4)


def test_a_dissociated_reference_adds_genes_that_the_model_lacks(model, slices):
    reference = slices[1].copy()
    del reference.obsm["spatial"]
    del reference.obs["slice_id"]
    new = reference[:, :2].copy()
    new.var_names = ["New1", "New2"]
    reference = anndata.concat([reference, new], axis=1, merge="same")
    made = model.impute(slices[0], genes=["New2"], reference=reference)
    assert list(made.var_names) == ["New2"]
    assert (made.layers["imputed_std"] > 0).all()
    with pytest.raises(InputError, match="New2"):
        model.impute(slices[0], genes=["New2"])


def test_without_training_cells_the_count_model_imputes_and_says_so(
    model, slices, monkeypatch, caplog
):
    monkeypatch.setattr(known_cells, "training_cells", lambda *_: None)
    query = slices[0][:, 3:].copy()
    with caplog.at_level("WARNING", logger="alphastomics"):
        made = model.impute(query)
    assert "count model alone" in caplog.text
    new = made[:, ~made.var["measured"]]
    assert new.n_vars > 0
    assert np.isfinite(new.X).all()
    assert (new.layers["imputed_std"] > 0).all()
    assert new.var["expected_r"].isna().all()
    with pytest.raises(InputError, match="cell types are predicted from training cells"):
        model.predict_labels(query)


def test_labels_are_those_that_are_most_probable(model, slices):
    query = slices[0].copy()
    del query.obs["cell_type"]
    found = model.predict_labels(query)
    assert (found == query.obs["cell_type_pred"].astype(str)).all()
    chance = query.obsm["cell_type_probabilities"]
    np.testing.assert_allclose(query.obs["cell_type_probability"], chance.max(1), atol=1e-6)
    assert query.uns["cell_type_probabilities"]["expected_accuracy"] > 0.3


def test_the_types_of_a_reference_count(model, slices):
    reference = slices[1].copy()
    reference.obs["cell_type"] = "new type"
    model.predict_labels(slices[0], reference=reference)
    assert "new type" in slices[0].uns["cell_type_probabilities"]["names"]


def test_a_reference_without_a_column_of_types_is_pointed_out(model, slices, caplog):
    reference = slices[1].copy()
    del reference.obs["cell_type"]
    model.predict_labels(slices[0], reference=reference)
    assert "its cells say nothing of types" in caplog.text


def test_a_reference_without_a_gene_of_the_query_is_refused(model, slices):
    reference = slices[1].copy()
    reference.var_names = [f"other_{number}" for number in range(reference.n_vars)]
    for verb in (model.impute, model.predict_labels):
        with pytest.raises(InputError, match=r"shares no gene with the input|none of the"):
            verb(slices[0][:, 4:].copy(), reference=reference)


def test_mistakes_are_named(model, slices):
    for arguments, words in (
        ({"genes": "Gene1"}, "expected a list"),
        ({"genes": ["Gene_1"]}, "not among the"),
        ({"reference": 3}, "expected an AnnData"),
    ):
        with pytest.raises(InputError, match=words):
            model.impute(slices[0], **arguments)
    strange = slices[0].copy()
    strange.var_names = [f"other_{number}" for number in range(strange.n_vars)]
    with pytest.raises(InputError, match="none of the"):
        model.impute(strange)
