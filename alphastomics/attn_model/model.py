"""The denoiser: noisy cells and their diffusion times enter, a `Prediction` of clean ones leaves.

`Model` adds to the set transformer what the data demands: genes that a slice did not measure,
features hidden for masked diffusion, and the routers' statistics. It knows no noise and no loss.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from alphastomics.attn_model.count_model import CountModel, LatentPart
from alphastomics.attn_model.embedding import seen_coordinates
from alphastomics.attn_model.gated_attention import without_padding
from alphastomics.attn_model.inputs import known_values, require_masks, resized
from alphastomics.attn_model.moe import MixtureOfExperts
from alphastomics.attn_model.neighbourhood import smoothed_expression
from alphastomics.attn_model.position_head import PositionHead, position_at_start
from alphastomics.attn_model.prediction import Auxiliary, Prediction
from alphastomics.attn_model.routing import RouterStatistics
from alphastomics.attn_model.transformer import GatedSelfAttentionModel, TrunkOutput
from alphastomics.config import Config, LayerConfig, ModelConfig
from alphastomics.errors import InputError
from alphastomics.geometry import centered

_SIZE = ModelConfig()
_SETTINGS = LayerConfig()
# Small beside standardised expression, yet not zero: hidden differs from zero from the first step.
UNSEEN_STD = 0.1


class Model(nn.Module):
    """The diffusion transformer over sets of cells.

    Parameters
    ----------
    num_genes
        Genes G of an expression vector.
    size
        Sizes, and what is done to expression that is given.
    settings
        Kind of attention, gate and feed-forward.
    expects_positions
        Whether a head says where given expression is expected; needs smoothing.
    num_latents, nu_expression
        Width L of the latent of a cell's expression, 0 for none; the exponent of its clock.
    **sizes
        Values of `size` by their names in `ModelConfig`, as in `Model(40, d_model=32)`.
    """

    def __init__(
        self,
        num_genes: int,
        *,
        size: ModelConfig = _SIZE,
        settings: LayerConfig = _SETTINGS,
        expects_positions: bool = False,
        num_latents: int = 0,
        nu_expression: float = 1.0,
        **sizes: Any,
    ) -> None:
        super().__init__()
        size = resized(size, sizes)
        self.num_genes, self.settings = num_genes, settings
        # Set in training: one unit of positions in the user's units, and whether mirrors count.
        self.position_scale: float | None = None
        self.reflection = True
        self.smoothing = {
            "rounds": size.smoothing_rounds,
            "neighbours": size.smoothing_neighbours,
            "components": size.smoothing_components,
        }
        self.trunk = GatedSelfAttentionModel(
            num_genes,
            d_model=size.d_model,
            n_heads=size.n_heads,
            n_layers=size.n_layers,
            d_ff=size.d_ff,
            dropout=size.dropout,
            input_dropout=size.input_dropout,
            settings=settings,
        )
        num_smoothed = size.smoothing_rounds * num_genes
        # Checkpoints have this name; the code says `smoothed_in`.
        self.alike_in = (
            nn.Sequential(
                nn.Dropout(size.smoothing_dropout),
                nn.Linear(num_smoothed, size.d_model),
                nn.SiLU(),
                nn.Linear(size.d_model, size.d_model),
            )
            if num_smoothed
            else None
        )
        self.position_head = (
            PositionHead(num_genes, num_smoothed) if expects_positions and num_smoothed else None
        )
        widths = num_genes, num_latents, size.d_model
        self.latents = LatentPart(*widths, nu_expression) if num_latents else None
        self.unseen_value = nn.Parameter(torch.randn(num_genes) * UNSEEN_STD)
        self.unseen_share = nn.Linear(2, size.d_model, bias=False)

    @property
    def count_model(self) -> CountModel | None:
        """Return what makes latents of expression, and counts of them, where it is used."""
        return None if self.latents is None else self.latents.count_model

    @property
    def smoothed_in(self) -> nn.Sequential | None:
        """Return what embeds smoothed expression, where it is used."""
        return self.alike_in

    @classmethod
    def from_config(cls, config: Config, num_genes: int | None = None) -> "Model":
        """Build the model that a configuration describes.

        Parameters
        ----------
        config
            The whole configuration.
        num_genes
            Genes of the data; must agree with `model.num_genes` where that is set.
        """
        size = config.model
        known = {count for count in (num_genes, size.num_genes) if count is not None}
        if len(known) != 1:
            raise InputError(
                f"num_genes: expected one number of genes, got {num_genes} from the data and "
                f"{size.num_genes} from model.num_genes"
            )
        return cls(
            known.pop(),
            size=size,
            settings=config.layer,
            expects_positions=config.has_position_head,
            num_latents=config.num_latents,
            nu_expression=config.diffusion.nu_expression,
        )

    def forward(
        self,
        expression: Float[Tensor, "B N G"],
        position: Float[Tensor, "B N 3"],
        diffusion_time: Float[Tensor, "B T"],
        node_mask: Bool[Tensor, "B N"] | None = None,
        *,
        gene_mask: Bool[Tensor, "B G"] | Bool[Tensor, "B N G"] | None = None,
        expression_hidden: Bool[Tensor, "B N G"] | None = None,
        position_hidden: Bool[Tensor, "B N 3"] | None = None,
        smoothed: Float[Tensor, "B N F"] | None = None,
        embedded: Float[Tensor, "B N D"] | None = None,
        context: Float[Tensor, "B N D"] | None = None,
        expected: Float[Tensor, "B N 3"] | None = None,
        latent: Float[Tensor, "B N L"] | None = None,
        reads_expression: bool = True,
        output_hidden_states: bool = False,
    ) -> Prediction:
        """Predict the clean cells.

        Parameters
        ----------
        expression, position
            Noisy expression, and positions at unit scale; what is given cleanly has time 0.
        diffusion_time
            t / T in [0, 1]: one for both modalities, or the expression's and the position's.
        node_mask, gene_mask
            True for real cells, and for genes that were measured, by set or by cell; None: all.
        expression_hidden, position_hidden
            True for entries hidden by masked diffusion, which are not seen.
        smoothed, embedded, context, expected
            Smoothed expression, and what `prepare` returned for these cells: saves the work.
        latent
            Noisy latents of expression in place of noisy values, which are then 0.
        reads_expression, output_hidden_states
            Predict expression, too, which else comes back as it came; return the cells that enter
            the first layer and leave each.
        """
        like = self.unseen_value
        require_masks(expression, gene_mask, expression_hidden, position_hidden, like=like)
        node_mask = self.trunk.checked_mask(expression, diffusion_time, position, node_mask)
        masks = {"gene_mask": gene_mask, "expression_hidden": expression_hidden}
        ready = smoothed, embedded, context, expected
        cells = expression, diffusion_time, node_mask
        visible, context, expected = self._given(*cells, masks, ready)
        if self.latents is not None and latent is not None:
            latent, added = self.latents(latent, diffusion_time)
            context = context + added
        output = self.trunk.denoise(
            *(visible, diffusion_time, position, node_mask),
            position_hidden=position_hidden,
            embedded=embedded,
            context=context,
            reads_expression=reads_expression,
            keep_hidden=output_hidden_states,
        )
        position = position_at_start(output.position, expected, diffusion_time)
        if self.latents is not None and latent is not None:
            latent = self.latents.clean(latent, output.cells, node_mask)
        return Prediction(output.expression, position, self._auxiliary(output, node_mask), latent)

    def _given(
        self,
        expression: Float[Tensor, "B N G"],
        time: Float[Tensor, "B T"],
        node_mask: Bool[Tensor, "B N"] | None,
        masks: dict[str, Tensor | None],
        ready: tuple[Tensor | None, ...],
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what is seen of expression, what follows from it, and expected positions."""
        smoothed, embedded, context, expected = ready
        visible = expression
        if embedded is None or context is None:
            visible, unseen = self._hide(expression, **masks)
        if context is None:
            if smoothed is None and self.smoothed_in is not None:
                smoothed = self.smooth(expression, time, node_mask, **masks)
            context = self._context(unseen, smoothed, time)
        if self.position_head is None:
            return visible, context, None
        if expected is None:
            assert smoothed is not None
            expected = self.expect(expression, smoothed, node_mask, **masks)
        expected = expected.detach().to(expression.dtype)
        seen = seen_coordinates(expected, node_mask, None)
        context = context + self.trunk.position_in(expected, seen) * (time[:, :1, None] == 0)
        return visible, context, expected

    def _context(
        self,
        unseen: Float[Tensor, "B N D"],
        smoothed: Float[Tensor, "B N F"] | None,
        time: Float[Tensor, "B T"],
    ) -> Float[Tensor, "B N D"]:
        """Embed smoothed expression beside what is unseen; sets from noise get nothing added."""
        if self.smoothed_in is None:
            return unseen
        return unseen + self.smoothed_in(smoothed) * (time[:, :1, None] == 0)

    def prepare(
        self,
        expression: Float[Tensor, "B N G"],
        diffusion_time: Float[Tensor, "B T"],
        node_mask: Bool[Tensor, "B N"] | None = None,
        *,
        gene_mask: Bool[Tensor, "B G"] | Bool[Tensor, "B N G"] | None = None,
        is_given: bool = True,
    ) -> dict[str, Tensor]:
        """Compute what follows from given expression alone: it is the same in every call.

        Where expression is generated, nothing follows: the network sees no smoothed expression, and
        of latents no values either.
        """
        masks: dict[str, Tensor | None] = {"gene_mask": gene_mask, "expression_hidden": None}
        visible, unseen = self._hide(expression, **masks)
        if not is_given:
            prepared = {"context": unseen}
            if self.latents is not None:
                prepared["embedded"] = self.trunk.expression_in(torch.zeros_like(expression))
            if self.position_head is not None:
                prepared["expected"] = expression.new_zeros(*expression.shape[:2], 3)
            return prepared
        smoothed = None
        if self.smoothed_in is not None:
            smoothed = self.smooth(expression, diffusion_time, node_mask, **masks)
        prepared = {
            "embedded": self.trunk.expression_in(without_padding(visible, node_mask)),
            "context": self._context(unseen, smoothed, diffusion_time),
        }
        if self.position_head is not None:
            assert smoothed is not None
            prepared["expected"] = self.expect(expression, smoothed, node_mask, gene_mask=gene_mask)
        return prepared

    @staticmethod
    def part_of(prepared: Mapping[str, Tensor], rows: Int64[Tensor, " M"]) -> dict[str, Tensor]:
        """Return what was prepared of some cells of a set, which become a set of their own."""
        part = {name: values[:, rows] for name, values in prepared.items()}
        if "expected" in part:
            seen = torch.ones_like(part["expected"][..., 0], dtype=torch.bool)
            part["expected"] = centered(part["expected"], seen)
        return part

    def expect(
        self,
        expression: Float[Tensor, "B N G"],
        smoothed: Float[Tensor, "B N F"],
        node_mask: Bool[Tensor, "B N"] | None = None,
        *,
        gene_mask: Bool[Tensor, "B G"] | Bool[Tensor, "B N G"] | None = None,
        expression_hidden: Bool[Tensor, "B N G"] | None = None,
    ) -> Float[Tensor, "B N 3"]:
        """Say where cells are expected by their expression, centred."""
        assert self.position_head is not None
        expression = known_values(expression, gene_mask, expression_hidden)
        expected = self.position_head(expression, smoothed, node_mask, gene_mask)
        return centered(expected, seen_coordinates(expected, node_mask, None))

    def smooth(
        self,
        expression: Float[Tensor, "B N G"],
        diffusion_time: Float[Tensor, "B T"],
        node_mask: Bool[Tensor, "B N"] | None = None,
        *,
        gene_mask: Bool[Tensor, "B G"] | Bool[Tensor, "B N G"] | None = None,
        expression_hidden: Bool[Tensor, "B N G"] | None = None,
    ) -> Float[Tensor, "B N F"]:
        """Smooth given expression over neighbours in expression space, as `forward` does.

        Hidden and unmeasured values count as 0, the mean of a standardised gene.
        """
        expression = known_values(expression, gene_mask, expression_hidden)
        given = diffusion_time[:, 0] == 0
        return smoothed_expression(expression, node_mask, given, **self.smoothing)

    def update_balance_bias(self, counts: Float[Tensor, "L E"]) -> None:
        """Balance every layer's experts after a step; nothing to do unless `moe_balance` is bias.

        Parameters
        ----------
        counts
            `aux.routing.counts` of the step, added up over all ranks.
        """
        if self.settings.moe_balance == "bias":
            for moe, layer_counts in zip(self.mixtures(), counts, strict=True):
                moe.update_balance_bias(layer_counts)

    def mixtures(self) -> list[MixtureOfExperts]:
        """List the mixtures of experts, by layer."""
        return [module for module in self.modules() if isinstance(module, MixtureOfExperts)]

    def router_parameters(self) -> dict[str, nn.Parameter]:
        """Name the weights that score experts: their gradient norm tells a healthy router."""
        return {name: p for name, p in self.named_parameters() if name.endswith("router.weight")}

    def router_time_modulations(self) -> list[nn.Module]:
        """List what lets time act on the routers, by layer; empty without experts or with it off.

        All weights start at zero, and their norm tells how much the routers listen to time.
        """
        modulations = [layer.router_time_modulation for layer in self.trunk.layers]
        return [modulation for modulation in modulations if isinstance(modulation, nn.Module)]

    def adaln_parameters(self) -> dict[str, nn.Parameter]:
        """Name the weights of AdaLN: those by which time acts on layers, not on routers."""
        every = self.time_modulation_parameters()
        return {name: p for name, p in every.items() if "router_time_modulation" not in name}

    def time_modulation_parameters(self) -> dict[str, nn.Parameter]:
        """Name the weights by which time acts on layers and routers; all of them start at zero."""
        return {name: p for name, p in self.named_parameters() if "time_modulation" in name}

    def _hide(
        self,
        expression: Float[Tensor, "B N G"],
        gene_mask: Bool[Tensor, "B G"] | Bool[Tensor, "B N G"] | None,
        expression_hidden: Bool[Tensor, "B N G"] | None,
    ) -> tuple[Float[Tensor, "B N G"], Float[Tensor, "B N D"]]:
        """Put a learned value where a gene is hidden or was not measured, and say how many are."""
        share = expression.new_zeros(*expression.shape[:2], 2)
        if expression_hidden is not None:
            share[..., 0] = expression_hidden.to(share.dtype).mean(-1)
            expression = torch.where(
                expression_hidden, self.unseen_value.to(expression.dtype), expression
            )
        if gene_mask is not None:
            measured = gene_mask if gene_mask.ndim == 3 else gene_mask[:, None]
            share[..., 1] = 1 - measured.to(share.dtype).mean(-1)
            unseen = self.unseen_value.to(expression.dtype)
            expression = torch.where(measured, expression, unseen)
        # The sum adds nothing but a gradient of zero: data-parallel training refuses a parameter
        # that no step reaches, and most runs hide nothing.
        return expression, self.unseen_share(share) + 0 * self.unseen_value.sum()

    def _auxiliary(self, output: TrunkOutput, node_mask: Bool[Tensor, "B N"] | None) -> Auxiliary:
        """Average the routers' losses over layers, and keep their statistics."""
        hidden_states = tuple(without_padding(cells, node_mask) for cells in output.hidden)
        zero = output.position.new_zeros(())
        if not output.routing:
            return Auxiliary(zero, zero, None, output.gates, hidden_states)
        for moe, statistics in zip(self.mixtures(), output.routing, strict=True):
            moe.remember(statistics)
        columns = zip(*output.routing, strict=True)
        routing = RouterStatistics(*(torch.stack(column) for column in columns))
        penalty = self.settings.moe_z_loss_weight * routing.z_loss.mean()
        if self.settings.moe_balance == "loss":
            weight = self.settings.moe_load_balance_loss_weight
            penalty = penalty + weight * routing.balance_loss.mean()
        balance = routing.balance_loss.detach().mean()
        return Auxiliary(penalty, balance, routing.detached(), output.gates, hidden_states)
