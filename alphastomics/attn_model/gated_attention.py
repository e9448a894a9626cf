"""Gated multi-head attention over a set of cells: cells enter, mixed cells leave.

out = sigmoid(g(x)) * softmax(Q K^T / sqrt(d_k)) V, one gate a head or one an element, before the
output projection (Qiu et al. 2025, "Gated attention for large language models"). QK-norm is RMSNorm
on each head's Q and K. The softmax runs in a fused kernel; the N x N matrix is never in memory.
"""

import math
from typing import Literal, NamedTuple, get_args

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from alphastomics.attn_model.inputs import (
    require_cells,
    require_choice,
    require_node_mask,
    require_setting,
)
from alphastomics.attn_model.layers import at_least_float32
from alphastomics.config import LayerConfig
from alphastomics.errors import InputError

Gate = Literal["none", "headwise", "elementwise"]

_SETTINGS = LayerConfig()
NORM_EPSILON = 1e-6
# A map of 4096 x 4096 in 8 heads takes 0.5 GB; above it, ask `inspection.attention_received`.
LARGEST_ATTENTION_MAP = 4096
# The fused CUDA kernels read rows in steps of 16 bytes.
KERNEL_ALIGNMENT_BYTES = 16


class Heads(NamedTuple):
    """What a layer's input is projected to: queries, keys, values and the logits of the gate.

    Shapes: (B, H, N, K) each; the logits are (B, N, H) headwise, (B, N, D) elementwise, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gate_logits: Tensor | None


def visible_keys(node_mask: Bool[Tensor, "B N"]) -> Bool[Tensor, "B 1 1 N"]:
    """Say which cells may be attended to, as a mask that broadcasts over heads and queries.

    A set without any real cell attends to its padding: a softmax over nothing would be NaN, and its
    rows are set to zero afterwards anyway.
    """
    empty = ~node_mask.any(dim=1, keepdim=True)
    return (node_mask | empty)[:, None, None, :]


def without_padding(
    cells: Float[Tensor, "B N D"], node_mask: Bool[Tensor, "B N"] | None
) -> Float[Tensor, "B N D"]:
    """Set padding to zero, whatever it held: NaN times zero would stay NaN."""
    return cells if node_mask is None else cells.masked_fill(~node_mask[..., None], 0)


def overridden(
    settings: LayerConfig,
    *,
    use_gated_attention: bool | None,
    gate_type: Gate | None,
    use_qk_norm: bool | None,
) -> LayerConfig:
    """Return the settings, overridden by the documented keywords; None leaves a setting."""
    attention = {True: "softmax", False: "linear", None: settings.attention}[use_gated_attention]
    require_setting(
        attention != "linear" or gate_type in (None, "none"),
        f"gate_type: linear attention has no gate; leave it out, got {gate_type!r}",
    )
    given = {"attention": attention, "gate": gate_type, "use_qk_norm": use_qk_norm}
    return settings.model_copy(update={key: v for key, v in given.items() if v is not None})


class GatedMultiHeadAttention(nn.Module):
    """Exact softmax attention with a sigmoid gate on each head's output.

    Parameters
    ----------
    d_model
        Width of a cell; a multiple of `n_heads`.
    n_heads
        Heads.
    gate_type
        `headwise`: one number a head; `elementwise`: one an element; `none`: plain attention.
        The gate's weights start at zero, so every gate starts at sigmoid(0) = 0.5.
    use_qk_norm
        RMSNorm on the queries and keys of each head, so that logits cannot grow without bound.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        gate_type: Gate = _SETTINGS.gate,
        use_qk_norm: bool = _SETTINGS.use_qk_norm,
    ) -> None:
        super().__init__()
        require_setting(
            d_model > 0 and n_heads > 0 and d_model % n_heads == 0,
            f"d_model: expected a positive multiple of n_heads ({n_heads}), got {d_model}",
        )
        require_choice("gate_type", gate_type, get_args(Gate))
        self.d_model, self.n_heads, self.gate = d_model, n_heads, gate_type
        self.d_head = d_model // n_heads
        gate_size = {"none": 0, "headwise": n_heads, "elementwise": d_model}[gate_type]
        self.in_projection = nn.Linear(d_model, 3 * d_model + gate_size)
        self.out_projection = nn.Linear(d_model, d_model)
        self.query_norm = nn.RMSNorm(self.d_head, eps=NORM_EPSILON) if use_qk_norm else None
        self.key_norm = nn.RMSNorm(self.d_head, eps=NORM_EPSILON) if use_qk_norm else None
        nn.init.zeros_(self.in_projection.bias)
        with torch.no_grad():
            self.in_projection.weight[3 * d_model :].zero_()

    def forward(
        self,
        cells: Float[Tensor, "B N D"],
        node_mask: Bool[Tensor, "B N"] | None = None,
        *,
        output_attentions: bool = False,
    ) -> Float[Tensor, "B N D"] | tuple[Float[Tensor, "B N D"], Float[Tensor, "B H N N"]]:
        """Let every real cell of a set attend to every other.

        Parameters
        ----------
        cells
            Normalised cells.
        node_mask
            True for real cells; None when there is no padding. Padding is attended to by nobody and
            comes back as zeros.
        output_attentions
            Return the attention weights too: at most 4096 cells, since that is an N x N matrix.
        """
        require_cells("cells", cells, self.d_model, self.in_projection.weight)
        require_node_mask(node_mask, cells)
        cells = without_padding(cells, node_mask)
        mixed = without_padding(self.attend(cells, node_mask)[0], node_mask)
        return (mixed, self.attention_map(cells, node_mask)) if output_attentions else mixed

    def attend(
        self, cells: Float[Tensor, "B N D"], node_mask: Bool[Tensor, "B N"] | None
    ) -> tuple[Float[Tensor, "B N D"], Float[Tensor, "B H N _"] | None]:
        """Return the mixed cells and the gate; padding must be finite, and comes back as noise."""
        query, key, value, logits = self.project(cells)
        mixed = rearrange(self.mix(query, key, value, node_mask), "b h n k -> b n (h k)")
        if logits is None:
            return self.out_projection(mixed), None
        mixed, gate = gated(mixed, logits, self.n_heads)
        return self.out_projection(mixed), rearrange(gate, "b n (h k) -> b h n k", h=self.n_heads)

    def project(self, cells: Float[Tensor, "B N D"]) -> Heads:
        """Project cells to queries, keys, values and gates by one matrix product."""
        projected = self.in_projection(cells)
        d_gate = projected.shape[-1] - 3 * self.d_model
        *qkv, logits = projected.split([self.d_model] * 3 + [d_gate], dim=-1)
        query, key, value = (rearrange(x, "b n (h k) -> b h n k", h=self.n_heads) for x in qkv)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = rms_norm(query, self.query_norm), rms_norm(key, self.key_norm)
        return Heads(query, key, _aligned(value), logits if d_gate else None)

    def mix(
        self,
        query: Float[Tensor, "B H N K"],
        key: Float[Tensor, "B H N K"],
        value: Float[Tensor, "B H N K"],
        node_mask: Bool[Tensor, "B N"] | None,
    ) -> Float[Tensor, "B H N K"]:
        """Average the values by softmax(Q K^T / sqrt(K)): eq. 1 of Vaswani et al. (2017)."""
        # Without padding no mask is given at all: only then may CUDA take its flash kernel. With
        # padding it is a (B, 1, 1, N) view, which the memory-efficient kernel reads in O(N) memory.
        keys = None if node_mask is None else visible_keys(node_mask)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=keys)

    def multiply_adds(self, set_size: int) -> int:
        """Count the multiply-adds of one cell's `mix`: a query meets N keys, then N values."""
        return 2 * self.d_model * set_size

    def weights(
        self,
        query: Float[Tensor, "B H M K"],
        key: Float[Tensor, "B H N K"],
        node_mask: Bool[Tensor, "B N"] | None,
    ) -> Float[Tensor, "B H M N"]:
        """Compute the attention of some queries to all keys, as a matrix."""
        logits = at_least_float32(query) @ at_least_float32(key).mT / math.sqrt(self.d_head)
        if node_mask is not None:
            logits = logits.masked_fill(~visible_keys(node_mask), -math.inf)
        return logits.softmax(dim=-1)

    def attention_map(
        self, cells: Float[Tensor, "B N D"], node_mask: Bool[Tensor, "B N"] | None
    ) -> Float[Tensor, "B H N N"]:
        """Compute the attention of every cell to every other, for sets small enough to look at."""
        if cells.shape[1] > LARGEST_ATTENTION_MAP:
            raise InputError(
                f"output_attentions: expected at most {LARGEST_ATTENTION_MAP} cells, got "
                f"{cells.shape[1]}; inspection.record tells the attention that each cell receives"
            )
        heads = self.project(cells)
        return self.weights(heads.query, heads.key, node_mask)


def gated(
    mixed: Float[Tensor, "B N D"], logits: Float[Tensor, "B N G"], n_heads: int
) -> tuple[Float[Tensor, "B N D"], Float[Tensor, "B N G"]]:
    """Multiply each head's output by the sigmoid of its logit, or of its elements'; return both."""
    gate = logits.sigmoid()
    heads = rearrange(mixed, "b n (h k) -> b n h k", h=n_heads)
    opened = heads * rearrange(gate, "b n (h k) -> b n h k", h=n_heads)
    return rearrange(opened, "b n h k -> b n (h k)"), gate


def rms_norm(heads: Float[Tensor, "B H N K"], norm: nn.RMSNorm) -> Float[Tensor, "B H N K"]:
    """RMSNorm in the precision of its input, so that the fused kernel serves under autocast too.

    The weight is multiplied outside: the fused backward takes three times as long for it.
    """
    normed = F.rms_norm(heads, heads.shape[-1:], eps=norm.eps).to(heads.dtype)
    return normed * norm.weight.to(heads.dtype)


def _aligned(value: Float[Tensor, "B H N K"]) -> Float[Tensor, "B H N K"]:
    """Copy values out of the fused projection where its row length would misalign the kernels."""
    row_bytes = value.stride(2) * value.element_size()
    return value if row_bytes % KERNEL_ALIGNMENT_BYTES == 0 else value.contiguous()
