"""Cells between the stages: tables of cells enter, Arrow files leave, and back.

A *part* is one Arrow IPC file of normalised cells in sparse form. Stage 1 writes one for each chunk
of a file; stage 2 sorts each into record batches by the bucket that they go to.
"""

import json
import math
from collections import OrderedDict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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

    def read(self, path: Path, bucket: int) -> CellTable:
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
