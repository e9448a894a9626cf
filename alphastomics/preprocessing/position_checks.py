"""Positions that hardly can be meant: what is known of each slice enters, warnings leave."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

ODD_RATIO = 100.0  # tissue slices of one data set differ far less in size


def warn_of_positions(found: list[dict[str, Any]], names: Sequence[str]) -> None:
    """Warn of slices without extent, and of slices in other units than the rest.

    Parameters
    ----------
    found
        Count, mean and summed squares of the training cells' positions, by part and slice.
    names
        The slices' names.
    """
    low: dict[int, np.ndarray] = {}
    high: dict[int, np.ndarray] = {}
    for record in found:
        number = record["slice"]
        low[number] = np.minimum(low.get(number, np.inf), record["minimum"])
        high[number] = np.maximum(high.get(number, -np.inf), record["maximum"])
    extent = {number: float((high[number] - low[number]).max()) for number in low}
    points = [names[number] for number, size in extent.items() if size == 0]
    if points:
        logger.warning(
            "%d slices have all their training cells at one position (first %s): check "
            "--position_key",
            len(points),
            points[0],
        )
    sizes = {number: size for number, size in extent.items() if size > 0}
    if not sizes:
        return
    middle = float(np.median(list(sizes.values())))
    odd = [n for n, size in sizes.items() if not 1 / ODD_RATIO < size / middle < ODD_RATIO]
    if odd:
        logger.warning(
            "%d slices are %.3g times as wide as most (first %s): if their coordinates are in "
            "other units, convert them; one scale serves all slices",
            len(odd),
            sizes[odd[0]] / middle,
            names[odd[0]],
        )
