"""The page's data: what is packed comes back, what is chosen is chosen for a reason."""

import base64
import json
import zlib
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from anndata import AnnData
from hypothesis import given
from hypothesis import strategies as st

from alphastomics.errors import InputError
from alphastomics.evaluation.calibration import Envelope
from alphastomics.evaluation.calibration import calibration as evaluation_calibration
from alphastomics.evaluation.neighbours import morans_i, spatial_neighbours
from alphastomics.generation.radii import Radii
from alphastomics.preprocessing.cell_source import SourceOptions
from alphastomics.report import prepare
from alphastomics.report.curves import CURVE_POINTS, curve_data
from alphastomics.report.findings import Curve
from alphastomics.report.groups import (
    Groups,
    clusters_of,
    error_by_group,
    groups_of,
    obs_columns,
)
from alphastomics.report.packing import numbers
from alphastomics.report.page import plotly_script, render, script_json
from alphastomics.report.prepare import (
    calibration_curve,
    chosen_genes,
    column_data,
    gene_levels,
    moran_of,
    page_data,
    require_genes,
    score_data,
    shown_rows,
    spanned,
)
from tests.report.tissue import EVIL, TYPES, make_cells, make_findings


def unpacked(text: str, kind: type) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=kind)


def test_the_page_begins_with_the_verdict_of_each_task_that_was_scored():
    cells = make_cells(60)
    methods = {"alphastomics": {"spearman_mean": 0.4}, "ridge": {"spearman_mean": 0.2}}
    data = page_data(make_findings(cells, scores={"expr_to_pos": methods}), 1, [], 50)
    assert data["verdict"] == [
        "positions of cells: Spearman 0.400, ridge 0.200, chance 0: "
        "good: better than every baseline"
    ]
    assert page_data(make_findings(cells, scores=None), 1, [], 50)["verdict"] == []


def test_all_cells_are_shown_until_there_are_too_many():
    cells = make_cells(100, slices=3)
    assert shown_rows(cells, 100, 1).tolist() == list(range(100))


def test_of_too_many_cells_every_slice_keeps_its_share_and_none_comes_twice():
    cells = make_cells(1000, slices=4)
    rows = shown_rows(cells, 200, 1)
    assert len(set(rows.tolist())) == len(rows) == 200
    assert np.bincount(cells.slice_id[rows]).tolist() == [50] * 4
    assert rows.tolist() == shown_rows(cells, 200, 1).tolist()
    assert rows.tolist() != shown_rows(cells, 200, 2).tolist()


@pytest.mark.parametrize("values", [[-3.0, 0.25, 7.5], [2.0, 2.0], [1e9, 1e9 + 1, 1e9 + 2]])
def test_packed_values_come_back_within_a_level(values: list[float]):
    entry = spanned(np.array(values))
    words = unpacked(entry["data"], "<u2")
    step = (entry["high"] - entry["low"]) / 65535
    np.testing.assert_allclose(entry["low"] + words * step, values, rtol=0, atol=step)


def test_a_gene_has_one_scale_for_truth_and_prediction_and_says_where_it_was_not_measured():
    true = np.linspace(0, 10, 200, dtype=np.float32)[:, None]
    measured = np.ones((200, 1), dtype=bool)
    measured[:20] = False
    (entry,) = gene_levels(true, {"predicted": true / 2}, measured, ["A"])
    low, high = np.quantile(true[20:], (0.01, 0.99))
    assert (entry["low"], entry["high"]) == (pytest.approx(low), pytest.approx(high))
    levels = {part: unpacked(entry[part], "u1") for part in ("true", "predicted")}
    assert (levels["true"][:20] == 255).all()
    assert (levels["true"][20:] < 255).all()
    back = entry["low"] + levels["predicted"] / 254 * (entry["high"] - entry["low"])
    inside = (true[:, 0] / 2 > low) & (true[:, 0] / 2 < high)
    np.testing.assert_allclose(back[inside], true[inside, 0] / 2, atol=(high - low) / 254)


def test_a_gene_that_nobody_measured_is_marked():
    (entry,) = gene_levels(np.zeros((5, 1), np.float32), {}, np.zeros((5, 1), dtype=bool), ["A"])
    assert (unpacked(entry["true"], "u1") == 255).all()


@pytest.mark.parametrize("dims", [2, 3])
def test_errors_that_keep_the_promise_of_their_std_are_calibrated(dims: int):
    random = np.random.default_rng(0)
    std = random.uniform(1, 5, 20_000)
    error = np.linalg.norm(random.normal(size=(20_000, dims)), axis=1) * std / np.sqrt(dims)
    result = calibration_curve(error, std, dims)
    assert result["ratio"] == pytest.approx(1, abs=0.02)
    np.testing.assert_allclose(result["covered"], result["level"], atol=0.015)
    np.testing.assert_allclose(result["error"], result["std"], rtol=0.06)
    sure = calibration_curve(error, std / 2, dims)
    assert sure["ratio"] == pytest.approx(2, abs=0.04)
    assert all(np.array(sure["covered"]) < np.array(sure["level"]))


def test_the_ratio_on_the_page_is_that_of_test():
    random = np.random.default_rng(1)
    position = random.normal(size=(90, 2)).astype(np.float32)
    slice_id = np.repeat([0, 1], [30, 60])
    deviation = random.uniform(0.1, 0.5, size=(90, 2)) * (1 + slice_id)[:, None]
    estimate = position + random.normal(size=(90, 2))
    scored = []
    for number in (0, 1):
        rows = slice_id == number
        samples = Envelope(position[rows], position[rows], deviation[rows], 4)
        scored.append(evaluation_calibration(estimate[rows], position[rows], samples))
    error = np.linalg.norm(estimate - position, axis=1)
    result = calibration_curve(error, np.linalg.norm(deviation, axis=1), 2, slice_id)
    means = np.average(np.array(scored), axis=0, weights=[30, 60])
    assert result["ratio"] == pytest.approx(means[2])
    assert result["correlation"] == pytest.approx(means[3])


def test_a_std_of_zero_covers_nothing_and_divides_by_nothing():
    result = calibration_curve(np.ones(30), np.zeros(30), 2)
    assert result["covered"] == [0.0] * len(result["level"])
    assert result["correlation"] is result["ratio"] is None
    assert calibration_curve(np.ones(2), np.ones(2), 2)["std"] == [1.0]


def test_spatial_order_is_that_of_the_metrics_and_unknown_where_nothing_was_measured():
    cells = make_cells(90, slices=1)
    graph = spatial_neighbours(cells.position[:, :2], k=6)
    # Neighbours are the same whatever the order of the cells.
    expected = morans_i(torch.from_numpy(cells.expression), graph).numpy()
    np.testing.assert_allclose(moran_of(cells, cells.expression, 1), expected, rtol=1e-5)
    cells.measured[0, 2] = False
    assert np.isnan(moran_of(cells, cells.expression, 1)[2])


def test_wanted_genes_come_first_then_the_most_spatial_while_there_is_room():
    genes, moran = ["a", "b", "c", "d"], np.array([0.1, 0.9, np.nan, 0.5])
    assert chosen_genes(genes, moran, [], 2).tolist() == [1, 3]
    assert chosen_genes(genes, moran, ["c", "c", "a"], 3).tolist() == [2, 0, 1]
    assert chosen_genes(genes, moran, ["c", "a"], 1).tolist() == [2, 0]
    assert chosen_genes(genes, moran, [], 9).tolist() == [1, 3, 0, 2]
    with pytest.raises(InputError, match="--genes: 'Gad1' is none of the checkpoint's 4 genes"):
        require_genes(["a", "Gad1"], genes)


def test_numbers_that_json_does_not_know_become_null():
    assert numbers([1.0, np.nan, np.inf, 0.123456789]) == [1.0, None, None, 0.12346]


def test_types_are_numbered_from_the_most_frequent():
    cells = make_cells(200)
    kind, names, codes = groups_of(cells, 1)
    assert kind == "Cell type"
    counts = np.bincount(codes)
    assert sorted(names) == sorted(TYPES)
    assert list(counts) == sorted(counts, reverse=True)
    assert [names[code] for code in codes] == list(cells.cell_type)
    assert groups_of(make_cells(15, types=False), 1) is None


def test_clusters_stand_in_where_there_are_no_types():
    random = np.random.default_rng(0)
    true = np.repeat(np.arange(4), 30)
    expression = (10 * np.eye(6)[true] + random.normal(size=(120, 6))).astype(np.float32)
    result = clusters_of(expression, 1)
    assert result.kind == "Cluster"
    assert result.names[0] == "cluster 1"
    # Finer than the truth perhaps, but no cluster holds cells of two groups.
    assert all(len(set(true[result.codes == code])) == 1 for code in range(len(result.names)))
    data = page_data(make_findings(make_cells(120, types=False)), 1, [], 1000)
    assert data["types_are"] == "Cluster"
    assert len(data["types"]) == 8


def test_errors_are_summed_up_by_group_the_worst_first():
    groups = Groups("Cell type", ["a", "b", "absent"], np.array([0, 0, 0, 1, 1]))
    error, std = np.array([1.0, 2.0, 9.0, 5.0, 7.0]), np.array([1.0, 1.0, 2.0, 3.0, 5.0])
    result = error_by_group(groups, error, std)
    assert [one["name"] for one in result] == ["b", "a"]
    assert result[0] == {"name": "b", "cells": 2, "error": 6.0, "std": 4.0}
    assert result[1]["error"] == 2.0
    assert error_by_group(None, error, None) is None


def test_errors_of_anchors_do_not_count_and_radii_say_what_they_hold():
    cells = make_cells(100, 1)
    findings = make_findings(cells)
    free = np.arange(100) >= 40
    error = np.where(free, np.arange(100.0), 0)
    radius = np.where(free, 89.5, 0)
    position = replace(
        findings.predicted_position,
        error=error,
        radii=Radii(radius, 0.9, "anchors", ~free),
        coverage=((0.5, 0.4), (0.9, 0.8)),
        free=free,
    )
    data = page_data(replace(findings, predicted_position=position), 0, (), 1000)
    shown = data["predicted_position"]
    assert shown["error_median"] == np.median(error[free])
    assert sum(group["cells"] for group in shown["by_group"]) == 60
    assert shown["radius"]["held"] == pytest.approx(50 / 60)
    assert shown["radius"]["median"] == 89.5
    assert not shown["radius"]["by_section"]
    assert shown["anchors"] is not None
    assert not shown["assigned"]


def test_columns_of_obs_become_colours(tmp_path):
    random = np.random.default_rng(0)
    obs = pd.DataFrame(
        {
            "region": pd.Categorical(["cortex", "thalamus", "cortex", None] * 15),
            "batch": ["one", "two"] * 30,
            "leiden": np.arange(60) % 5,
            "depth": np.where(np.arange(60) == 3, np.nan, random.normal(size=60)),
            "barcode": [f"cell-{number}" for number in range(60)],
            "constant": np.ones(60),
        },
        index=[str(number) for number in range(60)],
    )
    AnnData(np.ones((60, 2), np.float32), obs=obs).write_h5ad(tmp_path / "cells.h5ad")
    result = {
        column.name: column for column in obs_columns(tmp_path / "cells.h5ad", 60, SourceOptions())
    }
    assert set(result) == {"region", "batch", "leiden", "depth"}
    assert result["region"].names == ["cortex", "thalamus", "unknown"]
    assert result["leiden"].names is not None
    assert result["depth"].names is None
    data = column_data(result["depth"], np.arange(60))
    assert unpacked(data["levels"], "u1")[3] == 255
    region = column_data(result["region"], np.arange(8))
    assert unpacked(region["codes"]["data"], "<u2").tolist() == [0, 1, 0, 2, 0, 1, 0, 2]
    assert obs_columns(tmp_path, 60, SourceOptions()) == []


def test_scores_become_tables_with_known_metrics_first_and_headlines_that_exist():
    scores = {
        "expr_to_pos": {
            "alphastomics": {"zeta": 1.0, "procrustes": float("nan")},
            "MLP": {"zeta": 2.0},
            "class centroid oracle": {"zeta": 3.0},
        },
        "other": {"alphastomics": {"zeta": 1.0}},
    }
    (table,) = score_data(scores)
    assert [metric["name"] for metric in table["metrics"]] == ["procrustes", "zeta"]
    assert table["headlines"] == ["procrustes"]
    assert table["metrics"][1]["better"] == "unknown"
    assert table["values"]["alphastomics"] == {"zeta": 1.0, "procrustes": None}
    assert table["aside"] == ["class centroid oracle"]
    # Which way of an unknown metric is better is not known.
    assert [metric["best"] for metric in table["metrics"]] == [None, None]


def test_curves_of_the_losses_keep_their_ends_when_they_are_thinned():
    steps = np.arange(5000.0)
    result = curve_data(
        {
            "train/loss": Curve(steps, -steps),
            "train/learning_rate": Curve(steps, steps),
            "gate/activation_mean": Curve(steps, steps),
        }
    )
    assert list(result) == ["train/loss"]
    curve = result["train/loss"]
    assert len(curve["step"]) <= CURVE_POINTS
    assert (curve["step"][0], curve["step"][-1], curve["value"][-1]) == (0, 4999, -4999)


def test_more_genes_than_there_is_room_for_are_left_out_and_counted(monkeypatch):
    monkeypatch.setattr(prepare, "MOST_GENE_VALUES", 120 * 3 * 2)
    data = page_data(make_findings(make_cells(120)), 1, [], 1000)
    assert (len(data["genes"]), data["num_genes"]) == (2, 6)


def test_cells_beyond_the_limit_are_left_out_of_the_picture_and_counted():
    data = page_data(make_findings(make_cells(120)), 1, [], 50)
    assert (data["shown"], data["cells"]) == (50, 120)
    assert len(unpacked(data["position"]["x"]["data"], "<u2")) == 50
    assert len(unpacked(data["predicted_position"]["error"]["data"], "<u2")) == 50


@given(st.text() | st.sampled_from(["</script>", "<!--", "]]>", "\u2028\u2029", "&lt;"]))
def test_no_text_can_leave_its_block_and_every_text_comes_back(text: str):
    spelled = script_json({"name": text})
    assert not set("<>&\u2028\u2029") & set(spelled)
    assert json.loads(spelled) == {"name": text}


def test_nothing_of_the_data_is_markup_of_the_page():
    findings = make_findings(make_cells())
    page = render(page_data(findings, 1, [], 1000))
    assert EVIL not in page
    assert "<b>slice" not in page
    assert "onerror=alert(2)>" not in page
    # A gene called {{plotly}} is a name, and no place for plotly.js.
    assert "{{plotly}}" in page
    assert page.count(plotly_script()) == 1


def test_a_page_needs_no_network():
    page = render(page_data(make_findings(make_cells()), 1, [], 1000))
    assert "default-src 'none'" in page
    assert "<script src" not in page
    assert "<link" not in page.split("<script>")[0]


def test_the_same_findings_and_seed_make_the_same_data():
    one, other = (page_data(make_findings(make_cells()), 1, [], 50) for _ in range(2))
    assert one == other
