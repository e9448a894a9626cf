"""Writing SpatialData: an AnnData and positions enter, a whole .zarr store leaves, or none.

The layout is version 0.1 of the container, which every version of spatialdata reads: the table as
AnnData in Zarr, and the cells of each slice as circles, in GeoParquet. The spatialdata package
itself is not needed.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Float64, Int64

from alphastomics.errors import InputError
from alphastomics.io.files import replacing_folder, require_writable
from alphastomics.io.h5ad import nullable_strings

if TYPE_CHECKING:
    import pyarrow as pa
    from anndata import AnnData

STORE_SUFFIX = ".zarr"
TABLE = "table"
# Columns of obs: which element of shapes a cell is in, and its number there.
REGION_KEY, INSTANCE_KEY = "shapes_region", "shapes_instance"
MARKS = (".zgroup", "zarr.json")
VERSIONS = {"container": "0.1", "shapes": "0.2", "table": "0.1"}
EXTRA = 'pip install "alphastomics[spatialdata]"'
# Well-known binary of a point, little-endian, without and with a z.
POINT, POINT_Z = 1, 1001


def require_store(path: Path, *, overwrite: bool) -> None:
    """Refuse a store that cannot be written, or is there already, before any work is done."""
    try:
        import zarr  # noqa: F401
    except ImportError as error:
        raise InputError(f"{path}: writing .zarr needs the zarr package: {EXTRA}") from error
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}; make it first")
    if path.exists() and not any((path / mark).is_file() for mark in MARKS):
        raise InputError(f"{path}: exists and is no Zarr store; choose another --output")
    if path.exists() and not overwrite:
        raise InputError(
            f"{path}: exists already; add --overwrite to replace it, or choose another --output"
        )
    require_writable(path)


def write_spatialdata(
    path: Path,
    data: "AnnData",
    position: Float[np.ndarray, "N D"],
    slice_id: Int64[np.ndarray, " N"],
    slice_names: Sequence[str],
) -> None:
    """Write cells as a SpatialData store, complete or not at all.

    Parameters
    ----------
    path
        The store; one that is there is replaced.
    data
        The table. Its obs gets two columns that link it to the shapes.
    position
        Where each cell lies, in 2D or 3D.
    slice_id, slice_names
        The slice of each cell: each slice is one element of shapes.
    """
    import pandas as pd
    import pyarrow.parquet as pq
    import zarr
    from anndata.io import write_elem

    names = element_names(slice_names)
    instance = np.zeros(len(slice_id), dtype=np.int64)
    for number in range(len(names)):
        rows = np.flatnonzero(slice_id == number)
        instance[rows] = np.arange(len(rows))
    data.obs[REGION_KEY] = pd.Categorical(np.array(names, dtype=object)[slice_id])
    data.obs[INSTANCE_KEY] = instance
    link = {"region": names, "region_key": REGION_KEY, "instance_key": INSTANCE_KEY}
    data.uns["spatialdata_attrs"] = {**link, "region": np.array(names, dtype=object)}
    with replacing_folder(path) as partial:
        root = zarr.open_group(str(partial), mode="w", zarr_format=2)
        root.attrs["spatialdata_attrs"] = {"version": VERSIONS["container"]}
        with nullable_strings():
            write_elem(root.create_group("tables"), TABLE, data)
        root["tables"][TABLE].attrs.update(
            {
                "spatialdata-encoding-type": "ngff:regions_table",
                "version": VERSIONS["table"],
                **link,
            }
        )
        shapes = root.create_group("shapes")
        elements = [position[slice_id == number] for number in range(len(names))]
        for name, points in zip(names, elements, strict=True):
            shapes.create_group(name).attrs.update(shapes_attributes(points.shape[1]))
        # What is no Zarr is written after Zarr has looked through the store.
        zarr.consolidate_metadata(root.store)
        for name, points in zip(names, elements, strict=True):
            table = circles(points.astype(np.float64))
            pq.write_table(table, partial / "shapes" / name / "shapes.parquet")


def element_names(slice_names: Sequence[str]) -> list[str]:
    """Return names that SpatialData accepts: letters, digits, _, . and -, and no two the same."""
    names: list[str] = []
    for name in slice_names:
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip("_.") or "cells"
        taken = {other.lower() for other in names}
        number, free = 2, plain
        while free.lower() in taken:
            free, number = f"{plain}_{number}", number + 1
        names.append(free)
    return names


def shapes_attributes(dims: int) -> dict[str, Any]:
    """Describe an element whose coordinates are those of the global system."""
    axes = list("xyz"[:dims])
    system = [{"name": name, "type": "space", "unit": "unit"} for name in axes]
    return {
        "encoding-type": "ngff:shapes",
        "axes": axes,
        "coordinateTransformations": [
            {
                "type": "identity",
                "input": {"name": "".join(axes), "axes": system},
                "output": {"name": "global", "axes": system},
            }
        ],
        "spatialdata_attrs": {"version": VERSIONS["shapes"]},
    }


def circles(position: Float64[np.ndarray, "N D"]) -> "pa.Table":
    """Return points with a radius as GeoParquet 1.1: half the distance of nearest cells."""
    import pyarrow as pa
    from scipy.spatial import cKDTree

    count, dims = position.shape
    gap = cKDTree(position).query(position, k=2)[0][:, 1] if count > 1 else np.ones(1)
    radius = np.median(gap) / 2
    kind = np.dtype([("order", "u1"), ("type", "<u4"), ("at", "<f8", dims)])
    points = np.zeros(count, dtype=kind)
    points["order"], points["type"], points["at"] = 1, POINT if dims == 2 else POINT_Z, position
    size = kind.itemsize
    content = points.tobytes()
    geometry = [content[start : start + size] for start in range(0, len(content), size)]
    column = {
        "encoding": "WKB",
        "crs": None,
        "geometry_types": ["Point" if dims == 2 else "Point Z"],
    }
    geo = {"version": "1.1.0", "primary_column": "geometry", "columns": {"geometry": column}}
    table = pa.table(
        {
            "geometry": pa.array(geometry, type=pa.binary()),
            "radius": np.full(count, radius if radius > 0 else 1.0),
        }
    )
    return table.replace_schema_metadata({"geo": json.dumps(geo)})
