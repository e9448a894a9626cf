"""A layer of the set transformer: cells and the diffusion time enter, updated cells leave.

Attention over the set, then a feed-forward or a mixture of experts on each cell, both under
AdaLN-zero (Peebles & Xie 2023), so that the diffusion time conditions every layer.
"""

from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from alphastomics.attn_model.gated_attention import (
    Gate,
    GatedMultiHeadAttention,
    overridden,
    without_padding,
)
from alphastomics.attn_model.inputs import require_node_mask, require_setting, require_tensor
from alphastomics.attn_model.layers import FeedForward, modulate, zero_linear
from alphastomics.attn_model.linear_attention import LinearMultiHeadAttention
from alphastomics.attn_model.moe import MixtureOfExperts
from alphastomics.attn_model.routing import RouterStatistics
from alphastomics.config import LayerConfig, ModelConfig

_SIZE = ModelConfig()
_SETTINGS = LayerConfig()


class LayerOutput(NamedTuple):
    """Cells (B, N, D); the gate (B, H, N, 1 or K) and the router's statistics where there are."""

    cells: Tensor
    gate: Tensor | None
    routing: RouterStatistics | None


def make_attention(d_model: int, n_heads: int, settings: LayerConfig) -> GatedMultiHeadAttention:
    """Make the attention that the settings ask for; the linear baseline has no gate."""
    normed = settings.use_qk_norm
    match settings.attention:
        case "linear":
            return LinearMultiHeadAttention(d_model, n_heads, use_qk_norm=normed)
        case "softmax":
            gate = settings.gate
            return GatedMultiHeadAttention(d_model, n_heads, gate_type=gate, use_qk_norm=normed)


def make_feed_forward(
    d_model: int, d_ff: int, settings: LayerConfig
) -> FeedForward | MixtureOfExperts:
    """Make the dense or the sparse feed-forward that the settings ask for."""
    if not settings.use_moe:
        return FeedForward(d_model, d_ff)
    return MixtureOfExperts(
        d_model,
        d_ff,
        settings.num_experts,
        settings.moe_top_k,
        expert_size=settings.moe_expert_size,
        balance=settings.moe_balance,
    )


class TransformerLayer(nn.Module):
    """One layer: x + a1 Attention(AdaLN(x)), then x + a2 FeedForward(AdaLN(x)).

    Parameters
    ----------
    d_model, n_heads, d_ff, dropout
        Sizes as in `ModelConfig`; `d_ff` None is 4 x d_model.
    use_gated_attention, gate_type, use_qk_norm
        The documented keywords of the file; None leaves what `settings` say.
    settings
        Kind of attention, gate and feed-forward.
    """

    def __init__(
        self,
        d_model: int = _SIZE.d_model,
        n_heads: int = _SIZE.n_heads,
        *,
        d_ff: int | None = _SIZE.d_ff,
        dropout: float = _SIZE.dropout,
        use_gated_attention: bool | None = None,
        gate_type: Gate | None = None,
        use_qk_norm: bool | None = None,
        settings: LayerConfig = _SETTINGS,
    ) -> None:
        super().__init__()
        require_setting(0 <= dropout < 1, f"dropout: expected 0 <= dropout < 1, got {dropout}")
        settings = overridden(
            settings,
            use_gated_attention=use_gated_attention,
            gate_type=gate_type,
            use_qk_norm=use_qk_norm,
        )
        self.d_model = d_model
        self.attention = make_attention(d_model, n_heads, settings)
        self.feed_forward = make_feed_forward(
            d_model, 4 * d_model if d_ff is None else d_ff, settings
        )
        self.dropout = nn.Dropout(dropout)
        self.time_modulation = zero_linear(d_model, 6 * d_model)
        # Outside the mixture of experts: its parameter count is fixed, and it knows no time.
        self.router_time_modulation = (
            zero_linear(d_model, settings.num_experts)
            if settings.use_moe and settings.time_gate_modulation
            else None
        )

    def forward(
        self,
        cells: Float[Tensor, "B N D"],
        time: Float[Tensor, "B D"],
        node_mask: Bool[Tensor, "B N"] | None = None,
    ) -> LayerOutput:
        """Update every cell from its set and from the embedded diffusion time.

        Parameters
        ----------
        cells
            Cells; whatever padding holds is not seen.
        time
            Embedded diffusion time of each set.
        node_mask
            True for real cells; None when there is no padding.
        """
        require_tensor("cells", cells, ("B", "N", self.d_model), kind="float", device=time.device)
        require_tensor("time", time, (len(cells), self.d_model), kind="float", device=cells.device)
        require_node_mask(node_mask, cells)
        cells = without_padding(cells, node_mask)
        shift, scale, alpha, shift_ff, scale_ff, alpha_ff = self.modulation(time)
        mixed, gate = self.attention.attend(modulate(cells, shift, scale), node_mask)
        cells = cells + alpha * self.dropout(mixed)
        update, routing = self._feed(modulate(cells, shift_ff, scale_ff), time, node_mask)
        return LayerOutput(cells + alpha_ff * self.dropout(update), gate, routing)

    def modulation(self, time: Float[Tensor, "B D"]) -> tuple[Float[Tensor, "B 1 D"], ...]:
        """Return shift, scale and gate of the attention, then of the feed-forward."""
        return self.time_modulation(F.silu(time))[:, None].chunk(6, dim=-1)

    def attention_input(
        self, cells: Float[Tensor, "B N D"], time: Float[Tensor, "B D"]
    ) -> Float[Tensor, "B N D"]:
        """Return what the attention of this layer sees: for inspection."""
        shift, scale, *_ = self.modulation(time)
        return modulate(cells, shift, scale)

    def _feed(
        self,
        cells: Float[Tensor, "B N D"],
        time: Float[Tensor, "B D"],
        node_mask: Bool[Tensor, "B N"] | None,
    ) -> tuple[Float[Tensor, "B N D"], RouterStatistics | None]:
        """Run the dense feed-forward, or the experts that cell and time choose."""
        if isinstance(self.feed_forward, FeedForward):
            return self.feed_forward(cells), None
        modulation = self.router_time_modulation
        logit_shift = None if modulation is None else modulation(F.silu(time))
        update, routing = self.feed_forward(cells, node_mask, logit_shift)
        return update, routing
