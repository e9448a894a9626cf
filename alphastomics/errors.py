"""The one exception for what a caller gave: `main` prints its line and exits with status 2.

Also what every message goes through on its way out: secrets are taken out, control letters spelled.
"""

import os
import re

REDACTED = "[token]"
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACEHUB_API_TOKEN")
# A token of the Hub, and whatever stands where a request carries one.
TOKEN_PATTERN = re.compile(r"\bhf_[A-Za-z0-9_-]{6,}|(?<=[Bb]earer )[^\s'\",;)]+")
_SECRETS: set[str] = set()


class InputError(ValueError):
    """A mistake in what the caller gave: the message says what, where, and what to do.

    A class of its own, so that `main` can tell a caller's mistake from a `ValueError` that a
    library raises because of ours.
    """


def counted(number: int, noun: str) -> str:
    """Spell a number of things: 1 file, 2,000 files."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Spell out letters that a terminal would act on: names come from anywhere."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def keep_secret(secret: str | None) -> None:
    """Have a token taken out of everything that is said from now on."""
    if secret:
        _SECRETS.add(secret)


def redacted(text: str) -> str:
    """Take tokens out of a text; do so before it is cut, since half a token tells most of it."""
    known = _SECRETS | {os.environ.get(name, "") for name in TOKEN_VARIABLES}
    # Longest first: one may be the beginning of another.
    for secret in sorted(known - {""}, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return TOKEN_PATTERN.sub(REDACTED, text)


def quoted(said: object, longest: int) -> str:
    """Quote what somebody else said: in one line, without tokens, and not too long."""
    return redacted(" ".join(redacted(str(said)).split()))[:longest]
