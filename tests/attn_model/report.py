"""Runs test files and tells a person which claims hold: paths enter, an exit status leaves."""

import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Claims:
    """Collects the outcome of each test under the sentence that its name is."""

    def __init__(self) -> None:
        self.outcomes: dict[str, list[str]] = defaultdict(list)
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a test, and why where it failed."""
        if report.when != "call" and not report.failed:
            return
        name = report.nodeid.split("::")[1].partition("[")[0].removeprefix("test_")
        self.outcomes[name.replace("_", " ")].append(report.outcome)
        if report.failed:
            self.failures.append(f"{report.nodeid}\n{report.longreprtext}")

    def lines(self) -> list[str]:
        """Write one line a claim, then what failed, then a summary."""
        lines, broken = [], 0
        for claim, outcomes in self.outcomes.items():
            failed = sum(outcome == "failed" for outcome in outcomes)
            broken += failed > 0
            cases = f" ({len(outcomes)} cases)" if len(outcomes) > 1 else ""
            lines.append(f"{'FAIL' if failed else 'ok  '}  {claim}{cases}")
        summary = f"{len(self.outcomes) - broken} of {len(self.outcomes)} claims hold"
        return [*lines, *self.failures, "", summary]


def report(*paths: str) -> int:
    """Run test files of the repository and report their claims; return pytest's exit status."""
    claims = Claims()
    options = ["-p", "no:terminal", "--rootdir", str(ROOT)]
    status = pytest.main([*options, *(str(ROOT / path) for path in paths)], plugins=[claims])
    sys.stdout.write("\n".join(claims.lines()) + "\n")
    return int(status)
