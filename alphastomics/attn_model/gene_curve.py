"""A curve for each gene: noisy expression and the embedded time enter, a correction leaves.

Real values of a gene are many zeros and few large numbers. To tell the two apart from a noisy value
takes a bend that is the gene's own, and a cell is far narrower than the number of genes: so the
bend does not pass through the cell.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

# How many ways there are in which a curve changes with time; each gene mixes them.
RANK = 8
# Amplitude, slope and shift.
NUM_FACTORS = 3
START_STD = 0.1


class GeneCurve(nn.Module):
    """a tanh(softplus(1 + b) x + c), with a, b and c of each gene and time.

    Parameters
    ----------
    num_genes
        Genes G of an expression vector.
    d_model
        Width of the embedded time.
    """

    def __init__(self, num_genes: int, d_model: int) -> None:
        super().__init__()
        self.ways = nn.Linear(d_model, NUM_FACTORS * RANK)
        mixing = torch.randn(NUM_FACTORS, RANK, num_genes) * START_STD
        # Every curve starts as none.
        mixing[0] = 0
        self.mixing = nn.Parameter(mixing)

    def forward(
        self, expression: Float[Tensor, "B N G"], time: Float[Tensor, "B D"]
    ) -> Float[Tensor, "B N G"]:
        """Correct each value by its gene's curve at the time."""
        dtype = self.mixing.dtype
        ways = self.ways(F.silu(time)).to(dtype).unflatten(-1, (NUM_FACTORS, RANK))
        amplitude, slope, shift = torch.einsum("bkr,krg->kbg", ways, self.mixing)[:, :, None]
        return amplitude * torch.tanh(F.softplus(1 + slope) * expression.to(dtype) + shift)
