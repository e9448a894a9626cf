"""Cluster scores against scikit-learn and by hand."""

import itertools

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from alphastomics.errors import InputError
from alphastomics.utils.metrics import cluster_scores, clustered, transferred_labels


def blobs(rng: np.random.Generator, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Three cell types, far apart in 8 genes."""
    labels = rng.integers(0, 3, size=cells)
    return rng.normal(size=(cells, 8)) + 12 * np.eye(8)[labels], np.array(["a", "b", "c"])[labels]


def test_ari_and_nmi_are_those_of_sklearn(rng):
    one, two = rng.integers(0, 4, size=(2, 60))
    scores = cluster_scores(one, two)
    assert scores.ari == adjusted_rand_score(two, one)
    assert scores.nmi == normalized_mutual_info_score(two, one)
    naming = max(np.mean(np.array(order)[one] == two) for order in itertools.permutations(range(4)))
    assert scores.accuracy == naming


@pytest.mark.parametrize("names", [["0", "1", "2"], ["2", "0", "1"], ["a", "b", "c"], [0, 1, 2]])
def test_a_perfect_clustering_scores_one_whatever_the_labels_are_called(names):
    # Of many cells: numpy compares a few with one another as they are, and casts many to text.
    codes = np.tile([0, 1, 2, 2, 1, 0, 0], 20)
    assert cluster_scores(codes, np.array(names)[codes]) == (1, 1, 1)


def test_names_of_clusters_do_not_matter():
    true = ["x", "x", "y", "y", "y"]
    assert cluster_scores([7, 7, 3, 3, 3], true) == (1, 1, 1)
    # Cluster 0 is y (two cells), 1 is x (one), 2 has no name left.
    assert cluster_scores([1, 2, 0, 0, 2], true).accuracy == pytest.approx(3 / 5)
    assert cluster_scores(["y", "y", "x", "x", "x"], true).accuracy == 1


def test_kmeans_finds_separate_types_and_the_same_seed_the_same_clusters(rng):
    expression, labels = blobs(rng, 90)
    result = clustered(expression, num_clusters=3, seed=1)
    assert cluster_scores(result, labels).accuracy == 1
    assert (result == clustered(expression, num_clusters=3, seed=1)).all()


def test_generated_cells_take_the_type_of_the_real_cells_they_resemble(rng):
    real, real_labels = blobs(rng, 120)
    generated, labels = blobs(rng, 70)
    result = transferred_labels(generated, real, real_labels, k=5, seed=0)
    assert cluster_scores(result, labels) == (1, 1, 1)


def test_collapsed_expression_is_one_cluster_and_scores_0(rng):
    _, labels = blobs(rng, 30)
    result = clustered(np.ones((30, 8)), num_clusters=3, seed=0)
    assert cluster_scores(result, labels).ari == 0


def test_bad_input_is_named(rng):
    with pytest.raises(InputError, match="one label a cell"):
        cluster_scores([1, 2], [1, 2, 3])
    with pytest.raises(InputError, match="labels: 0 cells"):
        cluster_scores([], [])
    with pytest.raises(InputError, match=r"expression: 2 cells.*at least 3"):
        clustered(np.zeros((2, 4)), num_clusters=3, seed=0)
    with pytest.raises(InputError, match="generated expression: 4 values are NaN"):
        transferred_labels(np.full((1, 4), np.nan), np.zeros((5, 4)), list("abcde"), k=1, seed=0)
