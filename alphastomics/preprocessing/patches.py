"""Spatial patches: positions of a slice enter, contiguous sets of cells leave.

Recursive bisection: a slice is cut at right angles to its longest side until each part has at most
a set of cells; every cell is in exactly one part. The frame is rotated at random first, so that the
cuts of one epoch are not those of the next. Each level cuts all parts at once.
"""

import numpy as np
from jaxtyping import Float, Float64, Int64

from alphastomics.preprocessing.order import sets_of_slice


def rotated(position: Float[np.ndarray, "N 3"], angle: float) -> Float64[np.ndarray, "N 3"]:
    """Return coordinates along the slice's own axes, rotated within its widest plane."""
    centered = position.astype(np.float64) - position.mean(axis=0, dtype=np.float64)
    _, axes = np.linalg.eigh(centered.T @ centered)
    own = centered @ axes[:, ::-1]
    cosine, sine = np.cos(angle), np.sin(angle)
    own[:, :2] = own[:, :2] @ np.array([[cosine, -sine], [sine, cosine]])
    return own


def patches(
    position: Float[np.ndarray, "N 3"], set_size: int, rng: np.random.Generator
) -> list[Int64[np.ndarray, " M"]]:
    """Divide the cells of a slice into contiguous sets of nearly equal size."""
    cells = len(position)
    coordinates = rotated(position, rng.uniform(0, 2 * np.pi))
    order = np.arange(cells)
    sizes = np.array([cells])
    parts = np.array([sets_of_slice(cells, set_size)])  # how many sets each part still becomes
    while (parts > 1).any():
        order = _sorted_along_longest(coordinates, order, sizes)
        sizes, parts = _halved(sizes, parts, rng)
    return np.split(order, np.cumsum(sizes)[:-1])


def _sorted_along_longest(
    coordinates: Float64[np.ndarray, "N 3"],
    order: Int64[np.ndarray, " N"],
    sizes: Int64[np.ndarray, " K"],
) -> Int64[np.ndarray, " N"]:
    """Sort the cells of each part along the part's longest side."""
    starts = np.cumsum(sizes) - sizes
    here = coordinates[order]
    extent = np.maximum.reduceat(here, starts) - np.minimum.reduceat(here, starts)
    part = np.repeat(np.arange(len(sizes)), sizes)
    along = here[np.arange(len(here)), extent.argmax(axis=1)[part]]
    return order[np.lexsort((along, part))]


def _halved(
    sizes: Int64[np.ndarray, " K"], parts: Int64[np.ndarray, " K"], rng: np.random.Generator
) -> tuple[Int64[np.ndarray, " M"], Int64[np.ndarray, " M"]]:
    """Cut every part that is to become several sets, in proportion to the sets on each side."""
    lower = np.where(rng.random(len(parts)) < 0.5, parts // 2, -(-parts // 2))
    lower = np.where(parts > 1, lower, parts)
    lower_sizes = sizes * lower // parts
    pairs = np.stack([lower_sizes, sizes - lower_sizes], axis=1).reshape(-1)
    counts = np.stack([lower, parts - lower], axis=1).reshape(-1)
    return pairs[counts > 0], counts[counts > 0]
