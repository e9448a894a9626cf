"""The experts of each cell, and how evenly they are used: pure functions of router logits.

Logits enter; choices, weights and statistics leave. Top-k routing with a softmax over the chosen
(Shazeer et al. 2017), the load-balance loss of the Switch Transformer (Fedus et al. 2022, eq. 4)
over all k choices, its router z-loss (Zoph et al. 2022, eq. 5), and balancing by a bias on the
choice alone (Wang et al. 2024, "Auxiliary-loss-free load balancing").
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

# The step of Wang et al. (2024), section 4: larger ones make the load swing.
BIAS_STEP = 1e-3


class Routing(NamedTuple):
    """The experts of each cell, (T, k), and their weights, (T, k), which sum to 1."""

    choice: Tensor
    weight: Tensor


class RouterStatistics(NamedTuple):
    """What a router did in one step.

    `counts`, `probability` and `num_cells` are sums over cells: added up over ranks they are those
    of the whole batch. Of one layer the shapes are (E,) and (); of a model (L, E) and (L,).

    Attributes
    ----------
    counts
        Choices that fell on each expert; they add up to k times the number of real cells.
    probability
        Router probability of each expert, summed over real cells.
    num_cells
        Real cells.
    balance_loss
        Load-balance loss, with its gradient; 1 when experts are used evenly.
    z_loss
        Mean squared log-partition of the router, with its gradient.
    """

    counts: Tensor
    probability: Tensor
    num_cells: Tensor
    balance_loss: Tensor
    z_loss: Tensor

    def detached(self) -> "RouterStatistics":
        """Return the same numbers without the graph that made them."""
        return RouterStatistics(*(value.detach() for value in self))


def one_hot(index: Int[Tensor, "*T"], num_experts: int, like: Tensor) -> Float[Tensor, "*T E"]:
    """Mark the expert of each index by a 1, in the dtype and on the device of `like`.

    A comparison, not a scatter: products with it have a deterministic backward pass on a GPU.
    """
    experts = torch.arange(num_experts, device=like.device)
    return (index[..., None] == experts).to(like.dtype)


def route(logits: Float[Tensor, "T E"], balance_bias: Float[Tensor, " E"], top_k: int) -> Routing:
    """Choose the k largest of logits + bias; weigh them by a softmax over their logits alone."""
    choice = (logits + balance_bias).topk(top_k, dim=-1).indices
    chosen = one_hot(choice, logits.shape[-1], logits)
    return Routing(choice, (chosen * logits[:, None]).sum(-1).softmax(dim=-1))


def router_statistics(
    logits: Float[Tensor, "T E"],
    choice: Int[Tensor, "T k"],
    real: Float[Tensor, " T"],
) -> RouterStatistics:
    """Count choices and probabilities over real cells, and form the two auxiliary losses."""
    probability = (logits.softmax(dim=-1) * real[:, None]).sum(0)
    chosen = one_hot(choice, logits.shape[-1], logits).sum(1)
    counts = (chosen * real[:, None]).sum(0).detach()
    num_cells = real.sum()
    z_loss = (logits.logsumexp(dim=-1).square() * real).sum() / num_cells.clamp(min=1)
    balance = balance_loss(counts, probability, num_cells)
    return RouterStatistics(counts, probability, num_cells, balance, z_loss)


def balance_loss(
    counts: Float[Tensor, " E"], probability: Float[Tensor, " E"], num_cells: Float[Tensor, ""]
) -> Float[Tensor, ""]:
    """Compute E sum_e f_e P_e: share of the choices times mean probability; 1 when both are even.

    f_e = counts_e / sum(counts) has no gradient; P_e = probability_e / cells has.
    """
    share = counts / counts.sum().clamp(min=1)
    return len(counts) * (share * probability).sum() / num_cells.clamp(min=1)


def expert_use(counts: Float[Tensor, "*L E"]) -> Float[Tensor, "*L E"]:
    """Return each expert's share of the choices; even when nothing was routed."""
    total = counts.sum(-1, keepdim=True)
    return torch.where(total > 0, counts / total.clamp(min=1), 1 / counts.shape[-1])


def use_entropy(counts: Float[Tensor, "*L E"]) -> Float[Tensor, "*L"]:
    """Compute the entropy of expert use in nats: log E when even, 0 when one expert does it all."""
    return torch.special.entr(expert_use(counts)).sum(-1)


def normalized_use_entropy(counts: Float[Tensor, "*L E"]) -> Float[Tensor, "*L"]:
    """Compute the entropy of expert use over log E; 1 for a single expert."""
    num_experts = counts.shape[-1]
    entropy = use_entropy(counts)
    return entropy / math.log(num_experts) if num_experts > 1 else torch.ones_like(entropy)


def balanced_bias(bias: Float[Tensor, " E"], counts: Float[Tensor, " E"]) -> Float[Tensor, " E"]:
    """Raise the bias of experts used less than average by one step, and lower the others'."""
    return bias + BIAS_STEP * (counts.mean() - counts).sign().to(bias.dtype)
