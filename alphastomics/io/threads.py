"""How torch's threads wait for work; to be set before torch is imported."""

import os

# Iterations of a waiting loop, some microseconds (docs/benchmarks.md, Threads).
SHORT_WAIT = "1000"


def wait_briefly() -> None:
    """Let threads wait for microseconds before they sleep, unless the user has chosen.

    Threads that wait by spinning take the cores from whoever has work: on a busy machine a step
    took twenty times as long. Those that sleep at once must be woken for every small operation,
    which took twice as long on an idle one.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", SHORT_WAIT)
