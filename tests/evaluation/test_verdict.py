"""The verdict: every grade has its sentence, and oracles are no rivals."""

import pytest

from alphastomics.evaluation.verdict import verdicts

METRIC = {"expr_to_pos": "spearman_mean", "pos_to_expr": "pearson_gene_mean"}
TITLE = {
    "expr_to_pos": "positions of cells: Spearman",
    "pos_to_expr": "expression at positions: r by gene",
}


def judged(task: str, ours: float, **rivals: float):
    metric = METRIC[task]
    methods = {name.replace("_", " "): {metric: score} for name, score in rivals.items()}
    return verdicts({task: {"alphastomics": {metric: ours}, **methods}})[0]


@pytest.mark.parametrize("task", METRIC)
@pytest.mark.parametrize(
    ("ours", "grade", "words"),
    [
        (0.029, "at chance", "at chance: do not use it; "),
        (0.244, "below a baseline", "not better than ridge; "),
        (0.246, "level", "level with ridge; "),
        (0.254, "level", "level with ridge; "),
        (0.256, "good", "good: better than every baseline"),
    ],
)
def test_each_grade_has_its_sentence_with_the_numbers(task, ours, grade, words):
    verdict = judged(task, ours, ridge=0.25, expression_kNN=0.1, shuffled=0.0)
    assert (verdict.task, verdict.score, verdict.grade) == (task, ours, grade)
    assert (verdict.best_baseline, verdict.baseline_score) == ("ridge", 0.25)
    expected = f"{TITLE[task]} {ours:.3f}, ridge 0.250, chance 0: {words}"
    assert verdict.sentence.startswith(expected)
    assert verdict.sentence.endswith("would help") == (grade != "good")


def test_without_a_baseline_that_applies_the_sentence_says_so():
    verdict = judged("pos_to_expr", 0.2, shuffled=0.0, true_expression=1.0)
    assert (verdict.grade, verdict.best_baseline, verdict.baseline_score) == (
        "unrivalled",
        None,
        None,
    )
    assert verdict.sentence == (
        "expression at positions: r by gene 0.200, chance 0: above chance; no baseline applies "
        "(no training cells in this frame)"
    )
    placing = judged("expr_to_pos", 0.2, shuffled=0.0)
    assert placing.sentence.endswith("no baseline was fitted (no training cells at hand)")


def test_oracles_chance_and_our_own_samples_are_no_rivals():
    methods = {
        "alphastomics": {"spearman_mean": 0.5},
        "alphastomics sample": {"spearman_mean": 0.6},
        "class centroid oracle": {"spearman_mean": 0.9},
        "shuffled": {"spearman_mean": 0.7},
        "ridge": {"spearman_mean": 0.4},
        "without the metric": {"rmsd": 1.0},
    }
    verdict = verdicts({"expr_to_pos": methods})[0]
    assert (verdict.grade, verdict.best_baseline) == ("good", "ridge")


@pytest.mark.parametrize(
    ("auc", "grade", "words"),
    [
        (0.69, "good", "AUC 0.69 (other real cells 0.80): good"),
        # A fifth of the pairs of real cells are confused; here more than 0.6 of that, 0.2, less.
        (0.87, "good", "AUC 0.87 (other real cells 0.80): good: hardly more than other real cells"),
        (0.89, "partly separable", "usable for simulations, not as data"),
        (0.97, "separable", "do not use it as data"),
    ],
)
def test_where_real_cells_are_separable_the_difference_counts(auc, grade, words):
    methods = {"alphastomics": {"auc_cells": auc}, "real, other slice": {"auc_cells": 0.8}}
    (verdict,) = verdicts({"joint": methods})
    assert verdict.grade == grade
    assert verdict.sentence.endswith(words)


def test_where_even_real_cells_are_separable_only_a_low_auc_is_judged():
    methods = {"alphastomics": {"auc_cells": 0.6}, "real, other slice": {"auc_cells": 1.0}}
    assert verdicts({"joint": methods})[0].grade == "good"
    methods["alphastomics"] = {"auc_cells": 0.98}
    (verdict,) = verdicts({"joint": methods})
    assert verdict.grade == "not judged"
    assert "(other real cells 1.00): not judged: other real cells are separable" in verdict.sentence


def test_what_half_of_the_slice_would_tell_stands_beside_the_score():
    verdict = judged("expr_to_pos", 0.2, **{"ridge": 0.1, "half of the slice known": 0.42})
    assert verdict.sentence == (
        "positions of cells: Spearman 0.200, ridge 0.100, chance 0 "
        "(0.420 with half of the slice known): good: better than every baseline"
    )


@pytest.mark.parametrize(
    ("auc", "grade", "words"),
    [
        (0.69, "good", ": good"),
        (0.7, "partly separable", "usable for simulations, not as data"),
        (0.9, "separable", "not yet like real cells: do not use it as data"),
    ],
)
def test_new_tissue_is_judged_by_how_well_it_is_separated_from_real_cells(auc, grade, words):
    methods = {"alphastomics": {"auc_cells": auc}, "real, other slice": {"auc_cells": 0.55}}
    (verdict,) = verdicts({"joint": methods})
    assert (verdict.task, verdict.grade, verdict.baseline_score) == ("joint", grade, 0.55)
    assert f"AUC {auc:.2f} (other real cells 0.55)" in verdict.sentence
    assert verdict.sentence.endswith(words)


def test_tasks_that_were_not_scored_get_no_verdict_and_the_order_is_fixed():
    ours = {"spearman_mean": 0.5, "pearson_gene_mean": 0.5, "auc_cells": 0.5}
    tasks = ["joint", "pos_to_expr", "expr_to_pos"]
    result = verdicts({task: {"alphastomics": ours} for task in tasks})
    assert [verdict.task for verdict in result] == ["expr_to_pos", "pos_to_expr", "joint"]
    assert verdicts({}) == []
    assert verdicts({"joint": {"shuffled": ours}, "expr_to_pos": {"alphastomics": {}}}) == []


def test_half_of_the_slice_is_left_out_where_it_is_no_upper_reference():
    for rivals in ({"ridge": 0.5}, {"ridge": 0.1}):
        verdict = judged("expr_to_pos", 0.44, **rivals, **{"half of the slice known": 0.42})
        assert "half of the slice" not in verdict.sentence


def test_a_nearly_perfect_score_gets_no_advice_and_a_name_no_comma():
    verdict = judged("expr_to_pos", 0.998, **{"ExtraTrees, sqrt": 0.997})
    assert verdict.sentence == (
        "positions of cells: Spearman 0.998, ExtraTrees (sqrt) 0.997, chance 0: level with "
        "ExtraTrees (sqrt)"
    )
    assert verdict.best_baseline == "ExtraTrees, sqrt"
