"""The set transformer: features, positions and times of cells enter, denoised cells leave.

Expression, positions and times are embedded, pass through the layers (`transformer_layer.py`), and
are decoded into expression and positions.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from alphastomics.attn_model.embedding import NUM_COORDINATES, PositionEncoding, seen_coordinates
from alphastomics.attn_model.gated_attention import without_padding
from alphastomics.attn_model.gene_curve import GeneCurve
from alphastomics.attn_model.inputs import (
    require_cells,
    require_node_mask,
    require_setting,
    require_tensor,
)
from alphastomics.attn_model.layers import (
    NUM_MODALITIES,
    TimeEmbedding,
    at_least_float32,
    modulate,
    zero_linear,
)
from alphastomics.attn_model.routing import RouterStatistics
from alphastomics.attn_model.transformer_layer import LayerOutput, TransformerLayer
from alphastomics.config import LayerConfig, ModelConfig
from alphastomics.errors import InputError
from alphastomics.geometry import centered

_SIZE = ModelConfig()
_SETTINGS = LayerConfig()


class TrunkOutput(NamedTuple):
    """Denoised expression (B, N, E) and positions (B, N, 3), and what each layer did.

    `cells` (B, N, D) is what both were read off; `hidden` holds the cells that entered the first
    layer and that left each one, if asked for.
    """

    expression: Tensor
    position: Tensor
    gates: tuple[Tensor, ...]
    routing: tuple[RouterStatistics, ...]
    hidden: tuple[Tensor, ...]
    cells: Tensor


class GatedSelfAttentionModel(nn.Module):
    """Layers of gated self-attention over cells with features, positions and diffusion times.

    Parameters
    ----------
    expression_dim
        Width E of the expression features: the number of genes, or of any embedding of them.
    d_model, n_heads, n_layers, d_ff, dropout, input_dropout
        Sizes as in `ModelConfig`; `d_ff` None is 4 x d_model.
    settings
        Kind of attention, gate and feed-forward.
    """

    def __init__(
        self,
        expression_dim: int,
        *,
        d_model: int = _SIZE.d_model,
        n_heads: int = _SIZE.n_heads,
        n_layers: int = _SIZE.n_layers,
        d_ff: int | None = _SIZE.d_ff,
        dropout: float = _SIZE.dropout,
        input_dropout: float = _SIZE.input_dropout,
        settings: LayerConfig = _SETTINGS,
    ) -> None:
        super().__init__()
        require_setting(
            expression_dim > 0, f"expression_dim: expected at least 1, got {expression_dim}"
        )
        require_setting(n_layers > 0, f"n_layers: expected at least 1, got {n_layers}")
        self.expression_dim, self.d_model = expression_dim, d_model
        self.checkpointing = settings.activation_checkpointing
        self.expression_in = nn.Sequential(
            nn.Linear(expression_dim, d_model), nn.SiLU(), nn.Linear(d_model, d_model)
        )
        self.input_dropout = nn.Dropout(input_dropout)
        self.position_in = PositionEncoding(d_model)
        self.time_in = TimeEmbedding(d_model)
        self.layers = nn.ModuleList(
            TransformerLayer(d_model, n_heads, d_ff=d_ff, dropout=dropout, settings=settings)
            for _ in range(n_layers)
        )
        self.time_modulation = zero_linear(d_model, 2 * d_model)
        self.expression_out = nn.Linear(d_model, expression_dim)
        self.position_out = nn.Linear(d_model, NUM_COORDINATES)
        self.skip = zero_linear(d_model, NUM_MODALITIES)
        self.gene_curve = GeneCurve(expression_dim, d_model)

    def forward(
        self,
        expression_features: Float[Tensor, "B N E"],
        diffusion_time: Float[Tensor, "B T"],
        position_features: Float[Tensor, "B N 3"],
        node_mask: Bool[Tensor, "B N"] | None = None,
    ) -> tuple[Float[Tensor, "B N E"], Float[Tensor, "B N 3"], Float[Tensor, "B T"]]:
        """Denoise features and positions; the time leaves as it came, so that no stack loses it.

        Parameters
        ----------
        expression_features
            Expression of each cell, or an embedding of it.
        diffusion_time
            t / T in [0, 1]: one for both modalities, or the expression's and the position's.
        position_features
            Positions at unit scale; each set is centred about its real cells.
        node_mask
            True for real cells; None when there is no padding, which comes back as zeros.
        """
        node_mask = self.checked_mask(
            expression_features, diffusion_time, position_features, node_mask
        )
        output = self.denoise(expression_features, diffusion_time, position_features, node_mask)
        return output.expression, output.position, diffusion_time

    def checked_mask(
        self, expression: Tensor, time: Tensor, position: Tensor, node_mask: Tensor | None
    ) -> Bool[Tensor, "B N"] | None:
        """Refuse inputs that do not fit together; drop a mask that masks nothing.

        Without a mask the fastest kernels serve. Looking into the mask makes the CPU wait for the
        GPU, so it is done once a call, and never in a compiled or recorded graph: pass None where
        it is known that nothing is padded.
        """
        weight = self.position_out.weight
        require_cells("expression", expression, self.expression_dim, weight)
        num_sets, num_cells = expression.shape[:2]
        require_tensor(
            "position", position, (num_sets, num_cells, 3), kind="float", device=weight.device
        )
        require_tensor("diffusion_time", time, (num_sets, "T"), kind="float", device=weight.device)
        if time.shape[1] not in (1, NUM_MODALITIES):
            raise InputError(
                "diffusion_time: expected shape (B, 1), one time for both modalities, or (B, 2), "
                f"the expression's and the position's; got {tuple(time.shape)}"
            )
        require_node_mask(node_mask, expression)
        recorded = torch.compiler.is_compiling() or (
            expression.is_cuda and torch.cuda.is_current_stream_capturing()
        )
        if node_mask is None or recorded or not bool(node_mask.all()):
            return node_mask
        return None

    def denoise(
        self,
        expression: Float[Tensor, "B N E"],
        diffusion_time: Float[Tensor, "B T"],
        position: Float[Tensor, "B N 3"],
        node_mask: Bool[Tensor, "B N"] | None,
        *,
        position_hidden: Bool[Tensor, "B N 3"] | None = None,
        embedded: Float[Tensor, "B N D"] | None = None,
        context: Float[Tensor, "B N D"] | None = None,
        reads_expression: bool = True,
        keep_hidden: bool = False,
    ) -> TrunkOutput:
        """Run the network on checked inputs.

        Parameters
        ----------
        expression, diffusion_time, position, node_mask
            As in `forward`, with the mask of `checked_mask`.
        position_hidden
            True for coordinates that the network must not see.
        embedded
            What `expression_in` makes of expression, where it is known.
        context
            What else is known of each cell, added to its embedding.
        reads_expression
            Predict expression, too; else it comes back as it came.
        keep_hidden
            Return the cells between the layers too.
        """
        expression = without_padding(expression, node_mask)
        seen = seen_coordinates(position, node_mask, position_hidden)
        offset = centered(at_least_float32(position), seen)
        time = self.time_in(diffusion_time)
        if embedded is None:
            embedded = self._embedded(expression, diffusion_time)
        embedded = embedded + self.position_in(offset, seen) + time[:, None]
        embedded = embedded if context is None else embedded + context
        # The residual stream keeps the precision of the weights under autocast.
        cells = without_padding(embedded.to(self.position_out.weight.dtype), node_mask)
        hidden = [cells] if keep_hidden else []
        gates: list[Tensor] = []
        routing: list[RouterStatistics] = []
        for layer in self.layers:
            output = self._run(layer, cells, time, node_mask)
            cells = output.cells
            hidden += [cells] if keep_hidden else []
            gates += [] if output.gate is None else [output.gate.detach()]
            routing += [] if output.routing is None else [output.routing]
        cells = self._modulated(cells, time)
        clean, clean_position = expression, self._decode_position(cells, time, offset)
        if reads_expression:
            clean = without_padding(self._decode_expression(cells, time, expression), node_mask)
        clean_position = centered(clean_position, seen_coordinates(position, node_mask, None))
        layers = tuple(gates), tuple(routing), tuple(hidden)
        return TrunkOutput(clean, clean_position, *layers, cells)

    def _embedded(
        self, expression: Float[Tensor, "B N E"], time: Float[Tensor, "B T"]
    ) -> Float[Tensor, "B N D"]:
        """Embed expression; noisy one is blurred enough: what is given is dropped alone."""
        dropped = self.input_dropout(expression)
        embedded: Tensor = self.expression_in(
            torch.where(time[:, :1, None] == 0, dropped, expression)
        )
        return embedded

    def _run(
        self,
        layer: nn.Module,
        cells: Float[Tensor, "B N D"],
        time: Float[Tensor, "B D"],
        node_mask: Bool[Tensor, "B N"] | None,
    ) -> LayerOutput:
        """Run a layer, forgetting its activations until the backward pass if asked to."""
        if not (self.checkpointing and torch.is_grad_enabled()):
            return layer(cells, time, node_mask)
        return checkpoint(layer, cells, time, node_mask, use_reentrant=False)

    def _modulated(
        self, cells: Float[Tensor, "B N D"], time: Float[Tensor, "B D"]
    ) -> Float[Tensor, "B N D"]:
        """Let the time act on the cells that leave the last layer."""
        shift, scale = self.time_modulation(F.silu(time))[:, None].chunk(2, dim=-1)
        return modulate(cells, shift, scale)

    def _decode_expression(
        self,
        cells: Float[Tensor, "B N D"],
        time: Float[Tensor, "B D"],
        expression: Float[Tensor, "B N E"],
    ) -> Float[Tensor, "B N E"]:
        """Read expression off the cells, beside a time-weighted share of the input.

        The share starts at zero. With it, what little noise is left at small times need not pass
        through the width of a cell, which is far below the number of genes; nor need the shape of
        each gene's values, for which there are curves.
        """
        dtype = self.position_out.weight.dtype
        share = self.skip(F.silu(time)).to(dtype)[:, None]
        decoded = self.expression_out(cells).to(dtype) + share[..., :1] * expression.to(dtype)
        return decoded + self.gene_curve(expression, time)

    def _decode_position(
        self,
        cells: Float[Tensor, "B N D"],
        time: Float[Tensor, "B D"],
        offset: Float[Tensor, "B N 3"],
    ) -> Float[Tensor, "B N 3"]:
        """Read positions off the cells, beside such a share of the noisy ones."""
        dtype = self.position_out.weight.dtype
        share = self.skip(F.silu(time)).to(dtype)[:, None]
        # bf16 would round positions to 1/256 of the tissue: coarser than neighbours are apart.
        with torch.autocast(cells.device.type, enabled=False):
            return self.position_out(cells.to(dtype)) + share[..., 1:] * offset.to(dtype)
