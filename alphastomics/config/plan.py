"""A training's plan: settings resolved for data and a device; a table for the user leaves."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from alphastomics.config import Config
from alphastomics.preprocessing.holdout import Holdout


class Device(NamedTuple):
    """What a run runs on."""

    kind: Literal["cpu", "gpu"]
    name: str
    number: int
    cores: int


class Choice(NamedTuple):
    """A resolved setting: its key, its value, and why."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class TrainingPlan:
    """All settings of a run, and what is held out to judge it.

    Attributes
    ----------
    config
        Every setting resolved.
    choices
        What was resolved, and why.
    holdout
        What a first training holds out; None trains once, on everything.
    refit
        Whether a second training is made on everything.
    dissociated
        Cells without positions, which teach genes and types alone.
    updates, seconds
        Updates of the weights of one training, and how long the whole run may take.
    device
        What it runs on.
    """

    config: Config
    choices: tuple[Choice, ...]
    holdout: Holdout | None
    refit: bool
    dissociated: int
    updates: int
    seconds: float
    device: Device

    def lines(self) -> list[str]:
        """Write the plan as the lines of a table."""
        rows = [(choice.key, _shown(choice.value), choice.reason) for choice in self.choices]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        table = [f"  {key:<{widths[0]}}  {value:<{widths[1]}}  {why}" for key, value, why in rows]
        teach = f"{self.dissociated:,} dissociated cells teach {self.uses_of_dissociated}"
        more = [teach] if self.dissociated else []
        return [f"plan for {self.device.name}: {self.outline()}", *more, *table]

    @property
    def uses_of_dissociated(self) -> str:
        """Say what dissociated cells are used for, and what they are not."""
        fitted = "the count model (genes and types), " if self.config.num_latents else ""
        return f"{fitted}impute and label; nothing that is learned of positions sees them"

    def outline(self) -> str:
        """Say what will be done, and how long it may take."""
        minutes = f"about {_duration(self.seconds)}"
        updates = f"{self.updates:,} update{'' if self.updates == 1 else 's'}"
        if self.holdout is None:
            return f"one training of {updates}, {minutes}"
        held = self.holdout.describe()
        again = ", then on everything" if self.refit else ""
        return f"{updates} without {held}, which judges the model{again}; {minutes}"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
