"""How good a model is, in words: scores of all methods enter, a sentence for each task leaves."""

from collections.abc import Mapping
from typing import NamedTuple

Methods = Mapping[str, Mapping[str, float]]

OURS = "alphastomics"
# Methods that have seen the truth, or are chance: nothing to be better than.
ORACLES = ("class centroid oracle", "true expression")
CHANCE = "shuffled"
# Differences smaller than this are noise.
MARGIN = 0.005
AT_CHANCE = 0.03
GOOD_AUC, TOLD_APART = 0.7, 0.9


class TaskWords(NamedTuple):
    """What a task is called, its headline metric, why no baseline is there, and what would help."""

    title: str
    metric: str
    label: str
    alone: str
    advice: str


TASKS = {
    "expr_to_pos": TaskWords(
        "placing",
        "spearman_mean",
        "Spearman",
        "no baseline was fitted (no training cells at hand)",
        "more slices or animals, more genes, or cell types that differ by region would help",
    ),
    "pos_to_expr": TaskWords(
        "expression at positions",
        "pearson_gene_mean",
        "r by gene",
        "no baseline applies (no training cells in this frame)",
        "more slices, or slices in a common frame (--common_frame), would help",
    ),
}


class Verdict(NamedTuple):
    """The judgement of one task: the model's score, the best baseline, and a sentence."""

    task: str
    score: float
    best_baseline: str | None
    baseline_score: float | None
    grade: str
    sentence: str


def verdicts(scores: Mapping[str, Methods]) -> list[Verdict]:
    """Judge every task that was scored."""
    judged = [
        _judge(task, words, scores[task])
        for task, words in TASKS.items()
        if task in scores and words.metric in scores[task].get(OURS, {})
    ]
    if "joint" in scores and "auc_cells" in scores["joint"].get(OURS, {}):
        judged.append(_judge_tissue(scores["joint"]))
    return judged


def _judge(task: str, words: TaskWords, methods: Methods) -> Verdict:
    ours = methods[OURS][words.metric]
    rivals = {
        name: values[words.metric]
        for name, values in methods.items()
        if not name.startswith(OURS) and name not in (*ORACLES, CHANCE) and words.metric in values
    }
    best = max(rivals, key=rivals.__getitem__, default=None)
    bar = None if best is None else rivals[best]
    shown = f"{words.title}: {words.label} {ours:.3f}"
    shown += "" if bar is None else f", {best} {bar:.3f}"
    shown += ", chance 0"
    if ours < AT_CHANCE:
        grade, rest = "at chance", f"at chance: do not use it; {words.advice}"
    elif bar is None:
        grade, rest = "unrivalled", f"above chance; {words.alone}"
    elif ours < bar - MARGIN:
        grade, rest = "below a baseline", f"not better than {best}; {words.advice}"
    elif ours <= bar + MARGIN:
        grade, rest = "level", f"level with {best}; {words.advice}"
    else:
        grade, rest = "good", "good: better than every baseline"
    return Verdict(task, ours, best, bar, grade, f"{shown}: {rest}")


def _judge_tissue(methods: Methods) -> Verdict:
    """Judge new tissue by how well a classifier tells its cells from real ones; 0.5: not at all."""
    ours = methods[OURS]["auc_cells"]
    real = {
        name: values["auc_cells"]
        for name, values in methods.items()
        if name.startswith("real") and "auc_cells" in values
    }
    best = min(real, key=real.__getitem__, default=None)
    shown = f"new tissue: a classifier tells its cells from real ones with AUC {ours:.2f}"
    shown += "" if best is None else f" (other real cells {real[best]:.2f})"
    if ours < GOOD_AUC:
        grade, rest = "good", "good"
    elif ours < TOLD_APART:
        grade, rest = "told apart in part", "usable for simulations, not as data"
    else:
        grade, rest = "told apart", "not yet like real cells: do not use it as data"
    return Verdict(
        "joint", ours, best, None if best is None else real[best], grade, f"{shown}: {rest}"
    )
