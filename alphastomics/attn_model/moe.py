"""Mixture of experts: cells enter, each goes to k of E feed-forwards, their mixture leaves.

y = sum over the chosen e of w_e FFN_e(x), w = softmax over the chosen k of the router's logits.
In training the choice is made on noisy logits, x W_r + eps softplus(x W_n) (Shazeer et al. 2017,
eq. 4). Padding is never counted, weighs nothing, and reaches no other cell.
"""

import math
from typing import Literal, get_args

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from alphastomics.attn_model.dispatch import (
    collect,
    compute_dtype,
    grouped_product,
    plan_dispatch,
    send,
    with_bias,
)
from alphastomics.attn_model.gated_attention import without_padding
from alphastomics.attn_model.inputs import (
    require_cells,
    require_choice,
    require_node_mask,
    require_setting,
    require_tensor,
)
from alphastomics.attn_model.kernels import Experts, fused_mixture, fused_serves
from alphastomics.attn_model.layers import at_least_float32
from alphastomics.attn_model.routing import (
    RouterStatistics,
    balanced_bias,
    expert_use,
    normalized_use_entropy,
    one_hot,
    route,
    router_statistics,
    use_entropy,
)
from alphastomics.config import LayerConfig
from alphastomics.errors import InputError

ExpertSize = Literal["split", "full"]
Balance = Literal["loss", "bias"]

_SETTINGS = LayerConfig()


def expert_width(d_ff: int, num_experts: int, expert_size: ExpertSize) -> int:
    """Return the hidden width of an expert: d_ff / E when split, d_ff when full."""
    if expert_size == "full":
        return d_ff
    require_setting(
        d_ff % num_experts == 0,
        f"d_ff: expected a multiple of num_experts ({num_experts}) for split experts, got {d_ff}; "
        "change one of them, or set moe_expert_size to full",
    )
    return d_ff // num_experts


def add_bias(
    rows: Float[Tensor, "S M"], shares: Float[Tensor, "S E"], bias: Float[Tensor, "E M"]
) -> Float[Tensor, "S M"]:
    """Add to each row its experts' biases by their shares.

    A product with the shares, since the backward pass of plain indexing would add 10^5 rows onto E
    by atomics.
    """
    return torch.addmm(rows, shares, bias.to(rows.dtype))


class MixtureOfExperts(nn.Module):
    """Sparse feed-forward: each cell is assigned to `top_k` of `num_experts` experts.

    Parameters
    ----------
    d_model
        Width of a cell.
    d_ff
        Width of the dense feed-forward that the experts replace.
    num_experts
        Experts.
    top_k
        Experts that a cell is assigned to.
    expert_size
        `split`: an expert's hidden width is d_ff / num_experts; `full`: d_ff.
    balance
        `loss`: experts are kept even by the balance loss; `bias`: by `update_balance_bias`.
    """

    balance_bias: Tensor

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int = _SETTINGS.num_experts,
        top_k: int = _SETTINGS.moe_top_k,
        *,
        expert_size: ExpertSize = _SETTINGS.moe_expert_size,
        balance: Balance = _SETTINGS.moe_balance,
    ) -> None:
        super().__init__()
        require_setting(d_model > 0, f"d_model: expected at least 1, got {d_model}")
        require_setting(d_ff > 0, f"d_ff: expected at least 1, got {d_ff}")
        require_setting(num_experts > 0, f"num_experts: expected at least 1, got {num_experts}")
        require_setting(
            0 < top_k <= num_experts,
            f"top_k: expected 1 to num_experts ({num_experts}), got {top_k}",
        )
        require_choice("expert_size", expert_size, get_args(ExpertSize))
        require_choice("balance", balance, get_args(Balance))
        width = expert_width(d_ff, num_experts, expert_size)
        self.d_model, self.num_experts, self.top_k, self.balance = (
            d_model,
            num_experts,
            top_k,
            balance,
        )
        self.router = nn.Linear(d_model, num_experts, bias=False)
        self.noise = nn.Linear(d_model, num_experts, bias=False)
        self.up_weight = nn.Parameter(torch.empty(num_experts, d_model, width))
        self.up_bias = nn.Parameter(torch.empty(num_experts, width))
        self.down_weight = nn.Parameter(torch.empty(num_experts, width, d_model))
        self.down_bias = nn.Parameter(torch.empty(num_experts, d_model))
        self.register_buffer("balance_bias", torch.zeros(num_experts))
        self._last: RouterStatistics | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert as `nn.Linear` would; the noise starts at softplus(0) for all cells."""
        nn.init.zeros_(self.noise.weight)
        for weight, bias in (
            (self.up_weight, self.up_bias),
            (self.down_weight, self.down_bias),
        ):
            bound = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)

    def forward(
        self,
        cells: Float[Tensor, "B N D"],
        node_mask: Bool[Tensor, "B N"] | None = None,
        logit_shift: Float[Tensor, "B E"] | None = None,
    ) -> tuple[Float[Tensor, "B N D"], RouterStatistics]:
        """Route every real cell to its experts and mix their results.

        Parameters
        ----------
        cells
            Normalised cells.
        node_mask
            True for real cells; None when there is no padding, which comes back as zeros.
        logit_shift
            What the diffusion time adds to the router's logits of a set.
        """
        self._require(cells, node_mask, logit_shift)
        if self.is_fused(cells):
            mixed, statistics = self._mix_fused(cells, node_mask, logit_shift)
        else:
            mixed, statistics = self._mix_plainly(cells, node_mask, logit_shift)
        if not torch.compiler.is_compiling():
            self.remember(statistics)
        return mixed, statistics

    def is_fused(self, cells: Float[Tensor, "B N D"]) -> bool:
        """Tell whether the kernels serve these cells."""
        return fused_serves(cells, self.num_experts)

    def _mix_fused(
        self,
        cells: Float[Tensor, "B N D"],
        node_mask: Bool[Tensor, "B N"] | None,
        logit_shift: Float[Tensor, "B E"] | None,
    ) -> tuple[Float[Tensor, "B N D"], RouterStatistics]:
        """Route and mix by the kernels."""
        experts = Experts(
            self.router.weight,
            self.noise.weight if self.training else None,
            self.up_weight,
            self.up_bias,
            self.down_weight,
            self.down_bias,
        )
        return fused_mixture(cells, node_mask, logit_shift, self.balance_bias, experts, self.top_k)

    def _mix_plainly(
        self,
        cells: Float[Tensor, "B N D"],
        node_mask: Bool[Tensor, "B N"] | None,
        logit_shift: Float[Tensor, "B E"] | None,
    ) -> tuple[Float[Tensor, "B N D"], RouterStatistics]:
        """Route and mix by torch alone."""
        cells = without_padding(cells, node_mask)
        logits = self.router_logits(cells, logit_shift)
        choice, weight = route(logits, self.balance_bias, self.top_k)
        real = torch.ones_like(logits[:, 0])
        if node_mask is not None:
            # Padding keeps the shapes fixed, so that nothing waits for the GPU: it is assigned to
            # the last expert as zeros, with weight zero.
            padding = ~node_mask.flatten()[:, None]
            real = node_mask.flatten().to(logits.dtype)
            choice = choice.masked_fill(padding, self.num_experts - 1)
            weight = weight.masked_fill(padding, 0)
        statistics = router_statistics(logits, choice, real)
        mixed = self.mix_experts(rearrange(cells, "b n d -> (b n) d"), choice, weight)
        return rearrange(mixed, "(b n) d -> b n d", b=cells.shape[0]), statistics

    def router_logits(
        self, cells: Float[Tensor, "B N D"], logit_shift: Float[Tensor, "B E"] | None
    ) -> Float[Tensor, "T E"]:
        """Score the experts for each cell, with noise in training."""
        # float32 at least: in bf16 close logits tie, and cells change their expert by rounding.
        with torch.autocast(cells.device.type, enabled=False):
            x = rearrange(at_least_float32(cells), "b n d -> (b n) d")
            weight = self.router.weight
            if self.training:
                # One product for logits and noise: the cells are read once.
                weight = torch.cat([weight, self.noise.weight])
            scores = F.linear(x, at_least_float32(weight))
            logits = scores[:, : self.num_experts]
            if logit_shift is not None:
                shift = at_least_float32(logit_shift)
                logits = logits + repeat(shift, "b e -> (b n) e", n=cells.shape[1])
            if self.training:
                std = F.softplus(scores[:, self.num_experts :])
                logits = logits + torch.randn_like(std) * std
        return logits

    def mix_experts(
        self,
        cells: Float[Tensor, "T D"],
        choice: Tensor,
        weight: Float[Tensor, "T k"],
    ) -> Float[Tensor, "T D"]:
        """Run each cell's experts and add up their results by weight."""
        plan = plan_dispatch(choice, self.num_experts)
        inputs, up = with_bias(cells.to(compute_dtype(cells)), self.up_weight, self.up_bias)
        rows = send(inputs, plan, self.top_k)
        hidden = F.gelu(grouped_product(rows, up, plan.ends))
        results = collect(grouped_product(hidden, self.down_weight, plan.ends), plan, self.top_k)
        mixed = (results * weight[..., None].to(results.dtype)).sum(1)
        shares = (one_hot(choice, self.num_experts, weight) * weight[..., None]).sum(1)
        return add_bias(mixed, shares.to(mixed.dtype), self.down_bias)

    def remember(self, statistics: RouterStatistics) -> None:
        """Keep a step's statistics for `get_moe_stats`."""
        # Past torch's look at each attribute, which takes longer than the rest.
        self.__dict__["_last"] = statistics.detached()

    def get_moe_stats(self) -> dict[str, Tensor]:
        """Return the last step's expert use, its entropy, and the auxiliary losses.

        Returns
        -------
        dict
            `expert_counts` (E,), `expert_usage` (E,) summing to 1, `entropy` in nats,
            `normalized_entropy` in [0, 1], `usage_std`, `balance_loss` and `z_loss`.
        """
        if self._last is None:
            raise InputError("get_moe_stats: no step to report; call the module on cells first")
        usage = expert_use(self._last.counts)
        return {
            "expert_counts": self._last.counts,
            "expert_usage": usage,
            "entropy": use_entropy(self._last.counts),
            "normalized_entropy": normalized_use_entropy(self._last.counts),
            "usage_std": usage.std(correction=0),
            "balance_loss": self._last.balance_loss,
            "z_loss": self._last.z_loss,
        }

    @torch.no_grad()
    def update_balance_bias(self, counts: Float[Tensor, " E"]) -> None:
        """Move the choice towards experts that were used too little: `balance: bias` only.

        Parameters
        ----------
        counts
            Choices of each expert in the step just done, added up over all ranks.
        """
        if self.balance != "bias":
            raise InputError(f"update_balance_bias: expected balance 'bias', got {self.balance!r}")
        self.balance_bias.copy_(balanced_bias(self.balance_bias, counts))

    def _require(self, cells: Tensor, node_mask: Tensor | None, logit_shift: Tensor | None) -> None:
        """Refuse inputs that do not fit together."""
        require_cells("cells", cells, self.d_model, self.router.weight)
        require_node_mask(node_mask, cells)
        if logit_shift is not None:
            shape = (cells.shape[0], self.num_experts)
            require_tensor("logit_shift", logit_shift, shape, kind="float", device=cells.device)
