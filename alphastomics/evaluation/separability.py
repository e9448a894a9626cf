"""Can a classifier separate new from real cells: two samples enter, an area under the curve leaves.

0.5: it cannot; 1: it always can. Every cell is judged by a classifier that was fitted without it,
so that no cell may be in both samples. At most 2000 cells of either side, as many of each, are
looked at.
"""

import warnings

import numpy as np
from jaxtyping import Float, Int64
from numpy import ndarray
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from alphastomics.evaluation.neighbours import spatial_neighbours
from alphastomics.evaluation.tissue import NICHE, Tissue

TREES, MOST_CELLS, COMPONENTS = 100, 2000, 20  # of the forests, and what they see
FOLDS, INVERSE_PENALTY = 5, 0.01  # of the logistic regression


def two_sample_auc(
    generated: Float[ndarray, "N G"], real: Float[ndarray, "M G"], *, seed: int
) -> float:
    """Area under the curve of a random forest: a tree votes on cells that it has not seen.

    It sees 20 principal components of both: by single genes it would know a real cell by the value
    that a count of zero has in its slice.
    """
    both, is_real = _sampled(generated, real, seed)
    forest = _forest(seed, trees=TREES, oob_score=True).fit(_components(both, seed), is_real)
    votes = forest.oob_decision_function_[:, 1]
    return float(roc_auc_score(is_real, np.nan_to_num(votes, nan=0.5)))


def linear_auc(
    generated: Float[ndarray, "N G"], real: Float[ndarray, "M G"], *, seed: int
) -> float | None:
    """Area under the curve of a logistic regression on all genes; mean over five held-out fifths.

    It sees the means of genes, which trees on principal components may miss, and nothing else.
    None for fewer than five cells of either side.
    """
    both, is_real = _sampled(generated, real, seed)
    if len(both) < 2 * FOLDS:
        return None
    model = make_pipeline(StandardScaler(), LogisticRegression(C=INVERSE_PENALTY))
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    areas = []
    with warnings.catch_warnings():
        # Not converged: the direction is good enough to rank cells by.
        warnings.simplefilter("ignore", ConvergenceWarning)
        for fitted, held_out in folds.split(both, is_real):
            model.fit(both[fitted], is_real[fitted])
            areas.append(roc_auc_score(is_real[held_out], model.decision_function(both[held_out])))
    return float(np.mean(areas))


def niche_auc(generated: Tissue, real: Tissue, *, seed: int) -> float | None:
    """Area under the curve of a forest that sees a cell and the mean of its ten neighbours.

    Niches of neighbours share cells, so that a tree would know a niche by another one. So either
    tissue is halved at random, neighbours are sought within a half, and a forest that was fitted to
    one half judges the other; mean of both ways. It sees 20 principal components of the cells and
    20 of the means. None for fewer than six cells of either side.
    """
    random = np.random.default_rng(seed)
    size = min(len(generated.position), len(real.position)) // 2
    if size < 3:
        return None
    parts = [
        [niches(tissue, rows, size=min(size, MOST_CELLS // 2)) for rows in _halves(tissue, random)]
        for tissue in (generated, real)
    ]
    cells, means = zip(*(half for halves in parts for half in halves), strict=True)
    shown = np.hstack([_components(np.concatenate(part), seed) for part in (cells, means)])
    half = np.concatenate([np.full(len(part), n % 2) for n, part in enumerate(cells)])
    is_real = np.concatenate([np.full(len(part), n // 2) for n, part in enumerate(cells)])
    areas = []
    for fitted in (half == 0, half == 1):
        forest = _forest(seed, trees=TREES // 2).fit(shown[fitted], is_real[fitted])
        # Rounded: threads add the trees' votes in any order, which would break ties at random.
        votes = forest.predict_proba(shown[~fitted])[:, 1].round(9)
        areas.append(roc_auc_score(is_real[~fitted], votes))
    return float(np.mean(areas))


def niches(
    tissue: Tissue, rows: Int64[ndarray, " M"], *, size: int
) -> tuple[Float[ndarray, "K G"], Float[ndarray, "K G"]]:
    """Return the first `size` of some cells, and the mean of the ten nearest of those cells."""
    values, count = tissue.expression[rows], min(NICHE, len(rows) - 1)
    near = spatial_neighbours(tissue.position[rows], k=count)[:size].numpy()
    mean = np.zeros_like(values[:size])
    for neighbour in near.T:  # one at a time: all at once would be ten times the cells
        mean += values[neighbour] / count
    return values[:size], mean


def _halves(tissue: Tissue, random: np.random.Generator) -> list[Int64[ndarray, " M"]]:
    return np.array_split(random.permutation(len(tissue.position)), 2)


def _sampled(
    generated: Float[ndarray, "N G"], real: Float[ndarray, "M G"], seed: int
) -> tuple[Float[ndarray, "K G"], Int64[ndarray, " K"]]:
    """Return as many cells of either side, and which are real."""
    random = np.random.default_rng(seed)
    size = min(len(generated), len(real), MOST_CELLS)
    sides = [side[random.permutation(len(side))[:size]] for side in (generated, real)]
    return np.concatenate(sides), np.repeat([0, 1], size)


def _components(values: Float[ndarray, "N G"], seed: int) -> Float[ndarray, "N K"]:
    return PCA(min(COMPONENTS, *values.shape), random_state=seed).fit_transform(values)


def _forest(seed: int, *, trees: int, oob_score: bool = False) -> RandomForestClassifier:
    return RandomForestClassifier(
        trees, oob_score=oob_score, min_samples_leaf=2, random_state=seed, n_jobs=-1
    )
