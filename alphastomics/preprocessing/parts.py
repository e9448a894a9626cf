"""Cells between the stages: tables of cells enter, Arrow files leave, and back.

A *part* is one Arrow IPC file of normalised cells in sparse form. Stage 1 writes one for each chunk
of a file; stage 2 sorts each into record batches by the bucket that they go to.
"""

import io
import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float64, Int32, Int64
from scipy.sparse import csr_array, vstack

from alphastomics.io.files import replacing
from alphastomics.preprocessing.schema import vector_of

BUCKETS_KEY = b"buckets"
MOST_OPEN_PARTS = 64
WORK_BYTES = 16 << 20  # what a chunk of cells takes, counted once; a few copies are alive
SHORTEST_RUN_BYTES = 64 << 10  # what is worth a read of its own in the shuffle

# One value per cell: fields of `SparseCellTable`, and columns of parts and shards, in this order.
CELL_COLUMNS = {
    "cell_type": pa.int32(),
    "slice_id": pa.int32(),
    "cell_id": pa.int64(),
    "obs_name": pa.string(),
}
PART_SCHEMA = pa.schema(
    {
        "gene_index": vector_of(pa.int32()),
        "gene_value": vector_of(pa.float32()),
        "position": vector_of(pa.float64()),
        **CELL_COLUMNS,
    }
)


def shard_schema(storage: str, *, with_cell_type: bool) -> pa.Schema:
    """List the columns of a shard."""
    expression = (
        {"expression": vector_of(pa.float32())}
        if storage == "dense"
        else {"gene_index": vector_of(pa.int32()), "gene_value": vector_of(pa.float32())}
    )
    of_cells = {
        name: kind for name, kind in CELL_COLUMNS.items() if with_cell_type or name != "cell_type"
    }
    columns = {**expression, "position": vector_of(pa.float64()), **of_cells}
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


@dataclass(frozen=True)
class SparseCellTable:
    """A table of cells; `cell_type` is -1 where there is none."""

    values: csr_array
    position: Float64[np.ndarray, "N 3"]
    cell_type: Int32[np.ndarray, " N"]
    slice_id: Int32[np.ndarray, " N"]
    cell_id: Int64[np.ndarray, " N"]
    obs_name: pa.StringArray

    def __len__(self) -> int:
        """Count the cells."""
        return len(self.cell_id)

    def take(self, rows: Int64[np.ndarray, " M"]) -> "SparseCellTable":
        """Return these rows in this order."""
        columns = {
            name: column.take(pa.array(rows)) if isinstance(column, pa.Array) else column[rows]
            for name, column in self.columns().items()
        }
        return SparseCellTable(self.values[rows], self.position[rows], **columns)

    def columns(self) -> dict[str, Any]:
        """Return what has one value per cell, by the name of its column."""
        return {name: getattr(self, name) for name in CELL_COLUMNS}


def joined_sparse_tables(tables: Sequence[SparseCellTable]) -> SparseCellTable:
    """Put tables one below the other."""
    columns = {}
    for name in CELL_COLUMNS:
        pieces = [getattr(table, name) for table in tables]
        of_arrow = isinstance(pieces[0], pa.Array)
        columns[name] = pa.concat_arrays(pieces) if of_arrow else np.concatenate(pieces)
    return SparseCellTable(
        vstack([table.values for table in tables], format="csr"),
        np.concatenate([table.position for table in tables]),
        **columns,
    )


def chunk_bytes(total_bytes: float) -> int:
    """Return the size of a chunk for data of a given size.

    Every bucket of the shuffle takes a run from every part, so a run has chunk^2 / total bytes: the
    chunk grows with the root of the data, lest the runs get too short to be read at full speed.
    """
    return max(WORK_BYTES, int(math.sqrt(total_bytes * SHORTEST_RUN_BYTES)))


def rows_that_fit(max_rows: int, bytes_per_row: float, total_bytes: float) -> int:
    """Return how many rows to hold at a time: what the user allows, and no more than a chunk."""
    return max(1, min(max_rows, int(chunk_bytes(total_bytes) / max(bytes_per_row, 1))))


def vectors(values: np.ndarray, offsets: np.ndarray) -> pa.ListArray:
    """Return a column of vectors that are cut from `values` at `offsets`."""
    flat = pa.array(values)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), flat, vector_of(flat.type))


def equal_vectors(values: np.ndarray) -> pa.ListArray:
    """Return a column of vectors of one length: the rows of a matrix."""
    rows, width = values.shape
    return vectors(values.reshape(-1), np.arange(rows + 1) * width)


def arrow_columns(cells: SparseCellTable) -> dict[str, pa.Array]:
    """Return what has one value per cell, as Arrow."""
    return {
        name: column if isinstance(column, pa.Array) else pa.array(column)
        for name, column in cells.columns().items()
    }


def to_batch(cells: SparseCellTable) -> pa.RecordBatch:
    """Convert a table of cells into Arrow."""
    values = cells.values
    columns = [
        vectors(values.indices.astype(np.int32, copy=False), values.indptr),
        vectors(values.data, values.indptr),
        equal_vectors(cells.position),
        *arrow_columns(cells).values(),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=PART_SCHEMA)


def from_batch(batch: pa.RecordBatch, num_genes: int) -> SparseCellTable:
    """Convert Arrow back into a table of cells, without copying its numbers."""
    index, value = batch["gene_index"], batch["gene_value"]
    entries = (value.flatten().to_numpy(), index.flatten().to_numpy(), index.offsets.to_numpy())
    columns = {
        name: batch[name] if pa.types.is_string(kind) else batch[name].to_numpy()
        for name, kind in CELL_COLUMNS.items()
    }
    return SparseCellTable(
        csr_array(entries, shape=(len(batch), num_genes)),
        batch["position"].flatten().to_numpy().reshape(-1, 3),
        **columns,
    )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an error of the file system, such as a full disk, the name of the file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise


def write_part(path: Path, batches: dict[int, pa.RecordBatch]) -> None:
    """Write record batches under their bucket numbers, complete or not at all."""
    numbers = json.dumps(list(batches)).encode()
    schema = PART_SCHEMA.with_metadata({BUCKETS_KEY: numbers})
    with (
        naming(path),
        replacing(path) as partial,
        pa.OSFile(str(partial), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
    ):
        for batch in batches.values():
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))


def read_part(content: bytes, num_genes: int) -> SparseCellTable:
    """Read a part of one record batch from the bytes of its file; ValueError where it is none."""
    with pa.ipc.open_file(pa.BufferReader(content)) as reader:
        if not reader.schema.equals(PART_SCHEMA) or reader.num_record_batches != 1:
            raise ValueError("its columns are not those of a part")
        batch = reader.get_batch(0)
    batch.validate(full=True)  # every offset and every letter, before they are used as such
    index, value = batch["gene_index"], batch["gene_value"]
    genes = index.flatten().to_numpy()
    lengths = np.diff(batch["position"].offsets.to_numpy())
    checks = {
        "it has missing values": not any(column.null_count for column in batch.columns),
        "its genes and values differ in number": index.offsets.equals(value.offsets),
        "it has genes outside the list": not len(genes)
        or bool(genes.min() >= 0 and genes.max() < num_genes),
        "its positions have not 3 numbers": bool((lengths == 3).all()),
    }
    for said, holds in checks.items():
        if not holds:
            raise ValueError(said)
    return from_batch(batch, num_genes)


class SortedParts:
    """Reads buckets from sorted parts; a few parts stay open, since opening reads all their index.

    Used as a context: leaving it closes them.
    """

    def __init__(self, num_genes: int) -> None:
        self.num_genes = num_genes
        self._open: OrderedDict[Path, tuple[ExitStack, Any, dict[int, int]]] = OrderedDict()

    def __enter__(self) -> "SortedParts":
        return self

    def __exit__(self, *_error: object) -> None:
        while self._open:
            self._open.popitem()[1][0].close()

    def read(self, path: Path, bucket: int) -> SparseCellTable:
        """Read the cells of one bucket from a part that has some."""
        if path not in self._open:
            if len(self._open) == MOST_OPEN_PARTS:
                self._open.popitem(last=False)[1][0].close()
            files = ExitStack()
            source = files.enter_context(pa.OSFile(str(path)))
            reader = files.enter_context(pa.ipc.open_file(source))
            numbers = json.loads(reader.schema.metadata[BUCKETS_KEY])
            batch_of = {number: index for index, number in enumerate(numbers)}
            self._open[path] = (files, reader, batch_of)
        self._open.move_to_end(path)
        _, reader, batch_of = self._open[path]
        return from_batch(reader.get_batch(batch_of[bucket]), self.num_genes)


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write an .npz, complete or not at all, with the same bytes every time."""
    # Through memory: numpy's own writing to a full disk raises an error without a number or name.
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    with naming(path), replacing(path) as partial:
        partial.write_bytes(buffer.getbuffer())


def read_arrays(path: Path) -> dict[str, Any]:
    """Read an .npz of plain numbers."""
    with np.load(path, allow_pickle=False) as file:
        return dict(file)
