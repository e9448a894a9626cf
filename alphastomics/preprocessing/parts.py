"""Cells between the stages: tables of cells enter, Arrow files leave, and back.

A *part* is one Arrow IPC file of normalised cells in sparse form. Stage 1 writes one for each chunk
of a file; stage 2 sorts each into record batches by the bucket that they go to.
"""

import json
import math
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from alphastomics.io.files import hashing
from alphastomics.preprocessing.cell_table import PART_SCHEMA, CellTable, check_batch, from_batch

BUCKETS_KEY = b"buckets"
MOST_OPEN_PARTS = 64
WORK_BYTES = 16 << 20  # what a chunk of cells takes, counted once; a few copies are alive
SHORTEST_RUN_BYTES = 64 << 10  # what is worth a read of its own in the shuffle


def chunk_bytes(total_bytes: float) -> int:
    """Return the size of a chunk for data of a given size.

    Every bucket of the shuffle takes a run from every part, so a run has chunk^2 / total bytes: the
    chunk grows with the root of the data, lest the runs get too short to be read at full speed.
    """
    return max(WORK_BYTES, int(math.sqrt(total_bytes * SHORTEST_RUN_BYTES)))


def rows_that_fit(max_rows: int, bytes_per_row: float, total_bytes: float) -> int:
    """Return how many rows to hold at a time: what the user allows, and no more than a chunk."""
    return max(1, min(max_rows, int(chunk_bytes(total_bytes) / max(bytes_per_row, 1))))


def write_part(path: Path, batches: dict[int, pa.RecordBatch]) -> str:
    """Write record batches under their bucket numbers, whole or not at all; return the sha256."""
    schema = PART_SCHEMA.with_metadata({BUCKETS_KEY: json.dumps(list(batches)).encode()})
    with hashing(path) as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in batches.values():
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    return sink.sha256


def read_part(content: bytes, num_genes: int, num_cell_types: int) -> CellTable:
    """Read a part of one record batch from the bytes of its file; ValueError where it is none."""
    with pa.ipc.open_file(pa.BufferReader(content)) as reader:
        if not reader.schema.equals(PART_SCHEMA) or reader.num_record_batches != 1:
            raise ValueError("its columns are not those of a part")
        batch = reader.get_batch(0)
    batch.validate(full=True)  # every offset and every letter, before they are used as such
    check_batch(batch, PART_SCHEMA, num_genes, {"cell_type": num_cell_types})
    return from_batch(batch, num_genes)


class SortedParts:
    """Reads buckets from sorted parts; a few parts stay open, since opening reads all their index.

    A file is closed when its part is forgotten, which is when no cell of it is in use any more.
    """

    def __init__(self, num_genes: int) -> None:
        self.num_genes = num_genes
        self._opened = lru_cache(MOST_OPEN_PARTS)(_opened_part)

    def read(self, path: Path, bucket: int) -> CellTable:
        """Read the cells of one bucket from a part that has some."""
        reader, batch_of = self._opened(path)
        return from_batch(reader.get_batch(batch_of[bucket]), self.num_genes)


def _opened_part(path: Path) -> tuple[pa.ipc.RecordBatchFileReader, dict[int, int]]:
    """Open a sorted part; return its reader, and which record batch each bucket is."""
    reader = pa.ipc.open_file(pa.OSFile(str(path)))
    numbers = json.loads(reader.schema.metadata[BUCKETS_KEY])
    return reader, {number: index for index, number in enumerate(numbers)}
