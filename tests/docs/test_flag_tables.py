"""Tables of flags in the docs: every flag of the command is there, with the default of --help."""

import re

import pytest

from alphastomics.cli.flags import COMMANDS
from alphastomics.cli.parse import flag_default
from tests.docs.pages import text_of

TABLES = {"data.md": "preprocess", "report.md": "report"}
# On every command, and explained once: the seed, the file of settings, and what is logged.
EVERYWHERE = {"config", "set", "seed", "deterministic", "verbose"}


def rows(page: str) -> dict[str, str]:
    """Flags of a page's table with the default that stands beside them."""
    result = {}
    row = r"^\| ((?:`--[^`|]+`(?:, )?)+) \| ([^|]*) \|"
    for names, default in re.findall(row, text_of(page), re.MULTILINE):
        flags = re.findall(r"--([a-z][\w-]*)", names)
        parts = [part.strip() for part in default.split(",")]
        several = len(parts) == len(flags) > 1
        result |= dict(
            zip(flags, parts if several else [default.strip()] * len(flags), strict=True)
        )
    return result


@pytest.mark.parametrize("page", TABLES)
def test_a_table_of_flags_has_the_defaults_of_help(page):
    shown = rows(page)
    flags = {flag.spellings[0]: flag for flag in COMMANDS[TABLES[page]].flags}
    for name, default in shown.items():
        assert name in flags, f"{page}: {name}"
        expected = flag_default(flags[name])
        plain = default.replace("`", "")
        same = plain == expected or _number(plain) == _number(expected) is not None
        assert same, f"{name}: {default}"


@pytest.mark.parametrize("page", TABLES)
def test_a_table_of_flags_leaves_none_out(page):
    flags = {f.spellings[0] for f in COMMANDS[TABLES[page]].flags if not f.positional}
    assert flags - set(rows(page)) <= EVERYWHERE


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[0-9.]+", text) else None
