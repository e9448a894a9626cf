"""The position head: its networks against a loop, invariances, and which ensemble speaks."""

import pytest
import torch
from torch.nn import functional as F

from alphastomics.attn_model.position_head import (
    OWN,
    QUANTILES,
    SMOOTHED,
    Dropout,
    Ensemble,
    PositionHead,
    quantiles,
)
from alphastomics.config import auto

GENES, WIDTH, CELLS = 12, 36, 400


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def head() -> PositionHead:
    torch.manual_seed(0)
    return PositionHead(GENES, WIDTH).eval()


def test_an_ensemble_equals_its_networks_one_after_another():
    torch.manual_seed(0)
    ensemble = Ensemble(GENES, WIDTH, SMOOTHED).eval()
    for bias in ensemble.biases:
        torch.nn.init.normal_(bias)
    expression, smoothed = draw(7, GENES), draw(7, WIDTH, seed=1)
    together = ensemble(expression[None], smoothed[None])
    assert ensemble.smoothed is not None
    for number in range(len(SMOOTHED)):
        first, second, last = (bias[number] for bias in ensemble.biases)
        cells = F.relu(
            expression @ ensemble.own[number] + smoothed @ ensemble.smoothed[number] + first
        )
        cells = cells + F.relu(cells @ ensemble.block[number] + second)
        torch.testing.assert_close(together[number], cells @ ensemble.out[number] + last)
    chosen = ensemble(expression[None], smoothed[None], (4, 1))
    torch.testing.assert_close(chosen, together[[4, 1]])


def test_each_network_hides_its_own_share_and_keeps_the_mean():
    ensemble = Ensemble(GENES, 0, (Dropout(0.1, 1.0, 0.0), Dropout(0.6, 1.0, 0.0))).train()
    torch.manual_seed(0)
    seen = ensemble._hidden(torch.ones(1, 2000, 50), [0.1, 0.6])
    shares = (seen == 0).float().mean((1, 2))
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.6]), atol=0.01, rtol=0)
    torch.testing.assert_close(seen.mean((1, 2)), torch.ones(2), atol=0.02, rtol=0)


def test_quantiles_are_values_that_occur():
    values = torch.arange(11.0)[:, None] * torch.tensor([[1.0, -2.0]])
    expected = torch.tensor([[1.0, -18.0], [5.0, -10.0], [9.0, -2.0]])
    torch.testing.assert_close(quantiles(values), expected)
    assert QUANTILES == (0.1, 0.5, 0.9)


def counts(rates: torch.Tensor, cells: int, seed: int) -> torch.Tensor:
    """Standardised log counts of a slice with these rates."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.log1p(torch.poisson(rates.expand(cells, -1), generator=generator))
    return (values - values.mean(0)) / values.std(0)


def test_further_cells_of_a_training_slice_are_told_from_another_slice(head):
    rates = 0.2 + 2 * torch.rand(GENES, generator=torch.Generator().manual_seed(1))
    head.remember([counts(rates, 2000, seed=2), counts(3 * rates, 3000, seed=3)])
    same = counts(rates, CELLS, seed=4)
    other = counts(rates * torch.linspace(0.4, 2, GENES), CELLS, seed=5)
    sets = torch.stack([same, other])
    assert head.matched(sets, None, None).tolist() == [True, False]
    smoothed = draw(2, CELLS, WIDTH)
    expected = head(sets, smoothed, None, None)
    alone = [part[None] for part in (sets[0], smoothed[0])]
    torch.testing.assert_close(expected[0], head.own(*alone).mean(0))
    alone = [part[None] for part in (sets[1], smoothed[1])]
    torch.testing.assert_close(expected[1], head.smoothed(*alone).mean(0))


def test_few_cells_or_no_known_slice_match_nothing(head):
    rates = torch.ones(GENES)
    assert not head.matched(counts(rates, CELLS, seed=1)[None], None, None).any()
    head.remember([counts(rates, 2000, seed=2)])
    assert head.matched(counts(rates, CELLS, seed=1)[None], None, None).all()
    assert not head.matched(counts(rates, 100, seed=1)[None], None, None).any()


def test_genes_that_were_not_measured_do_not_count_in_the_comparison(head):
    rates = torch.ones(GENES)
    head.remember([counts(rates, 2000, seed=2)])
    cells = counts(rates, CELLS, seed=1)[None]
    measured = torch.arange(GENES)[None] < 4
    hidden = cells.masked_fill(~measured[:, None], 0)
    assert not head.matched(hidden, None, None).any()
    assert head.matched(hidden, None, measured).all()


def test_cell_order_padding_and_other_sets_change_nothing(head):
    rates = torch.ones(GENES)
    head.remember([counts(rates, 2000, seed=2)])
    cells, smoothed = counts(rates, CELLS, seed=1)[None], draw(1, CELLS, WIDTH)
    plain = head(cells, smoothed, None, None)
    order = torch.randperm(CELLS, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(
        head(cells[:, order], smoothed[:, order], None, None)[:, :], plain[:, order]
    )
    padded = [F.pad(part, (0, 0, 0, 60), value=9.0) for part in (cells, smoothed)]
    mask = (torch.arange(CELLS + 60) < CELLS)[None]
    torch.testing.assert_close(head(*padded, mask, None)[:, :CELLS], plain)
    others = [torch.cat([part, 2 * part]) for part in (cells, smoothed)]
    torch.testing.assert_close(head(*others, None, None)[:1], plain)


def test_bf16_around_it_does_not_round_positions(head):
    cells, smoothed = draw(1, 50, GENES), draw(1, 50, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = head(cells, smoothed, None, None)
    torch.testing.assert_close(inside, head(cells, smoothed, None, None))


def test_the_plan_counts_the_networks_that_there_are():
    assert (len(OWN), len(SMOOTHED)) == (auto.HEAD_OWN, auto.HEAD_SMOOTHED)
