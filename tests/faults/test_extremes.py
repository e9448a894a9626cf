"""Extreme numbers, odd places and odd kinds: no NaN leaves, nothing is left out without a word."""

import resource
import shutil
import warnings
from pathlib import Path

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
import torch

from alphastomics.errors import InputError
from alphastomics.preprocessing.cell_source import SourceOptions
from alphastomics.preprocessing.inspection import find_inputs
from tests.faults.conftest import Tiny
from tests.faults.door import MISTAKE, done, refused, require_no_accident
from tests.preprocessing.tissue import cells_of, digests, make_slice, run, write


def model(tiny: Tiny) -> tuple[object, ...]:
    return ("--checkpoint", tiny.checkpoint, "--config", tiny.config)


def changed(tiny: Tiny, path: Path, change) -> Path:
    """Write a changed copy of the slice."""
    data = anndata.read_h5ad(tiny.slice)
    change(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with anndata.settings.override(allow_write_nullable_strings=True):
            data.write_h5ad(path)
    return path


def test_slices_in_linked_folders_and_in_capitals_are_read(tiny: Tiny, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(tiny.slice, elsewhere / "far.h5ad")
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    shutil.copy(tiny.slice, folder / "LOUD.H5AD")
    (folder / "linked").symlink_to(elsewhere)
    (folder / "sub/loop").symlink_to(folder)
    (folder / "again").symlink_to(elsewhere)
    assert list(find_inputs(folder, SourceOptions())) == ["LOUD.H5AD", "again/far.h5ad"]


def test_capitals_preprocess_like_any_slice(tiny: Tiny, door, work):
    (work / "in").mkdir()
    shutil.copy(tiny.slice, work / "in/LOUD.H5AD")
    done(door("preprocess", "--input_dir", "in", "--output_dir", "out"))


@pytest.mark.parametrize("offset", [1e6, 1e9])
def test_coordinates_far_from_the_origin_keep_their_digits(offset, tmp_path):
    near, far = make_slice(60, 12, 1), make_slice(60, 12, 1)
    far.obsm["spatial"] = near.obsm["spatial"] + offset
    run(write(tmp_path / "in", only=far), tmp_path / "out")
    cells = cells_of(tmp_path / "out")
    place = pd.DataFrame(far.obsm["spatial"], index=far.obs_names).loc[cells["obs_name"]]
    assert np.array_equal(np.stack(cells["position"])[:, :2], place.to_numpy())


def test_batches_keep_the_digits_of_far_coordinates(tmp_path):
    from alphastomics.preprocessing.batch_loader import create_dataloaders

    data = make_slice(60, 12, 1)
    data.obsm["spatial"] = data.obsm["spatial"] + 1e9
    run(write(tmp_path / "in", only=data), tmp_path / "out")
    training, *_ = create_dataloaders(tmp_path / "out", batch_size=16, num_workers=0)
    names = cells_of(tmp_path / "out")["obs_name"]
    for batch in training:
        rows = batch.node_mask[0].nonzero().flatten()
        place = batch.positions[0, rows, :2].numpy()
        expected = data[names[batch.cell_id[0, rows].numpy()]].obsm["spatial"]
        assert np.array_equal(place, expected)


def test_a_sample_is_the_same_wherever_the_origin_is(tiny: Tiny, door, work):
    def rename(data) -> None:
        data.obs["slice_id"] = "unknown to the model: the network's alone"

    near = changed(tiny, work / "near.h5ad", rename)

    def move(data) -> None:
        rename(data)
        data.obsm["spatial"] = np.asarray(data.obsm["spatial"], np.float64) + 1e9

    far = changed(tiny, work / "far.h5ad", move)
    mode = ("--sample_mode", "pos_to_expr", "--estimator", "sample")
    for path in (near, far):
        output = path.with_suffix(".out.h5ad")
        done(door("sample", *model(tiny), "--input_data", path, *mode, "--output", output))
    found = [
        anndata.read_h5ad(path.with_suffix(".out.h5ad")).layers["generated"] for path in (near, far)
    ]
    np.testing.assert_allclose(found[0], found[1], atol=1e-2)


@pytest.mark.parametrize("command", ["sample", "extract"])
def test_no_nan_leaves(command, tiny: Tiny, door, work, monkeypatch):
    from alphastomics.attn_model.model import Model

    original = Model.forward

    def broken(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        states = found.aux.hidden_states
        if states:
            states[-1].fill_(torch.nan)
        return found._replace(expression=found.expression * torch.nan)

    monkeypatch.setattr(Model, "forward", broken)
    hidden = ("--extract_mode", "transformer")
    more = ("--sample_mode", "pos_to_expr") if command == "sample" else hidden
    given = ("--input_data", tiny.slice, "--output", "made.h5ad")
    refused(door(command, *model(tiny), *given, *more), "not finite")


def test_linear_algebra_of_what_is_not_finite_is_one_line(tiny: Tiny, door, monkeypatch):
    from alphastomics.attn_model.model import Model

    original = Model.forward

    def broken(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        return found._replace(position=found.position * torch.nan)

    monkeypatch.setattr(Model, "forward", broken)
    given = ("--input_data", tiny.slice, "--output", "made.h5ad", "--sample_mode", "expr_to_pos")
    refused(door("sample", *model(tiny), *given), "not finite")
    outcome = door("train", "--config", tiny.config)
    assert outcome.status == MISTAKE, outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("extreme", [1e25, 1e30])
def test_extreme_positions_give_numbers_or_a_refusal(extreme, tiny: Tiny, door, work):
    def stretch(data) -> None:
        data.obsm["spatial"] = np.asarray(data.obsm["spatial"], np.float64) * extreme

    path = changed(tiny, work / "in.h5ad", stretch)
    mode = ("--sample_mode", "pos_to_expr", "--output", "made.h5ad")
    outcome = door("sample", *model(tiny), "--input_data", path, *mode)
    require_no_accident(outcome)
    if outcome.status == 0:
        assert np.isfinite(anndata.read_h5ad(work / "made.h5ad").layers["generated"]).all()


def test_log_normalised_values_are_not_normalised_again(tiny: Tiny, door, work):
    def normalise(data) -> None:
        counts = data.X.toarray() if hasattr(data.X, "toarray") else np.asarray(data.X)
        data.X = np.log1p(1e4 * counts / counts.sum(1, keepdims=True)).astype(np.float32)

    found = []
    for name, change in (("counts", lambda data: None), ("logged", normalise)):
        path = changed(tiny, work / f"{name}.h5ad", change)
        done(door("extract", *model(tiny), "--input_data", path, "--output", f"{name}.out.h5ad"))
        made = anndata.read_h5ad(work / f"{name}.out.h5ad").obsm
        found.append(np.concatenate([made[key] for key in sorted(made)], axis=1))
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


def test_row_numbers_are_no_names_of_cells(tiny: Tiny, door, work):
    def number(data) -> None:
        data.obs_names = [str(row) for row in range(data.n_obs)]

    for name in ("cells", "reference"):
        changed(tiny, work / f"{name}.h5ad", number)
    given = ("--input_data", "cells.h5ad", "--reference", "reference.h5ad")
    mode = ("--sample_mode", "expr_to_pos", "--output", "made.h5ad")
    done(door("sample", *model(tiny), *given, *mode))
    frame = anndata.read_h5ad(work / "made.h5ad").uns["alphastomics"]["frame"]
    assert "cells in common" not in list(frame["known"])


def nullable_index(data) -> None:
    data.obs.index = pd.Index(data.obs_names.to_list(), dtype="string")


def test_a_nullable_index_is_copied(tiny: Tiny, door, work):
    path = changed(tiny, work / "in.h5ad", nullable_index)
    done(door("sample", *model(tiny), "--input_data", path, "--output", "made.h5ad"))
    made = anndata.read_h5ad(work / "made.h5ad")
    assert list(made.obs_names) == list(anndata.read_h5ad(path).obs_names)


@pytest.mark.parametrize("output", ["cells.npz", "cells.pt", "cells.h5", "cells.h5ad"])
def test_extract_on_a_full_disk_is_one_line(output, tiny: Tiny, door, monkeypatch):
    def full(_folder):
        return shutil._ntuple_diskusage(1, 1, 0)

    monkeypatch.setattr("shutil.disk_usage", full)
    line = ("extract", "--checkpoint", tiny.checkpoint, "--data_dir", tiny.processed)
    refused(door(*line, "--output", output), "No space left")


def test_a_killed_worker_is_one_line_and_its_work_stays(tiny: Tiny, door, work, monkeypatch):
    from concurrent.futures.process import BrokenProcessPool

    def broken(futures):
        raise BrokenProcessPool("killed")

    line = ("preprocess", "--input_dir", tiny.slices, "--output_dir", "out")
    with monkeypatch.context() as patch:
        patch.setattr("alphastomics.preprocessing.worker_pool.as_completed", broken)
        outcome = door(*line, "--workers", 2)
    assert outcome.status == MISTAKE
    assert "Traceback" not in outcome.err
    assert "ended from outside" in outcome.err.splitlines()[-1]
    done(door(*line))


def test_columns_with_more_chunks_than_open_files(tmp_path, monkeypatch):
    write(tmp_path / "csc", only=make_slice(120, 12, 1, "csc"))
    write(tmp_path / "csr", only=make_slice(120, 12, 1, "csr"))
    for name in ("transpose.MOST_OPEN_FILES", "parts.MOST_OPEN_PARTS"):
        monkeypatch.setattr(f"alphastomics.preprocessing.{name}", 8, raising=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    settings = {"max_cells_per_file": 3}
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, hard))
    try:
        run(tmp_path / "csc", tmp_path / "one", **settings)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    run(tmp_path / "csr", tmp_path / "two", **settings)
    first, second = digests(tmp_path / "one"), digests(tmp_path / "two")
    assert {name: first[name] for name in first if "parquet" in name} == {
        name: second[name] for name in second if "parquet" in name
    }


def test_a_table_of_coordinates_with_too_few_rows_is_refused(tiny: Tiny, door, work):
    def as_table(data) -> None:
        place = np.asarray(data.obsm["spatial"])[:, :2]
        data.obsm["spatial"] = pd.DataFrame(place, index=data.obs_names, columns=["x", "y"])

    path = changed(tiny, work / "in/s.h5ad", as_table)
    with h5py.File(path, "r+") as file:
        values = file["obsm/spatial/x"][:-3]
        del file["obsm/spatial/x"]
        file["obsm/spatial/x"] = values
    refused(door("preprocess", "--input_dir", "in", "--output_dir", "out"), "s.h5ad", "'x'")


def test_a_spatialdata_store_is_called_by_its_name(tiny: Tiny, door, work):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(work / "in/brain.zarr"), mode="w")
    for name in ("images", "tables"):
        group.create_group(name)
    refused(door("preprocess", "--input_dir", "in", "--output_dir", "out"), "SpatialData")


def test_a_missing_filter_is_no_damage(tmp_path):
    from alphastomics.preprocessing.anndata_file import reading

    with pytest.raises(InputError, match="hdf5plugin"), reading(tmp_path / "x.h5ad", "X"):
        raise OSError("Can't read data (required filter 'blosc' is not registered)")


def test_a_small_slice_is_left_out_of_the_scores_and_named(tiny: Tiny, door, work):
    shutil.copytree(tiny.slices, work / "in")
    data = anndata.read_h5ad(tiny.slice)[:10].copy()
    data.obs_names = [f"few_{row}" for row in range(10)]
    data.write_h5ad(work / "in/few.h5ad")
    done(door("preprocess", "--input_dir", "in", "--output_dir", "out"))
    line = ("test", *model(tiny), "--data_dir", "out", "--split", "train", "--no_report")
    outcome = door(*line, "--output", "scores.json")
    done(outcome)
    assert "few" in outcome.err


@pytest.mark.parametrize("command", ["sample", "test", "report", "extract"])
def test_a_target_that_cannot_be_written_is_noticed_before_the_work(
    command, tiny: Tiny, door, monkeypatch
):
    def work_done(*_args, **_kwargs):
        raise AssertionError("the work was begun")

    monkeypatch.setattr(torch, "load", work_done)
    lines = {
        "sample": ("--input_data", tiny.slice, "--output", "/proc/made.h5ad"),
        "test": ("--data_dir", tiny.processed, "--output", "/proc/made.json"),
        "report": ("--data_dir", tiny.processed, "--output", "/proc/made.html"),
        "extract": ("--data_dir", tiny.processed, "--output", "/proc/made.npz"),
    }
    where = (tiny.run,) if command == "report" else ()
    given = model(tiny)[: 2 if command == "report" else 4]
    refused(door(command, *where, *given, *lines[command]), "/proc/made")


def test_slices_in_other_units_and_without_extent_are_named(tmp_path, caplog):
    slices = {f"s{number}": make_slice(40, 12, number) for number in range(4)}
    slices["s1"].obsm["spatial"] = slices["s1"].obsm["spatial"] * 1000
    slices["s2"].obsm["spatial"] = slices["s2"].obsm["spatial"] * 0 + 7
    run(write(tmp_path / "in", **slices), tmp_path / "out")
    said = [record.message for record in caplog.records]
    assert any("slice s1 is" in line and "times as large as" in line for line in said)
    assert any("slice s2: all its cells lie at one position" in line for line in said)


def test_data_from_which_nothing_can_be_learned_is_said(tiny: Tiny, door, work):
    def constant(data) -> None:
        data.X = np.full(data.shape, 3, np.float32)
        data.obsm["spatial"] = np.asarray(data.obsm["spatial"]) * 0 + 5

    changed(tiny, work / "in/one.h5ad", constant)
    done(door("preprocess", "--input_dir", "in", "--output_dir", "out"))
    outcome = door("train", "--config", tiny.config, "--data_dir", "out", "--batch_size", 8)
    done(outcome)
    assert "genes are constant" in outcome.err
    assert "at one position" in outcome.err


def test_skipped_updates_are_said(tiny: Tiny, door, work, monkeypatch):
    from alphastomics.diffusion_model.module import AlphaSTomicsModule

    original = AlphaSTomicsModule.on_after_backward

    def broken(self):
        original(self)
        next(self.model.parameters()).grad.fill_(torch.nan)

    monkeypatch.setattr(AlphaSTomicsModule, "on_after_backward", broken)
    config = tiny.config.read_text().replace("max_epochs: 1", "max_epochs: 1, on_nonfinite: skip")
    (work / "skip.yaml").write_text(config)
    outcome = door("train", "--config", "skip.yaml")
    done(outcome)
    assert "updates were skipped" in outcome.err
