"""The tasks: what each generates, conditions on and is judged by. Every module asks here.

A cell has two modalities, expression and position. A task generates one of them from the other, or
both from noise. A checkpoint of `joint` training does every task, any other its own alone.
"""

from dataclasses import dataclass
from typing import Literal

Mode = Literal["joint", "expr_to_pos", "pos_to_expr"]
# What `sample` does besides: no task that a network is trained for.
IMPUTE: Literal["impute"] = "impute"
LABEL: Literal["label"] = "label"
SampleMode = Literal["joint", "expr_to_pos", "pos_to_expr", "impute", "label"]
EXPRESSION, POSITION = 0, 1


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes
    ----------
    name
        The mode, as `--training_mode` and `--sample_mode` spell it.
    generates
        The modalities that are generated; the others are given.
    title
        Heading in the report.
    label
        What the verdict calls it.
    metrics
        The metrics shown first; the first one judges.
    without_baseline
        Why no baseline may be there to compare with.
    advice
        What would help where the score is poor.
    """

    name: Mode
    generates: tuple[int, ...]
    title: str
    label: str
    metrics: tuple[str, ...]
    without_baseline: str
    advice: str

    @property
    def generates_expression(self) -> bool:
        """Whether expression is generated."""
        return EXPRESSION in self.generates

    @property
    def generates_position(self) -> bool:
        """Whether positions are generated."""
        return POSITION in self.generates

    @property
    def is_conditional(self) -> bool:
        """Whether a modality is given: only then has a cell a posterior mean and a std."""
        return len(self.generates) < 2

    @property
    def reads_training_cells(self) -> bool:
        """Whether the estimate comes from the training cells around a position."""
        return self.is_conditional and self.generates_expression

    def noised(self, time: int) -> tuple[int, int]:
        """Return the time of expression and of position: 0 where it is given."""
        return (
            time if self.generates_expression else 0,
            time if self.generates_position else 0,
        )


EXPR_TO_POS = Task(
    "expr_to_pos",
    (POSITION,),
    "Positions predicted from expression",
    "positions of cells",
    ("spearman_mean", "knn_preservation", "contact_precision_10pct", "procrustes"),
    "no baseline was fitted (no training cells at hand)",
    "more slices or animals, or more genes, would help",
)
POS_TO_EXPR = Task(
    "pos_to_expr",
    (EXPRESSION,),
    "Expression predicted at positions",
    "expression at positions",
    ("pearson_gene_mean", "pearson_cell_mean", "expression_mse", "moran_correlation"),
    "no baseline applies (no training cells in this frame)",
    "more slices, or slices in a common frame (--common_frame), would help",
)
JOINT = Task(
    "joint",
    (EXPRESSION, POSITION),
    "New tissue",
    "new tissue",
    ("auc_cells", "auc_niches", "type_neighbour_distance", "wasserstein_mean"),
    "",
    "more cells or a longer training would help",
)
TASKS: dict[Mode, Task] = {task.name: task for task in (EXPR_TO_POS, POS_TO_EXPR, JOINT)}


def tasks_of(trained: Mode) -> tuple[Task, ...]:
    """Return what a checkpoint of a mode can do: a joint one everything, another its own task."""
    return (JOINT, EXPR_TO_POS, POS_TO_EXPR) if trained == "joint" else (TASKS[trained],)
