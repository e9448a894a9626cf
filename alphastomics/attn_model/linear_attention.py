"""Linear attention: the O(N) baseline with the interface of gated attention, in LUNA's manner.

out_i = phi(q_i) . sum_j phi(k_j) v_j^T / (phi(q_i) . sum_j phi(k_j)) with phi = elu + 1
(Katharopoulos et al. 2020, eq. 5). Padding has no weight in either sum.
"""

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from alphastomics.attn_model.gated_attention import GatedMultiHeadAttention, visible_keys
from alphastomics.attn_model.layers import at_least_float32
from alphastomics.config import LayerConfig

_SETTINGS = LayerConfig()


def feature_map(
    heads: Float[Tensor, "B H N K"], real: Bool[Tensor, "B 1 1 N"] | None
) -> Float[Tensor, "B H N K"]:
    """Map to positive features, phi = elu + 1; cells that are not real have none."""
    # Written out: compiled, the backward of torch's elu trips over a fused projection's strides.
    features = torch.where(heads > 0, heads + 1, heads.clamp(max=0).exp())
    return features if real is None else features * real.mT


class LinearMultiHeadAttention(GatedMultiHeadAttention):
    """Linear attention without a gate: `attention: linear`."""

    def __init__(
        self, d_model: int, n_heads: int, *, use_qk_norm: bool = _SETTINGS.use_qk_norm
    ) -> None:
        super().__init__(d_model, n_heads, gate_type="none", use_qk_norm=use_qk_norm)

    def mix(
        self,
        query: Float[Tensor, "B H N K"],
        key: Float[Tensor, "B H N K"],
        value: Float[Tensor, "B H N K"],
        node_mask: Bool[Tensor, "B N"] | None,
    ) -> Float[Tensor, "B H N K"]:
        """Average the values by the kernel phi(q) . phi(k), summing over cells first."""
        real = None if node_mask is None else visible_keys(node_mask)
        # Sums over all cells of a set: float32 at least, or the last of 10^5 cells change nothing.
        with torch.autocast(value.device.type, enabled=False):
            q = feature_map(at_least_float32(query), None)
            k = feature_map(at_least_float32(key), real)
            summary = einsum(k, at_least_float32(value), "b h n k, b h n v -> b h k v")
            numerator = einsum(q, summary, "b h n k, b h k v -> b h n v")
            denominator = einsum(q, k.sum(dim=2), "b h n k, b h k -> b h n")
            smallest = torch.finfo(denominator.dtype).tiny
            return (numerator / denominator.clamp(min=smallest)[..., None]).to(value.dtype)

    def multiply_adds(self, set_size: int) -> int:
        """Count those of one cell: a key meets a value in each head, and a query their sum."""
        return 2 * self.d_model * self.d_head

    def weights(
        self,
        query: Float[Tensor, "B H M K"],
        key: Float[Tensor, "B H N K"],
        node_mask: Bool[Tensor, "B N"] | None,
    ) -> Float[Tensor, "B H M N"]:
        """Compute the matrix that linear attention never forms: rows of phi(q) . phi(k), over 1."""
        real = None if node_mask is None else visible_keys(node_mask)
        q, k = (
            feature_map(at_least_float32(query), None),
            feature_map(at_least_float32(key), real),
        )
        similarity = q @ k.mT
        return similarity / similarity.sum(dim=-1, keepdim=True)
