"""The one exception for what a caller gave: the door prints its line and exits with status 2."""


class InputError(ValueError):
    """A mistake in what the caller gave: the message says what, where, and what to do.

    A class of its own, so that the door can tell a caller's mistake from a `ValueError` that a
    library raises because of ours.
    """
