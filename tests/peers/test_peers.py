"""Benchmarks beside other programs: the simple methods, the scores and the processes."""

import argparse
import json
import sys
from pathlib import Path

import anndata
import numpy as np
import pytest
from scipy.sparse import csr_matrix
from scipy.spatial import cKDTree

from benchmarks.peers import expression, generation, imputation, positions, processes, scale
from benchmarks.peers.processes import Method, Task
from benchmarks.peers.slices import Split, log_values, part_of, smoothed, split_of

CELLS, GENES = 150, 24
TASKS = (positions.TASK, expression.TASK, imputation.TASK, generation.TASK)


def gradient_slice(name: str, seed: int) -> anndata.AnnData:
    """Cells in a square; half of the genes rise with x, half with y."""
    random = np.random.default_rng(seed)
    at = random.uniform(0, 100, (CELLS, 2))
    rate = np.repeat(at / 25, GENES // 2, axis=1)
    data = anndata.AnnData(csr_matrix(random.poisson(4 * rate + 1).astype(np.float32)))
    data.var_names = [f"g{gene:02d}" for gene in range(GENES)]
    data.obs_names = [f"{name}-{cell}" for cell in range(CELLS)]
    data.obs["slice_id"] = name
    data.obsm["spatial"] = at
    return data


@pytest.fixture(scope="module")
def other_slice() -> Split:
    return split_of([gradient_slice("a", 0)], [gradient_slice("b", 1)], {}, 0)


@pytest.fixture(scope="module")
def same_slice() -> Split:
    whole = gradient_slice("a", 2)
    return split_of([whole[30:].copy()], [whole[:30].copy()], {}, 0)


def test_a_split_holds_the_test_cells_in_their_order_and_their_log_values(other_slice: Split):
    counts = other_slice.test[0].X.toarray()
    wanted = np.log1p(counts / counts.sum(1, keepdims=True) * 1e4)
    np.testing.assert_allclose(log_values(other_slice.cells), wanted, atol=1e-3)
    np.testing.assert_allclose(
        other_slice.cells.position[:, :2], other_slice.test[0].obsm["spatial"], atol=1e-3
    )


def test_every_simple_method_predicts_positions_far_better_than_chance(other_slice: Split):
    for name in ("ExtraTrees, sqrt", "ExtraTrees, smoothed", "k-NN, smoothed", "k-NN, Laplacian"):
        found = positions.METHODS[name].run(other_slice, 0)
        scores = positions.score(other_slice, found, 0)
        assert set(scores) == {"b"}, "a slice smaller than the part is scored once"
        assert scores["b"]["spearman_mean"] > 0.3, name


def test_a_mapping_of_each_cell_to_one_known_cell_gives_that_cell_its_centred_position(
    other_slice: Split, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(positions, "PART_CELLS", 40)

    def first_cell(asked: np.ndarray, values: np.ndarray, at: np.ndarray, _seed: int):
        assert len(asked) == 40
        assert len(values) == len(at) == CELLS
        return np.eye(1, len(values)).repeat(len(asked), 0) * 3

    found = positions.mapped_parts(other_slice, 0, first_cell, is_smoothed=False)
    predicted = ~np.isnan(found).any(1)
    np.testing.assert_array_equal(np.flatnonzero(predicted), part_of(other_slice.cells, 40, 0))
    known = other_slice.known.position
    np.testing.assert_allclose(
        found[predicted], (known[:1] - known.mean(0)).repeat(40, 0), atol=1e-3
    )
    assert set(positions.score(other_slice, found, 0)) == {"b, part"}


def test_smoothing_is_the_mean_over_the_nearest_cells_of_the_same_slice():
    random = np.random.default_rng(0)
    values = random.normal(size=(40, 3)).astype(np.float32)
    groups = np.repeat([0, 1], 20)
    found = smoothed(values, groups)
    for cell in range(40):
        inside = np.flatnonzero(groups == groups[cell])
        distance = np.linalg.norm(values[inside] - values[cell], axis=1)
        nearest = inside[np.argsort(distance)[:15]]
        np.testing.assert_allclose(found[cell], values[nearest].mean(0), atol=1e-5)


def test_methods_of_expression_know_a_gradient(same_slice: Split):
    for name in ("spatial k-NN, best k", "Gaussian process"):
        found = expression.METHODS[name].run(same_slice, 0)
        scores = expression.score(same_slice, found, 0)
        assert scores["a"]["pearson_gene_mean"] > 0.3, name


def test_hidden_genes_are_predicted_from_the_nearest_training_cells():
    panels = imputation.panels_of([gradient_slice("a", 0)], gradient_slice("b", 1), 0)
    assert panels.hidden.sum() == round(0.2 * GENES)
    found = imputation.knn(panels, 0)
    assert imputation.score(panels, found, 0)["b"]["pearson_gene_mean"] > 0.2
    truth = panels.values(panels.test)[:, panels.hidden]
    assert imputation.score(panels, truth, 0)["b"]["pearson_gene_mean"] == pytest.approx(1)


def test_values_of_seen_genes_do_not_depend_on_the_hidden_ones():
    panels = imputation.panels_of([gradient_slice("a", 0)], gradient_slice("b", 1), 0)
    other = panels.test.copy()
    counts = other.X.toarray()
    counts[:, panels.hidden] *= 7
    other.X = counts
    seen = ~panels.hidden
    np.testing.assert_array_equal(
        panels.values(panels.test)[:, seen], panels.values(other)[:, seen]
    )


def test_the_resampler_returns_cells_of_the_training_slice_near_where_they_lay(same_slice: Split):
    new = generation.resampled(same_slice, 0)
    known = same_slice.known
    copies = cKDTree(known.expression).query(new.expression)
    np.testing.assert_array_equal(copies[0], 0)
    assert len(np.unique(copies[1])) == len(new.position), "no cell is copied twice"
    moved = np.linalg.norm(new.position - known.position[copies[1]], axis=1)
    assert np.median(moved) < 0.5 * 100
    assert {"new", "real, same slice", "shuffled"} <= set(generation.score(same_slice, new, 0))


def test_a_method_whose_package_is_missing_is_left_out_with_a_line(tmp_path, capsys):
    method = Method(lambda _problem, _seed: None, "no-such-package", "no_such_package")
    task = Task("positions", {"peer": method}, ["set"], None, None, ())
    arguments = argparse.Namespace(methods=["peer"], seeds=[0], sets=["set"], json=None)
    assert processes.run_all(task, arguments) == []
    assert "peer: left out, no-such-package is not installed" in capsys.readouterr().out


def test_rows_are_added_to_a_file_and_kept_by_a_second_call(tmp_path: Path, monkeypatch):
    found = {"scores": {"a": {"r": 0.5}}, "seconds": 1.0, "cpu_seconds": 1.0, "peak_mb": 1024.0}
    calls = []
    monkeypatch.setattr(processes, "run_one", lambda *call: calls.append(call) or dict(found))
    task = Task("positions", {"one": Method(len), "two": Method(len)}, ["set"], None, None, ("r",))
    arguments = argparse.Namespace(
        methods=["one"], seeds=[0, 1], sets=["set"], json=tmp_path / "rows.json", again=False
    )
    processes.run_all(task, arguments)
    arguments.methods = ["one", "two"]
    rows = processes.run_all(task, arguments)
    assert len(calls) == len(rows) == len(json.loads(arguments.json.read_text())) == 4
    assert "| set | a | one | 0.500 | 1 | 1.0 | 2 |" in processes.table(rows, ("r",))


def test_a_process_that_fails_or_takes_too_long_or_too_much_says_so():
    python = [sys.executable, "-c"]
    assert processes.run_process([*python, "pass"], 60, 4) is None
    assert processes.run_process([*python, "raise SystemExit('no 3D')"], 60, 4) == "no 3D"
    slow = [*python, "import time; time.sleep(60)"]
    assert processes.run_process(slow, 0.5, 4) == "more than 0.00833333 minutes"
    large = [*python, "import time; x = bytearray(2**28); time.sleep(60)"]
    assert processes.run_process(large, 60, 0.125) == "over 0.125 GB"


def test_every_task_names_a_set_that_there_is():
    assert all(set(task.sets) <= set(imputation.ALL_SETS) for task in TASKS)
    assert set(scale.METHODS) <= set(positions.METHODS)
