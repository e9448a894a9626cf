"""Units of generated expression: samplers and given cells enter, what it is standardised by leaves.

The network's expression is standardised as that of a training slice is. Given cells keep the unit
of their own slice, where their values say one.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Float32

from alphastomics.generation.cells import InputCells, in_unit
from alphastomics.generation.slices import SliceSampler
from alphastomics.preprocessing.shard_reader import Scaling


def scaling_of_generated(
    samplers: list[SliceSampler], cells: InputCells, *, is_scaled: bool
) -> Scaling | None:
    """Return what generated expression is standardised by: as the given slice, or a training one.

    Genes of which a given slice has no value but zero have no unit of their own: that of the
    training slice counts, and without one nobody knows it (NaN).
    """
    of_style, own = scaling_of_style(samplers), own_scaling(cells)
    if own is None:
        return of_style
    says_nothing = own.mean == 0
    if of_style is not None:
        pairs = zip(of_style, own, strict=True)
        return Scaling(*(np.where(says_nothing, style, given) for style, given in pairs))
    if is_scaled and samplers[0].task.is_conditional:
        return own._replace(mean=np.where(says_nothing, np.nan, own.mean))
    return own


def own_scaling(cells: InputCells) -> Scaling | None:
    """Return what cells that are given keep as their unit."""
    return None if cells.position is None else cells.scaling


def scaling_of_style(samplers: list[SliceSampler]) -> Scaling | None:
    """Return what sampled expression of each slice is standardised by; None without counts."""
    units = [unit for sampler in samplers for unit in sampler.scaling()]
    return Scaling(*map(np.stack, zip(*units, strict=True))) if units else None


def in_given_unit(
    expression: Float32[np.ndarray, "N G"],
    scaling: Scaling | None,
    samplers: list[SliceSampler],
    cells: InputCells,
) -> Float32[np.ndarray, "N G"] | None:
    """Bring samples into the unit of given cells; None where counts are not what is sampled."""
    of_style = scaling_of_style(samplers)
    if of_style is None:
        return None
    if scaling is None or own_scaling(cells) is None:
        return expression
    sampled = replace(cells, expression=expression, scaling=of_style)
    result = np.empty_like(expression)
    for number in range(len(cells.slice_names)):
        rows = cells.rows_of(number)
        result[rows] = in_unit(sampled, rows, Scaling(*(part[number] for part in scaling)))
    return result
