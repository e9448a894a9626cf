"""Anchors: they stay, all others come into their frame, nearer than before, with honest radii."""

import logging
from dataclasses import replace
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from alphastomics.config import SamplingConfig
from alphastomics.errors import InputError
from alphastomics.generation.anchors import (
    anchored_slice,
    check_anchors,
    left_out_prior,
    with_anchors,
)
from alphastomics.generation.cells import Blank, InputCells, blank_cells
from alphastomics.generation.commands import frame_of, sample
from alphastomics.generation.frame import KnownPositions, fitted
from alphastomics.generation.generate import Generated
from alphastomics.generation.known_positions import anchors_of_table
from alphastomics.generation.predict import require_placeable
from alphastomics.generation.radii import conformal_factor, least_cells
from tests.generation.conftest import QUICK, SETTINGS, checkpoint

CELLS, GENES = 1200, 20
ROTATION = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])  # a mirror image


@pytest.fixture(scope="module")
def tissue() -> tuple[InputCells, np.ndarray, np.ndarray]:
    """Cells whose expression follows their position, noisily; where they are; an estimate of it."""
    rng = np.random.default_rng(3)
    true = np.zeros((CELLS, 3))
    true[:, :2] = rng.uniform(-500, 500, size=(CELLS, 2))
    waves = rng.normal(size=(2, GENES)) / 300
    values = np.sin(true[:, :2] @ waves + rng.uniform(0, 6, size=GENES))
    # Half of the cells say less than the others.
    noise = np.where(true[:, :1] > 0, 0.6, 0.15)
    expression = values + noise * rng.normal(size=values.shape)
    estimate = 0.6 * true + np.sin(true[:, [1, 0, 2]] / 150) * 60
    blank = blank_cells(Blank(CELLS), GENES, dims=2)
    return replace(blank, expression=expression.astype(np.float32)), true, estimate


def anchored(
    tissue: tuple[InputCells, np.ndarray, np.ndarray],
    number: int,
    move=lambda position: position,
    settings: SamplingConfig | None = None,
) -> tuple[Generated, np.ndarray]:
    """Place the tissue by so many anchors, moved as one likes; say which they were."""
    cells, true, estimate = tissue
    known = np.isin(np.arange(CELLS), np.random.default_rng(5).permutation(CELLS)[:number])
    anchors = np.where(known[:, None], move(true), np.nan)
    zeros = np.zeros((CELLS, 3), np.float32)
    generated = Generated(cells.expression, cells.expression, estimate.astype(np.float32), zeros)
    settings = settings or SamplingConfig()
    cells = replace(cells, anchors=anchors)
    return with_anchors(cells, generated, settings, 0, reflection=True), known


def errors(position: np.ndarray, true: np.ndarray) -> np.ndarray:
    return np.linalg.norm(position - true, axis=1)


def test_anchors_stay_and_the_others_come_nearer_the_more_there_are(tissue):
    _, true, estimate = tissue
    before = errors(estimate, true).mean()
    means = []
    for number in (5, 50, 500):
        generated, known = anchored(tissue, number)
        np.testing.assert_array_equal(generated.position[known], true[known])
        means.append(errors(generated.position, true)[~known].mean())
    assert before > means[0] > means[1] > means[2]
    assert means[2] < 0.5 * before


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.95])
def test_radii_hold_the_share_of_cells_that_they_promise(tissue, level):
    _, true, _ = tissue
    generated, known = anchored(tissue, 400, settings=SamplingConfig(radius_level=level))
    inside = errors(generated.position, true)[~known] <= generated.radii.radius[~known]
    assert inside.mean() == pytest.approx(level, abs=0.05)
    assert (generated.radii.radius[known] == 0).all()


def test_radii_and_std_are_larger_where_cells_are_predicted_worse(tissue):
    _, true, _ = tissue
    generated, known = anchored(tissue, 400)
    noisy = true[:, 0] > 100
    radius = generated.radii.radius
    assert radius[noisy & ~known].mean() > 1.2 * radius[(true[:, 0] < -100) & ~known].mean()
    error = errors(generated.position, true)[~known]
    ratio = np.sqrt((error**2).mean() / (generated.position_std[~known] ** 2).sum(1).mean())
    assert ratio == pytest.approx(1, abs=0.15)


def test_another_frame_and_unit_of_the_anchors_are_those_of_the_result(tissue):
    here, known = anchored(tissue, 200)
    shift = np.array([1e4, -500.0, 0.0])
    there, _ = anchored(tissue, 200, lambda position: 1e-3 * position @ ROTATION + shift)
    expected = 1e-3 * here.position @ ROTATION + shift
    np.testing.assert_allclose(there.position, expected, atol=5e-3)
    np.testing.assert_allclose(there.radii.radius, 1e-3 * here.radii.radius, rtol=0.1, atol=1e-9)
    assert known.sum() == 200


@pytest.mark.parametrize(("factor", "said"), [(1.0, False), (1e-3, True), (50.0, True)])
def test_anchors_of_another_unit_are_said_by_their_extent(tissue, caplog, factor, said):
    cells, true, _ = tissue
    known = (np.arange(CELLS) < 60)[:, None]
    anchors = np.where(known, factor * true, np.nan)
    check_anchors(replace(cells, anchors=anchors), 288.0, reflection=True)
    assert ("in another unit" in caplog.text) == said


def test_a_poor_estimate_is_not_taken_for_another_unit(tissue, caplog):
    cells, true, _ = tissue
    noise = np.pad(np.random.default_rng(0).normal(size=(CELLS, 2)) * 300, ((0, 0), (0, 1)))
    anchored((cells, true, noise), 200)
    assert "unit" not in caplog.text


def test_a_sample_is_as_far_off_as_the_radii_say(tissue):
    estimate, known = anchored(tissue, 400)
    drawn, _ = anchored(tissue, 400, settings=SamplingConfig(estimator="sample"))
    again, _ = anchored(tissue, 400, settings=SamplingConfig(estimator="sample"))
    np.testing.assert_array_equal(drawn.position, again.position)
    away = errors(drawn.position, estimate.position)
    assert (away[known] == 0).all()
    assert (away <= estimate.radii.radius)[~known].mean() == pytest.approx(0.9, abs=0.04)
    # The radius about a sample reaches as far as that about the estimate.
    np.testing.assert_allclose(drawn.radii.radius, estimate.radii.radius + away, rtol=1e-6)


def test_factors_by_hand():
    errors_of_nine = np.arange(1.0, 10.0)
    assert conformal_factor(errors_of_nine, 0.5) == 5
    assert conformal_factor(errors_of_nine, 0.9) == 9
    assert np.isnan(conformal_factor(errors_of_nine, 0.91))
    assert (least_cells(0.5), least_cells(0.9), least_cells(0.95)) == (1, 9, 19)


def test_too_few_anchors_for_a_level_are_said_and_leave_the_radius_empty(tissue, caplog):
    generated, known = anchored(tissue, 19)
    assert np.isnan(generated.radii.radius[~known]).all()
    assert (
        "19 anchors are too few for a radius that holds 90 % of the cells: at least 20"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([0, 1], "2 known position(s); at least 3"),
        (range(6), "lie on one line"),
        ([5] * 4, "lie on one point"),
    ],
)
def test_anchors_that_leave_the_tissue_free_are_refused(tissue, rows, words):
    cells, true, estimate = tissue
    anchors = np.full_like(true, np.nan)
    anchors[: len(rows)] = np.outer(rows, [1.1, 2.3, 0.0])
    with pytest.raises(InputError, match=r"anchors: slice generated_0: .*") as refusal:
        anchored_slice(
            replace(cells, anchors=anchors), np.arange(CELLS), estimate, "generated_0", 0, 9,
            reflection=True,
        )  # fmt: skip
    assert words in str(refusal.value)
    with pytest.raises(InputError) as early:
        check_anchors(replace(cells, anchors=anchors), 300.0, reflection=True)
    assert str(early.value) == str(refusal.value)


def test_a_slice_without_anchors_is_said_to_stay_in_a_frame_of_its_own(tissue, caplog):
    cells, true, estimate = tissue
    two = replace(
        cells,
        slice_id=np.repeat([0, 1], CELLS // 2),
        slice_names=["here", "there"],
        measured=np.ones((2, GENES), dtype=bool),
        anchors=np.where((np.arange(CELLS) < 100)[:, None], true, np.nan),
    )
    zeros = np.zeros((CELLS, 3), np.float32)
    generated = Generated(cells.expression, cells.expression, estimate.astype(np.float32), zeros)
    result = with_anchors(two, generated, SamplingConfig(), 0, reflection=True)
    np.testing.assert_array_equal(result.position[600:], generated.position[600:])
    assert np.isnan(result.radii.radius[600:]).all()
    assert "slice there: has no anchors" in caplog.text


def test_a_section_that_is_stored_with_its_height_is_planar_all_the_same(tissue):
    cells, true, _ = tissue
    tall = true + np.array([0, 0, 42.0])
    flat, known = anchored(tissue, 100)
    raised = replace(cells, dims=3), tall, tissue[2]
    generated, _ = anchored(raised, 100)
    np.testing.assert_allclose(generated.position[:, 2], 42)
    np.testing.assert_allclose(generated.position[:, :2], flat.position[:, :2], atol=1e-6)
    assert known.sum() == 100


def test_names_that_stand_for_two_cells_are_refused(tissue):
    cells, _, _ = tissue
    double = replace(
        cells, obs_name=pa.array(["same", *cells.names[1:5], "same", *cells.names[6:]])
    )
    table = pd.DataFrame({"x": [1.0], "y": [4.0]}, index=["same"])
    with pytest.raises(InputError, match="the input: cell 'same' is there twice"):
        anchors_of_table(double, table)
    with pytest.raises(InputError, match="anchors: cell 'cell_0' is there twice"):
        anchors_of_table(cells, pd.DataFrame({"x": [1.0, 2], "y": [4.0, 5]}, index=["cell_0"] * 2))
    with pytest.raises(InputError, match="coordinates are numbers"):
        anchors_of_table(cells, pd.DataFrame({"x": ["a"], "y": [4.0]}, index=["cell_0"]))


def test_a_table_names_cells_and_has_all_their_coordinates(tissue):
    cells, _, _ = tissue
    names = cells.names[:3]
    table = pd.DataFrame({"x": [1.0, 2, 3], "y": [4.0, 5, 6]}, index=names)
    found = anchors_of_table(cells, table).anchors
    np.testing.assert_array_equal(found[:3], [[1, 4, 0], [2, 5, 0], [3, 6, 0]])
    assert np.isnan(found[3:]).all()
    with pytest.raises(InputError, match="1 of 3 anchors name no cell of the input"):
        anchors_of_table(cells, table.rename(index={names[0]: "nobody"}))
    with pytest.raises(InputError, match="row 1 has NaN"):
        anchors_of_table(cells, table.assign(y=[4.0, np.nan, 6]))
    with pytest.raises(InputError, match="columns x, y"):
        anchors_of_table(cells, table[["x"]])


@pytest.fixture
def query(workspace: Path, tmp_path: Path) -> anndata.AnnData:
    return anndata.read_h5ad(workspace / "slices/slice_0.h5ad")


def placed(workspace: Path, data: anndata.AnnData, folder: Path, **options) -> anndata.AnnData:
    """Run `sample` on cells, and read what it wrote."""
    source, target = folder / "query.h5ad", folder / "placed.h5ad"
    data.write_h5ad(source)
    mode = options.pop("mode", "expr_to_pos")
    estimator = options.pop("estimator", "mean")
    sampling = QUICK.model_copy(update={"mode": mode, "estimator": estimator})
    config = SETTINGS.model_copy(update={"sampling": sampling})
    sample(
        config, checkpoint=checkpoint(workspace), input_data=source, output=target, split="test",
        overwrite=True, **options,
    )  # fmt: skip
    return anndata.read_h5ad(target)


def with_some(data: anndata.AnnData, number: int) -> tuple[anndata.AnnData, np.ndarray, np.ndarray]:
    """Hide the positions of all cells but some; return which these are, and the truth."""
    true = np.asarray(data.obsm["spatial"], dtype=np.float64).copy()
    known = np.isin(
        np.arange(data.n_obs), np.random.default_rng(1).permutation(data.n_obs)[:number]
    )
    data = data.copy()
    data.obsm["spatial"] = np.where(known[:, None], true, np.nan)
    return data, known, true


def test_positions_that_are_not_nan_are_anchors(workspace, query, tmp_path, caplog):
    data, known, true = with_some(query, 30)
    with caplog.at_level(logging.INFO):
        result = placed(workspace, data, tmp_path)
    np.testing.assert_allclose(result.obsm["spatial_pred"][known], true[known], rtol=1e-6)
    np.testing.assert_array_equal(result.obs["position_is_anchor"], known)
    assert np.isfinite(result.obs["position_radius_90"]).all()
    record = result.uns["alphastomics"]["expr_to_pos"]
    assert record["radius_calibrated_by"] == "anchors"
    assert record["spatial_std_calibrated"]
    assert "30 of 90 cells have a known position: anchors" in caplog.text
    assert "not calibrated" not in caplog.text


def test_a_file_a_csv_and_a_column_give_the_same_anchors(workspace, query, tmp_path):
    data, known, true = with_some(query, 30)
    by_nan = placed(workspace, data, tmp_path).obsm["spatial_pred"]
    bare = query.copy()
    del bare.obsm["spatial"]
    query[known].copy().write_h5ad(tmp_path / "known.h5ad")
    table = pd.DataFrame(true[known], index=query.obs_names[known], columns=["x", "y"])
    table.to_csv(tmp_path / "known.csv")
    marked = query.copy()
    marked.obs["known"] = known
    for cells, anchors in (
        (bare, str(tmp_path / "known.h5ad")),
        (bare, str(tmp_path / "known.csv")),
        (marked, "known"),
    ):
        found = placed(workspace, cells, tmp_path, anchors=anchors).obsm["spatial_pred"]
        np.testing.assert_allclose(found, by_nan, rtol=1e-5)


def test_assigned_cells_have_positions_of_their_own(workspace, query, tmp_path):
    data, known, true = with_some(query, 30)
    result = placed(workspace, data, tmp_path, estimator="assigned")
    position = result.obsm["spatial_pred"]
    np.testing.assert_allclose(position[known], true[known], rtol=1e-6)
    assert len(np.unique(position, axis=0)) == len(position)
    reference = workspace / "slices/slice_1.h5ad"
    bare = query.copy()
    del bare.obsm["spatial"]
    frame = frame_of(reference, None, scale=False)
    onto = placed(workspace, bare, tmp_path, estimator="assigned", frame=frame)
    available = anndata.read_h5ad(reference).obsm["spatial"]
    found = {tuple(at) for at in onto.obsm["spatial_pred"].astype(np.float32).tolist()}
    assert found == {tuple(at) for at in np.asarray(available, dtype=np.float32).tolist()}


def test_known_cells_around_say_what_is_expressed_at_a_position(workspace, query, tmp_path):
    known = np.isin(np.arange(query.n_obs), np.random.default_rng(1).permutation(90)[:60])
    query[known].copy().write_h5ad(tmp_path / "known.h5ad")
    asked = query[~known].copy()
    asked.obs_names = [f"asked_{name}" for name in asked.obs_names]
    result, without = (
        placed(workspace, asked, tmp_path, mode="pos_to_expr", anchors=anchors)
        for anchors in (str(tmp_path / "known.h5ad"), None)
    )
    assert not np.allclose(result.layers["generated"], without.layers["generated"], equal_nan=True)
    assert (np.nanvar(result.layers["generated"], axis=0) > 0).all()


def partly_nan(data: anndata.AnnData) -> anndata.AnnData:
    data, known, _ = with_some(data, 30)
    data.obsm["spatial"][np.flatnonzero(known)[0], 1] = np.nan
    return data


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (partly_nan, {}, "NaN for all where its position is not known"),
        (lambda data: with_some(data, 2)[0], {}, "2 known position(s); at least 3"),
        (lambda data: with_some(data, 30)[0], {"mode": "pos_to_expr"}, "have no position (NaN)"),
        (lambda data: data, {"anchors": "nothing"}, "neither a file nor a column of obs"),
        (lambda data: data, {"anchors": "cell_type"}, "not a column of True and False"),
        (lambda data: data, {"estimator": "assigned"}, "--reference, or give --anchors"),
        (lambda data: with_some(data, 30)[0], {"frame": "slice_1"}, "the input has anchors"),
        (
            lambda data: data,
            {"estimator": "assigned", "mode": "pos_to_expr"},
            "--estimator assigned: is for positions",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_clear_line(workspace, query, tmp_path, change, options, words):
    if "frame" in options:
        frame = frame_of(workspace / f"slices/{options['frame']}.h5ad", None, scale=False)
        options = {"frame": frame}
    with pytest.raises(InputError) as refusal:
        placed(workspace, change(query), tmp_path, **options)
    assert words in str(refusal.value)
    assert not (tmp_path / "placed.h5ad").exists()


def test_an_anchor_that_is_left_out_does_not_fix_its_own_frame(tissue):
    _, true, estimate = tissue
    rows, where = np.arange(8), {"dims": 2, "scale": True, "reflection": True, "where": "here"}
    left = []
    for far in (0.0, 1e4):
        at = true[rows].copy()
        at[3] += [far, -far, 0]
        fit = fitted(estimate[rows], KnownPositions(rows, at), **where)
        left.append(left_out_prior(estimate[rows], at, fit, 2, reflection=True))
    np.testing.assert_allclose(left[0][3], left[1][3])
    assert np.abs(left[0][4] - left[1][4]).max() > 100
    others = rows[rows != 3]
    naive = fitted(estimate[others], KnownPositions(others, true[others]), **where)
    np.testing.assert_allclose(left[0][3], naive.apply(estimate[3:4])[0])


def test_high_levels_are_calibrated_by_as_many_anchors_as_they_need(tissue, caplog):
    from alphastomics.generation import anchor_regression

    with pytest.MonkeyPatch.context() as patch, caplog.at_level("INFO"):
        patch.setattr("alphastomics.generation.anchors.JUDGED", 50)
        patch.setattr(anchor_regression, "OTHER_CELLS", 100)
        settings = SamplingConfig(radius_level=0.99)
        result, known = anchored(tissue, 400, settings=settings)
    assert result.radii is not None
    assert np.isfinite(result.radii.radius[~known]).all()
    assert "99 % of the cells are calibrated" in caplog.text


def test_a_query_of_anchors_alone_has_nothing_to_predict(tissue):
    cells, true, _ = tissue
    everything = replace(cells, anchors=true)
    with pytest.raises(InputError, match="nothing to predict"):
        require_placeable(everything, "expr_to_pos", SamplingConfig(), None, None)
