"""Naive versions: loops, no tricks, plainly right."""

import itertools
import math

import numpy as np
from torch import Tensor


def distance_loss_naive(predicted: Tensor, true: Tensor, node_mask: Tensor) -> Tensor:
    """Mean over pairs of real cells, by two loops; differentiable."""
    errors = []
    for q, p, real in zip(predicted, true, node_mask, strict=True):
        cells = [cell for cell, flag in enumerate(real.tolist()) if flag]
        for i, j in itertools.permutations(cells, 2):
            squared = ((q[i] - q[j]) ** 2).sum()
            predicted_distance = squared.sqrt() if float(squared.detach()) > 0 else squared * 0
            errors.append((predicted_distance - math.dist(p[i].tolist(), p[j].tolist())) ** 2)
    return sum(errors) / len(errors) if errors else (predicted * 0).sum()


def expression_loss_naive(predicted, true, node_mask, gene_mask) -> float:
    """Mean over real cells and measured genes."""
    errors = [
        float((predicted[b, n, g] - true[b, n, g]) ** 2)
        for b, n, g in itertools.product(*map(range, true.shape))
        if node_mask[b, n] and gene_mask[b, n, g]
    ]
    return sum(errors) / len(errors) if errors else 0.0


def kabsch_naive(source: np.ndarray, target: np.ndarray, *, reflection: bool) -> np.ndarray:
    """Turn centred source onto centred target, by scipy or by trying both signs."""
    from scipy.linalg import orthogonal_procrustes
    from scipy.spatial.transform import Rotation

    source, target = source - source.mean(0), target - target.mean(0)
    if reflection:
        return source @ orthogonal_procrustes(source, target)[0]
    return Rotation.align_vectors(target, source)[0].apply(source)
