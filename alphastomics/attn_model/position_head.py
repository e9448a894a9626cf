"""Where a cell is to be expected by its expression alone: expression enters, positions leave.

Two ensembles of small networks look at one cell at a time. The networks of the first see a cell's
own expression: they are the best for further cells of a training slice. Those of the second also
see the mean of its nearest neighbours in expression space, which differs less between slices and
animals: they are the best for everything else. One cell at a time, because attention learns which
cells make up the training slices, and other animals have others. Of another slice, the positions
are then smoothed over neighbours in expression space that are expected nearby.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from alphastomics.attn_model.neighbourhood import (
    bilateral_mean,
    few_enough,
    nearest_cells,
    principal_components,
)

WIDTH, BLOCKS = 128, 2


class Dropout(NamedTuple):
    """Shares that a network hides in training."""

    expression: float
    smoothed: float
    inner: float


# Of the networks that see a cell's own expression, without and with normalised layers, and of
# those that also see its smoothed expression.
PLAIN = (Dropout(0.1, 1.0, 0.2), Dropout(0.3, 1.0, 0.3))
OWN = (Dropout(0.1, 1.0, 0.2), Dropout(0.3, 1.0, 0.3))
SMOOTHED = (
    Dropout(0.9, 0.5, 0.3),
    Dropout(0.7, 0.5, 0.3),
    Dropout(0.5, 0.3, 0.2),
    Dropout(0.1, 0.3, 0.2),
)
# The networks that hide most: in training, their errors are most like those on unseen cells.
NOISIEST = slice(0, 2)
# Slices that a query is compared with, and genes and quantiles that are compared.
REFERENCES, REFERENCE_GENES, QUANTILES = 64, 1000, (0.1, 0.5, 0.9)
# Fewer cells cannot tell slices apart.
LEAST_MATCHED = 250
# Median of the squared differences of quantiles, in units of their sampling variance. Further cells
# of a slice had 0.2 to 0.7, other slices and other blocks of a slice 1.1 to 16.
MATCHED = 0.9
# Rounds, neighbours and components of what smooths positions of another slice. Its width is the
# median disagreement of the networks, and at most this share of the std of positions.
ROUNDS, NEIGHBOURS, COMPONENTS, LARGEST_WIDTH = 2, 30, 30, 0.15


class Ensemble(nn.Module):
    """Small networks, all in one batched product.

    Parameters
    ----------
    num_genes, num_smoothed
        Genes of an expression vector; width of the smoothed expression, 0 if it is not seen.
    dropout
        What each network hides in training.
    normalized
        Whether layers are normalised: two blocks as in a transformer, else one without.
    """

    def __init__(
        self, num_genes: int, num_smoothed: int, dropout: Sequence[Dropout], *, normalized: bool
    ) -> None:
        super().__init__()
        self.dropout, self.normalized = tuple(dropout), normalized
        number, inner = len(dropout), 2 * WIDTH if normalized else WIDTH
        self.own = _weights(number, num_genes, WIDTH)
        self.smoothed = _weights(number, num_smoothed, WIDTH) if num_smoothed else None
        self.bias = nn.Parameter(torch.zeros(number, 1, WIDTH))
        self.blocks = nn.ModuleList(
            _Block(number, inner, normalized=normalized) for _ in range(BLOCKS if normalized else 1)
        )
        self.norm = _Norm(number) if normalized else None
        self.out = _weights(number, WIDTH, 3)
        self.out_bias = nn.Parameter(torch.zeros(number, 1, 3))

    def forward(
        self,
        expression: Float[Tensor, "#K N G"],
        smoothed: Float[Tensor, "#K N F"] | None,
        rows: slice = slice(None),
    ) -> Float[Tensor, "M N 3"]:
        """Predict the position of each cell by each network, or by some of them.

        `smoothed` may be None where it is not seen.
        """
        rates = self.dropout[rows]
        cells = self._hidden(expression, [rate.expression for rate in rates]) @ self.own[rows]
        if self.smoothed is not None:
            assert smoothed is not None
            seen = self._hidden(smoothed, [rate.smoothed for rate in rates])
            cells = cells + seen @ self.smoothed[rows]
        cells = cells + self.bias[rows]
        inner = [rate.inner for rate in rates]
        if self.norm is not None:
            cells = F.silu(self.norm(cells, rows))
        else:
            cells = self._hidden(F.relu(cells), inner)
        for block in self.blocks:
            assert isinstance(block, _Block)
            values = block.inner(cells, rows)
            cells = cells + block.outer(self._hidden(values, inner), rows)
        return cells @ self.out[rows] + self.out_bias[rows]

    def _hidden(
        self, values: Float[Tensor, "#K N D"], rates: Sequence[float]
    ) -> Float[Tensor, "#K N D"]:
        """Dropout with a rate for each network, to 1/256."""
        if not self.training:
            return values
        kept = values.new_empty(len(rates), *values.shape[1:])
        for network, drawn, rate in zip(kept, random_bytes(kept), rates, strict=True):
            share = round(256 * (1 - rate))
            torch.lt(drawn, share, out=network).mul_(256 / share)
        return values * kept


def random_bytes(values: Float[Tensor, "K N D"]) -> Integer[Tensor, "K N D"]:
    """Draw a number below 256 for each value, eight from a random word: much faster on a CPU."""
    words = values.new_empty(*values.shape[:2], -(-values.shape[2] // 8), dtype=torch.int64)
    return words.random_(-(2**63), None).view(torch.uint8)[..., : values.shape[2]]


class _Block(nn.Module):
    """Residual block: with normalised layers up, GELU, down; else one matrix and ReLU."""

    def __init__(self, number: int, inner: int, *, normalized: bool) -> None:
        super().__init__()
        self.norm = _Norm(number) if normalized else None
        self.up = _weights(number, WIDTH, inner)
        self.up_bias = nn.Parameter(torch.zeros(number, 1, inner))
        self.down = _weights(number, inner, WIDTH) if normalized else None
        self.down_bias = nn.Parameter(torch.zeros(number, 1, WIDTH)) if normalized else None

    def inner(self, cells: Float[Tensor, "K N D"], rows: slice) -> Float[Tensor, "K N I"]:
        """Return the values that dropout acts on."""
        if self.norm is None:
            return F.relu(cells @ self.up[rows] + self.up_bias[rows])
        return F.gelu(self.norm(cells, rows) @ self.up[rows] + self.up_bias[rows])

    def outer(self, values: Float[Tensor, "K N I"], rows: slice) -> Float[Tensor, "K N D"]:
        """Return what is added to the cells."""
        if self.down is None or self.down_bias is None:
            return values
        return values @ self.down[rows] + self.down_bias[rows]


class _Norm(nn.Module):
    """LayerNorm with a scale and shift for each network."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(number, 1, WIDTH))
        self.shift = nn.Parameter(torch.zeros(number, 1, WIDTH))

    def forward(self, cells: Float[Tensor, "K N D"], rows: slice) -> Float[Tensor, "K N D"]:
        return F.layer_norm(cells, (WIDTH,)) * self.scale[rows] + self.shift[rows]


def _weights(number: int, width_in: int, width_out: int) -> nn.Parameter:
    bound = width_in**-0.5
    return nn.Parameter(torch.empty(number, width_in, width_out).uniform_(-bound, bound))


class PositionHead(nn.Module):
    """Expected positions, by the ensemble that suits the cells.

    Fitted before the rest of the model (`diffusion_model/position_fit.py`), and fixed from then on.

    Parameters
    ----------
    num_genes
        Genes G of an expression vector.
    num_smoothed
        Width F of the smoothed expression.
    """

    reference: Float[Tensor, "R Q C"]
    reference_cells: Float[Tensor, " R"]

    def __init__(self, num_genes: int, num_smoothed: int) -> None:
        super().__init__()
        self.plain = Ensemble(num_genes, 0, PLAIN, normalized=False)
        self.own = Ensemble(num_genes, 0, OWN, normalized=True)
        self.smoothed = Ensemble(num_genes, num_smoothed, SMOOTHED, normalized=True)
        self.compared = slice(None, None, -(-num_genes // REFERENCE_GENES))
        width = len(range(num_genes)[self.compared])
        self.register_buffer("reference", torch.zeros(REFERENCES, len(QUANTILES), width))
        self.register_buffer("reference_cells", torch.zeros(REFERENCES))
        self.requires_grad_(requires_grad=False)

    def forward(
        self,
        expression: Float[Tensor, "B N G"],
        smoothed: Float[Tensor, "B N F"],
        node_mask: Bool[Tensor, "B N"] | None,
        gene_mask: Bool[Tensor, "B G"] | Bool[Tensor, "B N G"] | None,
    ) -> Float[Tensor, "B N 3"]:
        """Return the expected position of each cell.

        In training, only the networks that hide most are used: the others know their training
        cells too well to say how far an expected position is to be trusted.
        """
        # bf16 would round positions to 1/256 of the tissue: coarser than neighbours are apart.
        with torch.autocast(expression.device.type, enabled=False):
            if self.training:
                cells = [values.float().flatten(0, 1)[None] for values in (expression, smoothed)]
                noisy: Tensor = self.smoothed(cells[0], cells[1], NOISIEST).mean(0)
                return noisy.reshape(*expression.shape[:2], 3)
            matched = self.matched(expression, node_mask, gene_mask)
            expected = expression.new_zeros(*expression.shape[:2], 3, dtype=torch.float32)
            for number, same_slice in enumerate(matched.tolist()):
                rows = slice(None) if node_mask is None else node_mask[number]
                own = expression[number, rows].float()
                alone = own[None], smoothed[number, rows].float()[None]
                ensembles = (self.plain, self.own) if same_slice else (self.smoothed,)
                networks = torch.cat([ensemble(*alone) for ensemble in ensembles])
                expected[number, rows] = (
                    networks.mean(0) if same_slice else smoothed_positions(networks, own)
                )
            return expected

    def matched(
        self,
        expression: Float[Tensor, "B N G"],
        node_mask: Bool[Tensor, "B N"] | None,
        gene_mask: Bool[Tensor, "B G"] | Bool[Tensor, "B N G"] | None,
    ) -> Bool[Tensor, " B"]:
        """Say which sets are further cells of a training slice, by the quantiles of their genes."""
        sets = []
        for number, cells in enumerate(expression):
            rows = slice(None) if node_mask is None else node_mask[number]
            seen = cells[rows]
            genes = torch.ones(cells.shape[-1], dtype=torch.bool, device=cells.device)
            if gene_mask is not None:
                genes = gene_mask[number] if gene_mask.ndim == 2 else gene_mask[number][rows].all(0)
            sets.append(self._matches(seen[:, self.compared], genes[self.compared]))
        return torch.stack(sets)

    def _matches(
        self, expression: Float[Tensor, "N C"], measured: Bool[Tensor, " C"]
    ) -> Bool[Tensor, ""]:
        known = self.reference_cells >= LEAST_MATCHED
        if len(expression) < LEAST_MATCHED or not bool(known.any() & measured.any()):
            return torch.zeros((), dtype=torch.bool, device=expression.device)
        count, cells = len(expression), self.reference_cells[known]
        off = quantiles(expression)[:, measured] - self.reference[known][..., measured]
        scaled = off.square() * (count * cells / (count + cells))[:, None, None]
        return (scaled.flatten(1).median(1).values < MATCHED).any()

    def remember(self, slices: Sequence[Float[Tensor, "_ G"]]) -> None:
        """Note what the genes of the largest training slices look like."""
        largest = sorted(slices, key=len, reverse=True)[:REFERENCES]
        for number, expression in enumerate(largest):
            self.reference[number] = quantiles(expression[:, self.compared])
            self.reference_cells[number] = len(expression)


def smoothed_positions(
    networks: Float[Tensor, "K N 3"], expression: Float[Tensor, "N G"]
) -> Float[Tensor, "N 3"]:
    """Average the networks, and each cell with its expression neighbours that lie nearby.

    What one cell's noise did to its position goes. Neighbours nearby are those within what the
    networks disagree by: where they agree, little is changed.
    """
    position = networks.mean(0)
    if len(position) <= 1:
        return position
    disagreement = (networks - position).square().sum(-1).mean(0).median().sqrt()
    std = position.var(0, correction=0).sum().sqrt()
    width = torch.minimum(disagreement, LARGEST_WIDTH * std)
    count = few_enough(NEIGHBOURS, len(position))
    cells = nearest_cells(principal_components(expression, COMPONENTS), count)
    for _ in range(ROUNDS):
        position = bilateral_mean(position, cells, width)
    return position


def quantiles(values: Float[Tensor, "N C"]) -> Float[Tensor, "Q C"]:
    """Return some quantiles of each column, each the nearest value that occurs."""
    rows = [round(share * (len(values) - 1)) for share in QUANTILES]
    ordered: Tensor = values.float().sort(dim=0).values
    return ordered[rows]


def position_at_start(
    position: Float[Tensor, "B N 3"],
    expected: Float[Tensor, "B N 3"] | None,
    diffusion_time: Float[Tensor, "B T"],
) -> Float[Tensor, "B N 3"]:
    """Take expected positions for sets of pure noise beside given expression: all there is."""
    if expected is None:
        return position
    start = (diffusion_time[:, -1:] == 1) & (diffusion_time[:, :1] == 0)
    return torch.where(start[..., None], expected.to(position.dtype), position)
