"""Outlines of cells in GeoJSON: the file enters, read cell by cell; numbers and centroids leave."""

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from alphastomics.preprocessing.anndata_file import reading

READ_LETTERS = 1 << 20


def features_of(path: Path) -> Iterator[dict[str, Any]]:
    """Read the features of a GeoJSON file one after the other, as it may be larger than memory."""
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8") as file:
        text = file.read(READ_LETTERS)
        while (start := text.find('"features"')) < 0 or "[" not in text[start:]:
            block = file.read(READ_LETTERS)
            if not block:
                raise ValueError("it has no list of features")
            text += block
        text = text[text.index("[", start) + 1 :]
        while True:
            text = text.lstrip(" \r\n\t,")
            if text.startswith("]"):
                return
            try:
                feature, end = decoder.raw_decode(text)
            except json.JSONDecodeError:
                block = file.read(max(READ_LETTERS, len(text)))
                if not block:
                    raise
                text += block
                continue
            yield feature
            text = text[end:]


def centroid_of(ring: Float64[np.ndarray, "P 2"]) -> Float64[np.ndarray, " 2"]:
    """Return the centroid of a polygon: its area's, or its corners' mean where it has no area."""
    origin = ring[0]
    corners = ring - origin  # few digits are lost far from the origin
    following = np.roll(corners, -1, axis=0)
    cross = corners[:, 0] * following[:, 1] - following[:, 0] * corners[:, 1]
    area = cross.sum()
    if area == 0:
        return origin + corners.mean(axis=0)
    return origin + ((corners + following) * cross[:, None]).sum(axis=0) / (3 * area)


@lru_cache(maxsize=1)
def _centroids(
    path: Path, _size: int, _changed: int
) -> tuple[Int64[np.ndarray, " N"], Float64[np.ndarray, "N 2"]]:
    numbers, centroids = [], []
    with reading(path, "the outlines"):
        for feature in features_of(path):
            shape = feature["geometry"]["coordinates"]
            # Of a cell in several parts the one with the most corners, and the outer ring of it.
            parts = [shape] if feature["geometry"]["type"] == "Polygon" else shape
            ring = max((part[0] for part in parts), key=len)
            numbers.append(int(feature["properties"]["cell_id"]))
            centroids.append(centroid_of(np.asarray(ring, dtype=np.float64)[:, :2]))
    return np.array(numbers, dtype=np.int64), np.array(centroids).reshape(-1, 2)


def centroids_of(path: Path) -> tuple[Int64[np.ndarray, " N"], Float64[np.ndarray, "N 2"]]:
    """Return the number and the centroid of every cell; a process reads the same file once."""
    state = path.stat()
    return _centroids(path, state.st_size, state.st_mtime_ns)
