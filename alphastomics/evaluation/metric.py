"""What a metric is: its function, which way is better, its chance level, and how to read it.

The metrics themselves are in `metrics_of_*.py`, one entry each; `registry.py` finds them by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

NEIGHBOURS = 10  # of kNN preservation, as published
Direction = Literal["higher", "lower", "nearest", "unknown"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes
    ----------
    name
        Key in the scores.
    function
        The value for a pair of prediction and truth; None where it does not apply.
    better
        Which way is better; `nearest` to `ideal`, or not known.
    label, meaning
        What the report calls it, and how to read it.
    short
        What a sentence calls it; the label where it is empty.
    ideal
        The best value.
    bounded
        Whether no value exceeds 1: then a bar is full at 1.
    chance
        Score of a prediction that knows nothing, by the number of cells, where it is known.
    slow
        Whether it takes seconds for a tissue: the verdict of a training leaves it out.
    """

    name: str
    function: Callable[[Any], float | None]
    better: Direction
    label: str
    meaning: str
    ideal: float = 1.0
    bounded: bool = True
    chance: Callable[[int], float] | None = None
    short: str = ""
    slow: bool = False

    @property
    def name_in_sentence(self) -> str:
        """What a sentence calls the metric."""
        return self.short or self.label

    def rank(self, value: float) -> float:
        """Return a number that is smaller, the better a value is."""
        if self.better == "nearest":
            return abs(value - self.ideal)
        return value if self.better == "lower" else -value


def error_metric(
    name: str, function: Callable[[Any], float | None], label: str, meaning: str, **more: Any
) -> Metric:
    """Return a metric whose best value is 0."""
    return Metric(name, function, "lower", label, meaning, ideal=0.0, **more)


def score_metric(
    name: str, function: Callable[[Any], float | None], label: str, meaning: str, **more: Any
) -> Metric:
    """Return a metric whose best value is 1."""
    return Metric(name, function, "higher", label, meaning, **more)


def no_signal(_: int) -> float:
    """Chance level of a correlation."""
    return 0.0
