"""AnnData files of every odd structure, given to the commands that read slices."""

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
FINE_IN_SAMPLE = {"no obsm", "positions under another key"}
REFUSED_LATER = {"two cells", "huge positions", "huge counts"}


@pytest.mark.parametrize("command", ["preprocess", "sample", "extract"])
@pytest.mark.parametrize("name", BAD)
def test_content_that_cannot_be_used_is_refused(name, command, tiny, door, work):
    path = spoil(tiny, work / "in", BAD[name], None)
    outcome = door(*ways(tiny, path)[command])
    if command == "sample" and name in FINE_IN_SAMPLE:
        done(outcome)
    else:
        refused(outcome, "odd.h5ad")


@pytest.mark.parametrize("command", ["preprocess", "sample", "extract"])
@pytest.mark.parametrize("name", FINE)
def test_content_that_is_odd_and_can_be_used_works(name, command, tiny, door, work):
    path = spoil(tiny, work / "in", FINE[name], None)
    outcome = door(*ways(tiny, path)[command])
    require_no_accident(outcome)
    if name not in REFUSED_LATER:
        done(outcome)


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
