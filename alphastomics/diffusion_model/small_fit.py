"""Fits small networks to cells that stay on the device: a loss enters, fitted weights leave."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from alphastomics.diffusion_model.cuda_graph import recorded
from alphastomics.io.progress import Advance

# Cells of a step.
BATCH = 256
# The schedule divides by zero where the warm-up is one step: no number of updates has one.
LEARNING_RATE, WARM_UP, LARGEST_NORM = 2e-3, 0.101, 10.0


def minimise(
    loss: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    updates: int,
    advance: Advance,
    *,
    weight_decay: float,
    clips: bool = True,
) -> None:
    """Update weights by a loss that draws its own cells; on a GPU as one graph."""
    device = parameters[0].device
    on_gpu = device.type == "cuda"
    # A graph reads the learning rate from the GPU.
    rate = torch.tensor(LEARNING_RATE, device=device) if on_gpu else LEARNING_RATE
    optimizer = torch.optim.AdamW(
        parameters, rate, weight_decay=weight_decay, fused=True, capturable=on_gpu
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, updates, pct_start=WARM_UP, cycle_momentum=False
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()  # type: ignore[no-untyped-call]
        if clips:
            torch.nn.utils.clip_grad_norm_(parameters, LARGEST_NORM)
        optimizer.step()

    update = recorded(step, device)
    for _ in range(updates):
        update()
        scheduler.step()
        advance(1)
