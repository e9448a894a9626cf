"""The position head: its networks against a loop, invariances, and which ensemble speaks."""

import math

import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from torch.nn import functional as F

from alphastomics.attn_model.position_head import (
    OWN,
    PLAIN,
    QUANTILES,
    SMOOTHED,
    Dropout,
    Ensemble,
    PositionHead,
    quantiles,
    smoothed_positions,
)
from alphastomics.config import auto

GENES, WIDTH, CELLS = 12, 36, 400


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def head() -> PositionHead:
    torch.manual_seed(0)
    return PositionHead(GENES, WIDTH).eval()


def alone(ensemble: Ensemble, number: int, expression, smoothed) -> torch.Tensor:
    """One network of an ensemble, written out."""
    cells = expression @ ensemble.own[number] + ensemble.bias[number]
    if ensemble.smoothed is not None:
        cells = cells + smoothed @ ensemble.smoothed[number]
    if ensemble.norm is None:
        cells, block = F.relu(cells), ensemble.blocks[0]
        cells = cells + F.relu(cells @ block.up[number] + block.up_bias[number])
    else:
        cells = F.silu(normalized(ensemble.norm, number, cells))
        for block in ensemble.blocks:
            inner = normalized(block.norm, number, cells) @ block.up[number]
            inner = F.gelu(inner + block.up_bias[number])
            cells = cells + inner @ block.down[number] + block.down_bias[number]
    return cells @ ensemble.out[number] + ensemble.out_bias[number]


def normalized(norm, number: int, cells: torch.Tensor) -> torch.Tensor:
    centred = cells - cells.mean(-1, keepdim=True)
    unit = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return unit * norm.scale[number] + norm.shift[number]


@pytest.mark.parametrize("width", [0, WIDTH])
@pytest.mark.parametrize("is_normalized", [False, True])
def test_an_ensemble_equals_its_networks_one_after_another(is_normalized, width):
    torch.manual_seed(0)
    ensemble = Ensemble(GENES, width, SMOOTHED, normalized=is_normalized).eval().double()
    for parameter in ensemble.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    expression, smoothed = draw(7, GENES).double(), draw(7, WIDTH, seed=1).double()
    together = ensemble(expression[None], smoothed[None])
    for number in range(len(SMOOTHED)):
        torch.testing.assert_close(together[number], alone(ensemble, number, expression, smoothed))
    chosen = ensemble(expression[None], smoothed[None], slice(1, 4, 2))
    torch.testing.assert_close(chosen, together[[1, 3]])


def test_each_network_hides_its_own_share_and_keeps_the_mean():
    ensemble = Ensemble(GENES, 0, (Dropout(0.1, 1.0, 0.0),) * 2, normalized=True).train()
    torch.manual_seed(0)
    seen = ensemble._hidden(torch.ones(1, 2000, 50), [0.1, 0.6])
    shares = (seen == 0).float().mean((1, 2))
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.6]), atol=0.01, rtol=0)
    torch.testing.assert_close(seen.mean((1, 2)), torch.ones(2), atol=0.02, rtol=0)
    # Values that share a random word are hidden each by itself.
    both = ((seen[:, :, 0] == 0) & (seen[:, :, 1] == 0)).float().mean(1)
    torch.testing.assert_close(both, torch.tensor([0.01, 0.36]), atol=0.03, rtol=0)


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
    cells = [part[None] for part in (sets[0], smoothed[0])]
    own = torch.cat([head.plain(*cells), head.own(*cells)]).mean(0)
    torch.testing.assert_close(expected[0], own)
    cells = [part[None] for part in (sets[1], smoothed[1])]
    networks = head.smoothed(*cells)
    torch.testing.assert_close(expected[1], smoothed_positions(networks, sets[1]))
    assert (expected[1] - networks.mean(0)).abs().max() > 1e-3


def test_positions_of_another_slice_equal_the_loop_over_their_neighbours():
    networks, expression = draw(3, 100, 3).double(), draw(100, GENES, seed=1).double()
    position = networks.mean(0)
    off = (networks - position).square().sum(-1).mean(0).sqrt()
    width = min(float(off.median()), 0.15 * float(position.var(0, correction=0).sum().sqrt()))
    points = PCA(GENES, svd_solver="full").fit_transform(expression.numpy())
    near = NearestNeighbors(n_neighbors=5).fit(points).kneighbors(points, return_distance=False)
    for _ in range(2):
        moved = torch.zeros_like(position)
        for cell, others in enumerate(near):
            weights = [
                math.exp(-float((position[cell] - position[j]).square().sum()) / (2 * width**2))
                for j in others
            ]
            total = sum(w * position[j] for w, j in zip(weights, others, strict=True))
            moved[cell] = total / sum(weights)
        position = moved
    found = smoothed_positions(networks, expression)
    torch.testing.assert_close(found, position, rtol=1e-6, atol=1e-8)


def test_neighbours_in_expression_that_lie_elsewhere_do_not_pull_a_cell():
    expression = draw(40, GENES)
    expression[20:] = expression[:20]  # pairs of equal cells, expected in two regions
    position = draw(40, 3, seed=1)
    position[20:] += 1000
    networks = torch.stack([position, position + draw(40, 3, seed=2) / 100])
    found = smoothed_positions(networks, expression)
    assert (found - position).abs().max() < 1


def test_positions_that_the_networks_agree_on_stay():
    expression, position = draw(50, GENES), draw(50, 3, seed=1)
    found = smoothed_positions(position.expand(4, -1, -1), expression)
    torch.testing.assert_close(found, position)
    torch.testing.assert_close(smoothed_positions(position[None, :1], expression[:1]), position[:1])


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
    measured = mask[..., None].expand(-1, -1, GENES)  # padding has measured nothing
    torch.testing.assert_close(head(*padded, mask, measured)[:, :CELLS], plain)


def test_cell_order_and_padding_change_nothing_of_another_slice(head):
    cells, smoothed = draw(1, 60, GENES), draw(1, 60, WIDTH, seed=1)
    plain = head(cells, smoothed, None, None)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(3))
    moved = head(cells[:, order], smoothed[:, order], None, None)
    torch.testing.assert_close(moved, plain[:, order], rtol=1e-4, atol=1e-5)
    padded = [F.pad(part, (0, 0, 0, 9), value=9.0) for part in (cells, smoothed)]
    mask = (torch.arange(69) < 60)[None]
    torch.testing.assert_close(head(*padded, mask, None)[:, :60], plain)
    others = [torch.cat([part, 2 * part]) for part in (cells, smoothed)]
    torch.testing.assert_close(head(*others, None, None)[:1], plain)


def test_bf16_around_it_does_not_round_positions(head):
    cells, smoothed = draw(1, 50, GENES), draw(1, 50, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = head(cells, smoothed, None, None)
    torch.testing.assert_close(inside, head(cells, smoothed, None, None))


def test_the_plan_counts_the_networks_that_there_are(head):
    assert (len(PLAIN), len(OWN), len(SMOOTHED)) == (
        auto.HEAD_PLAIN,
        auto.HEAD_OWN,
        auto.HEAD_SMOOTHED,
    )
    # but for biases and scales
    matrices = sum(p.numel() for p in head.parameters() if p.shape[1] > 1)
    inputs = (auto.HEAD_PLAIN + auto.HEAD_OWN) * GENES + auto.HEAD_SMOOTHED * (GENES + WIDTH)
    inner = auto.HEAD_INNER["normalized"] * (auto.HEAD_OWN + auto.HEAD_SMOOTHED)
    inner += auto.HEAD_INNER["plain"] * auto.HEAD_PLAIN
    outputs = 3 * 128 * (len(PLAIN) + len(OWN) + len(SMOOTHED))
    assert matrices == auto.HEAD_WIDTH * inputs + inner + outputs


def test_cells_without_a_neighbour_nearby_stay_where_they_are():
    # Empty cells are all tied: a cell need not be among its own nearest, and those lie far off.
    networks = 1e3 * draw(4, 60, 3, seed=1)
    networks[1:] = networks[0]
    found = smoothed_positions(networks, torch.zeros(60, GENES))
    torch.testing.assert_close(found, networks[0])
