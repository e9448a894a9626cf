"""The page about reliability counts what these tests try, and names no test that is not there."""

import importlib
import re
from math import prod
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent.parent / "docs/reliability.md"
LEAST = 150


def cases(name: str) -> int:
    """Count the cases of a file of tests: those of each test, slow ones too."""
    module = importlib.import_module(f"tests.faults.{name}")
    total = 0
    for key, value in vars(module).items():
        if key.startswith("test_") and callable(value):
            marks = getattr(value, "pytestmark", [])
            total += prod(len(mark.args[1]) for mark in marks if mark.name == "parametrize")
    return total


def rows() -> dict[str, int]:
    """Read the table: file of tests -> the number of cases it is said to have."""
    found = re.findall(r"^\|[^|]*\| ([\d,]+) \|.*\| `(test_\w+)\.py` \|$", PAGE.read_text(), re.M)
    return {name: int(number.replace(",", "")) for number, name in found}


def test_the_table_has_every_file_of_tests_with_its_number_of_cases():
    files = {path.stem for path in FOLDER.glob("test_*.py")} - {Path(__file__).stem}
    assert rows() == {name: cases(name) for name in files}


def test_the_sum_is_told_and_is_more_than_enough():
    total = sum(rows().values())
    assert total >= LEAST
    assert f"{total:,} cases" in PAGE.read_text()
