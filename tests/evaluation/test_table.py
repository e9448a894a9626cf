"""The table on the terminal: every number in its place, the best marked in the right direction."""

import pytest

from alphastomics.evaluation.table import bar_end, best_method, score_table

METHODS = {
    "alphastomics": {"procrustes": 0.4, "spearman_mean": 0.5, "auc_cells": 0.6},
    "MLP regressor": {"procrustes": 0.5, "spearman_mean": 0.6, "auc_cells": 0.3},
    "class centroid oracle": {"procrustes": 0.1, "spearman_mean": 0.9, "auc_cells": 0.5},
}


@pytest.mark.parametrize(
    ("metric", "best"),
    [
        ("procrustes", "alphastomics"),  # lower
        ("spearman_mean", "MLP regressor"),  # higher
        ("auc_cells", "alphastomics"),  # nearest to 0.5; the oracle stands aside
        ("absent", None),
    ],
)
def test_the_best_method_is_found_in_the_metrics_own_direction(metric: str, best: str | None):
    assert best_method(metric, METHODS) == best


def test_a_metric_that_one_method_has_or_that_is_an_expectation_has_no_best():
    assert best_method("x", {"a": {"x": 1.0}, "b": {}}) is None
    both = {"a": {"std_coverage": 0.5}, "b": {"std_coverage": 0.7}}
    assert best_method("std_coverage", both) is None
    assert best_method("x", {"a": {"x": 1.0}, "b": {"x": float("nan")}}) is None


def test_every_number_stands_under_its_method():
    methods = METHODS | {"short": {"procrustes": 123456.0}}
    lines = score_table({"expr_to_pos": methods, "joint": {"one": {"auc_cells": 0.5}}}).splitlines()
    row = next(line for line in lines if line.startswith("procrustes"))
    assert row.split() == ["procrustes", "0.400*", "0.500", "0.100", "123,456"]
    header = next(line for line in lines if line.startswith("expr_to_pos"))
    for word in ("alphastomics", "regressor", "oracle", "short"):
        column = header.index(word) + len(word)
        assert row[column - 1] not in " *", f"{word} is not above its number"
    spearman = next(line for line in lines if line.startswith("spearman_mean"))
    assert spearman.split() == ["spearman_mean", "0.500", "0.600*", "0.900"]
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("joint") for line in lines)


@pytest.mark.parametrize(
    ("ours", "chance", "best"),
    [(0.034, 0.034, None), (0.034, 0.04, None), (0.045, 0.034, None), (0.3, 0.03, "alphastomics")],
)
def test_what_is_no_better_than_shuffled_gets_no_star(ours, chance, best):
    methods = {
        "alphastomics": {"spearman_mean": ours, "procrustes": 1 - ours},
        "kNN regressor": {"spearman_mean": 0.01, "procrustes": 0.99},
        "shuffled": {"spearman_mean": chance, "procrustes": 1 - chance},
    }
    assert best_method("spearman_mean", methods) == best
    assert best_method("procrustes", methods) == best


def test_a_full_bar_is_a_perfect_score_or_the_largest_error():
    methods = {
        "alphastomics": {"spearman_mean": 0.034, "rmsd": 5.0},
        "shuffled": {"spearman_mean": 0.01, "rmsd": 20.0},
    }
    assert bar_end("spearman_mean", methods) == 1
    assert bar_end("rmsd", methods) == 20
    assert bar_end("rmsd", {"a": {"rmsd": 0.0}}) == 1
