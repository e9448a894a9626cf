"""A reference section: other cells of the tissue are anchors, and positions come out among them."""

import logging
from dataclasses import replace
from pathlib import Path

import anndata
import numpy as np
import pytest
from scipy.spatial.distance import pdist

from alphastomics.config import SamplingConfig
from alphastomics.errors import InputError
from alphastomics.generation.anchors import with_anchors
from alphastomics.generation.cells import Blank, InputCells, blank_cells
from alphastomics.generation.commands import frame_of
from alphastomics.generation.generate import Generated
from alphastomics.generation.section import (
    beside_section,
    is_section,
    section_of,
    slices_unlike,
)
from tests.generation.test_anchors import placed


@pytest.fixture
def query(workspace: Path) -> anndata.AnnData:
    data = anndata.read_h5ad(workspace / "slices/slice_0.h5ad")
    data.obs_names = [f"a_{name}" for name in data.obs_names]
    del data.obsm["spatial"]
    return data


@pytest.fixture
def section(workspace: Path, tmp_path: Path) -> Path:
    data = anndata.read_h5ad(workspace / "slices/slice_1.h5ad")
    data.obs_names = [f"b_{name}" for name in data.obs_names]
    data.obs["slice_id"] = "another"
    data.obsm["spatial"] = np.asarray(data.obsm["spatial"]) + np.array([1e4, -500])
    data.write_h5ad(tmp_path / "section.h5ad")
    return tmp_path / "section.h5ad"


def cells_of(seed: int, slices: int = 1, prefix: str = "q") -> InputCells:
    blank = blank_cells(Blank(30, slices), 5, dims=2)
    rng = np.random.default_rng(seed)
    names = blank.obs_name.to_pylist()
    return replace(
        blank,
        obs_name=type(blank.obs_name).from_pandas(np.array([f"{prefix}{n}" for n in names])),
        expression=rng.normal(size=blank.expression.shape).astype(np.float32),
        position=np.pad(rng.normal(size=(len(names), 2)), ((0, 0), (0, 1))),
    )


def test_every_slice_gets_the_section_as_its_anchors_over_the_genes_of_both():
    query, section = cells_of(0, slices=2), cells_of(1, prefix="s")
    query.measured[1, 2] = section.measured[0, 4] = False
    both = beside_section(query, section)
    np.testing.assert_array_equal(both.slice_id[:60], query.slice_id)
    assert np.isnan(both.anchors[:60]).all()
    for number in (0, 1):
        rows = both.rows_of(number)[30:]
        np.testing.assert_array_equal(both.anchors[rows], section.position)
        shared = query.measured[number] & section.measured[0]
        np.testing.assert_array_equal(both.measured[number], shared)
        np.testing.assert_array_equal(
            both.expression[rows][:, shared], section.expression[:, shared]
        )
        assert (both.expression[both.rows_of(number)][:, ~shared] == 0).all()


def test_cells_of_the_query_and_cells_that_only_count_rows_are_no_section():
    query, section = cells_of(0), cells_of(1, prefix="s")
    assert is_section(query, section)
    assert not is_section(query, cells_of(1))
    assert not is_section(query, replace(section, position=None))
    nothing = np.zeros_like(section.expression)
    assert not is_section(query, replace(section, expression=nothing))
    with pytest.raises(InputError, match="has 2 slices"):
        section_of(query, cells_of(1, slices=2, prefix="s"), "section.h5ad")
    other = replace(section, measured=~section.measured)
    with pytest.raises(InputError, match=r"section\.h5ad: shares no gene with slice generated_0"):
        section_of(query, other, "section.h5ad")


def test_positions_come_out_in_the_frame_of_the_section_with_radii_of_another_section(
    workspace, query, section, tmp_path, caplog
):
    with caplog.at_level(logging.INFO):
        result = placed(workspace, query, tmp_path, anchors=str(section))
    where = np.asarray(anndata.read_h5ad(section).obsm["spatial"])
    low, high = where.min(0), where.max(0)
    position = result.obsm["spatial_pred"]
    assert ((position > low - 100) & (position < high + 100)).all()
    assert np.isfinite(result.obs["position_radius_90"]).all()
    assert "position_is_anchor" not in result.obs
    record = result.uns["alphastomics"]["expr_to_pos"]
    assert record["radius_calibrated_by"] == "another section: another"
    assert not record["spatial_std_calibrated"]
    assert "reference section" in record["spatial_std_note"]
    assert "taken as a reference section" in caplog.text
    assert "far smaller than the true error" not in caplog.text
    np.testing.assert_array_equal(result.X.toarray(), query.X.toarray())


def test_assigned_cells_take_the_positions_of_the_section(workspace, query, section, tmp_path):
    result = placed(workspace, query, tmp_path, anchors=str(section), estimator="assigned")
    where = np.asarray(anndata.read_h5ad(section).obsm["spatial"], dtype=np.float64)
    found = {tuple(at) for at in result.obsm["spatial_pred"].tolist()}
    assert found == {tuple(at) for at in where.tolist()}


def test_a_section_and_anchors_or_a_frame_are_refused(workspace, query, section, tmp_path):
    some = anndata.read_h5ad(section)
    some.obs_names = [*query.obs_names[:20], *some.obs_names[20:]]
    some.write_h5ad(tmp_path / "some.h5ad")
    with pytest.raises(InputError, match="20 of its 90 cells with a position are cells of the inp"):
        placed(workspace, query, tmp_path, anchors=str(tmp_path / "some.h5ad"))
    frame = frame_of(workspace / "slices/slice_1.h5ad", None, scale=False)
    with pytest.raises(InputError, match="--reference"):
        placed(workspace, query, tmp_path, anchors=str(section), frame=frame)
    query.obsm["spatial"] = np.full((query.n_obs, 2), np.nan)
    query.obsm["spatial"][:10] = np.random.default_rng(0).normal(size=(10, 2))
    with pytest.raises(InputError, match="positions can lie in one frame only"):
        placed(workspace, query, tmp_path, anchors=str(section))


def test_two_coordinates_for_a_model_of_volumes_are_said(workspace, query, section, caplog):
    from alphastomics.generation.commands import load_for_use
    from alphastomics.generation.predict import say_if_projected
    from tests.generation.conftest import checkpoint

    module, _ = load_for_use(checkpoint(workspace))
    for planar, said in ((True, False), (False, True)):
        caplog.clear()
        module.planar = planar
        say_if_projected(module, cells_of(1))
        assert ("projected onto the anchors' plane" in caplog.text) == said


def test_a_section_unlike_the_slice_gives_the_frame_alone(caplog):
    rng = np.random.default_rng(0)
    query, section = cells_of(0), cells_of(1, prefix="s")
    both = beside_section(query, section)
    assert slices_unlike(both, 30) == []
    other = replace(section, expression=section.expression + np.float32(8))
    both = beside_section(query, other)
    assert slices_unlike(both, 30) == [0]
    assert "100 % of a cell's nearest cells by expression are of its own section" in caplog.text
    estimate = np.pad(rng.normal(size=(60, 2)), ((0, 0), (0, 1))).astype(np.float32)
    nothing = np.zeros_like(estimate)
    generated = Generated(both.expression, both.expression, estimate, nothing)
    result = with_anchors(both, generated, SamplingConfig(), 0, reflection=True, frame_alone=[0])
    # Rotated, shifted, scaled, and otherwise as the model has them.
    before, after = (pdist(part[:30, :2]) for part in (estimate, result.position))
    np.testing.assert_allclose(after / before, (after / before)[0], rtol=1e-4)
    assert np.isnan(result.radii.radius[:30]).all()
    assert np.isnan(result.position_std[:30, :2]).all()


@pytest.mark.parametrize("unlike", [True, False])
def test_a_section_unlike_the_slice_or_of_the_training_gives_no_radii(
    workspace, query, section, tmp_path, monkeypatch, unlike
):
    # Here, or where the model was trained on the section.
    if unlike:
        monkeypatch.setattr("alphastomics.generation.section.MOST_OWN", 0.0)
    else:
        data = anndata.read_h5ad(section)
        data.obs["slice_id"] = "slice_1"
        data.write_h5ad(section)
    result = placed(workspace, query, tmp_path, anchors=str(section), estimator="sample")
    assert not [name for name in result.obs if name.startswith("position_radius")]
    record = result.uns["alphastomics"]["expr_to_pos"]
    assert "radius_calibrated_by" not in record
    reason = (
        "differs too much from the slices" if unlike else "was trained on the reference section"
    )
    assert record["spatial_std_note"].endswith(reason)
    assert record["spatial_std_note"].startswith("spatial_std is NaN: ")
    assert np.isfinite(result.obsm["spatial_pred"]).all()
