"""Each gene's curve: nothing at first, its own formula afterwards, and a shape that is learnt."""

import math

import torch
from torch.nn import functional as F

from alphastomics.attn_model.gene_curve import RANK, GeneCurve


def test_every_curve_starts_as_none_and_can_be_learnt():
    torch.manual_seed(0)
    curve = GeneCurve(5, 8)
    moved = curve(torch.randn(2, 3, 5), torch.randn(2, 8))
    assert torch.equal(moved, torch.zeros(2, 3, 5))
    moved.sum().backward()
    assert curve.mixing.grad[0].abs().min() > 0


@torch.no_grad()
def test_a_curve_is_the_formula_entry_by_entry():
    torch.manual_seed(1)
    curve = GeneCurve(4, 8).double()
    curve.mixing.normal_()
    expression, time = torch.randn(2, 3, 4).double(), torch.randn(2, 8).double()
    ways = curve.ways(F.silu(time)).reshape(2, 3, RANK)
    found = curve(expression, time)
    for one in range(2):
        for gene in range(4):
            a, b, c = (float(ways[one, k] @ curve.mixing[k, :, gene]) for k in range(3))
            for cell in range(3):
                steep = math.log1p(math.exp(1 + b))
                wanted = a * math.tanh(steep * float(expression[one, cell, gene]) + c)
                assert math.isclose(float(found[one, cell, gene]), wanted, rel_tol=1e-9)


def test_curves_learn_to_tell_zeros_from_counts_gene_by_gene():
    """A gene is -0.5 or 2: from a noisy value a line is left with more error than a curve."""
    torch.manual_seed(2)
    rare = torch.tensor([0.2, 0.5, 0.8])
    clean = torch.where(torch.rand(4000, 3) < rare, 2.0, -0.5)
    noisy = clean + 0.5 * torch.randn_like(clean)
    curve, line = GeneCurve(3, 8), torch.nn.Parameter(torch.zeros(2, 3))
    time = torch.randn(1, 8)
    optimizer = torch.optim.Adam([*curve.parameters(), line], lr=0.05)
    for _ in range(300):
        answer = curve(noisy[None], time)[0] + line[0] * noisy + line[1]
        loss = (answer - clean).square().mean(0)
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
    centred = noisy - noisy.mean(0)
    slope = (centred * clean).sum(0) / centred.square().sum(0)
    straight = (clean - clean.mean(0) - slope * centred).square().mean(0)
    assert (loss < 0.5 * straight).all()
