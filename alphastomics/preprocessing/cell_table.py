"""A table of cells: the one form in which files, parts, shards and queries hold them.

Columns of Arrow enter, checked, and leave. Numbers are shared with Arrow, not copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Float32, Int, Int32, Int64
from scipy.sparse import csr_array, vstack

Rows = slice | np.ndarray
Table = TypeVar("Table", bound="CellTable")


def vector_of(value: pa.DataType) -> pa.DataType:
    """Return the list type of a vector per cell; without nulls it reads twice as fast."""
    return pa.list_(pa.field("element", value, nullable=False))


# One value per cell: fields of `CellTable`, and columns of parts and shards, in this order.
CELL_COLUMNS = {
    "cell_type": pa.int32(),
    "slice_id": pa.int32(),
    "cell_id": pa.int64(),
    "obs_name": pa.string(),
}
DENSE = {"expression": vector_of(pa.float32())}
SPARSE = {"gene_index": vector_of(pa.int32()), "gene_value": vector_of(pa.float32())}
POSITION = {"position": vector_of(pa.float64())}
PART_SCHEMA = pa.schema({**SPARSE, **POSITION, **CELL_COLUMNS})


def shard_schema(storage: str, *, with_cell_type: bool) -> pa.Schema:
    """List the columns of a shard."""
    columns = {**(DENSE if storage == "dense" else SPARSE), **POSITION, **CELL_COLUMNS}
    if not with_cell_type:
        del columns["cell_type"]
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


@dataclass(frozen=True)
class CellTable:
    """Cells in memory.

    Parameters
    ----------
    expression
        Dense, or CSR until a batch is made of it.
    position
        Coordinates in the user's units.
    cell_type
        The number of each cell's type, -1 where there is none.
    slice_id, cell_id
        The number of each cell's slice, and its own.
    obs_name
        Names of the cells in their input, where they are needed.
    smoothed
        Expression smoothed over neighbours in expression space, where it is needed.
    """

    expression: Float32[np.ndarray, "N G"] | csr_array
    position: Float[np.ndarray, "N 3"]
    cell_type: Int32[np.ndarray, " N"]
    slice_id: Int[np.ndarray, " N"]
    cell_id: Int64[np.ndarray, " N"]
    obs_name: pa.StringArray | None = None
    smoothed: Float32[np.ndarray, "N F"] | None = None

    def __len__(self) -> int:
        """Count the cells."""
        return len(self.slice_id)

    @property
    def sparse(self) -> csr_array:
        """Return the expression of cells that are not dense yet."""
        assert isinstance(self.expression, csr_array)
        return self.expression

    def take(self: Table, rows: Rows) -> Table:
        """Return these cells in this order; a slice of them costs nothing."""
        columns = {field.name: getattr(self, field.name) for field in fields(CellTable)}
        return replace(self, **{name: _taken(column, rows) for name, column in columns.items()})

    def rows_of(self, number: int) -> Int64[np.ndarray, " M"]:
        """Return the rows of a slice's cells."""
        return np.flatnonzero(self.slice_id == number)


def _taken(column: Any, rows: Rows) -> Any:
    if column is None:
        return None
    if isinstance(column, pa.Array):
        return column.take(pa.array(np.r_[rows]))
    if isinstance(column, csr_array) and isinstance(rows, slice):
        return _viewed(column, rows.start, rows.stop)
    return column[rows]


def _viewed(values: csr_array, start: int, stop: int) -> csr_array:
    """View some rows of a CSR matrix; scipy's own slicing would copy them."""
    pointers = values.indptr[start : stop + 1]
    first, last = pointers[0], pointers[-1]
    parts = (values.data[first:last], values.indices[first:last], pointers - first)
    return csr_array(parts, shape=(stop - start, values.shape[1]))


def joined_tables(tables: Sequence[CellTable]) -> CellTable:
    """Put tables one below the other."""
    if len(tables) == 1:
        return tables[0]
    names = [field.name for field in fields(CellTable)]
    return CellTable(**{name: _stacked([getattr(part, name) for part in tables]) for name in names})


def _stacked(blocks: list[Any]) -> Any:
    if blocks[0] is None:
        return None
    if isinstance(blocks[0], pa.Array):
        return pa.concat_arrays(blocks)
    if isinstance(blocks[0], csr_array):
        return vstack(blocks, format="csr")
    return np.concatenate(blocks)


def empty_table(cells: int, genes: int) -> CellTable:
    """Allocate dense cells, without names."""
    return CellTable(
        expression=np.empty((cells, genes), dtype=np.float32),
        position=np.empty((cells, 3), dtype=np.float64),
        cell_type=np.empty(cells, dtype=np.int32),
        slice_id=np.empty(cells, dtype=np.int32),
        cell_id=np.empty(cells, dtype=np.int64),
    )


def put_rows(target: CellTable, rows: Int64[np.ndarray, " M"], cells: CellTable) -> None:
    """Copy cells to their rows of a dense table."""
    for field in fields(CellTable):
        column = getattr(target, field.name)
        if column is not None:
            column[rows] = getattr(cells, field.name)


def _vectors(values: np.ndarray, offsets: np.ndarray) -> pa.ListArray:
    """Return a column of vectors that are cut from `values` at `offsets`."""
    flat = pa.array(values)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), flat, vector_of(flat.type))


def _equal_vectors(values: np.ndarray) -> pa.ListArray:
    """Return a column of vectors of one length: the rows of a matrix."""
    rows, width = values.shape
    return _vectors(values.reshape(-1), np.arange(rows + 1) * width)


def to_batch(cells: CellTable, schema: pa.Schema) -> pa.RecordBatch:
    """Convert a table of cells into those columns of Arrow that a schema lists."""
    values = cells.expression
    if isinstance(values, csr_array):
        columns = {
            "gene_index": _vectors(values.indices.astype(np.int32, copy=False), values.indptr),
            "gene_value": _vectors(values.data, values.indptr),
        }
    else:
        columns = {"expression": _equal_vectors(values)}
    columns["position"] = _equal_vectors(cells.position)
    for name in CELL_COLUMNS:
        column = getattr(cells, name)
        columns[name] = column if isinstance(column, pa.Array) else pa.array(column)
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def from_batch(batch: pa.RecordBatch, num_genes: int) -> CellTable:
    """Convert columns of Arrow into a table of cells."""
    if "expression" in batch.schema.names:
        expression = batch["expression"].flatten().to_numpy().reshape(-1, num_genes)
    else:
        index, value = batch["gene_index"], batch["gene_value"]
        offsets = index.offsets.to_numpy()
        entries = (value.flatten().to_numpy(), index.flatten().to_numpy(), offsets - offsets[0])
        expression = csr_array(entries, shape=(len(batch), num_genes))
    position = batch["position"].flatten().to_numpy().astype(np.float64, copy=False)
    columns: dict[str, Any] = {"cell_type": np.full(len(batch), -1, dtype=np.int32)}
    for name in CELL_COLUMNS.keys() & set(batch.schema.names):
        is_text = pa.types.is_string(batch[name].type)
        columns[name] = batch[name] if is_text else batch[name].to_numpy()
    return CellTable(expression, position.reshape(-1, 3), **columns)


def check_batch(
    batch: pa.RecordBatch, schema: pa.Schema, num_genes: int, most: dict[str, int]
) -> None:
    """Refuse, with a ValueError, columns that are not what a schema says, or numbers too large.

    Parameters
    ----------
    batch
        Some of the schema's columns.
    schema
        The columns as they are written.
    num_genes
        Length of the gene list.
    most
        How many slices and cell types there are, by the name of the column that counts them.
    """
    lengths = {"expression": num_genes, "position": 3}
    for name in batch.schema.names:
        column, expected = batch[name], schema.field(name).type
        if not _is_of_type(column.type, expected, name):
            raise ValueError(f"{name} is of type {column.type}, not {expected}")
        values = column.flatten() if pa.types.is_list(expected) else column
        if column.null_count or values.null_count:
            raise ValueError(f"{name} has missing values")
        if name in lengths and (np.diff(column.offsets.to_numpy()) != lengths[name]).any():
            raise ValueError(f"{name} does not hold {lengths[name]} numbers per cell")
        if name in ("gene_index", *most) and len(values):
            low, limit = (-1, most[name]) if name == "cell_type" else (0, most.get(name, num_genes))
            numbers = values.to_numpy()
            if not low <= numbers.min() <= numbers.max() < limit:
                raise ValueError(f"{name} has numbers that are not from {low} to {limit - 1}")
    if "gene_index" in batch.schema.names and not batch["gene_index"].offsets.equals(
        batch["gene_value"].offsets
    ):
        raise ValueError("gene_index and gene_value differ in number")


def _is_of_type(kind: pa.DataType, expected: pa.DataType, name: str) -> bool:
    if not pa.types.is_list(expected):
        return bool(kind == expected)
    # Version 0.1 wrote positions as float32.
    older = {pa.float32()} if name == "position" else set()
    return pa.types.is_list(kind) and kind.value_type in {expected.value_type, *older}
