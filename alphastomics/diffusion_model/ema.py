"""Averaged weights: the network after a step enters, its exponential moving average moves.

average <- average + (1 - d) (current - average), with d = min(decay, (1 + n) / (10 + n)) after n
updates, so that a short run is not held back by its random start.
"""

import torch
from torch import nn

RAMP = 10


def average_decay(decay: float, updates: int) -> float:
    """Return the decay of the next update."""
    return min(decay, (1 + updates) / (RAMP + updates))


@torch.no_grad()
def update_average(average: nn.Module, current: nn.Module, decay: float) -> None:
    """Move the average's parameters towards the current ones; buffers are copied."""
    torch._foreach_lerp_(
        [parameter.detach() for parameter in average.parameters()],
        [parameter.detach() for parameter in current.parameters()],
        1 - decay,
    )
    for kept, buffer in zip(average.buffers(), current.buffers(), strict=True):
        kept.copy_(buffer)
