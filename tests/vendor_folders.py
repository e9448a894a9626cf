"""Folders as instruments write them, after the vendors' documented layouts, with known cells."""

import gzip
import json
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.sparse import csr_array

PIXEL_UM = 0.25  # exact in binary, so that positions can be compared to the last digit


class Cells(NamedTuple):
    """What a folder is written from, and must be read as."""

    names: list[str]
    genes: list[str]
    counts: np.ndarray
    position: np.ndarray


def some_cells(cells: int = 30, genes: int = 7, seed: int = 0, name: str = "cell") -> Cells:
    """Draw counts, positions in µm, and names."""
    rng = np.random.default_rng(seed)
    counts = rng.poisson(1.0, (cells, genes)).astype(np.float32)
    counts[:, 0] += 1  # no empty cell
    position = rng.integers(0, 40_000, (cells, 2)) * PIXEL_UM
    names = [f"{name}{number:03d}-1" for number in range(cells)]
    return Cells(names, [f"Gene{number}" for number in range(genes)], counts, position)


def write_10x_h5(path: Path, cells: Cells, controls: dict[str, str]) -> None:
    """Write a matrix as Cell Ranger 3 does: features x barcodes by columns, controls last."""
    rng = np.random.default_rng(1)
    extra = rng.poisson(2.0, (len(cells.names), len(controls)))
    # Controls come first, so that a reader which takes the first columns is wrong.
    values = csr_array(np.hstack([extra, cells.counts]).astype(np.int32))
    kinds = [*controls.values(), *["Gene Expression"] * len(cells.genes)]
    names = [*controls, *cells.genes]
    with h5py.File(path, "w") as file:
        group = file.create_group("matrix")
        group["barcodes"] = np.array(cells.names, dtype="S")
        group["data"], group["indices"] = values.data, values.indices.astype(np.int64)
        group["indptr"] = values.indptr.astype(np.int64)
        group["shape"] = np.array(values.shape[::-1], dtype=np.int32)
        group["features/name"] = np.array(names, dtype="S")
        group["features/id"] = np.array([f"ID{name}" for name in names], dtype="S")
        group["features/feature_type"] = np.array(kinds, dtype="S")


XENIUM_CONTROLS = {
    "NegControlProbe_00042": "Negative Control Probe",
    "NegControlCodeword_0500": "Negative Control Codeword",
    "UnassignedCodeword_0001": "Unassigned Codeword",
}


def write_xenium(folder: Path, cells: Cells, *, table: str = "parquet") -> Path:
    """Write a Xenium output folder; the table of cells is in another order than the matrix."""
    folder.mkdir(parents=True)
    write_10x_h5(folder / "cell_feature_matrix.h5", cells, XENIUM_CONTROLS)
    (folder / "experiment.xenium").write_text("{}")
    order = np.arange(len(cells.names))[::-1]
    columns = {
        "cell_id": [cells.names[row] for row in order],
        "x_centroid": cells.position[order, 0],
        "y_centroid": cells.position[order, 1],
        "segmentation_method": ["nucleus" if row % 3 else "boundary" for row in order],
    }
    if table == "parquet":
        pq.write_table(pa.table(columns), folder / "cells.parquet")
    else:
        write_csv(folder / "cells.csv.gz", columns)
    return folder


def xenium_names(cells: Cells) -> tuple[Cells, np.ndarray]:
    """Name cells as Xenium does, by eight letters for the hex digits of a number, and a suffix."""
    numbers = np.stack([np.arange(len(cells.names)) * 40_503 + 7, np.ones(len(cells.names))], 1)
    letters = [
        "".join("abcdefghijklmnop"[int(digit, 16)] for digit in f"{int(number):08x}")
        for number in numbers[:, 0]
    ]
    return cells._replace(names=[f"{name}-1" for name in letters]), numbers.astype(np.uint32)


def write_zipped_xenium(folder: Path, cells: Cells, *, listed: int | None = None) -> Cells:
    """Write a run whose counts are in cell_feature_matrix.zarr.zip alone, gene by gene."""
    import zarr

    cells, numbers = xenium_names(cells)
    write_xenium(folder, cells)
    (folder / "cell_feature_matrix.h5").unlink()
    rng = np.random.default_rng(1)
    half = len(cells.genes) // 2  # controls lie between genes
    extra = rng.poisson(2.0, (len(cells.names), 2))
    values = np.hstack([cells.counts[:, :half], extra, cells.counts[:, half:]]).astype(np.uint32)
    rows = csr_array(values.T)
    controls = ["NegControlProbe_00042", "UnassignedCodeword_0001"]
    kinds = ["negative_control_probe", "unassigned_codeword"]
    about = {
        "major_version": 3,
        "number_cells": listed or len(cells.names),
        "number_features": values.shape[1],
        "feature_keys": [*cells.genes[:half], *controls, *cells.genes[half:]],
        "feature_types": ["gene"] * half + kinds + ["gene"] * (len(cells.genes) - half),
    }
    with zarr.storage.ZipStore(folder / "cell_feature_matrix.zarr.zip", mode="w") as store:
        group = zarr.create_group(store, path="cell_features", zarr_format=2, attributes=about)
        arrays = {"data": rows.data, "indices": rows.indices, "indptr": rows.indptr}
        for name, array in {**arrays, "cell_id": numbers[:listed]}.items():
            group.create_array(name, data=array.astype(np.uint32))
    return cells


def write_csv(path: Path, columns: dict) -> None:
    """Write columns as CSV, compressed where the name says so."""
    rows = zip(*columns.values(), strict=True)
    lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
    text = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def write_merscope(folder: Path, cells: Cells, *, old: bool = False) -> Path:
    """Write a MERSCOPE output folder; older versions do not name the column of the cells."""
    folder.mkdir(parents=True)
    counts = {"" if old else "cell": cells.names, "Blank-1": [7] * len(cells.names)}
    counts |= {gene: cells.counts[:, i].astype(int) for i, gene in enumerate(cells.genes)}
    counts["Blank-2"] = [1] * len(cells.names)
    metadata = {
        "" if old else "EntityID": cells.names,
        "fov": [3] * len(cells.names),
        "volume": [100.5] * len(cells.names),
        "center_x": cells.position[:, 0],
        "center_y": cells.position[:, 1],
    }
    if not old:  # rows of the two files need not be in the same order
        counts = {name: list(column)[::-1] for name, column in counts.items()}
    write_csv(folder / "cell_by_gene.csv", counts)
    write_csv(folder / "cell_metadata.csv", metadata)
    return folder


def write_cosmx(folder: Path, cells: Cells, *, scale: bool = True, suffix: str = "") -> Path:
    """Write CosMx flat files: pixels, control probes, and a row of the background for each FOV."""
    folder.mkdir(parents=True)
    total = len(cells.names)
    fov, number = np.arange(total) // 10 + 1, np.arange(total) % 10 + 1
    counts = {"fov": fov, "cell_ID": number}
    counts |= {gene: cells.counts[:, i].astype(int) for i, gene in enumerate(cells.genes)}
    counts |= {"Negative01": [5] * total, "SystemControl7": [6] * total, "NegPrb3": [1] * total}
    background = {name: [99] * 3 for name in counts} | {"fov": [1, 2, 3], "cell_ID": [0, 0, 0]}
    counts = {name: [*background[name], *column] for name, column in counts.items()}
    metadata = {
        "fov": fov,
        "cell_ID": number,
        "cell": cells.names,
        "CenterX_local_px": [1] * total,
        "CenterY_local_px": [2] * total,
        "CenterX_global_px": cells.position[:, 0] / PIXEL_UM,
        "CenterY_global_px": cells.position[:, 1] / PIXEL_UM,
    }
    write_csv(folder / f"Slide1_exprMat_file.csv{suffix}", counts)
    write_csv(folder / f"Slide1_metadata_file.csv{suffix}", metadata)
    if scale:
        fovs = {
            "FOV": [1, 2, 3],
            "x_global_px": [0, 4096, 8192],
            "y_global_px": [0, 0, 4096],
            "x_global_mm": [0.0, 1.024, 2.048],
            "y_global_mm": [0.0, 0.0, 1.024],
        }
        write_csv(folder / f"Slide1_fov_positions_file.csv{suffix}", fovs)
    return folder


def write_scales(folder: Path, *, scale: bool) -> None:
    (folder / "spatial").mkdir()
    known = {"microns_per_pixel": PIXEL_UM, "bin_size_um": 8.0} if scale else {}
    content = {"tissue_hires_scalef": 0.1, **known}
    (folder / "spatial/scalefactors_json.json").write_text(json.dumps(content))


def write_visium_hd(folder: Path, cells: Cells, *, scale: bool = True) -> Path:
    """Write a folder of bins; its positions list bins outside the tissue, too."""
    folder.mkdir(parents=True)
    write_10x_h5(folder / "filtered_feature_bc_matrix.h5", cells, {})
    write_scales(folder, scale=scale)
    names = ["outside-1", *cells.names[::-1]]
    pixels = np.vstack([[[1.0, 1.0]], cells.position[::-1] / PIXEL_UM])
    columns = {
        "barcode": names,
        "in_tissue": [0, *[1] * len(cells.names)],
        "array_row": range(len(names)),
        "array_col": range(len(names)),
        "pxl_row_in_fullres": pixels[:, 1],
        "pxl_col_in_fullres": pixels[:, 0],
    }
    pq.write_table(pa.table(columns), folder / "spatial/tissue_positions.parquet")
    return folder


def write_segmented(folder: Path, cells: Cells) -> Path:
    """Write segmented cells: an outline around each position, whose centroid it is."""
    folder.mkdir(parents=True)
    numbers = range(1, len(cells.names) + 1)
    named = cells._replace(names=[f"cellid_{number:09d}-1" for number in numbers])
    write_10x_h5(folder / "filtered_feature_cell_matrix.h5", named, {})
    write_scales(folder, scale=True)
    # The centroid of this triangle is the origin; the mean of its closed ring's corners is not.
    triangle = np.array([[-4.0, -2.0], [4.0, -2.0], [0.0, 4.0], [-4.0, -2.0]])
    features = [
        {
            "type": "Feature",
            "properties": {"cell_id": number},
            "geometry": {
                "type": "Polygon",
                "coordinates": [(triangle + cells.position[number - 1] / PIXEL_UM).tolist()],
            },
        }
        for number in reversed(numbers)
    ]
    content = {"type": "FeatureCollection", "features": features}
    (folder / "cell_segmentations.geojson").write_text(json.dumps(content))
    return folder


def write_mtx(folder: Path, cells: Cells) -> Path:
    """Write a folder of matrix.mtx, barcodes and features, compressed."""
    folder.mkdir(parents=True)
    entries = csr_array(cells.counts).tocoo()
    row, column = entries.coords
    head = ["%%MatrixMarket matrix coordinate integer general", "%metadata_json: {}"]
    head.append(f"{len(cells.genes) + 1} {len(cells.names)} {entries.nnz + 1}")
    lines = [f"{c + 2} {r + 1} {int(v)}" for r, c, v in zip(row, column, entries.data, strict=True)]
    features = ["ID0\tCD3\tAntibody Capture"]
    features += [f"ID{gene}\t{gene}\tGene Expression" for gene in cells.genes]
    contents = {
        "matrix.mtx.gz": [*head, "1 1 50", *lines],
        "barcodes.tsv.gz": cells.names,
        "features.tsv.gz": features,
    }
    for name, content in contents.items():
        (folder / name).write_bytes(gzip.compress("\n".join([*content, ""]).encode(), mtime=0))
    return folder


def write_spatialdata(store: Path, tables: dict) -> Path:
    """Write a store as SpatialData does: a group of tables, each AnnData, beside images."""
    import anndata
    import zarr

    root = zarr.open_group(str(store), mode="w", zarr_format=2)
    root.attrs["spatialdata_attrs"] = {"version": "0.1"}
    for name in ("images", "shapes", "tables"):
        root.create_group(name)
    for name, table in tables.items():
        anndata.io.write_elem(root["tables"], name, table)
    return store
