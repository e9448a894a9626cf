"""Averaged weights: the network after a step enters, its exponential moving average moves.

average <- average + (1 - d) (current - average), with d = min(decay, (1 + n) / (10 + n)) after n
updates, so that a short run is not held back by its random start.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

RAMP = 10


def average_decay(decay: float, updates: int) -> float:
    """Return the decay of the next update."""
    return min(decay, (1 + updates) / (RAMP + updates))


def average_decay_on_device(decay: float, updates: Int[Tensor, ""]) -> Float[Tensor, ""]:
    """Return the same of a count that the host does not know."""
    return ((1 + updates) / (RAMP + updates)).clamp(max=decay)


@torch.no_grad()
def update_average(average: nn.Module, current: nn.Module, decay: float | Tensor) -> None:
    """Move the average's parameters towards the current ones; buffers are copied.

    What is not trained is the same in both. A decay on the device is not read by the host.
    """
    pairs = zip(average.parameters(), current.parameters(), strict=True)
    trained = [pair for pair in pairs if pair[1].requires_grad]
    kept, new = ([pair[side].detach() for pair in trained] for side in (0, 1))
    if isinstance(decay, Tensor):
        moves = torch._foreach_sub(new, kept)
        torch._foreach_mul_(moves, (1 - decay).to(kept[0].dtype))
        torch._foreach_add_(kept, moves)
    else:
        torch._foreach_lerp_(kept, new, 1 - decay)
    for held, buffer in zip(average.buffers(), current.buffers(), strict=True):
        held.copy_(buffer)
