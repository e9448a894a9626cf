"""Shards back into cells: row groups of Parquet enter, checked tables of numbers leave."""

import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from threading import Lock
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool, Float32, Float64, Int64

from alphastomics.errors import InputError, quoted
from alphastomics.preprocessing.cell_table import (
    CellTable,
    check_batch,
    from_batch,
    shard_schema,
)
from alphastomics.preprocessing.folder import DataFolder
from alphastomics.preprocessing.normalize import absent, densified
from alphastomics.preprocessing.schema import (
    METADATA_FILE,
    REFERENCE,
    SCALING_FILE,
    Metadata,
    ShardRecord,
)

Result = TypeVar("Result")
DAMAGED = "the shard was altered or cut short: copy it again, or preprocess again"


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


class Scaling(NamedTuple):
    """Mean and std of every slice's genes (S, G)."""

    mean: Float64[np.ndarray, "S G"]
    std: Float64[np.ndarray, "S G"]


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
        if self.metadata.storage != "sparse" or self.scaling is None:
            return None
        return absent(*self.scaling)

    @cached_property
    def scaling(self) -> Scaling | None:
        """Return what slices were standardised by; None where they were not."""
        if not self.metadata.normalization.scale:
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
        shape = (len(self.metadata.records), self.metadata.num_genes)
        if not mean.shape == std.shape == shape or {mean.dtype.kind, std.dtype.kind} != {"f"}:
            raise InputError(f"{where}: does not hold {shape[0]} slices x {shape[1]} genes")
        return Scaling(mean, std)

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
        return np.array([record.panel for record in self.metadata.records])

    def read(self, piece: Piece) -> CellTable:
        """Read some rows of a row group; the names of cells stay on the disk."""
        columns = [name for name in self._schema.names if name != "obs_name"]
        cells = self._read_columns(piece, columns, lambda batch: self._cells(batch, piece))
        whole = len(piece) == len(cells)
        return cells if whole else cells.take(slice(piece.start, piece.stop))

    def names(self, piece: Piece) -> tuple[Int64[np.ndarray, " N"], pa.StringArray]:
        """Return the numbers of a row group's cells, and their names in the input."""
        return self._read_columns(
            piece,
            ["cell_id", "obs_name"],
            lambda batch: (batch["cell_id"].to_numpy(), batch["obs_name"]),
        )

    def _read_columns(
        self, piece: Piece, columns: list[str], convert: Callable[[pa.RecordBatch], Result]
    ) -> Result:
        """Read columns of a whole row group, and convert them; what goes wrong is the shard's."""
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
                table = file.read_row_group(piece.group, columns, use_threads=False)
            return convert(table.combine_chunks().to_batches()[0])
        except (pa.ArrowException, OSError, LookupError, ValueError) as error:
            raise InputError(
                f"{self.folder.name_of(record.file)}: cannot be read ({quoted(error, 150)}): "
                f"{DAMAGED}"
            ) from (error if self.folder.local is not None else None)

    def dense(self, table: CellTable) -> Float32[np.ndarray, "N G"]:
        """Return the expression of some cells as vectors."""
        if isinstance(table.expression, np.ndarray):
            return table.expression
        return densified(table.expression, table.slice_id, self.absent_value)

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

    def _cells(self, batch: pa.RecordBatch, piece: Piece) -> CellTable:
        """Convert the columns of a row group into numbers, without copying."""
        if len(batch) != self.shards[piece.shard].row_groups[piece.group]:
            raise ValueError(f"row group {piece.group} has {len(batch)} rows")
        metadata = self.metadata
        slices = len(metadata.records if self.split == REFERENCE else metadata.slices)
        most = {"slice_id": slices, "cell_type": len(metadata.cell_types or ())}
        check_batch(batch, self._schema, metadata.num_genes, most)
        return from_batch(batch, metadata.num_genes)
