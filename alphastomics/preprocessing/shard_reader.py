"""Shards back into cells: row groups of Parquet enter, checked tables of numbers leave."""

import io
import zipfile
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from threading import Lock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool, Float32, Float64, Int32, Int64
from scipy.sparse import csr_array, vstack

from alphastomics.errors import InputError, quoted
from alphastomics.preprocessing.folder import DataFolder
from alphastomics.preprocessing.normalize import absent, densified
from alphastomics.preprocessing.parts import CELL_COLUMNS, shard_schema
from alphastomics.preprocessing.schema import (
    METADATA_FILE,
    SCALING_FILE,
    Metadata,
    ShardRecord,
)

Rows = slice | np.ndarray
# One number per cell: fields of `CellTable`, and columns of shards. Names stay on the disk.
NUMBER_COLUMNS = {
    name: kind.to_pandas_dtype()
    for name, kind in CELL_COLUMNS.items()
    if not pa.types.is_string(kind)
}
DAMAGED = "the shard was altered or cut short: copy it again, or preprocess again"


@dataclass(frozen=True)
class CellTable:
    """Cells in memory; expression is dense, or CSR until a batch is made of it."""

    expression: Float32[np.ndarray, "N G"] | csr_array
    position: Float64[np.ndarray, "N 3"]
    cell_type: Int32[np.ndarray, " N"]
    slice_id: Int32[np.ndarray, " N"]
    cell_id: Int64[np.ndarray, " N"]
    smoothed: Float32[np.ndarray, "N F"] | None = None

    def __len__(self) -> int:
        """Count the cells."""
        return len(self.cell_id)

    def take(self, rows: Rows) -> "CellTable":
        """Return some cells; a slice of them costs nothing."""
        if isinstance(self.expression, csr_array) and isinstance(rows, slice):
            expression = sparse_rows(self.expression, rows.start, rows.stop)
        else:
            expression = self.expression[rows]
        smoothed = None if self.smoothed is None else self.smoothed[rows]
        columns = {name: column[rows] for name, column in self.columns().items()}
        return CellTable(expression, self.position[rows], **columns, smoothed=smoothed)

    def columns(self) -> dict[str, np.ndarray]:
        """Return what has one number per cell, by the name of its column."""
        return {name: getattr(self, name) for name in NUMBER_COLUMNS}


def sparse_rows(values: csr_array, start: int, stop: int) -> csr_array:
    """View some rows of a CSR matrix; scipy's own slicing would copy them."""
    pointers = values.indptr[start : stop + 1]
    first, last = pointers[0], pointers[-1]
    parts = (values.data[first:last], values.indices[first:last], pointers - first)
    return csr_array(parts, shape=(stop - start, values.shape[1]))


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of a row group."""

    shard: int
    group: int
    start: int
    stop: int

    def __len__(self) -> int:
        """Count the cells."""
        return self.stop - self.start


class ShardReader:
    """Reads the shards of one split; several threads may do so at once.

    Parameters
    ----------
    folder
        The processed folder.
    metadata
        What the folder's metadata.json says.
    split
        train, validation or test.
    verify
        Compare each shard with its sha256 before its first row is used; far away, where that would
        read it twice, compare every page with its own checksum instead.
    """

    def __init__(self, folder: DataFolder, metadata: Metadata, split: str, *, verify: bool) -> None:
        self.folder, self.metadata, self.split, self.verify = folder, metadata, split, verify
        self.shards = metadata.splits[split].shards
        self._footers: dict[int, pq.FileMetaData] = {}
        self._locks = [Lock() for _ in self.shards]
        self._verified: set[int] = set()
        if verify:
            for shard in self.shards:
                self._check_size(shard)

    @property
    def pieces(self) -> list[Piece]:
        """List all row groups."""
        return [
            Piece(number, group, 0, rows)
            for number, shard in enumerate(self.shards)
            for group, rows in enumerate(shard.row_groups)
        ]

    @cached_property
    def absent_value(self) -> Float32[np.ndarray, "S G"] | None:
        """Return what an entry that is not stored stands for, by slice; None where it is 0."""
        if not (self.metadata.storage == "sparse" and self.metadata.normalization.scale):
            return None
        content = self.folder.read_bytes(SCALING_FILE)
        where = self.folder.name_of(SCALING_FILE)
        if sha256(content).hexdigest() != self.metadata.scaling_sha256:
            raise InputError(
                f"{where}: its checksum (sha256) is not that of {METADATA_FILE}: it was altered or "
                "cut short; copy it again, or preprocess again"
            )
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                mean, std = arrays["mean"], arrays["std"]
        except (ValueError, OSError, KeyError, zipfile.BadZipFile) as error:
            raise InputError(f"{where}: cannot be read: it is damaged; preprocess again") from error
        shape = (len(self.metadata.slices), self.metadata.num_genes)
        if not mean.shape == std.shape == shape or {mean.dtype.kind, std.dtype.kind} != {"f"}:
            raise InputError(f"{where}: does not hold {shape[0]} slices x {shape[1]} genes")
        return absent(mean, std)

    @cached_property
    def measured_genes(self) -> Bool[np.ndarray, "P G"]:
        """Return which genes each panel measured."""
        table = np.ones((len(self.metadata.panels), self.metadata.num_genes), dtype=bool)
        for number, panel in enumerate(self.metadata.panels):
            table[number, panel.missing] = False
        return table

    @cached_property
    def panel_of_slice(self) -> Int64[np.ndarray, " S"]:
        """Return the panel of each slice."""
        return np.array([record.panel for record in self.metadata.slices])

    def read(self, piece: Piece) -> CellTable:
        """Read some rows of a row group."""
        table = self._read_columns(piece, self._columns)
        record = self.shards[piece.shard]
        try:
            return self._cells(table, record, piece)
        except (KeyError, IndexError, UnicodeDecodeError, pa.ArrowException) as error:
            raise self._damaged(record, error) from error

    def names(self, piece: Piece) -> list[str]:
        """Return the cells' names in the input."""
        names = self._read_columns(piece, ["obs_name"])["obs_name"].to_pylist()
        return names[piece.start : piece.stop]

    def named_cells(self, piece: Piece) -> tuple[Int64[np.ndarray, " N"], pa.ChunkedArray]:
        """Return the numbers of a row group's cells, and their names in the input."""
        table = self._read_columns(piece, ["cell_id", "obs_name"])
        return table["cell_id"].to_numpy(), table["obs_name"]

    def _damaged(self, record: ShardRecord, error: Exception) -> InputError:
        said = quoted(error, 150)
        return InputError(f"{self.folder.name_of(record.file)}: cannot be read ({said}): {DAMAGED}")

    def _read_columns(self, piece: Piece, columns: list[str]) -> pa.Table:
        """Read columns of a whole row group."""
        record = self.shards[piece.shard]
        self._verify_once(piece.shard)
        try:
            with self.folder.open(record.file) as source:
                file = pq.ParquetFile(
                    source,
                    metadata=self._footers.get(piece.shard),
                    page_checksum_verification=self.verify and self.folder.local is None,
                )
                self._footers[piece.shard] = file.metadata
                return file.read_row_group(piece.group, columns, use_threads=False)
        except (pa.ArrowException, OSError, KeyError, IndexError, UnicodeDecodeError) as error:
            raise self._damaged(record, error) from (
                error if self.folder.local is not None else None
            )

    def dense(self, table: CellTable) -> Float32[np.ndarray, "N G"]:
        """Return the expression of some cells as vectors."""
        if isinstance(table.expression, np.ndarray):
            return table.expression
        return densified(table.expression, table.slice_id, self.absent_value)

    @property
    def _columns(self) -> list[str]:
        unread = CELL_COLUMNS.keys() - NUMBER_COLUMNS.keys()
        return [name for name in self._schema.names if name not in unread]

    @cached_property
    def _schema(self) -> pa.Schema:
        with_type = self.metadata.cell_types is not None
        return shard_schema(self.metadata.storage, with_cell_type=with_type)

    def _check_size(self, shard: ShardRecord) -> None:
        size = self.folder.size_of(shard.file)
        if size != shard.bytes:
            raise InputError(
                f"{self.folder.name_of(shard.file)}: its checksum (sha256) cannot be that of "
                f"{METADATA_FILE}: it has {size} bytes where {shard.bytes} were written; {DAMAGED}"
            )

    def _verify_once(self, number: int) -> None:
        if not self.verify or number in self._verified:
            return
        with self._locks[number]:  # the first reader checks, the others wait for it
            if number in self._verified:
                return
            shard = self.shards[number]
            digest = self.folder.digest_of(shard.file)
            if digest not in (None, shard.sha256):
                raise InputError(
                    f"{self.folder.name_of(shard.file)}: its checksum (sha256 {digest}) is not "
                    f"that of {METADATA_FILE} ({shard.sha256}): {DAMAGED}"
                )
            self._verified.add(number)

    def _cells(self, table: pa.Table, record: ShardRecord, piece: Piece) -> CellTable:
        """Convert the columns of a row group into numbers, without copying."""
        batch = table.combine_chunks().to_batches()[0]
        rows, genes = len(batch), self.metadata.num_genes
        if rows != record.row_groups[piece.group]:
            raise KeyError(f"row group {piece.group} has {rows} rows")
        self._check_columns(batch)
        expression: np.ndarray | csr_array
        if self.metadata.storage == "dense":
            values = batch["expression"].flatten().to_numpy()
            if len(values) != rows * genes:
                raise KeyError(f"expression does not hold {genes} genes per cell")
            expression = values.reshape(rows, genes)
        else:
            expression = self._sparse(batch, rows, genes)
        coordinates = batch["position"].flatten().to_numpy().astype(np.float64, copy=False)
        if len(coordinates) != rows * 3:
            raise KeyError("position does not hold 3 numbers per cell")
        columns = {"cell_type": np.full(rows, -1, dtype=np.int32)}
        stored = [name for name in NUMBER_COLUMNS if name in batch.schema.names]
        columns |= {name: batch[name].to_numpy() for name in stored}
        types, labels = self.metadata.cell_types, columns["cell_type"]
        if types is not None and rows and not -1 <= labels.min() <= labels.max() < len(types):
            raise KeyError("cell_type has numbers that are no cell type's")
        whole = CellTable(expression, coordinates.reshape(rows, 3), **columns)
        return whole if len(piece) == rows else whole.take(slice(piece.start, piece.stop))

    def _check_columns(self, batch: pa.RecordBatch) -> None:
        """Refuse columns of another type, with missing values, or with vectors of other lengths."""
        lengths = {"expression": self.metadata.num_genes, "position": 3}
        for name in batch.schema.names:
            column, wanted = batch[name], self._schema.field(name).type
            is_list = pa.types.is_list(wanted)
            same = pa.types.is_list(column.type) if is_list else column.type == wanted
            if same and is_list:
                # Version 0.1 wrote positions as float32.
                older = {pa.float32()} if name == "position" else set()
                same = column.type.value_type in {wanted.value_type, *older}
            if not same:
                raise KeyError(f"{name} is of type {column.type}, not {wanted}")
            flat = column.flatten() if is_list else column
            if column.null_count or flat.null_count:
                raise KeyError(f"{name} has missing values")
            if name in lengths and (np.diff(column.offsets.to_numpy()) != lengths[name]).any():
                raise KeyError(f"{name} does not hold {lengths[name]} numbers per cell")
        numbers = batch["slice_id"].to_numpy()
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self.metadata.slices):
            raise KeyError("slice_id has numbers that are no slice's")

    def _sparse(self, batch: pa.RecordBatch, rows: int, genes: int) -> csr_array:
        index = batch["gene_index"]
        indices, offsets = index.flatten().to_numpy(), index.offsets.to_numpy()
        if len(indices) and not (indices.min() >= 0 and indices.max() < genes):
            raise KeyError("gene_index lies outside the gene list")
        if not index.offsets.equals(batch["gene_value"].offsets):
            raise KeyError("gene_index and gene_value differ in number")
        values = batch["gene_value"].flatten().to_numpy()
        return csr_array((values, indices, offsets - offsets[0]), shape=(rows, genes))


def joined_tables(tables: list[CellTable]) -> CellTable:
    """Put tables one below the other."""
    if len(tables) == 1:
        return tables[0]
    blocks = [table.expression for table in tables]
    sparse = isinstance(blocks[0], csr_array)
    columns = {
        name: np.concatenate([getattr(table, name) for table in tables]) for name in NUMBER_COLUMNS
    }
    return CellTable(
        vstack(blocks, format="csr") if sparse else np.concatenate(blocks),
        np.concatenate([table.position for table in tables]),
        **columns,
    )


def empty_table(cells: int, genes: int) -> CellTable:
    """Allocate dense cells."""
    return CellTable(
        np.empty((cells, genes), dtype=np.float32),
        np.empty((cells, 3), dtype=np.float64),
        **{name: np.empty(cells, dtype=kind) for name, kind in NUMBER_COLUMNS.items()},
    )


def put_rows(target: CellTable, rows: Int64[np.ndarray, " M"], cells: CellTable) -> None:
    """Copy cells to their rows of a dense table."""
    target.expression[rows] = cells.expression
    target.position[rows] = cells.position
    for name, column in target.columns().items():
        column[rows] = getattr(cells, name)
