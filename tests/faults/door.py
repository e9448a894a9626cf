"""The door under attack: a command line enters, a verdict on how it ended leaves."""

import io
import logging
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from alphastomics.main import main

DONE, MISTAKE = 0, 2
PATIENCE_SECONDS = 120


class Hang(BaseException):
    """Raised by the alarm; no `except Exception` of the program swallows it."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it said."""

    status: int
    out: str
    err: str
    written: frozenset[str]
    """Files that are new or differ, relative to the sandbox."""


@contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """Turn a standstill into a failure."""

    def ring(_number: int, _frame: object) -> None:
        raise Hang(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def snapshot(*folders: Path) -> dict[str, tuple[int, int]]:
    """Name every file and folder below some folders, with size and time."""
    found = {}
    for folder in folders:
        for root, names, files in os.walk(folder):
            for name in [*names, *files]:
                path = os.path.join(root, name)  # noqa: PTH118 (names that are no UTF-8 too)
                state = os.lstat(path)
                is_folder = name in names
                found[path] = (0, 0) if is_folder else (state.st_size, state.st_mtime_ns)
    return found


def attempt(argv: Sequence[object], sandbox: Path, *shared: Path) -> Outcome:
    """Call the program in this process with the sandbox's `work` as its working folder."""
    before = snapshot(sandbox, *shared)
    term = signal.getsignal(signal.SIGTERM)
    here = Path.cwd()
    out, err = io.StringIO(), io.StringIO()
    os.chdir(sandbox / "work")
    try:
        # As users have it: what libraries warn of is not our failure.
        with warnings.catch_warnings(), alarm(PATIENCE_SECONDS):
            warnings.simplefilter("default")
            with redirect_stdout(out), redirect_stderr(err):
                status = main([str(word) for word in argv])
    finally:
        logging.captureWarnings(capture=False)
        os.chdir(here)
        signal.signal(signal.SIGTERM, term)
    after = snapshot(sandbox, *shared)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    written = frozenset(os.path.relpath(name, sandbox) for name in changed)
    return Outcome(status, out.getvalue(), err.getvalue(), written)


def require_no_accident(outcome: Outcome) -> None:
    """Whatever was given: done, or one clear line; no traceback, nothing half-written."""
    said = f"status {outcome.status}\n{outcome.err[-3000:]}"
    assert "Traceback" not in outcome.err, said
    assert outcome.status in (DONE, MISTAKE), said
    left = [name for name in outcome.written if ".partial" in name]
    assert left == [], left
    if outcome.status == MISTAKE:
        lines = [line for line in outcome.err.splitlines() if line.startswith("alphastomics: ")]
        assert len(lines) == 1, said
        assert outcome.err.endswith(lines[0] + "\n"), said
        assert len(lines[0]) > len("alphastomics: ") + 5, said
        assert lines[0].isprintable(), repr(lines[0])
        assert outcome.out == ""
        assert outcome.written == frozenset(), sorted(outcome.written)


def refused(outcome: Outcome, *words: str) -> None:
    """Check that one clear line refused it, and that nothing was written."""
    require_no_accident(outcome)
    assert outcome.status == MISTAKE, outcome.out[-1000:] + outcome.err[-1000:]
    for word in words:
        assert word in outcome.err


def done(outcome: Outcome) -> None:
    """Check that it worked."""
    require_no_accident(outcome)
    assert outcome.status == DONE, outcome.err[-3000:]
