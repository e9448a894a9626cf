"""Anchors in a notebook: every way to name them gives the same positions, and leaves with them."""

import anndata
import numpy as np
import pandas as pd
import pytest

from alphastomics import AlphaSTomics
from alphastomics.errors import InputError


@pytest.fixture
def known() -> np.ndarray:
    return np.isin(np.arange(90), np.random.default_rng(2).permutation(90)[:40])


def test_a_column_a_table_an_anndata_and_nan_name_the_same_anchors(
    model: AlphaSTomics, slices: list[anndata.AnnData], known: np.ndarray
):
    data = slices[0]
    true = np.asarray(data.obsm["spatial"], dtype=np.float64).copy()
    data.obs["known"] = known
    position = model.predict_positions(data, anchors="known")
    np.testing.assert_allclose(position[known], true[known], rtol=1e-6)
    assert np.isfinite(data.obs["position_radius_90"]).all()
    np.testing.assert_array_equal(data.obs["position_is_anchor"], known)
    table = pd.DataFrame(true[known], index=data.obs_names[known], columns=["x", "y"])
    for anchors in (table, data[known].copy()):
        again = model.predict_positions(slices[0].copy(), anchors=anchors)
        np.testing.assert_allclose(again, position, rtol=1e-5)
    data.obsm["spatial"] = np.where(known[:, None], true, np.nan)
    np.testing.assert_allclose(model.predict_positions(data), position, rtol=1e-5)
    # What was known of an earlier prediction does not stay with another one.
    data.obsm["spatial"] = true
    model.predict_positions(data)
    assert "position_radius_90" not in data.obs
    assert "position_is_anchor" not in data.obs
    assert "known" in data.obs


def test_other_cells_are_a_reference_section_whose_frame_positions_are_in(model, slices):
    query, section = slices
    query.obs_names = [f"a_{name}" for name in query.obs_names]
    section.obs_names = [f"b_{name}" for name in section.obs_names]
    section.obs["slice_id"] = "another"
    section.obsm["spatial"] = np.asarray(section.obsm["spatial"]) + 1e4
    position = model.predict_positions(query, anchors=section)
    centre = np.asarray(section.obsm["spatial"]).mean(0)
    assert np.abs(position.mean(0) - centre).max() < np.ptp(section.obsm["spatial"], axis=0).max()
    assert "position_is_anchor" not in query.obs
    assigned = model.predict_positions(query, anchors=section, estimator="assigned")
    there = {tuple(at) for at in np.asarray(section.obsm["spatial"], np.float64).tolist()}
    assert {tuple(at) for at in assigned.tolist()} == there
    with pytest.raises(InputError, match="give one of both"):
        model.predict_positions(query, anchors=section, reference=section)


def test_evaluate_scores_by_anchors_what_test_scores(model, slices, known, tmp_path):
    from alphastomics.config import PreprocessingConfig
    from alphastomics.generation.commands import test as score

    data = slices[0]
    data.obs["known"] = known
    scores = model.evaluate(data, anchors="known", seed=3)
    model.save(tmp_path / "model")
    data.write_h5ad(tmp_path / "slice_0.h5ad")
    reading = PreprocessingConfig(cell_type_key="cell_type")
    seed = model.config.seed.model_copy(update={"global_seed": 3})
    kept = {"data": model.config.data.model_copy(update={"preprocessing": reading}), "seed": seed}
    kept["data"] = kept["data"].model_copy(
        update={"processed_data_dir": str(model._folder / "processed")}
    )
    config = model.config.model_copy(update=kept)
    expected = score(
        config, checkpoint=tmp_path / "model", input_data=tmp_path / "slice_0.h5ad", split="test",
        output=tmp_path / "scores.json", anchors="known", modes=["expr_to_pos"],
    )["expr_to_pos"]  # fmt: skip
    assert {"alphastomics", "alphastomics without anchors"} <= set(scores["expr_to_pos"])
    for method, metrics in expected.items():
        for metric, value in metrics.items():
            found = scores["expr_to_pos"][method][metric]
            assert found == pytest.approx(value, rel=1e-4), (method, metric)
    true = np.asarray(data.obsm["spatial"], dtype=np.float64)
    table = pd.DataFrame(true[known], index=data.obs_names[known], columns=["x", "y"])
    again = model.evaluate(data, anchors=table, seed=3)
    pd.testing.assert_frame_equal(again["expr_to_pos"], scores["expr_to_pos"], rtol=1e-4)


def test_evaluate_refuses_anchors_without_cells_and_assignments_without_anchors(model, slices):
    with pytest.raises(InputError, match="give adata, too"):
        model.evaluate(anchors="known")
    with pytest.raises(InputError, match="around anchors: name them with anchors="):
        model.evaluate(slices[0], estimator="assigned")
    with pytest.raises(InputError, match="around anchors"):
        model.evaluate(estimator="assigned")


def test_a_level_names_its_column(model, slices, known):
    data = slices[0]
    data.obs["known"] = known
    model.predict_positions(data, anchors="known", radius_level=0.5)
    assert "position_radius_50" in data.obs


def test_known_cells_of_a_slice_inform_expression_at_other_positions(model, slices, known):
    here, asked = slices[0][known].copy(), slices[0][~known].copy()
    with_known = model.predict_expression(asked, anchors=here)
    bare = model.predict_expression(np.asarray(asked.obsm["spatial"]), anchors=here)
    np.testing.assert_allclose(bare.layers["generated"], with_known, rtol=1e-4, atol=1e-5)


def test_other_known_cells_and_genes_they_lack_are_not_taken_from_an_earlier_call(
    model, slices, known
):
    here, asked = slices[0][known].copy(), slices[0][~known].copy()
    first = model.predict_expression(asked, anchors=here)
    there = here.copy()
    there.X = np.asarray(here.X[::-1].toarray())
    assert not np.allclose(model.predict_expression(asked, anchors=there), first)
    # What no known cell measured is left to the network, and is not zero.
    few = here[:, here.var_names[:10]].copy()
    values = model.predict_expression(asked, anchors=few)
    lacking = [n for n, gene in enumerate(model.genes) if gene not in set(few.var_names)]
    assert len(lacking) >= 14
    assert (values[:, lacking].std(0) > 0).all()
    assert (asked.layers["generated_std"][:, asked.var_names.isin(few.var_names)] > 0).all()


@pytest.mark.parametrize(
    ("anchors", "words"),
    [
        ("nothing", "neither a file nor a column of obs"),
        ([1, 2, 3], "anchors: expected an AnnData, a table"),
        (pd.DataFrame({"x": [1.0], "y": [2.0]}, index=["nobody"]), "name no cell of the input"),
    ],
)
def test_what_is_no_anchor_is_refused(model, slices, anchors, words):
    with pytest.raises(InputError, match=words):
        model.predict_positions(slices[0], anchors=anchors)
    assert "spatial_pred" not in slices[0].obsm


def test_anchors_and_a_reference_are_two_frames(model, slices, known):
    slices[0].obs["known"] = known
    with pytest.raises(InputError, match="give one of both"):
        model.predict_positions(slices[0], anchors="known", reference=slices[1])
