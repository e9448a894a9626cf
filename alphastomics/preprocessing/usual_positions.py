"""Which coordinates a dataset is read by: settings and inputs enter, settled settings leave.

What the user names stays. Else the usual keys are looked for, and z is taken where it is measured.
"""

import logging
from pathlib import Path

import numpy as np

from alphastomics.config import PreprocessingConfig
from alphastomics.preprocessing.cell_source import (
    CellSource,
    SourceOptions,
    usual_position_key,
)
from alphastomics.preprocessing.reader import OBS_ROWS
from alphastomics.preprocessing.subprocess_reader import in_subprocess

logger = logging.getLogger(__name__)


def with_usual_positions(
    options: PreprocessingConfig, inputs: dict[str, Path]
) -> PreprocessingConfig:
    """Name the coordinates, and say whether they are in 3D, by what every input has."""
    given = options.model_fields_set
    if {"position_key", "position_is_3d"} <= given:
        return options
    key: str | None = None
    has_z, ranges = True, []
    for path in inputs.values():
        with in_subprocess(path, SourceOptions.of(options)) as source:
            own = usual_position_key(source.position_keys, options)
            if source.is_dissociated(own):
                continue
            if own not in source.position_keys or key not in (None, own):
                return options  # the inspection says what is missing
            key = own
            z = _range_of_z(source, own)
        has_z = has_z and z is not None
        ranges += [] if z is None else [z]
    if key is None:
        return options
    lowest, highest = (min(z[0] for z in ranges), max(z[1] for z in ranges)) if ranges else (0, 0)
    # The same z for all cells is no third dimension.
    is_3d = has_z and lowest < highest and "position_is_3d" not in given
    update = {"position_key": key} | ({"position_is_3d": True} if is_3d else {})
    if is_3d or key != options.position_key:
        logger.info(
            "positions%s are taken from obsm[%r]; name another with --position_key",
            ", with their z," if is_3d else "",
            key,
        )
    return options.model_copy(update=update)


def _range_of_z(source: CellSource, key: str) -> tuple[float, float] | None:
    """Return the lowest and the highest z; None for planar coordinates."""
    positions = source.positions(key)
    if positions.columns != 3:
        return None
    starts = range(0, positions.cells, OBS_ROWS)
    ends = []
    for start in starts:
        z = positions.rows(start, min(start + OBS_ROWS, positions.cells))[:, 2]
        ends += [float(np.min(z)), float(np.max(z))]
    return (min(ends), max(ends)) if ends else (0.0, 0.0)
