"""The small parts of a layer: AdaLN modulation, the dense feed-forward, the embedding of time.

Time enters as numbers in [0, 1], one for both modalities or one each, and leaves as one vector a
set. AdaLN-zero follows Peebles & Xie (2023): the vector scales and shifts a normalised input, and
gates each residual branch, all starting at no effect.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

NUM_MODALITIES = 2
# 64 octave-spaced pairs resolve t/T down to T = 1000 steps and still tell 0 from 1 at a glance.
TIME_FREQUENCIES = 64
LARGEST_TIME_FREQUENCY = 1000.0


def at_least_float32(value: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Bring half precision to float32, and leave float32 and float64 as they are."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def modulate(
    cells: Float[Tensor, "B N D"], shift: Float[Tensor, "B 1 D"], scale: Float[Tensor, "B 1 D"]
) -> Float[Tensor, "B N D"]:
    """Normalise each cell over its width, then scale and shift by the time: (1 + s) LN(x) + b."""
    return F.layer_norm(cells, cells.shape[-1:]) * (1 + scale) + shift


def zero_linear(d_in: int, d_out: int) -> nn.Linear:
    """Make a linear map that starts at zero, and so at no effect."""
    linear = nn.Linear(d_in, d_out)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def sinusoids(time: Float[Tensor, "B T"]) -> Float[Tensor, "B F"]:
    """Embed each time by sines and cosines at frequencies from 1 to 1000, geometrically spaced."""
    exponent = torch.linspace(
        0, math.log(LARGEST_TIME_FREQUENCY), TIME_FREQUENCIES, device=time.device, dtype=time.dtype
    )
    angle = time[..., None] * exponent.exp()
    return torch.cat([angle.sin(), angle.cos()], dim=-1).flatten(1)


class FeedForward(nn.Module):
    """Dense feed-forward: W2 GELU(W1 x + b1) + b2."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff)
        self.down = nn.Linear(d_ff, d_model)

    def forward(self, cells: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """Transform each cell on its own."""
        return self.down(F.gelu(self.up(cells)))


class TimeEmbedding(nn.Module):
    """The expression's and the position's diffusion time, as one vector a set."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.inner = nn.Linear(NUM_MODALITIES * 2 * TIME_FREQUENCIES, d_model)
        self.outer = nn.Linear(d_model, d_model)

    def forward(self, time: Float[Tensor, "B T"]) -> Float[Tensor, "B D"]:
        """Embed one shared time (T = 1) or one for each modality (T = 2)."""
        # float32 at least: in bf16 neighbouring steps of a thousand are the same number.
        features = sinusoids(at_least_float32(time).expand(-1, NUM_MODALITIES))
        return self.outer(F.silu(self.inner(features.to(self.inner.weight.dtype))))


@contextmanager
def without_dropout(model: object) -> Iterator[None]:
    """Put a network into evaluation mode, and back."""
    network = model if isinstance(model, nn.Module) and model.training else None
    if network is not None:
        network.eval()
    try:
        yield
    finally:
        if network is not None:
            network.train()
