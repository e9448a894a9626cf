"""Clusters: labels of cells enter, agreement leaves; or generated cells enter and get labels.

Two ways to ask whether generated expression has the right cell types: cluster it anew
(`clustered`), or let it take the types of the real cells that it resembles (`transferred_labels`).
Both look at 50 principal components, as scanpy's neighbours do.
"""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int64
from numpy import ndarray
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import (
    adjusted_rand_score,
    confusion_matrix,
    normalized_mutual_info_score,
)
from sklearn.neighbors import KNeighborsClassifier

from alphastomics.errors import InputError
from alphastomics.evaluation.arrays import Array, checked, require_enough_cells

Labels = Sequence[object] | ndarray

COMPONENTS = 50  # scanpy's default, too
RESTARTS = 10  # of k-means: one start may end in a poor local optimum


class ClusterScores(NamedTuple):
    """Agreement of two labellings; by chance ARI is 0 and NMI near 0."""

    ari: float
    nmi: float
    accuracy: float


def cluster_scores(predicted: Labels, true: Labels) -> ClusterScores:
    """Return the adjusted Rand index, normalised mutual information and accuracy.

    Accuracy is the share of equal labels under the best one-to-one naming of clusters (Hungarian
    matching), whatever their names.
    """
    labels, real = np.asarray(predicted), np.asarray(true)
    if labels.shape != real.shape or labels.ndim != 1:
        raise InputError(
            f"labels: predicted have shape {labels.shape}, true {real.shape}: "
            "give one label a cell."
        )
    require_enough_cells(len(real), "labels", least=1)
    return ClusterScores(
        float(adjusted_rand_score(real, labels)),
        float(normalized_mutual_info_score(real, labels)),
        _accuracy(labels, real),
    )


def _accuracy(predicted: ndarray, true: ndarray) -> float:
    (_, a), (_, b) = (np.unique(labels, return_inverse=True) for labels in (predicted, true))
    table = confusion_matrix(a, b)
    rows, columns = linear_sum_assignment(table, maximize=True)
    return float(table[rows, columns].sum() / len(true))


def clustered(
    expression: Float[Array, "N G"], *, num_clusters: int, seed: int
) -> Int64[ndarray, " N"]:
    """Return the number of each cell's k-means cluster in the cells' principal components."""
    values = checked(expression, "expression", least=num_clusters).float().cpu().numpy()
    means = KMeans(num_clusters, n_init=RESTARTS, random_state=seed)
    with warnings.catch_warnings():
        # Fewer different cells than clusters: a collapsed sample, which the score will show.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return means.fit_predict(_fitted_pca(values, seed).transform(values)).astype(np.int64)


def transferred_labels(
    generated: Float[Array, "N G"],
    real: Float[Array, "M G"],
    real_labels: Labels,
    *,
    k: int,
    seed: int,
) -> ndarray:
    """Label of the majority among the k real cells nearest to each generated cell."""
    return TypedCells(real, real_labels, k=k, seed=seed).labels_of(generated)


class TypedCells:
    """Real cells with labels, which others take theirs from; made once, asked often."""

    def __init__(
        self, real: Float[Array, "M G"], real_labels: Labels, *, k: int, seed: int
    ) -> None:
        known = checked(real, "real expression", least=k).float().cpu().numpy()
        self.pca = _fitted_pca(known, seed)
        self.names = np.unique(np.asarray(real_labels))
        self.classifier = KNeighborsClassifier(k).fit(
            self.pca.transform(known), np.asarray(real_labels)
        )

    def labels_of(self, generated: Float[Array, "N G"]) -> ndarray:
        """Label of the majority among the k real cells nearest to each generated cell."""
        asked = checked(generated, "generated expression").float().cpu().numpy()
        return np.asarray(self.classifier.predict(self.pca.transform(asked)))


def _fitted_pca(values: Float32[ndarray, "N G"], seed: int) -> PCA:
    components = min(COMPONENTS, *values.shape)
    # Identical cells have no variance to explain: sklearn divides 0 by 0 for a ratio not used here.
    with np.errstate(invalid="ignore"):
        return PCA(components, random_state=seed).fit(values)
