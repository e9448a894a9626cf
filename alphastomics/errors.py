"""The one exception for what a caller gave: the door prints its line and exits with status 2."""


class InputError(ValueError):
    """A mistake in what the caller gave: the message says what, where, and what to do.

    A class of its own, so that the door can tell a caller's mistake from a `ValueError` that a
    library raises because of ours.
    """


def printable(text: str) -> str:
    """Spell out letters that a terminal would act on: names come from anywhere."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
