"""One frame for slices that share none: cells of slices enter, a rotation of each slice leaves.

Slices lie on a slide as they were laid there. What they have in common is expression: a ridge
regression of position on smoothed expression, fitted to the other slices, says where the cells of a
slice would lie in their frame, and the best rotation or mirror image (Kabsch 1976) brings it there.
Repeated until slices agree: generalised Procrustes analysis (Gower 1975) through expression.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64

from alphastomics.attn_model.neighbourhood import principal_components, smoothed_set
from alphastomics.geometry import best_rotation

# Enough cells of a slice to fix its rotation, and few enough to smooth in an instant.
MOST_CELLS = 3000
COMPONENTS = 64
PENALTY = 10.0
ROUNDS = 6
SMOOTHING = {"rounds": 2, "neighbours": 15, "components": 30}


class SliceCells(NamedTuple):
    """Expression (N, G) and positions (N, 3) of some cells of a slice."""

    expression: np.ndarray
    position: np.ndarray


class Registration(NamedTuple):
    """Rotation of each slice into the common frame (S, 3, 3), and how well expression tells it.

    `agreement` (S) is the correlation of a slice's rotated positions with those that the other
    slices' expression predicts.
    """

    rotation: Float64[np.ndarray, "S 3 3"]
    agreement: Float64[np.ndarray, " S"]


def register_slices(
    slices: Sequence[SliceCells], *, planar: bool, seed: int, held_out: Sequence[int] = ()
) -> Registration:
    """Rotate slices into the frame of the largest.

    Parameters
    ----------
    slices
        The slices, each in a frame of its own.
    planar
        Whether slices are planar: they are rotated and mirrored within their plane.
    seed
        Seed of the choice of cells.
    held_out
        Slices that follow the others without any say in how these lie.
    """
    dims = 2 if planar else 3
    chosen = [_some(cells, seed + number) for number, cells in enumerate(slices)]
    features = _features([cells.expression for cells in chosen])
    targets = [_unit(cells.position[:, :dims]) for cells in chosen]
    judges = [number for number in range(len(slices)) if number not in held_out]
    first = max(judges, key=lambda number: len(slices[number].position))
    grams = [x.T @ x for x in features]
    rotations = [np.eye(dims) for _ in slices]

    def expected(number: int, others: Sequence[int]) -> Float64[np.ndarray, "N D"]:
        """Where cells lie by a ridge regression of position on features, over other slices."""
        gram = sum(grams[n] for n in others) + PENALTY * np.eye(len(grams[0]))
        moment = sum(features[n].T @ (targets[n] @ rotations[n].T) for n in others)
        return features[number] @ np.linalg.solve(gram, np.asarray(moment))

    known = {first}
    for step in range(ROUNDS):
        for number in sorted(judges, key=lambda n: -len(slices[n].position)):
            others = [n for n in (known if step == 0 else judges) if n != number]
            if number == first or not others:
                continue
            rotations[number] = _rotation(targets[number], expected(number, others))
            known.add(number)
    for number in held_out:
        rotations[number] = _rotation(targets[number], expected(number, judges))
    agreement = []
    for number in range(len(slices)):
        others = [n for n in range(len(slices)) if n != number]
        rotated = targets[number] @ rotations[number].T
        agreement.append(_correlation(expected(number, others), rotated) if others else 1.0)
    whole = np.tile(np.eye(3), (len(slices), 1, 1))
    whole[:, :dims, :dims] = rotations
    return Registration(whole, np.array(agreement))


def _some(cells: SliceCells, seed: int) -> SliceCells:
    order = np.random.default_rng(seed).permutation(len(cells.position))[:MOST_CELLS]
    return SliceCells(cells.expression[order], cells.position[order])


def _features(expressions: Sequence[np.ndarray]) -> list[Float64[np.ndarray, "N C"]]:
    """Smooth each slice by itself, and project all on their common principal components."""
    smoothed = [
        smoothed_set(torch.from_numpy(np.ascontiguousarray(values, np.float32)), **SMOOTHING)
        for values in expressions
    ]
    values = principal_components(torch.cat(smoothed), COMPONENTS).double()
    values = values / values.square().mean().sqrt().clamp(min=1e-12)
    return [part.numpy() for part in torch.split(values, [len(part) for part in smoothed])]


def _unit(position: Float[np.ndarray, "N D"]) -> Float64[np.ndarray, "N D"]:
    """Centre positions and bring them to unit scale."""
    centred = position.astype(np.float64) - position.mean(0, dtype=np.float64)
    return centred / max(float(np.sqrt((centred**2).mean())), 1e-12)


def _rotation(
    source: Float64[np.ndarray, "N D"], target: Float64[np.ndarray, "N D"]
) -> Float64[np.ndarray, "D D"]:
    """Rotation or mirror image that brings `source` nearest to `target`: target ~ source @ R^T."""
    pair = [torch.from_numpy(part) for part in (source, target - target.mean(0))]
    return np.asarray(best_rotation(*pair, reflection=True))


def _correlation(
    predicted: Float64[np.ndarray, "N D"], rotated: Float64[np.ndarray, "N D"]
) -> float:
    """Correlate positions about their means, over cells and axes."""
    pair = [(part - part.mean(0)).ravel() for part in (predicted, rotated)]
    norms = float(np.linalg.norm(pair[0]) * np.linalg.norm(pair[1]))
    return float(pair[0] @ pair[1]) / norms if norms else 0.0
