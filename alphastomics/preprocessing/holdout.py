"""What a training holds out to judge itself: metadata enters; which cells those are leaves.

An animal or sample where obs names them, else a slice where there are at least three, else blocks
of each slice, else cells at random: the first of these that the data allow, since each says more
about new tissue than the next. A pure function of the metadata, the cells and a seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int, Int64

from alphastomics.preprocessing.schema import Metadata

HoldoutKind = Literal["sample", "slice", "block", "cells"]
Key = TypeVar("Key", int, str)

HELD_OUT_SHARE = 0.2
# More than this share of the cells leaves too little to train on.
LARGEST_SHARE = 0.5
LEAST_SLICES = 3
# A slice is cut into TILES x TILES blocks; fewer cells than this make blocks of a few cells.
TILES = 6
LEAST_CELLS_FOR_BLOCKS = 500
HOLDOUT_STREAM = 7


@dataclass(frozen=True)
class Holdout:
    """Which training cells are held out: whole slices, or a share of every slice."""

    kind: HoldoutKind
    slices: tuple[int, ...]
    names: tuple[str, ...]
    seed: int

    def mask(
        self, slice_id: Int[np.ndarray, " N"], position: Float[np.ndarray, "N 3"]
    ) -> Bool[np.ndarray, " N"]:
        """Return True for the cells that are held out."""
        if self.is_of_slices:
            return np.isin(slice_id, self.slices)
        held = np.zeros(len(slice_id), dtype=bool)
        for number in np.unique(slice_id).tolist():
            rows = np.flatnonzero(slice_id == number)
            rng = np.random.default_rng([self.seed, HOLDOUT_STREAM, number])
            held[rows] = (
                _blocks(position[rows], rng)
                if self.kind == "block"
                else _at_random(position[rows], rng)
            )
        return held

    @property
    def is_of_slices(self) -> bool:
        """Whether slices are held out as a whole."""
        return self.kind in ("sample", "slice")

    def describe(self) -> str:
        """Say in words what is held out."""
        share = f"a fifth of each slice, {'in blocks' if self.kind == 'block' else 'at random'}"
        names = ", ".join(self.names[:3]) + (" and more" if len(self.names) > 3 else "")
        plural = "s" if len(self.names) > 1 else ""
        return f"{self.kind}{plural} {names}" if self.kind in ("sample", "slice") else share


def _blocks(position: Float[np.ndarray, "N 3"], rng: np.random.Generator) -> Bool[np.ndarray, " N"]:
    """Hold out some of the blocks that quantiles of the two widest axes cut a slice into."""
    widest = np.argsort(-np.ptp(position, axis=0), kind="stable")[:2]
    columns = [_quantile_bins(position[:, axis]) for axis in widest]
    tile = columns[0] * TILES + columns[1]
    chosen = rng.permutation(TILES * TILES)[: round(HELD_OUT_SHARE * TILES * TILES)]
    return np.isin(tile, chosen)


def _quantile_bins(values: Float[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
    edges = np.quantile(values, np.arange(1, TILES) / TILES)
    return np.searchsorted(edges, values, side="right")


def _at_random(
    position: Float[np.ndarray, "N 3"], rng: np.random.Generator
) -> Bool[np.ndarray, " N"]:
    """Hold out a share of the cells; their order in the shard does not matter."""
    order = np.lexsort(position.T)
    held = np.zeros(len(position), dtype=bool)
    held[order[rng.permutation(len(position))[: round(HELD_OUT_SHARE * len(position))]]] = True
    return held


def choose_holdout(metadata: Metadata, seed: int) -> Holdout | None:
    """Choose what to hold out of the training split; None where it is too small for anything."""
    cells = [record.cells_per_split["train"] for record in metadata.slices]
    present = [number for number, size in enumerate(cells) if size]
    samples: dict[str, list[int]] = {}
    for number in present:
        sample = metadata.slices[number].sample
        samples.setdefault("" if sample is None else sample, []).append(number)
    if "" not in samples and len(samples) > 1:
        sizes = {name: sum(cells[n] for n in numbers) for name, numbers in samples.items()}
        name = _middle(sizes)
        if name is not None:
            return Holdout("sample", tuple(samples[name]), (name,), seed)
    if len(present) >= LEAST_SLICES:
        middle = _middle({number: cells[number] for number in present})
        if middle is not None:
            several = _several(present, cells, middle)
            names = tuple(metadata.slices[n].name for n in several)
            return Holdout("slice", several, names, seed)
    if sum(cells) / max(len(present), 1) >= LEAST_CELLS_FOR_BLOCKS:
        return Holdout("block", (), (), seed)
    return Holdout("cells", (), (), seed) if sum(cells) >= 10 / HELD_OUT_SHARE else None


def _several(present: Sequence[int], cells: list[int], first: int) -> tuple[int, ...]:
    """Add slices to the first, evenly among the others, until a fifth of the cells is held out."""
    chosen, goal = [first], HELD_OUT_SHARE * sum(cells)
    step = max(round(1 / HELD_OUT_SHARE), 1)
    for number in present[::step]:
        if sum(cells[n] for n in chosen) + cells[number] > goal:
            break
        if number != first:
            chosen.append(number)
    return tuple(sorted(chosen))


def _middle(sizes: dict[Key, int]) -> Key | None:
    """Return whose size is in the middle, if it leaves enough to train on."""
    ranked = sorted(sizes, key=lambda key: sizes[key])
    name = ranked[len(ranked) // 2]
    if sizes[name] > LARGEST_SHARE * sum(sizes.values()):
        name = ranked[0]
    return name if sizes[name] <= LARGEST_SHARE * sum(sizes.values()) else None
