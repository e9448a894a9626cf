"""How good a model is, in words: scores of all methods enter, a sentence for each task leaves."""

from collections.abc import Mapping
from typing import NamedTuple

from alphastomics.evaluation.methods import KNOWN_HALF, MODEL, kind_of
from alphastomics.evaluation.registry import metric_named
from alphastomics.tasks import JOINT, TASKS, Task

Methods = Mapping[str, Mapping[str, float]]

# Differences smaller than this are noise.
MARGIN = 0.005
AT_CHANCE = 0.03
GOOD_AUC, SEPARABLE_AUC = 0.7, 0.9
# A score that leaves little to gain.
NEARLY_PERFECT = 0.95
# Held-out blocks may hold other kinds of cells: where real cells are separable, too, new ones are
# measured by what is left to them.
SEPARABLE_REAL = 0.6


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
    return [
        _judge(task, scores[task.name]) if task.is_conditional else _judge_tissue(scores[task.name])
        for task in TASKS.values()
        if task.metrics[0] in scores.get(task.name, {}).get(MODEL, {})
    ]


def _judge(task: Task, methods: Methods) -> Verdict:
    metric, advice = task.metrics[0], task.advice
    ours = methods[MODEL][metric]
    rivals = {
        name: values[metric]
        for name, values in methods.items()
        if kind_of(name) == "baseline" and metric in values
    }
    best = max(rivals, key=rivals.__getitem__, default=None)
    bar = None if best is None else rivals[best]
    shown = f"{task.label}: {metric_named(metric).name_in_sentence} {ours:.3f}"
    rival = in_sentence(best)
    shown += "" if bar is None else f", {rival} {bar:.3f}"
    shown += ", chance 0"
    # What trees learn of half of few cells is no upper reference where others reach more.
    ceiling = methods.get(KNOWN_HALF, {}).get(metric, -1.0)
    shown += f" ({ceiling:.3f} with {KNOWN_HALF})" if ceiling > max(ours, bar or ours) else ""
    if ours < AT_CHANCE:
        grade, rest = "at chance", f"at chance: do not use it; {advice}"
    elif bar is None:
        grade, rest = "unrivalled", f"above chance; {task.without_baseline}"
    elif ours < bar - MARGIN:
        grade, rest = "below a baseline", f"not better than {rival}; {advice}"
    elif ours <= bar + MARGIN:
        grade, rest = "level", f"level with {rival}"
        rest += "" if ours > NEARLY_PERFECT else f"; {advice}"
    else:
        grade, rest = "good", "good: better than every baseline"
    return Verdict(task.name, ours, best, bar, grade, f"{shown}: {rest}")


def in_sentence(name: str | None) -> str:
    """Write the name of a method without a comma of its own."""
    head, _, kind = (name or "").partition(", ")
    return f"{head} ({kind})" if kind else head


def _judge_tissue(methods: Methods) -> Verdict:
    """Judge new tissue by how well a classifier tells its cells from real ones; 0.5: not at all."""
    ours = methods[MODEL]["auc_cells"]
    real = {
        name: values["auc_cells"]
        for name, values in methods.items()
        if kind_of(name) == "reference" and "auc_cells" in values
    }
    best = min(real, key=real.__getitem__, default=None)
    shown = f"new tissue: a classifier tells its cells from real ones with AUC {ours:.2f}"
    shown += "" if best is None else f" (other real cells {real[best]:.2f})"
    real_auc = 0.5 if best is None or real[best] <= SEPARABLE_REAL else real[best]
    beyond = 1 - 0.5 * (1 - ours) / max(1 - real_auc, 1e-9)
    if ours < GOOD_AUC:
        grade, rest = "good", "good"
    elif real_auc > SEPARABLE_AUC:
        grade = "not judged"
        rest = "not judged: other real cells are separable, too; score hidden cells of a training "
        rest += "slice with `test`"
    elif beyond < GOOD_AUC:
        grade, rest = "good", "good: hardly more than other real cells"
    elif beyond < SEPARABLE_AUC:
        grade, rest = "partly separable", "usable for simulations, not as data"
    else:
        grade, rest = "separable", "not yet like real cells: do not use it as data"
    return Verdict(
        JOINT.name, ours, best, None if best is None else real[best], grade, f"{shown}: {rest}"
    )
