"""What a flag and a command are: the classes that `flags.py` describes the interface with."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from alphastomics.config import Mode


@dataclass(frozen=True)
class Flag:
    """One flag.

    Parameters
    ----------
    name
        Name of the argument, in underscores.
    path
        The setting it overrides, as in the file; none if it is no setting.
    value
        For a switch: the value that the setting gets; none for a flag that takes a value.
    help, default
        Words that replace the schema's, or stand in for them where there is no setting.
    kind, minimum, expected
        How the text of a flag that is no setting is read, its least value, and words for that.
    excludes
        Flags with the same word here cannot be given together.
    positional
        An argument that stands by itself, without its name.
    """

    name: str
    path: str | None = None
    value: Any = None
    help: str = ""
    default: str | None = None
    required: bool = False
    many: bool = False
    kind: Callable[[str], Any] | None = None
    minimum: float | None = None
    expected: str = "a value"
    excludes: str | None = None
    metavar: str | None = None
    second_names: tuple[str, ...] = ()
    hyphenated: bool = False
    positional: bool = False

    @property
    def is_switch(self) -> bool:
        """Say whether the flag stands alone, with no value after it."""
        return self.value is not None

    @property
    def spellings(self) -> list[str]:
        """Return the documented spellings, the first one first."""
        first = self.name.replace("_", "-") if self.hyphenated else self.name
        return [first, *self.second_names]


@dataclass(frozen=True)
class Command:
    """One command: a line about it, and its flags."""

    summary: str
    flags: list[Flag] = field(default_factory=list)

    @property
    def reads_config(self) -> bool:
        """Say whether the command takes settings from a file."""
        return any(flag.name == "config" for flag in self.flags)


def path_flag(name: str, words: str, **options: Any) -> Flag:
    """Describe a flag that takes a path."""
    return Flag(name, help=words, kind=Path, expected="a path", metavar="PATH", **options)


def count_flag(name: str, words: str, default: str, minimum: int = 1, **options: Any) -> Flag:
    """Describe a flag that takes a whole number and is no setting."""
    return Flag(
        name,
        help=words,
        default=default,
        kind=int,
        minimum=float(minimum),
        expected=f"a whole number of at least {minimum}",
        metavar="N",
        **options,
    )


def split_name(text: str) -> str:
    """Read the name of a split."""
    if text not in ("train", "validation", "test"):
        raise ValueError(text)
    return text


def finite_number(text: str) -> float:
    """Read a number."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def mode_name(text: str) -> Mode:
    """Read the name of a task."""
    modes: dict[str, Mode] = {mode: mode for mode in get_args(Mode)}
    if text not in modes:
        raise ValueError(text)
    return modes[text]


def settings(section: str, *names: str) -> list[Flag]:
    """Describe flags that have the names of the settings that they override."""
    return [Flag(name, f"{section}.{name}") for name in names]


def on_and_off(on: str, off: str, path: str, words_off: str, words_on: str = "") -> list[Flag]:
    """Describe two switches that exclude each other: they set one setting to true and to false."""
    return [
        Flag(on, path, value=True, excludes=path, help=words_on),
        Flag(off, path, value=False, excludes=path, help=words_off),
    ]


def switch(name: str, words: str) -> Flag:
    """Describe a switch that is no setting."""
    return Flag(name, help=words, value=True)
