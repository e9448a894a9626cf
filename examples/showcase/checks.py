"""What a demo claims: a claim, its figure and whether it holds enter, lines for a reader leave."""

import sys
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Check:
    """One claim, the figure it was checked by, and whether it holds."""

    claim: str
    figure: str
    holds: bool

    def line(self) -> str:
        """Say it in one line."""
        return f"  {'ok  ' if self.holds else 'FAIL'}  {self.claim}: {self.figure}"


@dataclass
class Tally:
    """Shows checks as they come, and counts those that hold."""

    total: int = 0
    failed: list[Check] = field(default_factory=list)

    def show(self, title: str, seconds: float, checks: list[Check]) -> None:
        """Write one step's checks."""
        self.total += len(checks)
        self.failed += [check for check in checks if not check.holds]
        lines = [f"{title} ({seconds:.1f} s)", *(check.line() for check in checks)]
        self.write("\n".join(lines) + "\n")

    def write(self, text: str) -> None:
        """Write to whoever runs the demo, at once."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def summary(self, seconds: float) -> str:
        """Say how many claims hold."""
        held = self.total - len(self.failed)
        return f"{held} of {self.total} checks hold, {seconds:.0f} s"


def below(claim: str, value: float, limit: float) -> Check:
    """Claim that a number is at most a limit."""
    return Check(claim, f"{value:.3g} (at most {limit:.3g})", value <= limit)


def above(claim: str, value: float, limit: float) -> Check:
    """Claim that a number is greater than a limit."""
    return Check(claim, f"{value:.3g} (above {limit:.3g})", value > limit)


def within(claim: str, value: float, low: float, high: float) -> Check:
    """Claim that a number lies in a range."""
    return Check(claim, f"{value:.3g} (from {low:.3g} to {high:.3g})", low <= value <= high)
