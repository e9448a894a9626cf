"""Smoothing over neighbours in expression space: expression enters, its local means leave.

One cell's counts are noisy; the mean over its nearest neighbours in expression space is not, and
such neighbours mostly sit side by side. Each round finds every cell's nearest
cells in the leading principal components, takes their mean, and standardises each gene again; the
next round starts from there (diffusion on a graph, as in MAGIC, van Dijk et al. 2018).
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Subspace iteration: the leading components of expression are well apart after so many rounds.
POWER_ITERATIONS = 8
# Distances held at a time: 2^25 float32 numbers are 128 MB.
LARGEST_BLOCK = 2**25
SMALLEST_DEVIATION = 1e-6
CELLS_PER_NEIGHBOUR, LEAST_NEIGHBOURS = 20, 3
# Of the bilateral mean: widths below it divide by almost 0.
SMALLEST_WIDTH = 1e-6


def principal_components(values: Float[Tensor, "*B N G"], count: int) -> Float[Tensor, "*B N C"]:
    """Project cells onto their leading principal components, found by subspace iteration.

    The start is the same for every set with these genes: no randomness, whatever the cells' order.
    """
    centred = values - values.mean(-2, keepdim=True)
    num_genes = values.shape[-1]
    generator = torch.Generator().manual_seed(num_genes)
    basis = torch.randn(num_genes, min(count, num_genes), generator=generator).to(values)
    for _ in range(POWER_ITERATIONS):
        basis = torch.linalg.qr(centred.mT @ (centred @ basis)).Q
    return centred @ basis


def nearest_cells(points: Float[Tensor, "*B N C"], count: int) -> Int[Tensor, "*B N K"]:
    """Return each point's nearest points, itself among them, in blocks of rows."""
    rows = max(LARGEST_BLOCK // (points.shape[-2] * math.prod(points.shape[:-2])), 1)
    nearest = [
        torch.cdist(block, points).topk(count, largest=False, sorted=False).indices
        for block in torch.split(points, rows, dim=-2)
    ]
    return torch.cat(nearest, dim=-2)


def neighbour_mean(
    values: Float[Tensor, "*B N G"], cells: Int[Tensor, "*B N K"]
) -> Float[Tensor, "*B N G"]:
    """Mean over each cell's listed cells; neighbour by neighbour, so that no (N, K, G) is held."""
    total = torch.zeros_like(values)
    for column in cells.unbind(-1):
        total += values.take_along_dim(column[..., None], dim=-2)
    return total / cells.shape[-1]


def few_enough(count: int, size: int) -> int:
    """Return how many neighbours to take: of few cells the nearest are not near, fewer say more."""
    return min(count, max(size // CELLS_PER_NEIGHBOUR, LEAST_NEIGHBOURS), size)


def bilateral_mean(
    position: Float[Tensor, "N D"],
    cells: Int[Tensor, "M K"],
    width: Float[Tensor, ""],
    rows: Int[Tensor, " M"] | slice = slice(None),
) -> Float[Tensor, "M D"]:
    """Mean position of each cell's listed cells, those that lie near it (Tomasi & Manduchi 1998).

    Weights are exp(-|p_i - p_j|^2 / 2 w^2): neighbours in expression space that are expected
    elsewhere do not count. `rows` are the cells that `cells` lists the neighbours of; one whose
    neighbours are all elsewhere stays.
    """
    near, own = position[cells], position[rows]
    off = (near - own[:, None]).square().sum(-1, keepdim=True)
    weight = torch.exp(-off / (2 * width.clamp(min=SMALLEST_WIDTH).square()))
    total = weight.sum(1)
    # Of tied cells, as empty ones are, a cell need not be among its own nearest.
    smallest = torch.finfo(total.dtype).tiny
    return torch.where(total >= smallest, (near * weight).sum(1) / total.clamp(min=smallest), own)


def standardized(values: Float[Tensor, "*B N G"]) -> Float[Tensor, "*B N G"]:
    """Bring each gene to mean 0 and deviation 1; one that does not vary becomes 0."""
    centred = values - values.mean(-2, keepdim=True)
    std = centred.square().mean(-2, keepdim=True).sqrt()
    return centred / std.clamp(min=SMALLEST_DEVIATION)


def smoothed_set(
    expression: Float[Tensor, "*B N G"], *, rounds: int, neighbours: int, components: int
) -> Float[Tensor, "*B N F"]:
    """Smooth one set, or several of one size; the results of all rounds side by side, F = rounds G.

    Several at once save a GPU most of its waiting, and give each what it gets alone.
    """
    values, scales = expression, []
    size = expression.shape[-2]
    count = few_enough(neighbours, size)
    for _ in range(rounds):
        cells = nearest_cells(principal_components(values, components), count)
        values = standardized(neighbour_mean(values, cells))
        scales.append(values)
    return torch.cat(scales, dim=-1)


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def smoothed_expression(
    expression: Float[Tensor, "B N G"],
    node_mask: Bool[Tensor, "B N"] | None,
    given: Bool[Tensor, " B"],
    *,
    rounds: int,
    neighbours: int,
    components: int,
) -> Float[Tensor, "B N F"]:
    """Smooth the sets whose expression is given; the others, and padding, get zeros.

    Parameters
    ----------
    expression
        Expression, with zeros for genes that were not measured.
    node_mask
        True for real cells; None when there is no padding.
    given
        Sets whose expression is clean: neighbours of noise mean nothing.
    rounds, neighbours, components
        As in `ModelConfig`.
    """
    num_sets, num_cells, num_genes = expression.shape
    smoothed = expression.new_zeros(num_sets, num_cells, rounds * num_genes, dtype=torch.float32)
    with torch.autocast(expression.device.type, enabled=False):
        chosen = given.nonzero().flatten().tolist()
        whole = node_mask is None or bool(node_mask[given].all())
        if expression.is_cuda and whole and len(chosen) > 1:
            smoothed[given] = smoothed_set(
                expression[given].float(),
                rounds=rounds,
                neighbours=neighbours,
                components=components,
            )
            chosen = []
        for index in chosen:
            real = slice(None) if node_mask is None else node_mask[index]
            cells = expression[index, real].float()
            if len(cells):
                smoothed[index, real] = smoothed_set(
                    cells, rounds=rounds, neighbours=neighbours, components=components
                )
    return smoothed.to(expression.dtype)
