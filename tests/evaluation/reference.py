"""Naive versions: loops, no tricks, plainly right."""

import itertools
import math

import numpy as np
from scipy.stats import spearmanr


def spearman_naive(predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Correlate row by row with scipy; undefined rows by the documented rule."""
    result = []
    for cell in range(len(true)):
        others = [other for other in range(len(true)) if other != cell]
        sides = [
            np.array([math.dist(side[cell], side[other]) for other in others])
            for side in (predicted, true)
        ]
        if len(set(sides[1])) == 1:
            result.append(math.nan)
        elif len(set(sides[0])) == 1:
            result.append(0.0)
        else:
            result.append(spearmanr(*sides).statistic)
    return np.array(result)


def contacts_naive(position: np.ndarray, share: float) -> set[tuple[int, int]]:
    """Return the nearest `share` of all pairs, with all that are as near as the last."""
    pairs = list(itertools.combinations(range(len(position)), 2))
    distance = {(i, j): ((position[i] - position[j]) ** 2).sum() for i, j in pairs}
    limit = sorted(distance.values())[max(1, round(share * len(pairs))) - 1]
    return {pair for pair in pairs if distance[pair] <= limit}


def knn_naive(predicted: np.ndarray, true: np.ndarray, k: int) -> np.ndarray:
    """Compare the sets of cells as near as the k-th neighbour."""

    def near(position: np.ndarray, cell: int) -> set[int]:
        gap = np.linalg.norm(position - position[cell], axis=1)
        others = [other for other in range(len(position)) if other != cell]
        limit = sorted(gap[others])[k - 1] * (1 + 1e-9)
        return {other for other in others if gap[other] <= limit}

    result = []
    for cell in range(len(true)):
        a, b = near(predicted, cell), near(true, cell)
        result.append(len(a & b) / max(len(a), len(b)))
    return np.array(result)


def moran_naive(values: np.ndarray, neighbours: np.ndarray) -> float:
    """Moran's I of one gene by its definition, with row-standardised weights."""
    z = values - values.mean()
    weight = 1 / neighbours.shape[1]
    inner = sum(weight * z[i] * z[j] for i, row in enumerate(neighbours.tolist()) for j in row)
    return len(values) / len(values) * inner / (z**2).sum()


def distance_mse_naive(predicted: np.ndarray, true: np.ndarray) -> float:
    """Mean over ordered pairs, by two loops."""
    errors = [
        (math.dist(predicted[i], predicted[j]) - math.dist(true[i], true[j])) ** 2
        for i, j in itertools.permutations(range(len(true)), 2)
    ]
    return sum(errors) / len(errors)


def rotated(position: np.ndarray, angle: float, *, mirror: bool) -> np.ndarray:
    """Rotate about the last axis (or the origin in 2D), shift, and mirror the first axis."""
    rotation = np.eye(position.shape[1])
    rotation[:2, :2] = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    moved = position @ rotation.T + np.arange(1, position.shape[1] + 1)
    return moved * np.where(np.arange(position.shape[1]) == 0, -1, 1) if mirror else moved
