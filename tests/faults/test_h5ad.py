"""AnnData files of every odd structure, given to the commands that read slices."""

import gzip
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from tests.faults.conftest import Tiny
from tests.faults.door import done, refused, require_no_accident

Change = Callable[[anndata.AnnData], object]
Patch = Callable[[h5py.File], object]


def put_x(values: object) -> Change:
    def change(data: anndata.AnnData) -> None:
        data.X = values(np.asarray(data.X.todense())) if callable(values) else values

    return change


def put_position(values: Callable[[np.ndarray], object]) -> Change:
    def change(data: anndata.AnnData) -> None:
        data.obsm["spatial"] = values(data.obsm["spatial"])

    return change


def put_obs(column: str, values: Callable[[int], object]) -> Change:
    def change(data: anndata.AnnData) -> None:
        data.obs[column] = values(data.n_obs)

    return change


def spoilt(array: np.ndarray, value: float) -> np.ndarray:
    array = array.astype(np.float64)
    array[3, 1] = value
    return array


def table(position: np.ndarray, first: object) -> pd.DataFrame:
    names = [f"slice_0_{number}" for number in range(len(position))]
    return pd.DataFrame({"x": first, "y": position[:, 1]}, index=names)


def rename(axis: str, names: Callable[[int], list[str]]) -> Change:
    def change(data: anndata.AnnData) -> None:
        index = pd.Index(names(len(getattr(data, f"{axis}_names"))), dtype=object)
        setattr(data, f"{axis}_names", index)

    return change


def raw_only(data: anndata.AnnData) -> None:
    data.raw = data.copy()
    data.X = None


def no_obsm(data: anndata.AnnData) -> None:
    del data.obsm


def wrong_key(data: anndata.AnnData) -> None:
    data.obsm["X_umap"] = data.obsm.pop("spatial")


BAD = {
    "no obsm": no_obsm,
    "positions under another key": wrong_key,
    "one coordinate": put_position(lambda p: p[:, :1]),
    "four coordinates": put_position(lambda p: np.hstack([p, p])),
    "no coordinate": put_position(lambda p: p[:, :0]),
    "three axes": put_position(lambda p: p.reshape(len(p), 2, 1)),
    "words for positions": put_position(lambda p: p.astype("S8").astype(object)),
    "sparse positions": put_position(sp.csr_matrix),
    "complex positions": put_position(lambda p: p.astype(complex)),
    "NaN position": put_position(lambda p: spoilt(p, np.nan)),
    "infinite position": put_position(lambda p: spoilt(p, np.inf)),
    "position beyond float32": put_position(lambda p: spoilt(p, 1e300)),
    "NaN in X": put_x(lambda x: spoilt(x, np.nan)),
    "infinity in X": put_x(lambda x: spoilt(x, -np.inf)),
    "NaN in sparse X": put_x(lambda x: sp.csr_matrix(spoilt(x, np.nan))),
    "NaN in X by columns": put_x(lambda x: sp.csc_matrix(spoilt(x, np.nan))),
    "X beyond float32": put_x(lambda x: spoilt(x, 1e300)),
    "negative counts": put_x(lambda x: spoilt(x, -1)),
    "X of None": put_x(None),
    "raw only": raw_only,
    "complex X": put_x(lambda x: x.astype(complex)),
    "duplicated genes": rename("var", lambda n: ["same"] * n),
    "no shared gene": rename("var", lambda n: [f"other{i}" for i in range(n)]),
    "positions as a table of categories": put_position(
        lambda p: table(p, pd.Categorical(["1"] * len(p)))
    ),
    "positions as a table with gaps": put_position(
        lambda p: table(p, pd.array([None] + [1] * (len(p) - 1), dtype="Int64"))
    ),
    "positions as a table of words": put_position(lambda p: table(p, ["left"] * len(p))),
    "NaN slice": put_obs("slice_id", lambda n: pd.Categorical([None] + ["a"] * (n - 1))),
}
FINE = {
    "integer X": put_x(lambda x: x.astype(np.int64)),
    "unsigned X": put_x(lambda x: x.astype(np.uint16)),
    "boolean X": put_x(lambda x: x > 0),
    "half precision X": put_x(lambda x: x.astype(np.float16)),
    "double X": put_x(lambda x: x.astype(np.float64)),
    "dense X": put_x(lambda x: x),
    "X by columns": put_x(sp.csc_matrix),
    "X of zeros": put_x(lambda x: sp.csr_matrix(x.shape, dtype=np.float32)),
    "huge counts": put_x(lambda x: x * 1e30),
    "integer positions": put_position(lambda p: p.astype(np.int32)),
    "positions as a table": put_position(
        lambda p: pd.DataFrame(p, columns=["x", "y"], index=[f"slice_0_{i}" for i in range(len(p))])
    ),
    "all cells at one place": put_position(lambda p: np.zeros_like(p)),
    "all cells on a line": put_position(lambda p: p * [1, 0]),
    "huge positions": put_position(lambda p: p * 1e30),
    "tiny positions": put_position(lambda p: p * 1e-30),
    "positions at the end of int64": put_position(
        lambda p: np.full(p.shape, 2**63 - 1, dtype=np.int64)
    ),
    "truths for positions": put_position(lambda p: p > 0),
    "half precision positions": put_position(lambda p: (p * 1e-3).astype(np.float16)),
    "counts next to nothing": put_x(lambda x: np.where(x > 0, 1e-45, -0.0).astype(np.float32)),
    "genes that differ in case": lambda data: setattr(
        data, "var_names", [*data.var_names[:-2], "abc", "ABC"]
    ),
    "a gene without a name": lambda data: setattr(data, "var_names", ["", *data.var_names[1:]]),
    "earlier results of another shape": lambda data: (
        data.obsm.__setitem__("spatial_pred", np.zeros((data.n_obs, 7))),
        data.uns.__setitem__("alphastomics", 3),
    ),
    "slices called nan and inf": put_obs(
        "slice_id", lambda n: pd.Categorical(["nan", "inf", "1", "-inf"] * (n // 4))
    ),
    "duplicated cells": rename("obs", lambda n: ["same"] * n),
    "cells without letters": rename("obs", lambda n: [" " * i for i in range(n)]),
    "strings for slices": put_obs("slice_id", lambda n: [str(i % 2) for i in range(n)]),
    "numbers for slices": put_obs("slice_id", lambda n: np.arange(n) % 2),
    "fractions for slices": put_obs("slice_id", lambda n: np.arange(n) % 2 + 0.5),
    "truths for slices": put_obs("slice_id", lambda n: np.arange(n) % 2 == 0),
    "nullable numbers for slices": put_obs("slice_id", lambda n: pd.array([1, 2] * (n // 2))),
    "unused slices": put_obs("slice_id", lambda n: pd.Categorical(["a"] * n, ["z", "a", "b"])),
    "a slice of one cell": put_obs("slice_id", lambda n: ["a"] + ["b"] * (n - 1)),
    "a slice for every cell": put_obs("slice_id", lambda n: [f"s{i}" for i in range(n)]),
    "NaN cell types": put_obs("cell_type", lambda n: pd.Categorical([None, "a"] * (n // 2))),
    "only NaN cell types": put_obs("cell_type", lambda n: pd.Categorical([None] * n, ["a"])),
    "numbers for cell types": put_obs("cell_type", lambda n: np.arange(n) % 3),
    "nullable cell types": put_obs("cell_type", lambda n: pd.array([1, None] * (n // 2))),
    "an empty cell type": put_obs("cell_type", lambda n: pd.Categorical([""] * n)),
    "one gene known": lambda data: data._inplace_subset_var([0]),
    "two cells": lambda data: data._inplace_subset_obs([0, 1]),
}
PATCHES: dict[str, Patch] = {
    "obs gone": lambda f: f.__delitem__("obs"),
    "var gone": lambda f: f.__delitem__("var"),
    "obs as an array": lambda f: (f.__delitem__("obs"), f.create_dataset("obs", data=[1, 2])),
    "index gone": lambda f: f["obs"].__delitem__("_index"),
    "index named otherwise": lambda f: f["obs"].attrs.__setitem__("_index", "nowhere"),
    "index of numbers in its name": lambda f: f["obs"].attrs.__setitem__("_index", 7),
    "X of records": lambda f: (
        f.__delitem__("X"),
        f.create_dataset("X", data=np.zeros((40, 20), dtype=[("a", "f4")])),
    ),
    "X of references": lambda f: (
        f.__delitem__("X"),
        f.create_dataset("X", data=f["obs"].ref, dtype=h5py.ref_dtype),
    ),
    "X wider than var": lambda f: (
        f.__delitem__("X"),
        f.create_dataset("X", data=np.zeros((40, 21), np.float32)),
    ),
    "obs as before 2019": lambda f: (
        f.__delitem__("obs"),
        f.create_dataset("obs", data=np.zeros(40, dtype=[("index", "S5"), ("n", "f4")])),
    ),
    "indices beyond int64": lambda f: (
        f["X"].__delitem__("indices"),
        f["X"].create_dataset("indices", data=np.full(len(f["X/data"]), 2**63, np.uint64)),
    ),
    "X gone": lambda f: f.__delitem__("X"),
    "X of words": lambda f: (f.__delitem__("X"), f.create_dataset("X", data=[[b"a"]])),
    "X a number": lambda f: (f.__delitem__("X"), f.create_dataset("X", data=3.0)),
    "X of unknown kind": lambda f: f["X"].attrs.__setitem__("encoding-type", "origami"),
    "X without kind": lambda f: f["X"].attrs.__delitem__("encoding-type"),
    "X without shape": lambda f: f["X"].attrs.__delitem__("shape"),
    "X of another shape": lambda f: f["X"].attrs.__setitem__("shape", [3, 3]),
    "X of a shape of words": lambda f: f["X"].attrs.__setitem__("shape", "wide"),
    "X of a huge shape": lambda f: f["X"].attrs.__setitem__("shape", [2**60, 2**60]),
    "data gone": lambda f: f["X"].__delitem__("data"),
    "indices gone": lambda f: f["X"].__delitem__("indices"),
    "indices outside": lambda f: f["X/indices"].__setitem__(0, 10**6),
    "indices below": lambda f: f["X/indices"].__setitem__(0, -5),
    "pointers that fall": lambda f: f["X/indptr"].__setitem__(3, 10**6),
    "pointers short": lambda f: (
        f["X"].__delitem__("indptr"),
        f["X"].create_dataset("indptr", data=[0, 1]),
    ),
    "obsm as an array": lambda f: (f.__delitem__("obsm"), f.create_dataset("obsm", data=[1.0])),
    "positions of other cells": lambda f: (
        f["obsm"].__delitem__("spatial"),
        f["obsm"].create_dataset("spatial", data=np.zeros((3, 2))),
    ),
    "positions a soft link to nothing": lambda f: (
        f["obsm"].__delitem__("spatial"),
        f["obsm"].__setitem__("spatial", h5py.SoftLink("/nowhere")),
    ),
    "positions a link to a missing file": lambda f: (
        f["obsm"].__delitem__("spatial"),
        f["obsm"].__setitem__("spatial", h5py.ExternalLink("nowhere.h5", "/x")),
    ),
    "positions a group in itself": lambda f: (
        f["obsm"].__delitem__("spatial"),
        f["obsm"].__setitem__("spatial", f["obsm"]),
    ),
    "names of no UTF-8": lambda f: (
        f["var"].__delitem__("_index"),
        f["var"].create_dataset("_index", data=np.array([b"\xff%d" % i for i in range(20)])),
    ),
    "slice codes without category": lambda f: f["obs/slice_id/codes"].__setitem__(0, 100),
    "slice codes below": lambda f: f["obs/slice_id/codes"].__setitem__(0, -100),
    "slice categories gone": lambda f: f["obs/slice_id"].__delitem__("categories"),
    "slice codes short": lambda f: (
        f["obs/slice_id"].__delitem__("codes"),
        f["obs/slice_id"].create_dataset("codes", data=np.zeros(3, np.int8)),
    ),
}


def spoil(tiny: Tiny, folder: Path, change: Change | None, patch: Patch | None) -> Path:
    """Write a slice with one thing changed in it."""
    folder.mkdir()
    path = folder / "odd.h5ad"
    data = anndata.read_h5ad(tiny.slice)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if change is not None:
            change(data)
        data.write_h5ad(path)
    if patch is not None:
        with h5py.File(path, "r+") as file:
            patch(file)
    return path


def ways(tiny: Tiny, path: Path) -> dict[str, list[object]]:
    """List the commands that read slices, as applied to one."""
    model = ["--checkpoint", tiny.checkpoint, "--config", tiny.config]
    given, places = ["--input_data", path], ["--sample_mode", "expr_to_pos"]
    listed = ["--cell_type_key", "cell_type", "--gene_list_file", tiny.genes]
    return {
        "preprocess": ["preprocess", "--input_dir", path.parent, "--output_dir", "out", *listed],
        "sample": ["sample", *model, *given, "--output", "out.h5ad", *places],
        "extract": ["extract", *model, *given, "--output", "out.h5ad"],
    }


# What one command needs of a file, another does not.
FINE_WITHOUT_POSITIONS = {"no obsm", "positions under another key"}
REFUSED_LATER = {"two cells", "huge positions", "huge counts"}


@pytest.mark.parametrize("command", ["preprocess", "sample", "extract"])
@pytest.mark.parametrize("name", BAD)
def test_content_that_cannot_be_used_is_refused(name, command, tiny, door, work):
    path = spoil(tiny, work / "in", BAD[name], None)
    outcome = door(*ways(tiny, path)[command])
    if command != "preprocess" and name in FINE_WITHOUT_POSITIONS:
        done(outcome)
    else:
        refused(outcome, "odd.h5ad")


@pytest.mark.parametrize("command", ["preprocess", "sample", "extract"])
@pytest.mark.parametrize("name", FINE)
def test_content_that_is_odd_and_can_be_used_works(name, command, tiny, door, work):
    path = spoil(tiny, work / "in", FINE[name], None)
    outcome = door(*ways(tiny, path)[command])
    require_no_accident(outcome)
    says_nothing = (command, name) == ("sample", "X of zeros")
    if name not in REFUSED_LATER:
        refused(outcome, "odd.h5ad") if says_nothing else done(outcome)


@pytest.mark.parametrize("command", ["preprocess", "sample", "extract"])
@pytest.mark.parametrize("name", PATCHES)
def test_structure_that_contradicts_itself_is_refused(name, command, tiny, door, work):
    path = spoil(tiny, work / "in", None, PATCHES[name])
    outcome = door(*ways(tiny, path)[command])
    refused(outcome, "odd.h5ad")


@pytest.mark.parametrize("command", ["preprocess", "sample", "extract"])
@pytest.mark.parametrize(("cells", "genes"), [(0, 20), (1, 20), (40, 0), (0, 0)])
def test_files_without_cells_or_genes(cells, genes, command, tiny, door, work):
    def cut(data: anndata.AnnData) -> None:
        data._inplace_subset_obs(np.arange(cells))
        data._inplace_subset_var(np.arange(genes))

    outcome = door(*ways(tiny, spoil(tiny, work / "in", cut, None))[command])
    if command == "preprocess" and (cells, genes) == (1, 20):
        done(outcome)
    else:
        refused(outcome, "odd.h5ad")


def test_a_backed_file_that_another_program_holds_open_is_read(tiny, door, work):
    path = spoil(tiny, work / "in", None, None)
    backed = anndata.read_h5ad(path, backed="r")
    done(door(*ways(tiny, path)["preprocess"]))
    backed.file.close()


@pytest.mark.parametrize("command", ["preprocess", "sample", "extract"])
def test_compressed_content_that_is_damaged_is_refused(command, tiny, door, work):
    path = spoil(tiny, work / "in", None, None)
    with h5py.File(path, "r+") as file:
        values = file["X/data"][...]
        del file["X/data"]
        file["X"].create_dataset("data", data=values, compression="gzip")
        place = file["X/data"].id.get_chunk_info(0)
    content = bytearray(path.read_bytes())
    middle = place.byte_offset + place.size // 2
    content[middle : middle + 16] = bytes(16)
    path.write_bytes(content)
    refused(door(*ways(tiny, path)[command]), "odd.h5ad")


UNCOPIED: dict[str, Patch] = {
    "bytes without meaning in uns": lambda f: f["uns"].create_dataset("odd", data=np.void(b"abc")),
    "nothing at all in uns": lambda f: f["uns"].create_dataset("odd", data=h5py.Empty("f4")),
    "uns an array": lambda f: (f.__delitem__("uns"), f.create_dataset("uns", data=[1, 2])),
    "a layer of another shape": lambda f: f["layers"].create_dataset("odd", data=np.zeros((3, 5))),
    "obsm of other cells": lambda f: f["obsm"].create_dataset("odd", data=np.zeros((7, 5))),
    "obsp of other cells": lambda f: f["obsp"].create_dataset("odd", data=np.zeros((3, 3))),
    "a column that is not there": lambda f: f["obs"].attrs.__setitem__("column-order", ["odd"]),
}


@pytest.mark.parametrize("name", UNCOPIED)
def test_what_cannot_be_copied_is_refused_before_the_work(name, tiny, door, work):
    path = spoil(tiny, work / "in", None, UNCOPIED[name])
    outcome = door(*ways(tiny, path)["sample"])
    refused(outcome, "odd.h5ad")
    assert "network calls" not in outcome.err
    done(door(*ways(tiny, path)["preprocess"]))


@pytest.mark.parametrize("kind", ["gzip", "a Zarr store", "a folder of slices", "10x"])
def test_another_thing_with_the_name_of_an_h5ad_is_refused(kind, tiny, door, work):
    (work / "in").mkdir()
    path = work / "in/odd.h5ad"
    if kind == "gzip":
        path.write_bytes(gzip.compress(tiny.slice.read_bytes()))
    elif kind == "a Zarr store":
        write_zarr(tiny.slice, path)
    elif kind == "a folder of slices":
        shutil.copytree(tiny.slices, path)
    else:
        with h5py.File(path, "w") as file:
            file["matrix/barcodes"] = [b"a"]
    for argv in ways(tiny, path).values():
        refused(door(*argv), "odd.h5ad")


def write_zarr(source: Path, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        anndata.read_h5ad(source).write_zarr(path)


def test_a_zarr_store_is_placed_and_scored_like_a_file(tiny, door, work):
    write_zarr(tiny.slice, work / "cells.zarr")
    model = ["--checkpoint", tiny.checkpoint, "--config", tiny.config]
    done(door("sample", *model, "--input_data", work / "cells.zarr", "--output", "made.h5ad"))
    assert anndata.read_h5ad(work / "made.h5ad").obs.equals(anndata.read_h5ad(tiny.slice).obs)
    rest = ["--output", "scores.json", "--no_report"]
    done(door("test", *model, "--input_data", work / "cells.zarr", *rest))


def test_slices_have_one_order_even_when_one_is_called_nan(tiny, door, work):
    orders = []
    for number, categories in enumerate([["nan", "2", "1"], ["1", "nan", "2"]]):
        change = put_obs(
            "slice_id", lambda n, c=categories: pd.Categorical(["1", "nan", "2"] * 13 + ["1"], c)
        )
        path = spoil(tiny, work / f"in{number}", change, None)
        done(door("preprocess", "--input_dir", path.parent, "--output_dir", f"out{number}"))
        metadata = json.loads((work / f"out{number}/metadata.json").read_text())
        orders.append([one["name"] for one in metadata["slices"]])
    assert orders[0] == orders[1] == ["1", "2", "nan"]
