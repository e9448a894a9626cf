"""What a call of the network returns: clean cells, and what its layers did."""

from typing import NamedTuple

from torch import Tensor

from alphastomics.attn_model.routing import RouterStatistics


class Auxiliary(NamedTuple):
    """What the layers did in one step.

    Attributes
    ----------
    penalty
        Weighted balance and z-loss, averaged over layers: add it to the loss. 0 without experts.
    balance_loss
        Unweighted balance loss, averaged over layers, without gradient.
    routing
        Statistics of every layer's router, stacked: counts (L, E); None without experts.
    gates
        The gate of every layer, (B, H, N, 1) or (B, H, N, K), without gradient; empty without gate.
    hidden_states
        Cells (B, N, D) entering the first layer and leaving each; empty unless asked for.
    """

    penalty: Tensor
    balance_loss: Tensor
    routing: RouterStatistics | None
    gates: tuple[Tensor, ...]
    hidden_states: tuple[Tensor, ...]


class Prediction(NamedTuple):
    """Predicted clean expression (B, N, G) and positions (B, N, 3), centred; padding is zero.

    `latent` (B, N, L) is that of expression, where the network was given a noisy one.
    """

    expression: Tensor
    position: Tensor
    aux: Auxiliary
    latent: Tensor | None = None
