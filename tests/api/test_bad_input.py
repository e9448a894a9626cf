"""Settings and input of the notebook: what is accepted, and how it says no."""

import warnings
from pathlib import Path

import anndata
import numpy as np
import pytest

from alphastomics import AlphaSTomics
from alphastomics.api.settings import keyword_paths, updated
from alphastomics.config import Config
from alphastomics.config.file import document_fields
from alphastomics.errors import InputError
from tests.api.conftest import TINY


def test_every_keyword_is_a_setting_and_flags_have_their_names():
    known = keyword_paths()
    assert set(known.values()) <= set(document_fields())
    config = updated(None, {"lr": 0.5, "d_model": 64, "seed": 7, "training_mode": "expr_to_pos"})
    assert config.training.learning_rate == 0.5
    assert (config.model.d_model, config.seed.global_seed) == (64, 7)
    assert config.training.mode == "expr_to_pos"


def test_settings_are_a_file_a_dict_or_a_config(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("model: {d_model: 64}")
    forms = [tmp_path / "mine.yaml", {"model": {"d_model": 64}}, Config(model={"d_model": 64})]
    assert len({updated(form, {"n_heads": 4}).model_dump_json() for form in forms}) == 1


MISTAKES = {
    "lrr": ({"lrr": 1}, "lrr: unknown keyword; did you mean lr"),
    "mode": ({"mode": "joint"}, "several settings end like that"),
    "save_dir": ({"save_dir": "x"}, "give folder="),
    "slice_key": ({"slice_key": "x"}, r"setup_anndata\(adata, slice_key=…\)"),
    "layer": ({"layer": "counts"}, r"setup_anndata\(adata, layer=…\)"),
    "value": ({"d_model": "wide"}, "d_model: expected a whole number"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_bad_keyword_is_one_line(name, slices):
    keywords, words = MISTAKES[name]
    with pytest.raises(InputError, match=words):
        AlphaSTomics(slices, TINY, **keywords)


def spoilt(adata: anndata.AnnData, how: str) -> object:
    adata = adata.copy()
    if how == "no AnnData":
        return adata.to_df()
    if how == "NaN in X":
        adata.X.data[3] = np.nan
    elif how == "no shared gene":
        adata.var_names = [f"Other{n}" for n in range(adata.n_vars)]
    elif how == "repeated genes":
        with warnings.catch_warnings(action="ignore"):
            adata.var_names = ["same"] * adata.n_vars
    elif how == "one cell":
        return adata[:1]
    elif how == "NaN in spatial":
        adata.obsm["spatial"][4, 0] = np.nan
    elif how == "no slice for a cell":
        adata.obs["slice_id"] = [None, *["a"] * (adata.n_obs - 1)]
    elif how == "no counts":
        adata.X = None
    return adata


REFUSED = {
    "no AnnData": "adata: expected an AnnData, got DataFrame",
    "NaN in X": "adata: X has NaN",
    "no shared gene": "adata: none of the 24 listed genes",
    "repeated genes": "adata: var_names has 1 duplicate gene ",
    "one cell": "adata: 1 cell",
    "NaN in spatial": r"adata: obsm\['spatial'\]: has NaN",
    "no slice for a cell": r"adata: obs\['slice_id'\] is missing for some cells",
    "no counts": "adata: X is missing",
}


@pytest.mark.parametrize("how", REFUSED)
def test_bad_cells_are_refused_in_one_line_and_left_as_they_were(how, model, slices):
    adata = spoilt(slices[0], how)
    with pytest.raises(InputError, match=REFUSED[how]) as caught:
        model.predict_positions(adata)
    assert "\n" not in str(caught.value)
    assert "/tmp" not in str(caught.value)
    if how != "no AnnData":
        assert "spatial_pred" not in adata.obsm


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (
            {"position_key": "xy"},
            r"obsm\['xy'\] is missing \(there: body, spatial\).*position_key=",
        ),
        ({"cell_type_key": "types"}, r"obs\['types'\] is missing .*cell_type_key="),
        ({"slice_key": "section"}, r"obs\['section'\] is missing"),
        ({"layer": "counts"}, r"layers\['counts'\] is missing \(there: none\)"),
    ],
)
def test_a_choice_that_is_not_there_is_refused(choice, words, slices):
    with pytest.raises(InputError, match=words):
        AlphaSTomics.setup_anndata(slices[0], **choice)
    assert "alphastomics_setup" not in slices[0].uns


def test_data_that_cannot_be_trained_on_is_refused(slices):
    with pytest.raises(InputError, match="list is empty"):
        AlphaSTomics([])
    with pytest.raises(InputError, match=r"slice_1\.h5ad: no such file"):
        AlphaSTomics([slices[0], "slice_1.h5ad"])
    with pytest.raises(InputError, match=r"adata\[1\]: expected an AnnData"):
        AlphaSTomics([slices[0], None])
    deep = slices[1].copy()
    deep.obsm["spatial"] = np.zeros((90, 3))
    with pytest.raises(InputError, match="2D and in 3D do not mix"):
        AlphaSTomics([slices[0], deep])
    with pytest.raises(InputError, match=r"batch_size.*but the training split of adata has"):
        AlphaSTomics(slices, TINY).train(batch_size=4096)
    AlphaSTomics.setup_anndata(slices[0], position_key=None)
    with pytest.raises(InputError, match="without coordinates; training needs them"):
        AlphaSTomics(slices[0], TINY)


@pytest.mark.parametrize("number", [0, 1, -3, 2.5, True])
def test_a_bad_number_of_cells_is_refused(number, model):
    with pytest.raises(InputError, match="n: expected a whole number"):
        model.generate(number)


def test_bad_coordinates_are_refused(model):
    for bad, words in {
        "text": (np.array([["a", "b"]]), "numbers"),
        "shape": (np.zeros((5, 4)), "shape"),
        "NaN": (np.full((5, 2), np.nan), "NaN"),
        "one place": (np.zeros((1, 2)), "positions: 1 cell"),
    }.values():
        with pytest.raises(InputError, match=words):
            model.predict_expression(bad)


def test_a_mode_that_the_model_lacks_is_refused_with_those_it_has(slices):
    placer = AlphaSTomics(slices, TINY, training_mode="expr_to_pos").train(1)
    placer.predict_positions(slices[0])
    with pytest.raises(InputError, match="trained for expr_to_pos alone"):
        placer.generate(20)


def test_a_view_of_a_file_on_disk_is_refused_in_one_line(tmp_path):
    from tests.preprocessing.tissue import make_slice

    make_slice(60, 12, 1).write_h5ad(tmp_path / "cells.h5ad")
    backed = anndata.read_h5ad(tmp_path / "cells.h5ad", backed="r")
    AlphaSTomics.setup_anndata(backed)
    with pytest.raises(InputError, match="to_memory"):
        AlphaSTomics.setup_anndata(backed[:40])
    backed.file.close()


def test_a_file_given_for_the_folder_of_a_run_is_refused(tmp_path):
    from tests.preprocessing.tissue import make_slice

    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file"):
        AlphaSTomics(make_slice(60, 12, 1), folder=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_counts_in_coordinate_form_are_written_as_rows():
    from scipy.sparse import coo_matrix

    from alphastomics.api.setup import rows_of_cells

    # anndata 0.12 lets none into an AnnData; what holds it may.
    values = coo_matrix([[0, 1.0], [2, 0]])
    assert rows_of_cells(values).format == "csr"
    assert (rows_of_cells(values).toarray() == values.toarray()).all()
