"""Baselines by hand, and on the simulated tissue, where each must beat chance."""

import numpy as np
import pytest
import torch
from sklearn.ensemble import ExtraTreesRegressor

from alphastomics.config import SimulationConfig
from alphastomics.errors import InputError
from alphastomics.evaluation.baselines import (
    class_centroids,
    closest_slice,
    features_at_a_split,
    from_other_half,
    regressed_positions,
    shuffled,
    spatial_knn_mean,
    tuned_num_neighbours,
)
from alphastomics.simulate import simulate
from alphastomics.utils.metrics import expression_mse, position_scores, procrustes, summary

EVERY_GENE = np.ones((1, 60), dtype=bool)


def test_each_cell_goes_to_the_centroid_of_its_class():
    position = np.array([[0.0, 0.0], [2.0, 4.0], [5.0, 5.0]])
    predicted = class_centroids(position, ["a", "a", "b"])
    assert predicted.tolist() == [[1, 2], [1, 2], [5, 5]]
    with pytest.raises(InputError, match="labels: 2 for 3 cells"):
        class_centroids(position, ["a", "b"])


def test_shuffling_keeps_the_cells_and_follows_the_generator():
    values = torch.arange(12.0).reshape(6, 2)
    one, again = (shuffled(values, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, again)
    assert not torch.equal(one, values)
    assert sorted(one.tolist()) == values.tolist()


def test_the_spatial_mean_is_over_the_nearest_cells_that_measured_the_gene():
    at = np.array([[0.0, 0], [1, 0], [2, 0], [50, 0]])
    expression = np.array([[1.0, 5], [3, 5], [8, 7], [0, 9]])
    measured = np.array([[True, False], [True, False], [True, True], [True, True]])
    result = spatial_knn_mean(np.array([[0.1, 0]]), at, expression, measured, k=2)
    # Gene 0: (1 + 3) / 2. Gene 1: neither measured it, so the mean of 7 and 9.
    assert result.tolist() == [[2, 8]]
    three = spatial_knn_mean(np.array([[0.1, 0]]), at, expression, measured, k=3)
    assert three.tolist() == [[4, 7]]
    everything = spatial_knn_mean(np.array([[0.1, 0]]), at, expression, measured[-1:], k=9)
    assert everything.tolist() == [[3, 6.5]]


def test_the_closest_slice_gives_the_expression_of_its_nearest_cell():
    at = np.array([[0.0, 0, 0], [9, 0, 0], [0, 0, 30], [9, 0, 30]])
    expression, of_slice = np.array([[1.0], [2], [3], [4]]), np.array([4, 4, 7, 7])
    cells = np.array([[1.0, 0, 20], [8, 0, 20], [9, 0, 20]])
    assert closest_slice(cells, at, expression, of_slice).ravel().tolist() == [3, 4, 4]


def test_few_neighbours_are_chosen_for_clean_fields_and_many_for_noise(rng):
    at = rng.random((300, 2))
    of_slice = np.arange(300) % 3
    clean, noise = np.sin(6 * at), rng.normal(size=(300, 2))
    assert tuned_num_neighbours(at, clean, of_slice, (1, 3, 100)) == 3
    assert tuned_num_neighbours(at, noise, of_slice, (1, 3, 100)) == 100
    assert tuned_num_neighbours(at, noise, of_slice * 0, (1, 3, 100, 300)) == 100
    with pytest.raises(InputError, match="there are 2 cells"):
        tuned_num_neighbours(at[:3], noise[:3], of_slice[:3] * 0, (5,))


@pytest.mark.parametrize("regressor", ["ridge", "knn", "trees", "sqrt trees", "smoothed trees"])
def test_a_linear_map_is_found_by_every_regressor(regressor, rng):
    expression = rng.normal(size=(700, 3)).astype(np.float32)
    position = expression.astype(float) @ rng.normal(size=(3, 3)) * 100 + 4000
    result = regressed_positions(
        expression[500:], expression[:500], position[:500], regressor=regressor, seed=0
    )
    assert procrustes(result, position[500:], scale=True, reflection=True) < 0.05
    error, of_the_mean = (np.abs(x - position[500:]).mean() for x in (result.numpy(), 4000))
    # Averages over leaves of five cells and more are drawn to the middle.
    assert error < (0.75 * of_the_mean if "trees" in regressor else 60)


def test_each_half_of_a_slice_is_predicted_from_the_other_alone(rng):
    expression = rng.normal(size=(401, 3)).astype(np.float32)
    position = expression[:, :2].astype(float) * 100 + 4000
    result = from_other_half(expression, position, seed=1, most=1000)
    order = np.random.default_rng(1).permutation(401)
    asked, known = order[:200], order[200:]
    by_hand = regressed_positions(
        expression[asked], expression[known], position[known], regressor="sqrt trees", seed=1
    )
    assert torch.equal(result[torch.from_numpy(asked)], by_hand)
    # What is known of a half does not reach that half's own prediction.
    moved = position.copy()
    moved[asked] += 500
    again = from_other_half(expression, moved, seed=1, most=1000)
    assert torch.equal(again[torch.from_numpy(asked)], by_hand)
    assert (again - result)[torch.from_numpy(known)].abs().min() > 100


@pytest.mark.parametrize(
    ("regressor", "share"), [("trees", 1.0), ("sqrt trees", "sqrt"), ("smoothed trees", 0.3)]
)
def test_trees_are_those_of_sklearn(regressor, share, rng):
    expression = rng.normal(size=(300, 20)).astype(np.float32)
    position = expression[:, :2].astype(float) @ rng.normal(size=(2, 2))
    position = (position - position.mean(0)) / position.std(0)
    trees = ExtraTreesRegressor(200, min_samples_leaf=5, max_features=share, random_state=3)
    expected = trees.fit(expression[:250], position[:250]).predict(expression[250:])
    result = regressed_positions(
        expression[250:], expression[:250], position[:250], regressor=regressor, seed=3
    )
    # The training part of standardised positions is standardised again, which moves little.
    assert np.corrcoef(result.numpy().ravel(), expected.ravel())[0, 1] > 0.999


def test_of_very_many_genes_some_are_tried_at_a_split():
    shares = {
        "trees": (1, 250, 500, 500),
        "sqrt trees": (1, 15, 22, 141),
        "smoothed trees": (1, 75, 150, 500),
    }
    for regressor, expected in shares.items():
        result = tuple(features_at_a_split(regressor, number) for number in (1, 250, 500, 20_000))
        assert result == expected


@pytest.fixture(scope="module")
def tissue() -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Four neighbouring slices: log-normalised expression, place in the body, cell type."""
    settings = SimulationConfig(cells=400, slices=4, genes=60, dims=3)
    slices = []
    for adata in simulate(settings, seed=0):
        counts = adata.X.toarray().astype(np.float64)
        expression = np.log1p(counts / counts.sum(1, keepdims=True).clip(1) * 1e3)
        slices.append((expression, adata.obsm["body"], np.asarray(adata.obs["cell_type"])))
    return slices


def test_on_simulated_tissue_baselines_of_position_beat_chance(tissue):
    expression, true, labels = tissue[1]
    known = [np.concatenate([tissue[index][part] for index in (0, 2, 3)]) for part in (0, 1)]
    generator = torch.Generator().manual_seed(0)
    chance = position_scores(shuffled(true, generator), true, labels)
    predicted = {"oracle": class_centroids(true, labels)}
    for name in ("ridge", "knn", "trees", "sqrt trees", "smoothed trees"):
        predicted[name] = regressed_positions(expression, *known, regressor=name, seed=0)
    for position in predicted.values():
        scores = position_scores(position, true, labels)
        assert scores["spearman_mean"] > 0.3 > 0.05 > chance["spearman_mean"]
        assert scores["contact_precision_10pct"] > 1.5 * chance["contact_precision_10pct"]
        assert scores["procrustes"] < 0.7 < 0.9 < chance["procrustes"]
        assert scores["rmsd"] < chance["rmsd"]


def test_on_simulated_tissue_baselines_of_expression_beat_chance(tissue):
    true, at, _ = tissue[1]
    known_expression, known_at = (
        np.concatenate([tissue[index][part] for index in (0, 2, 3)]) for part in (0, 1)
    )
    of_slice = np.repeat([0, 2, 3], 400)
    k = tuned_num_neighbours(known_at, known_expression, of_slice, (1, 3, 10, 30, 100))
    assert k >= 10
    mean = spatial_knn_mean(at, known_at, known_expression, EVERY_GENE, k=k)
    copied = closest_slice(at, known_at, known_expression, of_slice)
    chance = shuffled(true, torch.Generator().manual_seed(0))
    errors = [expression_mse(x, true, EVERY_GENE) for x in (mean, copied, chance)]
    assert errors[0] < 0.8 * errors[1] < 0.95 * errors[2]


def test_nothing_and_nan_are_refused():
    none, one = np.zeros((0, 2)), np.zeros((1, 2))
    with pytest.raises(InputError, match="positions: 0 cells, but"):
        closest_slice(none, one, one, np.zeros(1, dtype=np.int64))
    with pytest.raises(InputError, match="expression: 2 values are NaN"):
        regressed_positions(one * np.nan, one, one, regressor="knn", seed=0)
    assert summary(torch.ones(1), "x").mean == 1
