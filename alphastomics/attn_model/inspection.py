"""A look inside: within `record(model)` a forward pass leaves what its layers did.

Gates, expert use and the attention each cell receives are recomputed from a layer's input by hooks
that exist only inside the `with` block: a model that is not watched pays nothing. Hooks do not fire
inside a compiled graph, so call the model itself there, not what `torch.compile` returned.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from alphastomics.attn_model.gated_attention import GatedMultiHeadAttention
from alphastomics.attn_model.routing import expert_use
from alphastomics.attn_model.transformer_layer import LayerOutput, TransformerLayer

# Attention weights held at a time, over sets, heads, queries and keys: 64 MB in float32.
WEIGHTS_AT_A_TIME = 2**24


@dataclass
class LayerRecord:
    """What one layer did in one forward pass.

    Attributes
    ----------
    gate
        Open share of the gate, (B, H, N, 1) or (B, H, N, K); None without a gate.
    expert_use
        Share of the choices that fell on each expert, (E,); None without experts.
    attention_received
        Share of its set's attention that each cell receives, (B, N), summing to 1 over a set's real
        cells; None unless asked for.
    attention_map
        Attention of each cell to each other, (B, H, N, N); None unless asked for.
    """

    gate: Tensor | None
    expert_use: Tensor | None
    attention_received: Tensor | None
    attention_map: Tensor | None


@dataclass
class Recording:
    """All layers' records of a call, in the order in which they ran, and the mask they had."""

    layers: list[LayerRecord] = field(default_factory=list)
    node_mask: Tensor | None = None

    def gate_statistics(self) -> list[tuple[float, float]]:
        """Return mean and standard deviation of each layer's gate over real cells."""
        gates = (layer.gate for layer in self.layers if layer.gate is not None)
        return [
            (float(mean), float(std))
            for mean, std in (gate_moments(gate, self.node_mask) for gate in gates)
        ]

    def largest_share(self) -> list[float]:
        """Return, by layer, the largest share of a set's attention that one cell receives."""
        shares = (layer.attention_received for layer in self.layers)
        return [float(share.max()) for share in shares if share is not None]


def gate_moments(
    gate: Float[Tensor, "B H N K"], node_mask: Bool[Tensor, "B N"] | None
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Compute mean and standard deviation of a gate over heads and real cells, without a wait."""
    gate = gate.detach().float()
    real = torch.ones_like(gate[:, :1, :, :1])
    if node_mask is not None:
        real = node_mask[:, None, :, None].to(gate.dtype)
    count = (real.sum() * gate.shape[1] * gate.shape[3]).clamp(min=1)
    mean = (gate * real).sum() / count
    return mean, (((gate - mean).square() * real).sum() / count).sqrt()


def attention_received(
    attention: GatedMultiHeadAttention,
    cells: Float[Tensor, "B N D"],
    node_mask: Bool[Tensor, "B N"] | None,
) -> Float[Tensor, "B N"]:
    """Compute the share of its set's attention that each cell receives: a column mean.

    An even share is one over the number of real cells; a sink takes far more. Queries are taken a
    block at a time, so that the N x N matrix is never whole in memory.
    """
    query, key, _, _ = attention.project(cells)
    num_sets, num_heads, num_cells, _ = query.shape
    real = cells.new_ones(num_sets, num_cells) if node_mask is None else node_mask.to(cells.dtype)
    received = torch.zeros_like(real)
    block = max(1, WEIGHTS_AT_A_TIME // (num_sets * num_heads * num_cells))
    for start in range(0, num_cells, block):
        rows = slice(start, start + block)
        weights = attention.weights(query[:, :, rows], key, node_mask).mean(1)
        received += (weights * real[:, rows, None]).sum(1)
    return received * real / real.sum(1, keepdim=True).clamp(min=1)


@contextmanager
def record(
    model: nn.Module, *, attention: Literal["none", "received", "map"] = "none"
) -> Iterator[Recording]:
    """Record what each transformer layer of `model` does in the last call within the block.

    To see expert use by diffusion time, call the model at t = 0.1, 0.5 and 0.9, each in its own
    block; by modality, give each its own time.

    Parameters
    ----------
    model
        A `Model`, or anything that holds `TransformerLayer`s; not a compiled one.
    attention
        `received`: also the attention that each cell receives, in O(N^2) time and O(N) memory;
        `map`: besides, whole attention maps, of sets of at most 4096 cells.
    """
    recording = Recording()

    @torch.no_grad()
    def look(layer: nn.Module, inputs: tuple[Any, ...], output: LayerOutput) -> None:
        assert isinstance(layer, TransformerLayer)
        if layer is layers[0]:
            recording.layers.clear()
        cells, time, node_mask = inputs
        received = attention_map = None
        if attention != "none":
            seen = layer.attention_input(cells, time)
            received = attention_received(layer.attention, seen, node_mask)
            if attention == "map":
                attention_map = layer.attention.attention_map(seen, node_mask)
        use = None if output.routing is None else expert_use(output.routing.counts)
        gate = None if output.gate is None else output.gate.detach()
        recording.layers.append(LayerRecord(gate, use, received, attention_map))
        recording.node_mask = node_mask

    layers = [part for part in model.modules() if isinstance(part, TransformerLayer)]
    hooks = [layer.register_forward_hook(look) for layer in layers]
    try:
        yield recording
    finally:
        for hook in hooks:
            hook.remove()
