"""From slices to shards: scanpy's numbers, every cell once, positions bit for bit."""

import itertools
import logging
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.preprocessing.tissue import (
    by_hand,
    by_scanpy,
    cells_of,
    digests,
    expression_of,
    files_in,
    make_slice,
    metadata_of,
    run,
    write,
)

TYPES = ["neuron", "glia", "never seen"]
GENES = {"a": [f"g{i}" for i in range(9)], "b": [f"g{i}" for i in range(4, 14)]}


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files with different panels and storage; one holds two interleaved slices."""
    return write(
        tmp_path_factory.mktemp("slices"),
        first=make_slice(61, GENES["a"], 1, "csr", types=TYPES[:2]),
        second=make_slice(50, GENES["b"], 2, "dense", slices=["10", "9"], types=TYPES[:1]),
    )


def inputs_of(folder: Path) -> list[tuple[str, anndata.AnnData]]:
    """List the slices of a folder as the contract orders them."""
    result = []
    for path in sorted(folder.glob("*.h5ad")):
        data = anndata.read_h5ad(path)
        if "slice_id" not in data.obs:
            result.append((path.stem, data))
        else:
            names = sorted(data.obs["slice_id"].unique(), key=float)
            result.extend((name, data[data.obs["slice_id"] == name].copy()) for name in names)
    return result


def check_against_scanpy(source: Path, target: Path, *, log: bool = True, scale: bool = True):
    """Compare all of a processed folder with what scanpy makes of its input files."""
    check(source, target, partial(by_scanpy, log=log, scale=scale))


def check(source: Path, target: Path, pipeline: Callable[..., np.ndarray]):
    """Compare all of a processed folder with its input files."""
    metadata, cells = metadata_of(target), cells_of(target)
    expected = inputs_of(source)
    assert [record["name"] for record in metadata["slices"]] == [name for name, _ in expected]
    assert cells["cell_id"].tolist() == list(range(sum(data.n_obs for _, data in expected)))
    values = expression_of(target, cells)
    for number, (_, data) in enumerate(expected):
        mine = (cells["slice_id"] == number).to_numpy()
        assert cells["obs_name"][mine].tolist() == data.obs_names.tolist()
        truth = pipeline(data, metadata["genes"])
        np.testing.assert_allclose(values[mine], truth, rtol=1e-5, atol=1e-5)
        position = np.stack(cells["position"][mine].to_numpy())
        given_position = np.asarray(data.obsm["spatial"], dtype=np.float64)
        assert (position[:, : given_position.shape[1]] == given_position).all()
        missing = metadata["panels"][metadata["slices"][number]["panel"]]["missing"]
        assert [metadata["genes"][path] for path in missing] == [
            gene for gene in metadata["genes"] if gene not in data.var_names
        ]


@pytest.mark.parametrize(
    ("layout", "storage", "split_by"),
    list(itertools.product(["shuffled", "slice"], ["dense", "sparse"], ["cell", "slice"])),
)
def test_values_equal_scanpy_and_every_cell_appears_once(
    slices, tmp_path, layout, storage, split_by
):
    run(
        slices,
        tmp_path,
        layout=layout,
        storage=storage,
        split_by=split_by,
        cell_type_key="cell_type",
        max_shard_size=20,
        max_cells_per_file=17,
    )
    check_against_scanpy(slices, tmp_path)


@pytest.mark.parametrize("storage", ["dense", "sparse"])
@pytest.mark.parametrize(("log", "scale"), [(True, False), (False, True), (False, False)])
def test_each_step_of_the_normalisation_can_be_skipped(slices, tmp_path, log, scale, storage):
    run(slices, tmp_path, log_normalize=log, scale=scale, storage=storage)
    check_against_scanpy(slices, tmp_path, log=log, scale=scale)
    assert (tmp_path / "scaling.npz").exists() == scale


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    genes=st.integers(1, 12),
    forms=st.lists(st.sampled_from(["csr", "csc", "dense"]), min_size=3, max_size=3),
    chunk=st.integers(1, 40),
    shard=st.integers(1, 40),
    ratios=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
    choices=st.tuples(
        st.sampled_from(["shuffled", "slice"]),
        st.sampled_from(["dense", "sparse"]),
        st.sampled_from(["cell", "slice"]),
    ),
    seed=st.integers(0, 1000),
)
def test_any_shape_chunk_ratio_and_shard_size_gives_the_right_numbers_once(
    tmp_path_factory, sizes, genes, forms, chunk, shard, ratios, choices, seed
):
    source, target = tmp_path_factory.mktemp("in"), tmp_path_factory.mktemp("out")
    for number, (cells, form) in enumerate(zip(sizes, forms, strict=False)):
        write(source, **{f"s{number}": make_slice(cells, genes, seed + number, form)})
    run(
        source,
        target,
        seed=seed,
        train_ratio=ratios[0],
        val_ratio=ratios[1] - ratios[0],
        max_cells_per_file=chunk,
        max_shard_size=shard,
        layout=choices[0],
        storage=choices[1],
        split_by=choices[2],
    )
    check(source, target, by_hand)
    for record in metadata_of(target)["splits"].values():
        assert record["cells"] == sum(part["cells"] for part in record["shards"])
        assert all(part["cells"] <= shard for part in record["shards"])


def test_the_folder_is_laid_out_as_the_contract_says(slices, tmp_path):
    run(slices, tmp_path, cell_type_key="cell_type")
    visible = [name for name in files_in(tmp_path) if not name.startswith("_intermediate")]
    assert visible == [
        "data/test.parquet",
        "data/train.parquet",
        "data/validation.parquet",
        "metadata.json",
        "scaling.npz",
    ]
    columns = pq.read_schema(tmp_path / "data/train.parquet").names
    assert {"expression", "position", "cell_type", "slice_id"} <= set(columns)
    metadata = metadata_of(tmp_path)
    assert metadata["genes"] == sorted(set(GENES["a"]) | set(GENES["b"]))
    assert metadata["cell_types"] == ["glia", "neuron"]
    assert {name: split["cells"] for name, split in metadata["splits"].items()} == {
        "train": 89,
        "validation": 11,
        "test": 11,
    }
    counted = cells_of(tmp_path).groupby(["slice_id", "split"]).size()
    for number, record in enumerate(metadata["slices"]):
        for split, cells in record["cells_per_split"].items():
            assert counted.get((number, split), 0) == cells


def test_many_shards_are_numbered_and_carry_checksums(slices, tmp_path):
    run(slices, tmp_path, max_shard_size=30)
    shards = metadata_of(tmp_path)["splits"]["train"]["shards"]
    assert [shard["file"] for shard in shards] == [f"data/train-{i:05d}.parquet" for i in range(3)]
    known = digests(tmp_path)
    assert all(known[shard["file"]] == shard["sha256"] for shard in shards)


def test_cell_types_keep_their_names_and_missing_ones_are_minus_one(tmp_path):
    data = make_slice(30, types=["b", "a"])
    data.obs.loc[data.obs_names[:5], "cell_type"] = np.nan
    run(write(tmp_path / "in", one=data), tmp_path / "out", cell_type_key="cell_type")
    cells, names = cells_of(tmp_path / "out"), metadata_of(tmp_path / "out")["cell_types"]
    assert names == ["a", "b"]
    assert cells["cell_type"][:5].tolist() == [-1] * 5
    assert [names[number] for number in cells["cell_type"][5:]] == data.obs["cell_type"][
        5:
    ].tolist()


@pytest.mark.parametrize(
    "values",
    [
        pd.array([1, 2, None, 1], dtype="Int64"),
        pd.array(["x", "y", "x", "y"], dtype="str"),
        np.array([1.5, np.nan, 2.5, 1.5]),
        np.array([True, False, True, True]),
    ],
)
def test_labels_of_every_kind_are_read_as_text(tmp_path, values):
    data = make_slice(4)
    data.obs["label"] = values
    run(write(tmp_path / "in", one=data), tmp_path / "out", cell_type_key="label")
    metadata, cells = metadata_of(tmp_path / "out"), cells_of(tmp_path / "out")
    for number, value in zip(cells["cell_type"], values, strict=True):
        if pd.isna(value):
            assert number == -1
        else:
            expected = str(value).lower() if isinstance(value, np.bool_) else str(value)
            assert metadata["cell_types"][number] == expected


def test_three_dimensional_positions_are_kept_as_they_are(tmp_path):
    data = make_slice(30, dims=3)
    run(write(tmp_path / "in", one=data), tmp_path / "out", position_is_3d=True)
    position = np.stack(cells_of(tmp_path / "out")["position"].to_numpy())
    assert (position == data.obsm["spatial"]).all()
    assert metadata_of(tmp_path / "out")["slices"][0]["z"] is None


def test_a_table_in_obsm_is_read_as_coordinates(tmp_path):
    data = make_slice(30)
    data.obsm["spatial"] = pd.DataFrame(
        data.obsm["spatial"], index=data.obs_names, columns=["x", "y"]
    )
    run(write(tmp_path / "in", one=data), tmp_path / "out")
    position = np.stack(cells_of(tmp_path / "out")["position"].to_numpy())
    assert (position[:, :2] == data.obsm["spatial"].to_numpy()).all()


def test_slice_i_lies_at_i_times_the_spacing(slices, tmp_path):
    run(slices, tmp_path, z_spacing=2.5)
    cells = cells_of(tmp_path)
    z_values = np.stack(cells["position"].to_numpy())[:, 2]
    assert (z_values == cells["slice_id"].to_numpy() * np.float32(2.5)).all()


def test_position_statistics_are_those_of_the_training_cells(slices, tmp_path):
    run(slices, tmp_path, max_cells_per_file=13)
    cells = cells_of(tmp_path)
    training = cells[cells["split"] == "train"]
    position = np.stack(training["position"].to_numpy()).astype(np.float64)
    result = metadata_of(tmp_path)["position_statistics"]
    np.testing.assert_allclose(result["center"], position.mean(axis=0), rtol=1e-9)
    std = np.sqrt(((position - position.mean(axis=0)) ** 2).mean())
    np.testing.assert_allclose(result["scale"], std, rtol=1e-9)
    np.testing.assert_allclose(result["minimum"], position.min(axis=0))
    np.testing.assert_allclose(result["maximum"], position.max(axis=0))
    within = (
        position
        - pd.DataFrame(position)
        .groupby(training["slice_id"].to_numpy())
        .transform("mean")
        .to_numpy()
    )
    planar = np.sqrt((within[:, :2] ** 2).mean())
    np.testing.assert_allclose(result["within_slice_scale"], planar, rtol=1e-6)


def test_a_gene_list_chooses_and_orders_the_genes_but_not_the_totals(slices, tmp_path):
    listed = tmp_path / "genes.txt"
    listed.write_text("g5\n\nnot measured\ng1 \n")
    run(slices, tmp_path / "out", genes=listed)
    assert metadata_of(tmp_path / "out")["genes"] == ["g5", "not measured", "g1"]
    check_against_scanpy(slices, tmp_path / "out")


def test_zarr_stores_are_read_like_h5ad(tmp_path):
    zarr = pytest.importorskip("zarr")
    assert zarr
    data = make_slice(40, form="csr", types=TYPES[:2], slices=["a", "b"])
    write(tmp_path / "h5", one=data)
    (tmp_path / "zarr").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the writer's own, about formats to come
        data.write_zarr(tmp_path / "zarr/one.zarr")
    for kind in ("h5", "zarr"):
        run(tmp_path / kind, tmp_path / f"out-{kind}", cell_type_key="cell_type")
    left, right = (cells_of(tmp_path / f"out-{kind}") for kind in ("h5", "zarr"))
    pd.testing.assert_frame_equal(left, right)


def test_integer_and_wide_counts_give_the_same_as_float32(tmp_path):
    for kind in (np.float32, np.int64, np.float64, np.uint8):
        data = make_slice(30)
        data.X = data.X.astype(kind)
        run(write(tmp_path / kind.__name__, one=data), tmp_path / f"out-{kind.__name__}")
    expected = cells_of(tmp_path / "out-float32")
    for kind in ("int64", "float64", "uint8"):
        pd.testing.assert_frame_equal(cells_of(tmp_path / f"out-{kind}"), expected)


def test_repeated_and_unsorted_entries_of_a_sparse_matrix_are_added_up(tmp_path):
    data = make_slice(10)
    write(tmp_path / "plain", one=data)
    whole = data.X.tocsr()
    halves = whole.copy()
    halves.data = np.repeat(whole.data / 2, 2)
    halves.indices = np.repeat(whole.indices, 2)[::1]
    halves.indptr = whole.indptr * 2
    halves.has_canonical_format = False
    data.X = halves
    write(tmp_path / "doubled", one=data)
    for kind in ("plain", "doubled"):
        run(tmp_path / kind, tmp_path / f"out-{kind}")
    pd.testing.assert_frame_equal(
        cells_of(tmp_path / "out-plain"), cells_of(tmp_path / "out-doubled")
    )


def test_duplicate_cell_names_are_kept(tmp_path):
    data = make_slice(20)
    data.obs_names = ["same"] * 20
    run(write(tmp_path / "in", one=data), tmp_path / "out")
    assert cells_of(tmp_path / "out")["obs_name"].tolist() == ["same"] * 20


def test_equal_slice_names_in_two_files_are_kept_apart_and_said(tmp_path, caplog):
    source = write(
        tmp_path / "in", one=make_slice(20, seed=1, slices=["s"]), two=make_slice(20, slices=["s"])
    )
    with caplog.at_level(logging.WARNING):
        run(source, tmp_path / "out")
    names = [record["name"] for record in metadata_of(tmp_path / "out")["slices"]]
    assert names == ["one:s", "two:s"]
    assert "slice names occur in more than one file" in caplog.text


def test_intermediate_slices_can_be_deleted(slices, tmp_path):
    import shutil

    run(slices, tmp_path)
    before = digests(tmp_path)
    shutil.rmtree(tmp_path / "_intermediate_slices")
    assert run(slices, tmp_path)["state"] == "was finished before"
    assert digests(tmp_path) == before
