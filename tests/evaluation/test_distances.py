"""Pairwise metrics against loops, scipy and scikit-learn."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy.stats import rankdata
from sklearn.metrics import f1_score, precision_score, recall_score

from alphastomics.errors import InputError
from alphastomics.evaluation import arrays, distances, pairs
from alphastomics.evaluation.pairs import PositionPair
from alphastomics.evaluation.ranks import order_rows
from alphastomics.utils.metrics import (
    contact_scores,
    distance_mse,
    distance_spearman,
    position_scores,
)
from tests.evaluation.reference import (
    contacts_naive,
    distance_mse_naive,
    rotated,
    spearman_naive,
)

LATTICE = np.stack(np.meshgrid(np.arange(7.0), np.arange(6.0)), -1).reshape(-1, 2)


def tissues(rng: np.random.Generator) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Predictions and truths that are hard in one way each."""
    true = rng.normal(size=(50, 3))
    noise = rng.normal(size=true.shape)
    doubled = np.repeat(true[:25], 2, axis=0)
    far = true.copy()
    far[7] = 1e9
    return {
        "plain": (true + noise, true),
        "2D": (true[:, :2] + noise[:, :2], true[:, :2]),
        "lattice as truth": (LATTICE + rng.normal(size=LATTICE.shape), LATTICE),
        "lattice as prediction": (LATTICE, LATTICE + rng.normal(size=LATTICE.shape)),
        "two lattices": (LATTICE[::-1] * [1, 2], LATTICE),
        "doubled truth": (true + noise, doubled),
        "doubled prediction": (doubled, true + noise),
        "doubled twice": (doubled, doubled[::-1].copy()),
        "one cell far away": (far, true),
        "one true cell far away": (true + noise, far),
        "three cells": (true[:3] + noise[:3], true[:3]),
    }


@pytest.fixture
def threads(request) -> Iterator[int]:
    """Let torch have so many threads, and afterwards what it had."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param
    torch.set_num_threads(before)


CASES = list(tissues(np.random.default_rng(0)))


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("threads")
def test_spearman_equals_a_loop_of_scipy(case, rng, monkeypatch):
    predicted, true = tissues(rng)[case]
    monkeypatch.setattr(arrays, "ENTRIES_ON_CPU", 32 * len(true))
    expected = spearman_naive(predicted, true)
    np.testing.assert_allclose(distance_spearman(predicted, true), expected, atol=1e-12)


def test_spearman_equals_a_loop_of_scipy_on_a_thousand_cells(rng):
    true = rng.normal(size=(1003, 3))
    predicted = true + rng.normal(size=true.shape)
    expected = spearman_naive(predicted, true)
    np.testing.assert_allclose(distance_spearman(predicted, true), expected, atol=1e-12)


def test_spearman_worked_by_hand():
    # From cell 0, the others are truly at 1, 2, 3, and were placed at 2, 1, 3: rho = 1 - 6*2/(3*8).
    true, predicted = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array([[0.0], [2.0], [1.0], [3.0]])
    both = [np.hstack([side, np.zeros_like(side)]) for side in (predicted, true)]
    assert float(distance_spearman(*both)[0]) == pytest.approx(0.5)


def test_a_collapsed_prediction_scores_0_and_shuffled_cells_score_about_0(rng):
    true = rng.normal(size=(400, 3))
    assert distance_spearman(np.zeros_like(true), true).tolist() == [0] * 400
    chance = distance_spearman(rng.permutation(true), true)
    # Distances of a cell that lies at the rim, taken for one in the middle, still agree a little.
    assert abs(float(chance.mean())) < 0.05


def test_rows_are_ordered_as_by_a_stable_sort_with_the_cell_itself_first(rng):
    values = rng.integers(0, 5, size=(6, 200)).astype(float)
    values[1] *= 1e300
    values[2] = 0
    values[3] = rng.random(200)
    values[4, 9] = 1e12
    own = rng.integers(0, 200, size=6)
    values[np.arange(6), own] = 0
    marked = values.copy()
    marked[np.arange(6), own] = -1
    order, ranks_of_ties = order_rows(torch.from_numpy(values), torch.from_numpy(own))
    np.testing.assert_array_equal(order, marked.argsort(axis=1, kind="stable"))
    expected = np.sort(rankdata(marked, axis=1), axis=1) - 101
    expected[:, 0] = 0
    np.testing.assert_array_equal(ranks_of_ties, expected)


@pytest.mark.parametrize("share", [0.01, 0.3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("most_at_once", "threads"), [(0, 1), (20, 3), (10**6, 2)], indirect=["threads"]
)
@pytest.mark.usefixtures("threads")
def test_contacts_equal_sets_of_pairs_and_sklearn(case, rng, share, most_at_once, monkeypatch):
    predicted, true = tissues(rng)[case]
    monkeypatch.setattr(arrays, "PAIRS_ON_CPU", 900)
    monkeypatch.setattr(distances, "PAIRS_TO_PICK_FROM", most_at_once)
    a, b = contacts_naive(predicted, share), contacts_naive(true, share)
    pairs = sorted(a | b)
    labels = [pair in b for pair in pairs], [pair in a for pair in pairs]
    scores = contact_scores(predicted, true, share=share)
    assert scores.precision == pytest.approx(precision_score(*labels))
    assert scores.recall == pytest.approx(recall_score(*labels))
    assert scores.f1 == pytest.approx(f1_score(*labels))


def test_contact_precision_of_shuffled_and_collapsed_cells_is_the_share(rng):
    true = rng.normal(size=(600, 2))
    chance = contact_scores(rng.permutation(true), true, share=0.1)
    assert chance.precision == pytest.approx(0.1, abs=0.02)
    collapsed = contact_scores(np.zeros_like(true), true, share=0.1)
    assert (collapsed.precision, collapsed.recall) == (pytest.approx(0.1, abs=1e-4), 1)


def test_contacts_worked_by_hand():
    true = np.array([[0.0, 0.0], [1.0, 0.0], [3.0, 0.0], [7.0, 0.0]])
    # Pairs by true distance: 01 (1), 12 (2), 02 (3); predicted: 02 (1), 01 (2), 12 (3).
    predicted = np.array([[0.0, 0.0], [-2.0, 0.0], [1.0, 0.0], [9.0, 0.0]])
    assert contact_scores(predicted, true, share=2 / 6) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("case", CASES)
def test_distance_mse_equals_the_loop(case, rng, monkeypatch):
    predicted, true = tissues(rng)[case]
    expected = distance_mse_naive(predicted, true)
    assert distance_mse(predicted, true) == pytest.approx(expected)
    monkeypatch.setattr(arrays, "PAIRS_ON_CPU", 120)
    assert distance_mse(predicted, true) == pytest.approx(expected)


def test_turning_mirroring_and_reordering_change_no_pairwise_score(pair, rng):
    predicted, true = pair
    order = rng.permutation(len(true))
    moved = rotated(predicted, 1.1, mirror=True)[order], true[order]
    assert distance_mse(*moved) == pytest.approx(distance_mse(*pair))
    assert contact_scores(*moved, share=0.1) == contact_scores(*pair, share=0.1)
    np.testing.assert_allclose(
        distance_spearman(*moved), distance_spearman(*pair)[order], atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_equals_the_same_numbers_in_double(pair, dtype):
    half = [torch.from_numpy(side).to(dtype) for side in pair]
    full = [side.double() for side in half]
    assert distance_mse(*half) == distance_mse(*full)
    assert contact_scores(*half, share=0.1) == contact_scores(*full, share=0.1)
    torch.testing.assert_close(distance_spearman(*half), distance_spearman(*full), rtol=0, atol=0)


@pytest.mark.parametrize("cells", [0, 1, 2])
def test_too_few_cells_are_refused_with_what_to_do(cells):
    few = np.zeros((cells, 3))
    with pytest.raises(InputError, match=f"{cells} cells, but this metric needs at least 3"):
        distance_spearman(few, few)
    if cells < 2:
        with pytest.raises(InputError, match="at least 2"):
            contact_scores(few, few, share=0.1)


def test_nan_and_a_share_outside_its_range_are_refused(pair):
    predicted, true = pair
    for share in (0, 1.5):
        with pytest.raises(InputError, match="share of contacts"):
            contact_scores(predicted, true, share=float(share))
    predicted[5, 1] = np.inf
    with pytest.raises(InputError, match=r"predicted positions.*cell 5, column 1"):
        distance_spearman(predicted, true)


@pytest.mark.gpu
def test_the_gpu_gives_the_scores_of_the_cpu(rng):
    true = torch.from_numpy(rng.normal(size=(3000, 3)))
    predicted = true + torch.from_numpy(rng.normal(size=true.shape))
    on_gpu = predicted.cuda(), true.cuda()
    torch.testing.assert_close(
        distance_spearman(*on_gpu).cpu(), distance_spearman(predicted, true), rtol=0, atol=1e-12
    )
    assert distance_mse(*on_gpu) == pytest.approx(distance_mse(predicted, true))
    assert contact_scores(*on_gpu, share=0.1) == contact_scores(predicted, true, share=0.1)


def test_the_limit_of_a_truth_that_is_asked_again_is_that_of_a_search():
    generator = torch.Generator().manual_seed(5)
    for dims in (2, 3):
        true = torch.randn(60, dims, generator=generator, dtype=torch.float64)
        for rank in (1, 17, 1770):
            every = sorted(torch.pdist(true).square().tolist())
            limits = [distances.known_limit(true, rank) for _ in range(2)]
            assert limits == [distances.nth_smallest_key(true, rank)] * 2
            value = torch.tensor(limits[0]).view(torch.float64).item()
            assert value == pytest.approx(every[rank - 1], rel=1e-12)


def test_pairs_of_a_large_slice_are_those_of_random_cells_and_neighbours_those_of_all(
    rng, monkeypatch
):
    true = rng.normal(size=(3000, 2))
    predicted = true + rng.normal(size=true.shape)
    whole = position_scores(predicted, true)
    monkeypatch.setattr(pairs, "MOST_PAIRED_CELLS", 1500)
    some = position_scores(predicted, true)
    assert len(PositionPair(predicted, true, None).paired[0]) == 1500
    changed = {name for name, value in some.items() if value != whole[name]}
    shares = {f"contact_{kind}_{share}pct" for kind in ("precision", "f1") for share in (1, 10)}
    assert changed == {"spearman_mean", "spearman_median", "distance_mse"} | shares
    for name in ("spearman_mean", "contact_precision_10pct", "distance_mse"):
        assert some[name] == pytest.approx(whole[name], rel=0.05)
