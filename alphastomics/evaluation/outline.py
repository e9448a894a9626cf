"""How densely cells lie, and the shape of a tissue: positions of two tissues enter, scores leave.

The outline of a tissue is the boxes of a grid that hold cells. New tissue has no frame: outlines
are compared after moving both onto their principal axes, in the orientation that suits them best.
"""

from itertools import permutations

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64
from numpy import ndarray
from scipy.ndimage import binary_closing
from scipy.spatial import cKDTree
from scipy.stats import wasserstein_distance

BOX = 3  # median spacings
MOST_BOXES = 1 << 17
ANGLE_STEP = 10  # degrees between the rotations that are tried in 2D
REACH = 2  # radii of the real tissue; boxes end there


def spacings(position: Float[ndarray, "N D"]) -> Float64[ndarray, " N"]:
    """Distance of each cell to its nearest other cell."""
    points = np.asarray(position, dtype=np.float64)
    gap, _ = cKDTree(points).query(points, k=2)
    return gap[:, 1]


def spacing_distance(generated: Float[ndarray, "N D"], real: Float[ndarray, "M D"]) -> float | None:
    """1-Wasserstein distance of the nearest-neighbour distances, in medians of the real ones.

    None where half of the real cells or more lie at the position of another one.
    """
    real_gaps = spacings(real)
    median = np.median(real_gaps)
    if median == 0:
        return None
    return float(wasserstein_distance(spacings(generated) / median, real_gaps / median))


def outline_overlap(generated: Float[ndarray, "N D"], real: Float[ndarray, "M D"]) -> float | None:
    """Intersection over union of two outlines, of the best orientation: 1 the same, 0 disjoint.

    In 2D every ten degrees from the principal axes are tried, in 3D every order of these axes; both
    with reflections. None where the real cells lie at one position.
    """
    points, truth = (on_principal_axes(side) for side in (generated, real))
    radius = float(np.linalg.norm(truth, axis=1).max())
    if radius == 0:
        return None
    dims = truth.shape[1]
    smallest = 2 * REACH * radius / MOST_BOXES ** (1 / dims)
    edge = max(BOX * float(np.median(spacings(real))), smallest)
    half = int(np.ceil(REACH * radius / edge))
    outline = occupied(truth, edge, half)
    overlaps = [
        _intersection_over_union(occupied(points @ axes, edge, half), outline)
        for axes in orientations(dims)
    ]
    return max(overlaps)


def on_principal_axes(position: Float[ndarray, "N D"]) -> Float64[ndarray, "N D"]:
    """Move the mean to the origin, and the directions of largest variance onto the axes."""
    points = np.asarray(position, dtype=np.float64)
    points = points - points.mean(0)
    _, axes = np.linalg.eigh(points.T @ points)
    return points @ axes[:, ::-1]


def orientations(dims: int) -> list[Float64[ndarray, "D D"]]:
    """Rotations and reflections to try: signed orders of the axes; in 2D, all steps between."""
    signs = [np.diag(1.0 - 2.0 * np.array(flips)) for flips in np.ndindex((2,) * dims)]
    if dims != 2:
        orders = [np.eye(dims)[list(order)] for order in permutations(range(dims))]
        return [order @ sign for order in orders for sign in signs]
    angles = np.deg2rad(np.arange(0, 360, ANGLE_STEP))
    rotations = [np.array([[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]]) for a in angles]
    return [rotation @ mirror for rotation in rotations for mirror in signs[:2]]


def occupied(position: Float64[ndarray, "N D"], edge: float, half: int) -> Bool[ndarray, "..."]:
    """Mark the boxes that hold a cell, and gaps of up to two boxes between them.

    Boxes have the given edge, one is around the origin, and there are `half` of them to each side;
    cells beyond count in the last.
    """
    box: Int64[ndarray, "N D"] = np.clip(np.rint(position / edge), -half, half).astype(np.int64)
    dims = position.shape[1]
    grid = np.zeros((2 * half + 3,) * dims, dtype=bool)  # a free box at each side, for the closing
    grid[tuple((box + half + 1).T)] = True
    return binary_closing(grid, np.ones((3,) * dims, dtype=bool))


def _intersection_over_union(a: Bool[ndarray, "..."], b: Bool[ndarray, "..."]) -> float:
    return float((a & b).sum() / (a | b).sum())
