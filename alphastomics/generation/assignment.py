"""Assignment: expected positions and those that are available enter, one position a cell leaves.

Expected positions lie nearer to the middle than true ones do, and on top of one another. Here each
cell gets an available position of its own, so that outline and density are those of the tissue:
optimal transport between both, of squared distance. Large tissues are halved along their longest
axis until an exact assignment is fast; halves hold as many cells as positions.
"""

import numpy as np
from jaxtyping import Float64, Int64
from scipy.optimize import linear_sum_assignment
from scipy.spatial import cKDTree
from scipy.spatial.distance import cdist

# Cells that are assigned exactly: more cost no less, and take longer.
EXACT_CELLS = 250
# A new position lies within this share of the distance to so many neighbours: wide enough to leave
# no gaps between few anchors, and no wider than the tissue. Of so many times as many as are needed,
# some are taken evenly, since cells keep a distance; of very many positions fewer are tried.
NEAREST, REACH = 5, 0.5
TRIED, MOST_TRIED = 4, 100_000
# An axis that is so much shorter than the longest is none: the z of a section, for one.
LEAST_EXTENT = 1e-3

Positions = Float64[np.ndarray, "N D"]


def assigned(expected: Positions, available: Float64[np.ndarray, "M D"], seed: int) -> Positions:
    """Give each cell an available position; some are left out, or made, to fit their number."""
    fitting = as_many(available, len(expected), seed)
    return fitting[matched(expected, fitting)]


def as_many(available: Float64[np.ndarray, "M D"], number: int, seed: int) -> Positions:
    """Return so many positions of the same outline and density.

    Of more, some are taken evenly; fewer are filled up by positions around them.
    """
    if number <= len(available):
        return evenly_of(available, number)
    missing = number - len(available)
    tried = missing * max(min(TRIED, MOST_TRIED // missing), 1)
    return np.concatenate([available, evenly_of(around(available, tried, seed), missing)])


def evenly_of(position: Float64[np.ndarray, "M D"], number: int) -> Positions:
    """Take so many positions, as dense everywhere as they are."""
    return position[halved_order(position)[evenly(len(position), number)]]


def around(available: Float64[np.ndarray, "M D"], number: int, seed: int) -> Positions:
    """Draw positions in discs, or balls, about those there are, as wide as these are apart.

    A planar tissue stays planar, and one on a line stays on it.
    """
    rng = np.random.default_rng(seed)
    extent = np.ptp(available, axis=0)
    varies = extent > LEAST_EXTENT * extent.max()
    if not varies.any():
        return np.repeat(available[:1], number, axis=0)
    start = halved_order(available)[evenly(len(available), number)]
    nearest = min(NEAREST, len(available) - 1)
    distance = cKDTree(available).query(available, k=[nearest + 1])[0][start]
    direction = rng.normal(size=(number, available.shape[1])) * varies
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    radius = rng.random((number, 1)) ** (1 / varies.sum())
    return available[start] + REACH * distance * radius * direction


def evenly(number: int, taken: int) -> Int64[np.ndarray, " M"]:
    """Return so many of the numbers below another, at equal distances."""
    return (np.arange(taken) * number // max(taken, 1)).astype(np.int64)


def halved_order(position: Positions) -> Int64[np.ndarray, " N"]:
    """Order positions by halving them along their longest axis: neighbours stay together."""
    parts = [np.arange(len(position))]
    while max(map(len, parts)) > 1:
        parts = [half for part in parts for half in halves(position, part, len(part) // 2)]
    return np.concatenate(parts)


def halves(
    position: Positions, rows: Int64[np.ndarray, " M"], first: int
) -> tuple[Int64[np.ndarray, " A"], Int64[np.ndarray, " B"]]:
    """Divide rows along the longest axis of their positions."""
    if len(rows) < 2:
        return rows, rows[:0]
    return divided(position, rows, longest_axis(position[rows]), first)


def longest_axis(position: Positions) -> int:
    """Return the axis along which positions vary most."""
    return int(np.argmax(np.ptp(position, axis=0)))


def divided(
    position: Positions, rows: Int64[np.ndarray, " M"], axis: int, first: int
) -> tuple[Int64[np.ndarray, " A"], Int64[np.ndarray, " B"]]:
    """Divide rows by one coordinate; the first part has so many."""
    order = rows[np.argsort(position[rows, axis], kind="stable")]
    return order[:first], order[first:]


def matched(expected: Positions, available: Positions) -> Int64[np.ndarray, " N"]:
    """Return the number of the position that each cell gets, of as many positions as cells."""
    choice = np.zeros(len(expected), dtype=np.int64)
    everything = np.arange(len(expected))
    parts = [(everything, everything)]
    while parts:
        cells, positions = parts.pop()
        if len(cells) <= EXACT_CELLS:
            cost = cdist(expected[cells], available[positions], "sqeuclidean")
            row, column = linear_sum_assignment(cost)
            choice[cells[row]] = positions[column]
            continue
        axis = longest_axis(available[positions])
        first = len(cells) // 2
        parts += zip(
            divided(expected, cells, axis, first),
            divided(available, positions, axis, first),
            strict=True,
        )
    return choice
