"""Numbers for pictures: arrays enter, texts for the page leave.

They travel as 8 or 16 bit levels between two ends, deflated, in base64: a pixel shows no more.
"""

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int64


def packed(values: np.ndarray) -> str:
    """Deflate an array of bytes or 16 bit words and spell it in base64."""
    assert values.dtype in (np.uint8, np.uint16)
    little = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"))
    return base64.b64encode(zlib.compress(little.tobytes(), 6)).decode("ascii")


def levels(values: Float[np.ndarray, "*shape"], low: float, high: float) -> dict[str, Any]:
    """Pack values as 16 bit levels between two ends."""
    width = high - low if high > low else 1.0
    scaled = np.clip((np.asarray(values, dtype=np.float64) - low) / width, 0, 1)
    words = np.round(scaled * 65535).astype(np.uint16)
    return {"bits": 16, "low": low, "high": low + width, "data": packed(words)}


def spanned(values: Float[np.ndarray, "*shape"]) -> dict[str, Any]:
    """Pack values between their own least and largest."""
    return levels(values, float(np.min(values)), float(np.max(values)))


def codes(values: Int64[np.ndarray, " N"]) -> dict[str, Any]:
    """Pack small whole numbers as they are."""
    return {"bits": 16, "low": 0, "high": 65535, "data": packed(values.astype(np.uint16))}


def packed_positions(position: Float[np.ndarray, "N 3"]) -> dict[str, Any]:
    """Pack coordinates axis by axis."""
    return {axis: spanned(position[:, index]) for index, axis in enumerate("xyz")}


def numbers(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """Return numbers as JSON knows them: what is not finite becomes null."""
    rounded = (float(f"{value:.5g}") for value in np.asarray(values, dtype=np.float64))
    return [value if np.isfinite(value) else None for value in rounded]
