"""h5ad without flags: counts, positions and slices are found under the keys that are usual."""

import numpy as np
import pandas as pd
import pytest

from alphastomics.config import PreprocessingConfig
from alphastomics.preprocessing.query_fit import opened_query
from tests.preprocessing.tissue import cells_of, make_slice, metadata_of, refused, run, write

PLAIN = {"scale": False}


def position_of(folder) -> np.ndarray:
    return np.stack(cells_of(folder)["position"])


@pytest.mark.parametrize("key", ["spatial3d", "X_spatial"])
def test_positions_are_found_under_their_usual_keys(tmp_path, key):
    data = make_slice()
    expected = data.obsm["spatial"].copy()
    data.obsm[key] = expected
    del data.obsm["spatial"]
    run(write(tmp_path / "in", one=data), tmp_path / "out")
    np.testing.assert_array_equal(position_of(tmp_path / "out")[:, :2], expected)
    refused(tmp_path / "in", tmp_path / "no", "obsm['spatial'] is missing", position_key="spatial")


def test_positions_in_3d_need_no_flag_and_keep_their_z(tmp_path):
    data = make_slice(dims=3)
    run(write(tmp_path / "in", one=data), tmp_path / "out")
    np.testing.assert_array_equal(position_of(tmp_path / "out"), data.obsm["spatial"])
    assert metadata_of(tmp_path / "out")["slices"][0]["z"] is None


def test_files_that_differ_in_their_keys_are_refused(tmp_path):
    one, two = make_slice(), make_slice(seed=1)
    two.obsm["X_spatial"] = two.obsm["spatial"]
    del two.obsm["spatial"]
    refused(write(tmp_path / "in", one=one, two=two), tmp_path / "out", "two.h5ad", "X_spatial")


def test_counts_come_from_their_layer_unless_they_are_not_wanted(tmp_path):
    data = make_slice()
    other = data.copy()
    other.layers["counts"] = data.X.copy()
    other.X = data.X * 0.37
    run(write(tmp_path / "plain", one=data), tmp_path / "a", **PLAIN)
    run(write(tmp_path / "layer", one=other), tmp_path / "b", **PLAIN)
    run(tmp_path / "layer", tmp_path / "c", log_normalize=False, **PLAIN)
    a, b, c = (np.stack(cells_of(tmp_path / name)["expression"]) for name in "abc")
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(c, other.X.toarray())


def test_a_query_takes_the_layer_of_counts_too(tmp_path):
    data = make_slice()
    data.layers["counts"] = data.X.copy()
    data.X = data.X * 0.37
    data.uns["log1p"] = {"base": None}
    path = write(tmp_path / "in", one=data) / "one.h5ad"
    with opened_query(path, list(data.var_names), None, PreprocessingConfig()) as query:
        assert query.form.log_normalize
        counts = query.reader.counts(0, 40).toarray()
    np.testing.assert_array_equal(counts, data.layers["counts"].toarray())


@pytest.mark.parametrize("key", ["library_id", "sample_id"])
def test_slices_are_found_under_their_usual_columns(tmp_path, key):
    data = make_slice()
    data.obs[key] = pd.Categorical(["left", "right"] * 20)
    run(write(tmp_path / "in", one=data), tmp_path / "out")
    assert [record["name"] for record in metadata_of(tmp_path / "out")["slices"]] == [
        "left",
        "right",
    ]
    data.obs["slice_id"] = pd.Categorical(["a"] * 40)  # the documented name comes first
    run(write(tmp_path / "named", one=data), tmp_path / "again")
    assert [record["name"] for record in metadata_of(tmp_path / "again")["slices"]] == ["a"]


def test_a_column_with_one_name_leaves_the_slice_its_file_name(tmp_path):
    data = make_slice()
    data.obs["sample_id"] = pd.Categorical(["brain"] * 40)
    run(write(tmp_path / "in", one=data), tmp_path / "out")
    record = metadata_of(tmp_path / "out")["slices"][0]
    assert (record["name"], record["sample"]) == ("one", "brain")


def test_samples_of_dissociated_cells_are_no_slices(tmp_path):
    data = make_slice()
    del data.obsm["spatial"]
    data.obs["sample_id"] = pd.Categorical(["left", "right"] * 20)
    path = write(tmp_path / "in", one=data) / "one.h5ad"
    with opened_query(path, list(data.var_names), None, PreprocessingConfig()) as query:
        assert query.reader.slices == ("one",)


def stereoseq(**uns):
    """Make a file as stereopy converts it, with its positions in obs alone."""
    data = make_slice()
    data.obs["x"], data.obs["y"] = np.arange(40), np.arange(40) * 3
    del data.obsm["spatial"]
    data.uns.update(uns)
    return data


def test_stereoseq_files_have_their_positions_in_obs(tmp_path):
    expected = np.stack([np.arange(40), np.arange(40) * 3], axis=1)
    run(write(tmp_path / "in", one=stereoseq(bin_type="cell_bins")), tmp_path / "out")
    np.testing.assert_array_equal(position_of(tmp_path / "out")[:, :2], expected)
    source = write(tmp_path / "plain", one=stereoseq())
    refused(source, tmp_path / "no", "obsm['spatial'] is missing")
    run(source, tmp_path / "asked", format="stereoseq")
    np.testing.assert_array_equal(position_of(tmp_path / "asked")[:, :2], expected)
