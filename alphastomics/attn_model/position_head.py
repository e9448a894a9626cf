"""Where a cell is to be expected by its expression alone: expression enters, positions leave.

A few small networks look at one cell at a time: at its expression and at that of its nearest
neighbours in expression space. They hide different shares of it in training, and their mean is the
expected position. One cell at a time, because attention learns which cells make up the training
slices, and other animals have others.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, BLOCKS = 160, 2
# Dropout of a cell's expression, of the smoothed expression, and inside, of each member.
MEMBERS = ((0.8, 0.5, 0.3), (0.5, 0.3, 0.2))


class Member(nn.Module):
    """One network of the head: two embeddings, added, and residual blocks."""

    def __init__(self, num_genes: int, num_smoothed: int, dropout: tuple[float, ...]) -> None:
        super().__init__()
        own, smoothed, inner = dropout
        self.expression_in = nn.Sequential(nn.Dropout(own), nn.Linear(num_genes, WIDTH))
        self.smoothed_in = nn.Sequential(nn.Dropout(smoothed), nn.Linear(num_smoothed, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 2 * WIDTH),
                nn.GELU(),
                nn.Dropout(inner),
                nn.Linear(2 * WIDTH, WIDTH),
            )
            for _ in range(BLOCKS)
        )
        self.out = nn.Linear(WIDTH, 3)

    def forward(
        self, expression: Float[Tensor, "B N G"], smoothed: Float[Tensor, "B N F"]
    ) -> Float[Tensor, "B N 3"]:
        """Predict the position of each cell by itself."""
        cells = self.expression_in(expression) + self.smoothed_in(smoothed)
        cells = F.silu(self.norm(cells))
        for block in self.blocks:
            cells = cells + block(cells)
        # bf16 would round positions to 1/256 of the tissue: coarser than neighbours are apart.
        with torch.autocast(cells.device.type, enabled=False):
            return self.out(cells.to(self.out.weight.dtype))


class PositionHead(nn.Module):
    """Expected positions, by several members.

    Parameters
    ----------
    num_genes
        Genes G of an expression vector.
    num_smoothed
        Width F of the smoothed expression.
    """

    def __init__(self, num_genes: int, num_smoothed: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(
            Member(num_genes, num_smoothed, dropout) for dropout in MEMBERS
        )

    def forward(
        self, expression: Float[Tensor, "B N G"], smoothed: Float[Tensor, "B N F"]
    ) -> Float[Tensor, "M B N 3"]:
        """Predict by each member; their mean is the expected position."""
        return torch.stack([member(expression, smoothed) for member in self.members])
