"""Expression values: raw counts enter, normalised and standardised values leave.

The numbers are those of scanpy's `normalize_total(target_sum=1e4)`, `log1p` and `scale`. Mean and
variance are gathered chunk by chunk (Chan, Golub & LeVeque 1983), never from a sum of squares,
which loses all digits when the mean is large beside the std.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int32
from scipy.sparse import csr_array

from alphastomics.preprocessing.schema import TARGET_SUM

# Summing n equal numbers in float64 leaves a relative std of about n x 1e-16: not a real one.
CONSTANT_TOLERANCE = 1e-10
ROWS_IN_CACHE = 32


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of each column."""

    count: int
    mean: Float64[np.ndarray, " C"]
    squares: Float64[np.ndarray, " C"]


def log_normalized(counts: csr_array) -> csr_array:
    """Bring each cell to a total of 1e4 and take log(1 + x); a cell without counts stays zero."""
    total = counts.sum(axis=1, dtype=np.float64)
    divisor = np.where(total == 0, 1, total / TARGET_SUM)
    sizes = np.diff(counts.indptr)
    with np.errstate(divide="ignore", over="ignore"):
        values = counts.data / np.repeat(divisor.astype(np.float32), sizes)
    tiny = divisor < np.finfo(np.float32).tiny
    if tiny.any():  # as float32 they have few digits, or are 0
        entries = np.repeat(tiny, sizes)
        values[entries] = counts.data[entries] / np.repeat(divisor, sizes)[entries]
    return with_values(counts, np.log1p(values))


def with_values(pattern: csr_array, values: np.ndarray) -> csr_array:
    """Return a matrix with the same entries filled, but with other values."""
    return csr_array((values, pattern.indices, pattern.indptr), shape=pattern.shape)


def moments_of_sparse(values: csr_array) -> Moments:
    """Gather the moments of each gene in a chunk: two passes over the entries, none over zeros."""
    cells, genes = values.shape
    filled = np.bincount(values.indices, minlength=genes)
    data = values.data.astype(np.float64)
    mean = np.bincount(values.indices, weights=data, minlength=genes) / max(cells, 1)
    deviation = data - mean[values.indices]
    squares = np.bincount(values.indices, weights=deviation**2, minlength=genes)
    return Moments(cells, mean, squares + (cells - filled) * mean**2)


def moments_of_dense(values: Float[np.ndarray, "N C"]) -> Moments:
    """Gather the moments of each column."""
    wide = values.astype(np.float64)
    mean = wide.sum(axis=0) / max(len(wide), 1)
    return Moments(len(wide), mean, ((wide - mean) ** 2).sum(axis=0))


def merged(first: Moments, second: Moments) -> Moments:
    """Join the moments of two parts: eq. 2.1 of Chan, Golub & LeVeque (1983)."""
    count = first.count + second.count
    if count == 0:
        return first
    delta = second.mean - first.mean
    share = second.count / count
    return Moments(
        count,
        first.mean + delta * share,
        first.squares + second.squares + delta**2 * (first.count * share),
    )


def standard_deviation(moments: Moments) -> Float64[np.ndarray, " C"]:
    """Return the unbiased deviation (n - 1), with 1 for a constant gene as scanpy has it."""
    deviation = np.sqrt(moments.squares / max(moments.count - 1, 1))
    constant = deviation <= CONSTANT_TOLERANCE * np.abs(moments.mean)
    return np.where(constant, 1.0, deviation)


def standardized_entries(
    values: csr_array, mean: Float64[np.ndarray, " G"], std: Float64[np.ndarray, " G"]
) -> csr_array:
    """Standardise the entries of one slice that are filled; `absent` has the others' value."""
    # float64: with a mean of 1e4 stds, float32 would already lose the third digit.
    scaled = (values.data - mean[values.indices]) / std[values.indices]
    return with_values(values, scaled.astype(np.float32))


def absent(
    mean: Float64[np.ndarray, "... G"], std: Float64[np.ndarray, "... G"]
) -> Float32[np.ndarray, "... G"]:
    """Return the standardised value of zero, which is what an entry that is not stored means."""
    return ((0.0 - mean) / std).astype(np.float32)


def densified(
    values: csr_array,
    slice_id: Int32[np.ndarray, " N"],
    absent_value: Float32[np.ndarray, "S G"] | None,
) -> Float32[np.ndarray, "N G"]:
    """Expand stored entries to vectors; the rest takes its slice's absent value, or 0."""
    if absent_value is None:
        return values.toarray()
    cells, genes = values.shape
    dense = np.empty((cells, genes), dtype=np.float32)
    # A few rows at a time: they stay in the processor's cache between filling and placing.
    for start in range(0, cells, ROWS_IN_CACHE):
        stop = min(start + ROWS_IN_CACHE, cells)
        rows = dense[start:stop]
        np.take(absent_value, slice_id[start:stop], axis=0, out=rows, mode="clip")
        pointers = values.indptr[start : stop + 1]
        index = np.repeat(np.arange(stop - start, dtype=np.int64) * genes, np.diff(pointers))
        index += values.indices[pointers[0] : pointers[-1]]
        rows.reshape(-1)[index] = values.data[pointers[0] : pointers[-1]]
    return dense


def standardized(
    values: csr_array, moments: Moments | None, measured: Bool[np.ndarray, " G"]
) -> Float32[np.ndarray, "N G"]:
    """Expand cells of one slice, standardised where there are moments; 0 where not measured."""
    if moments is None:
        dense = values.toarray()
    else:
        mean, std = moments.mean, standard_deviation(moments)
        entries = standardized_entries(values, mean, std)
        slice_id = np.zeros(values.shape[0], dtype=np.int32)
        dense = densified(entries, slice_id, absent(mean, std)[None])
    dense[:, ~measured] = 0
    return dense
