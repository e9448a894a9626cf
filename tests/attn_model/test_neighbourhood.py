"""Smoothing in expression space: against scikit-learn, and what must not change it."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors

from alphastomics.attn_model import Model
from alphastomics.attn_model.neighbourhood import (
    nearest_cells,
    principal_components,
    smoothed_expression,
    smoothed_set,
)

SETTINGS = {"rounds": 2, "neighbours": 7, "components": 5}


def tissue(num_cells: int, num_genes: int, seed: int = 0) -> torch.Tensor:
    """Cells of three kinds along a gradient, so that the leading components stand out."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_cells, 5, generator=generator) * torch.tensor([5.0, 4, 3, 2.5, 2])
    loading = torch.randn(5, num_genes, generator=generator)
    return hidden @ loading + torch.randn(num_cells, num_genes, generator=generator)


def by_sklearn(x: np.ndarray) -> np.ndarray:
    """The definition, with a library's components and neighbours."""
    scales = []
    for _ in range(SETTINGS["rounds"]):
        points = PCA(SETTINGS["components"], svd_solver="full").fit_transform(x)
        search = NearestNeighbors(n_neighbors=SETTINGS["neighbours"]).fit(points)
        x = x[search.kneighbors(points, return_distance=False)].mean(1)
        x = (x - x.mean(0)) / x.std(0)
        scales.append(x)
    return np.concatenate(scales, 1)


def test_smoothing_agrees_with_scikit_learn() -> None:
    x = tissue(150, 40)
    expected = by_sklearn(x.double().numpy())
    torch.testing.assert_close(
        smoothed_set(x.double(), **SETTINGS), torch.from_numpy(expected), rtol=1e-6, atol=1e-6
    )


def test_components_keep_the_distances_of_a_full_decomposition() -> None:
    x = tissue(90, 30).double()
    ours = principal_components(x, 5)
    theirs = torch.from_numpy(PCA(5, svd_solver="full").fit_transform(x.numpy()))
    ways = [torch.cdist(part, part) for part in (ours, theirs)]
    torch.testing.assert_close(*ways, rtol=1e-6, atol=1e-5)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    points = tissue(61, 4)
    whole = nearest_cells(points, 6).sort(1).values
    monkeypatch.setattr("alphastomics.attn_model.neighbourhood.LARGEST_BLOCK", 150)
    assert torch.equal(nearest_cells(points, 6).sort(1).values, whole)


def test_permuting_cells_permutes_the_result() -> None:
    x = tissue(80, 20)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        smoothed_set(x[order], **SETTINGS), smoothed_set(x, **SETTINGS)[order], rtol=1e-3, atol=1e-3
    )


def test_padding_and_other_sets_change_nothing() -> None:
    x = tissue(50, 20)
    alone = smoothed_expression(x[None], None, torch.tensor([True]), **SETTINGS)
    batch = torch.stack([tissue(70, 20, 1), torch.cat([x, torch.full((20, 20), 9.0)])])
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[1, 50:] = False
    both = smoothed_expression(batch, mask, torch.tensor([True, True]), **SETTINGS)
    torch.testing.assert_close(both[1, :50], alone[0])
    assert not both[1, 50:].any()


def test_noisy_sets_get_nothing_and_all_padded_ones_are_fine() -> None:
    batch = tissue(40, 20)[None].repeat(3, 1, 1)
    mask = torch.ones(3, 40, dtype=torch.bool)
    mask[2] = False
    made = smoothed_expression(batch, mask, torch.tensor([True, False, True]), **SETTINGS)
    assert made[0].any()
    assert not made[1:].any()


def test_fewer_cells_than_neighbours_or_components_is_fine() -> None:
    # The mean of a single cell is the cell, and does not vary.
    assert not smoothed_set(tissue(1, 20), **SETTINGS).any()
    for count in (2, 4):
        made = smoothed_set(tissue(count, 20), **SETTINGS)
        assert made.shape == (count, 40)
        # Standardised over so few cells, no value is far from 0.
        assert made.abs().max() <= count


def test_a_gene_that_does_not_vary_becomes_zero() -> None:
    x = tissue(30, 20)
    x[:, 3] = 2.5
    made = smoothed_set(x, **SETTINGS)
    assert not made[:, [3, 23]].any()


def small_model(**settings: float) -> Model:
    torch.manual_seed(0)
    return Model(20, d_model=16, n_heads=2, n_layers=1, dropout=0.0, **settings).eval()


def test_the_network_reads_alike_cells_when_expression_is_given_alone() -> None:
    model = small_model(smoothing_rounds=2)
    x, p = tissue(30, 20)[None], torch.zeros(1, 30, 3)
    given, noisy = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 1.0]])
    made = model.smooth(x, given)

    def first_state(time: torch.Tensor, smoothed: torch.Tensor | None) -> torch.Tensor:
        prediction = model(x, p, time, smoothed=smoothed, output_hidden_states=True)
        return prediction.aux.hidden_states[0]

    assert torch.equal(first_state(given, None), first_state(given, made))
    assert not torch.allclose(first_state(given, made), first_state(given, 0 * made))
    assert torch.equal(first_state(noisy, made), first_state(noisy, 0 * made))


def test_hidden_and_unmeasured_values_do_not_reach_alike_cells() -> None:
    model = small_model(smoothing_rounds=1)
    x, time = tissue(30, 20)[None], torch.zeros(1, 2)
    hidden = torch.zeros(1, 30, 20, dtype=torch.bool)
    hidden[0, :, 4] = True
    measured = torch.ones(1, 20, dtype=torch.bool)
    measured[0, 5] = False
    changed = x.clone()
    changed[..., 4:6] += 100
    marks = {"gene_mask": measured, "expression_hidden": hidden}
    assert torch.equal(model.smooth(x, time, **marks), model.smooth(changed, time, **marks))


def test_input_dropout_touches_given_expression_in_training_alone() -> None:
    model = small_model(input_dropout=0.5)
    x, p = tissue(30, 20)[None], torch.zeros(1, 30, 3)
    seen: list[torch.Tensor] = []
    model.trunk.expression_in.register_forward_pre_hook(
        lambda _module, inputs: seen.append(*inputs)
    )
    model(x, p, torch.zeros(1, 2))
    model.train()
    model(x, p, torch.zeros(1, 2))
    model(x, p, torch.full((1, 2), 0.4))
    at_rest, dropped, noisy = seen
    assert torch.equal(at_rest, x)
    assert torch.equal(noisy, x)
    kept = dropped != 0
    assert 0.4 < float(kept.float().mean()) < 0.6
    torch.testing.assert_close(dropped[kept], 2 * x[kept])
