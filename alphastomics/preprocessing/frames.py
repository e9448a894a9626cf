"""Do slices share a frame, and are their units the same? Where cells lie enters, words leave.

Positions of two slices can be compared only in a common frame: 3D positions have one, 2D slices
when the user says so. What the positions themselves show is held against that.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from alphastomics.preprocessing.schema import Metadata

# Real slices of one study differ in size by less; micrometres and pixels differ by more.
LARGEST_RATIO = 5.0
# Centres this near to one another, in units of a slice's size, are those of registered slices.
REGISTERED = 0.1
# Centres this far apart are those of slices that lie side by side on a slide.
SIDE_BY_SIDE = 1.5


class SliceExtent(NamedTuple):
    """Centre and size (diagonal of the bounding box) of a slice's training cells, in x and y."""

    center: Float64[np.ndarray, " 2"]
    size: float


def slice_extents(records: list[dict[str, Any]]) -> dict[int, SliceExtent]:
    """Join what the parts say of where each slice lies: count, mean, minimum and maximum."""
    slices: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        slices.setdefault(record["slice"], []).append(record)
    extents = {}
    for number, parts in sorted(slices.items()):
        counts = np.array([part["count"] for part in parts], dtype=np.float64)
        means = np.array([part["mean"][:2] for part in parts])
        low = np.min([part["minimum"][:2] for part in parts], axis=0)
        high = np.max([part["maximum"][:2] for part in parts], axis=0)
        center = (means * counts[:, None]).sum(0) / counts.sum()
        extents[number] = SliceExtent(center, float(np.linalg.norm(high - low)))
    return extents


def center_distance(extents: dict[int, SliceExtent]) -> float:
    """Return how far slices lie from their common centre, in units of their size."""
    centers = np.array([extent.center for extent in extents.values()])
    size = _median_size(extents)
    apart = float(np.sqrt(((centers - centers.mean(0)) ** 2).sum(1).mean()))
    return apart / size if size > 0 else 0.0


def frame_notes(metadata: Metadata, extents: dict[int, SliceExtent]) -> list[str]:
    """Say what looks wrong with the frame or the units, and what to do about it."""
    notes = _unit_notes(metadata, extents)
    spacings = [record.z for record in metadata.slices]
    if len(extents) < 2 or None in spacings:
        return notes
    apart = center_distance(extents)
    if not metadata.common_frame and apart < REGISTERED:
        notes.append(
            f"the {len(extents)} slices are taken without a common frame: each is learned by "
            f"itself. Their centres lie within {100 * apart:.0f} % of a slice's size: if they are "
            "registered to one another or to an atlas, preprocess with --common_frame"
        )
    if metadata.common_frame and apart > SIDE_BY_SIDE:
        notes.append(
            f"--common_frame: the slices' centres lie {apart:.1f} times their size apart, as on a "
            "slide: if the slices are not registered to one another, leave the flag out"
        )
    if metadata.common_frame:
        z_values = sorted(float(z) for z in spacings if z is not None)
        step, size = z_values[1] - z_values[0], _median_size(extents)
        if step > size > 0:
            notes.append(
                f"--z_spacing {step:g} is larger than a slice ({size:.3g} across): give it in the "
                "units of the coordinates"
            )
    return notes


def _median_size(extents: dict[int, SliceExtent]) -> float:
    return float(np.median([extent.size for extent in extents.values()]))


def _unit_notes(metadata: Metadata, extents: dict[int, SliceExtent]) -> list[str]:
    """Point out slices whose size differs from the others' as units do."""
    sizes = {number: extent.size for number, extent in extents.items()}
    names = [record.name for record in metadata.slices]
    # Of a single training cell there is nothing to say.
    without_extent = [
        names[number]
        for number, size in sizes.items()
        if size == 0 and metadata.slices[number].cells_per_split["train"] > 1
    ]
    notes = []
    if without_extent:
        notes.append(
            f"slice {without_extent[0]}: all its cells lie at one position: check its coordinates"
        )
    known = {number: size for number, size in sizes.items() if size > 0}
    if known and max(known.values()) > LARGEST_RATIO * min(known.values()):
        small, large = (choose(known, key=known.__getitem__) for choose in (min, max))
        notes.append(
            f"slice {names[large]} is {known[large] / known[small]:.0f} times as large as "
            f"{names[small]} ({known[large]:.3g} and {known[small]:.3g} across): are both in the "
            "same units (micrometres, pixels)?"
        )
    return notes
