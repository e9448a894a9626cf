"""A column-wise X (CSC) converted into chunks of rows, with memory for a chunk only.

Columns are read in blocks; the entries of a block are dealt out to one file per chunk of rows. So
the matrix is read once, where picking rows out of columns would read it once per chunk.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from scipy.sparse import coo_array, csr_array

from alphastomics.io.files import hashing
from alphastomics.preprocessing.anndata_file import (
    Expression,
    opened,
    reading,
    require_finite_values,
)
from alphastomics.preprocessing.inspection import BYTES_PER_ENTRY, Inspection
from alphastomics.preprocessing.parts import WORK_BYTES
from alphastomics.preprocessing.resume import is_file_of, load_marker, write_marker

MOST_OPEN_FILES = 128
SCHEMA = pa.schema({"row": pa.int32(), "column": pa.int32(), "value": pa.float32()})


@dataclass(frozen=True)
class TransposeTask:
    """A CSC file, and the folder and prefix of the row chunks to write."""

    inspection: Inspection
    folder: Path
    prefix: str

    def chunk_path(self, chunk: int) -> Path:
        """Return where the entries of a chunk of rows go."""
        return self.folder / f"{self.prefix}-{chunk:05d}.rows"


def transpose(task: TransposeTask) -> None:
    """Write the entries of a CSC file by chunks of rows, unless that is done."""
    done = task.folder / f"{task.prefix}.rows.json"
    chunks = task.inspection.chunks()
    paths = [task.chunk_path(number) for number in range(len(chunks))]
    marker = load_marker(done)
    if marker is not None and all(map(is_file_of, paths, marker["sha256"])):
        return
    # A process may have so many files open at once; the columns are read once for each group.
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
    """Append each block's entries to the file of the rows that they belong to."""
    with opened(inspection.path) as root:
        expression = Expression(inspection.path, root, inspection.cells, len(inspection.genes))
        for start, stop in _column_blocks(expression):
            block = expression.lines(start, stop, inspection.cells)  # columns as lines
            require_finite_values(inspection.path, block, start)
            by_row = block.T.tocsr()
            for writer, (first, last) in zip(writers, chunks, strict=True):
                piece = by_row[first:last].tocoo()
                row, column = piece.coords
                entries = [row.astype(np.int32), (column + start).astype(np.int32), piece.data]
                writer.write_batch(
                    pa.RecordBatch.from_arrays([pa.array(part) for part in entries], schema=SCHEMA)
                )


def _column_blocks(expression: Expression) -> list[tuple[int, int]]:
    """Cut the columns into blocks of about equal numbers of entries."""
    with reading(expression.path, "X/indptr"):
        pointers = np.asarray(expression.element["indptr"][...]).astype(np.int64)
    per_block = WORK_BYTES // (2 * BYTES_PER_ENTRY)
    cuts = np.searchsorted(pointers, np.arange(per_block, pointers[-1], per_block))
    edges = np.unique(np.concatenate([[0], cuts, [expression.genes]])).tolist()
    return list(pairwise(edges))


def read_chunk_rows(path: Path, cells: int, genes: int) -> csr_array:
    """Read one chunk of rows back."""
    with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as reader:
        table = reader.read_all()
    row, column, value = (table[name].to_numpy() for name in SCHEMA.names)
    values = coo_array((value, (row, column)), shape=(cells, genes)).tocsr()
    values.eliminate_zeros()
    return values
