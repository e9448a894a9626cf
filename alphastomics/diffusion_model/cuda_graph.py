"""A step that is repeated: many kernel launches enter, one leaves.

Small networks leave a GPU idle while the host launches their kernels. A CUDA graph records the
launches of one call and replays them, on the same memory.
"""

from collections.abc import Callable
from typing import Any

import torch

# Calls before the recording, on a stream of their own, as torch asks for: they allocate what stays.
WARM_UP = 3


class RecordingError(RuntimeError):
    """A step does what a graph cannot; it was not done."""


class RecordedStep:
    """A step as a CUDA graph, once it has been called a few times.

    Parameters
    ----------
    step
        Reads and writes the same tensors in every call, and never waits for the GPU. Random numbers
        are those of the device's own generator.
    pool
        Memory to share with other graphs that never run at the same time.
    """

    def __init__(self, step: Callable[[], None], pool: Any = None) -> None:
        self.step, self.pool = step, pool
        self.calls = 0
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.graph = torch.cuda.CUDAGraph()

    def __call__(self) -> None:
        """Do the step."""
        if self.calls < WARM_UP:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.step()
            torch.cuda.current_stream().wait_stream(self.stream)
        else:
            if self.calls == WARM_UP:
                self._record()
            self.graph.replay()
        self.calls += 1

    def _record(self) -> None:
        """Record the step, without doing it; other threads may use the GPU meanwhile."""
        try:
            with torch.cuda.graph(
                self.graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                self.step()
        except RuntimeError as error:
            raise RecordingError(str(error).partition("\n")[0]) from error


def recorded(
    step: Callable[[], None], device: torch.device, pool: Any = None
) -> Callable[[], None]:
    """Return what does a step again and again: as a CUDA graph on a GPU."""
    return RecordedStep(step, pool) if device.type == "cuda" else step
