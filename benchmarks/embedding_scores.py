"""Scores of embeddings of an unseen slice: cell types, domains, and how slices mix."""

import numpy as np
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

NEIGHBOURS, MIXED, FEWEST, SEEDS = 15, 30, 50, 3
# Labels that name no type.
UNKNOWN = {"Low quality", "Ambiguous", "unlabelled", "nan"}


def is_typed(types: np.ndarray) -> np.ndarray:
    """Say which cells have a type."""
    return ~np.isin(types.astype(str), list(UNKNOWN))


def type_accuracy(
    train: np.ndarray, train_types: np.ndarray, test: np.ndarray, test_types: np.ndarray
) -> dict[str, float]:
    """Predict the types of a test slice from embeddings of training slices.

    A type that training lacks counts as missed, as it does for every method.
    """
    known, asked = is_typed(train_types), is_typed(test_types)
    train, train_types, test, test_types = (
        train[known], train_types[known], test[asked], test_types[asked],
    )  # fmt: skip
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
    near = KNeighborsClassifier(NEIGHBOURS)
    return {
        name: float((model.fit(train, train_types).predict(test) == test_types).mean())
        for name, model in (("probe", probe), ("k-NN", near))
    }


def domain_scores(embedding: np.ndarray, domains: np.ndarray) -> dict[str, float]:
    """Compare k-means clusters of a slice, as many as domains, with its domains; mean of seeds."""
    known = domains.astype(str) != "nan"
    domains = domains[known].astype(str)
    number = len(np.unique(domains))
    found = [
        KMeans(number, n_init=10, random_state=seed).fit_predict(embedding[known])
        for seed in range(SEEDS)
    ]
    return {
        "ARI": float(np.mean([adjusted_rand_score(domains, one) for one in found])),
        "NMI": float(np.mean([normalized_mutual_info_score(domains, one) for one in found])),
    }


def mixing(
    train: np.ndarray, train_types: np.ndarray, test: np.ndarray, test_types: np.ndarray
) -> float:
    """Return how well training and test cells of one type mix: 1 is by chance, 0 not at all.

    Of each type as many cells of both sides are taken, by a fixed seed; the value is the share of a
    cell's 30 nearest neighbours within its type that come from the other side, over the share that
    is expected by chance, and the mean is over cells.
    """
    random = np.random.default_rng(0)
    shares = []
    for name in np.unique(test_types[is_typed(test_types)]):
        rows = [np.flatnonzero(types == name) for types in (train_types, test_types)]
        number = min(map(len, rows))
        if number < FEWEST:
            continue
        one, two = (random.permutation(part)[:number] for part in rows)
        cells = np.concatenate([train[one], test[two]])
        side = np.repeat([0, 1], number)
        near = NearestNeighbors(n_neighbors=MIXED + 1).fit(cells).kneighbors(cells)[1][:, 1:]
        other = (side[near] != side[:, None]).mean(1)
        shares.append(other * (2 * number - 1) / number)
    return float(np.concatenate(shares).mean())
