"""Scores of embeddings of an unseen slice: cell types, domains, and how slices mix."""

from importlib.util import find_spec

import anndata
import numpy as np
import scanpy
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

NEIGHBOURS, MIXED, FEWEST, SEEDS = 15, 30, 50, 3
# Resolutions of Leiden that are searched, and how often the range is halved.
RESOLUTIONS, BISECTIONS = (0.01, 10.0), 20
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


def leiden(embedding: np.ndarray, number: int, seed: int) -> np.ndarray:
    """Cluster by Leiden on scanpy's graph of neighbours, into as many clusters as asked.

    The resolution is found by bisection of its logarithm; it depends on the embedding and on the
    number alone. Where no resolution gives that many clusters, that of the nearest number counts.
    """
    cells = anndata.AnnData(np.zeros((len(embedding), 1), np.float32))
    cells.obsm["embedding"] = embedding
    scanpy.pp.neighbors(cells, NEIGHBOURS, use_rep="embedding", random_state=seed)
    low, high = np.log(RESOLUTIONS)
    best, distance = np.zeros(len(embedding), int), np.inf
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        scanpy.tl.leiden(
            cells,
            resolution=float(np.exp(middle)),
            random_state=seed,
            flavor="igraph",
            n_iterations=2,
            directed=False,
        )
        clusters = cells.obs["leiden"].astype(int).to_numpy()
        many = len(np.unique(clusters))
        if abs(many - number) < distance:
            best, distance = clusters, abs(many - number)
        if many == number:
            break
        low, high = (low, middle) if many > number else (middle, high)
    return best


def agreement(domains: np.ndarray, found: list[np.ndarray], suffix: str) -> dict[str, float]:
    """Compare clusterings with domains; mean over clusterings."""
    return {
        f"ARI{suffix}": float(np.mean([adjusted_rand_score(domains, one) for one in found])),
        f"NMI{suffix}": float(
            np.mean([normalized_mutual_info_score(domains, one) for one in found])
        ),
    }


def domain_scores(embedding: np.ndarray, domains: np.ndarray) -> dict[str, float]:
    """Compare clusters of a slice, as many as domains, with its domains; mean of seeds.

    Clusters are those of k-means and, where igraph is installed, of Leiden.
    """
    known = domains.astype(str) != "nan"
    domains, embedding = domains[known].astype(str), embedding[known]
    number = len(np.unique(domains))
    seeds = range(SEEDS)
    means = [KMeans(number, n_init=10, random_state=one).fit_predict(embedding) for one in seeds]
    scores = agreement(domains, means, "")
    if find_spec("igraph"):
        graphs = [leiden(embedding, number, one) for one in seeds]
        scores |= agreement(domains, graphs, ", Leiden")
        scores["clusters - domains"] = float(
            np.mean([len(np.unique(one)) - number for one in graphs])
        )
    return scores


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
