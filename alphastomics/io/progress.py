"""Progress of long work: counts enter; a bar (on a terminal) or plain log lines leave.

Nothing is shown unless the caller of the library let INFO through, as the command line does, or
sits before a notebook, which always gets a bar.
"""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from alphastomics.errors import counted

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_NOTES = 1.0
RECENT_SECONDS = 30.0  # the rate is that of so long: later parts may be slower


@runtime_checkable
class Advance(Protocol):
    """Takes what was just finished and, for those who watch, how it goes."""

    def __call__(self, finished: int, *, note: Callable[[], str] | None = None) -> None:
        """Count finished units; `note` is asked for only when it is shown."""
        ...


def in_notebook() -> bool:
    """Say whether this is a notebook's kernel."""
    return "ipykernel" in sys.modules


@contextmanager
def track(description: str, total: int, unit: str, *, done: int = 0) -> Iterator[Advance]:
    """Show how far a piece of work is; the yielded function takes what was just finished.

    Parameters
    ----------
    description
        What is being done, e.g. ``"stage 1"``.
    total
        How many units there are in all.
    unit
        What is counted, e.g. ``"cells"``.
    done
        Units that an earlier, interrupted piece of work finished: they say nothing of the rate.
    """
    shown = logger.isEnabledFor(logging.INFO)
    if in_notebook() or (shown and sys.stderr.isatty()):
        from tqdm import tqdm

        with tqdm(
            total=total, initial=done, desc=description, unit=f" {unit}", unit_scale=True
        ) as bar:
            noted = 0.0

            def advance(finished: int, *, note: Callable[[], str] | None = None) -> None:
                nonlocal noted
                if note is not None and time.monotonic() - noted >= SECONDS_BETWEEN_NOTES:
                    noted = time.monotonic()
                    bar.set_postfix_str(note(), refresh=False)
                bar.update(finished)

            yield advance
    elif shown:
        lines = ProgressLines(description, total, unit, done)
        yield lines.advance
        lines.close()
    else:
        yield _silent


def _silent(finished: int, *, note: Callable[[], str] | None = None) -> None:
    """Show nothing."""


def spelled_rate(rate: float) -> str:
    """Spell a rate; a slow one keeps its digits, so that it never reads as 0."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


class ProgressLines:
    """Log a line now and then: done, share, recent rate and time left."""

    def __init__(self, description: str, total: int, unit: str, done: int = 0) -> None:
        self.description, self.total, self.unit = description, total, unit
        self.done = self.before = done
        self.started = self.last_line = time.monotonic()
        # When so much was done, about once a second; the first is the start of what is recent.
        self.recent = deque([(self.started, done)])

    def advance(self, finished: int, *, note: Callable[[], str] | None = None) -> None:
        """Count finished units, and log a line if the last one is long enough ago."""
        self.done += finished
        now = time.monotonic()
        if now - self.recent[-1][0] >= SECONDS_BETWEEN_NOTES:
            self.recent.append((now, self.done))
        while len(self.recent) > 1 and now - self.recent[1][0] >= RECENT_SECONDS:
            self.recent.popleft()
        if now - self.last_line >= SECONDS_BETWEEN_LINES and self.done < self.total:
            self.last_line = now
            logger.info(self.line(now) + (f", {note()}" if note is not None else ""))

    def line(self, now: float) -> str:
        """Describe the state at the time `now`."""
        since, before = self.recent[0]
        rate = (self.done - before) / max(now - since, 1e-9)
        left = f"{(self.total - self.done) / rate:.0f} s left" if rate > 0 else "time left unknown"
        return (
            f"{self.description}: {self.done:,}/{self.total:,} {self.unit} "
            f"({self.done / max(self.total, 1):.0%}), {spelled_rate(rate)} {self.unit}/s, {left}"
        )

    def close(self) -> None:
        """Log the closing line."""
        seconds = time.monotonic() - self.started
        finished = counted(self.done - self.before, self.unit.removesuffix("s"))
        logger.info("%s: %s in %.1f s", self.description, finished, seconds)
