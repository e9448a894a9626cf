"""Gradients that are not finite: norms enter as a step makes them, news of bad ones leave later.

To read a norm at once makes the host wait for the GPU in every step. So the optimizer reads on the
device that it must leave the weights alone; the host reads the number when it has arrived.
"""

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

# Steps that a GPU may be behind before the host waits for it.
MOST_WAITING = 8


class CheckedStep(NamedTuple):
    """A step whose gradient is looked at: its number, its epoch, its sets' slices."""

    step: int
    epoch: int
    slices: list[Tensor]


class GradientCheck:
    """Reads the norms of gradients without waiting for them."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Tensor, torch.cuda.Event | None, CheckedStep]] = deque()

    def add(self, norm: Tensor, step: CheckedStep) -> None:
        """Begin to copy a norm to the host."""
        norm = norm.detach()
        if norm.device.type != "cuda":
            self.waiting.append((norm, None, step))
            return
        copied = torch.empty(norm.shape, dtype=norm.dtype, pin_memory=True)
        copied.copy_(norm, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self.waiting.append((copied, event, step))

    def first_bad(self, *, wait: bool = False) -> CheckedStep | None:
        """Return the first step whose gradient is known not to be finite, and forget it."""
        while self.waiting:
            norm, event, step = self.waiting[0]
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                if not wait and len(self.waiting) <= MOST_WAITING:
                    return None
                event.synchronize()
            self.waiting.popleft()
            if not bool(torch.isfinite(norm)):
                return step
        return None
