"""SpatialData stores: a .zarr folder enters, the cells of one of its tables leave.

A table in such a store is AnnData in Zarr, and is read as that; images and shapes are not touched.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alphastomics.errors import InputError
from alphastomics.preprocessing.anndata_file import as_text, opened, reading
from alphastomics.preprocessing.cell_source import (
    CellSource,
    Coordinates,
    Format,
    SourceOptions,
    require_table,
)
from alphastomics.preprocessing.formats.h5ad import AnnDataSource

TABLES = "tables"
EXTRA = 'pip install "alphastomics[spatialdata]"'


class SpatialDataSource(AnnDataSource):
    """The cells of one table."""

    def __init__(self, path: Path, root: Any, options: SourceOptions) -> None:
        super().__init__(path, root, options)
        with reading(path, "uns/spatialdata_attrs"):
            key = "uns/spatialdata_attrs/region_key"
            # Which region a cell is of: a section, where the table has several.
            self.slice_keys = (as_text([root[key][()]])[0].as_py(),) if key in root else ()

    def positions(self, key: str) -> Coordinates:
        """Open obsm[key] of the table."""
        if key not in self.position_keys:
            there = ", ".join(self.position_keys) or "none"
            raise InputError(
                f"{self.path}: obsm[{key!r}] is missing (keys of obsm: {there}): put the centroids "
                "of the cells into the table, table.obsm['spatial'] = "
                "spatialdata.get_centroids(shapes).compute()[['x', 'y']].to_numpy(), and write it "
                "again"
            )
        return super().positions(key)

    def is_dissociated(self, key: str) -> bool:
        """Say no: a store of spatial data has positions, in its shapes if not in its table."""
        return False

    def to_anndata(self) -> Any:
        """Read the whole table."""
        import anndata

        with reading(self.path, "the whole of it"):
            return anndata.read_zarr(self.path)


def is_store(path: Path) -> bool:
    """Tell whether a folder is a Zarr store with tables."""
    marks = (".zgroup", "zarr.json", ".zattrs")
    is_zarr = path.is_dir() and any((path / mark).is_file() for mark in marks)
    return is_zarr and (path / TABLES).is_dir() and not (path / "obs").exists()


def table_folder(path: Path, options: SourceOptions) -> list[Path]:
    """Return the folder of the table that is asked for."""
    if not is_store(path):
        raise InputError(f"{path}: is no SpatialData store: {TABLES}/ is missing")
    names = sorted(entry.name for entry in (path / TABLES).iterdir() if entry.is_dir())
    if not names:
        raise InputError(f"{path}: is a SpatialData store without a table: add one with counts")
    return [path / TABLES / require_table(path, names, options.table)]


@contextmanager
def opened_table(path: Path, options: SourceOptions) -> Iterator[CellSource]:
    """Open one table of a store."""
    try:
        import zarr  # noqa: F401
    except ImportError as error:
        raise InputError(f"{path}: a SpatialData store needs the zarr package: {EXTRA}") from error
    (folder,) = table_folder(path, options)
    with opened(folder) as root:
        yield SpatialDataSource(folder, root, options)


FORMAT = Format(
    name="spatialdata",
    content="a SpatialData .zarr store with tables/",
    recognises=is_store,
    files=table_folder,
    opened=opened_table,
    uses=lambda *_: ("table", "pixel_size"),
)
