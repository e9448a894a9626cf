"""Counts without ranges of rows (CSC, CSV) converted into chunks of rows, with bounded memory.

The matrix is read in pieces; the entries of a piece are dealt out to one file per chunk of rows. So
it is read once, where picking the rows of a chunk would read it once per chunk.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from scipy.sparse import coo_array, csr_array

from alphastomics.io.files import hashing
from alphastomics.preprocessing.formats.registry import opened_source
from alphastomics.preprocessing.inspection import Inspection
from alphastomics.preprocessing.resume import is_file_of, load_marker, write_marker

MOST_OPEN_FILES = 128
SCHEMA = pa.schema({"row": pa.int32(), "column": pa.int32(), "value": pa.float32()})


@dataclass(frozen=True)
class TransposeTask:
    """A file without ranges of rows, and the folder and prefix of the row chunks to write."""

    inspection: Inspection
    folder: Path
    prefix: str

    def chunk_path(self, chunk: int) -> Path:
        """Return where the entries of a chunk of rows go."""
        return self.folder / f"{self.prefix}-{chunk:05d}.rows"


def transpose(task: TransposeTask) -> None:
    """Write the entries of a file by chunks of rows, unless that is done."""
    done = task.folder / f"{task.prefix}.rows.json"
    chunks = task.inspection.chunks()
    paths = [task.chunk_path(number) for number in range(len(chunks))]
    marker = load_marker(done)
    if marker is not None and all(map(is_file_of, paths, marker["sha256"])):
        return
    # A process may have so many files open at once; the matrix is read once for each group.
    digests: list[str] = []
    for start in range(0, len(chunks), MOST_OPEN_FILES):
        group = slice(start, start + MOST_OPEN_FILES)
        digests += _write_group(task.inspection, paths[group], chunks[group])
    write_marker(done, {"sha256": digests})


def _write_group(
    inspection: Inspection, paths: list[Path], chunks: list[tuple[int, int]]
) -> list[str]:
    """Write the entries of some chunks of rows; return the sha256 of each file."""
    with ExitStack() as files:
        sinks = [files.enter_context(hashing(path)) for path in paths]
        writers = [files.enter_context(pa.ipc.new_file(sink, SCHEMA)) for sink in sinks]
        _deal_out(inspection, writers, chunks)
    return [sink.sha256 for sink in sinks]


def _deal_out(
    inspection: Inspection,
    writers: list[pa.ipc.RecordBatchFileWriter],
    chunks: list[tuple[int, int]],
) -> None:
    """Append each piece's entries to the file of the rows that they belong to."""
    starts = [start for start, _ in chunks]
    edges = np.array([*starts, chunks[-1][1]])
    with opened_source(inspection.path, inspection.options) as source:
        for piece in source.expression.pieces():
            row, column = piece.coords
            order = np.argsort(row, kind="stable")
            row, column, value = row[order], column[order], piece.data[order]
            cuts = np.searchsorted(row, edges)
            for writer, start, cut, end in zip(writers, starts, cuts[:-1], cuts[1:], strict=True):
                if cut < end:
                    entries = [row[cut:end] - start, column[cut:end], value[cut:end]]
                    arrays = [
                        pa.array(part).cast(kind)
                        for part, kind in zip(entries, SCHEMA.types, strict=True)
                    ]
                    writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))


def read_chunk_rows(path: Path, cells: int, genes: int) -> csr_array:
    """Read one chunk of rows back."""
    with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as reader:
        table = reader.read_all()
    row, column, value = (table[name].to_numpy() for name in SCHEMA.names)
    values = coo_array((value, (row, column)), shape=(cells, genes)).tocsr()
    values.eliminate_zeros()
    return values
