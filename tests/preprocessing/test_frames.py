"""Frames and units: what the positions show is said, and slices without a frame are never mixed."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from alphastomics.errors import InputError
from alphastomics.preprocessing.batch_loader import create_dataloaders, resolve_set_draw
from alphastomics.preprocessing.folder import DataFolder
from alphastomics.preprocessing.frames import SliceExtent, center_distance, slice_extents
from alphastomics.preprocessing.schema import Metadata
from tests.preprocessing.tissue import make_slice, metadata_of, run, write


def slices_at(folder: Path, *, scales=(1.0, 1.0, 1.0), step=0.0, cells=60, dims=2) -> Path:
    """Three slices, 1000 units wide when their scale is 1, with centres `step` apart."""
    generated = {}
    for number, scale in enumerate(scales):
        data = make_slice(cells, seed=number, dims=dims)
        rng = np.random.default_rng(number)
        data.obsm["spatial"] = scale * rng.uniform(-500, 500, (cells, dims))
        data.obsm["spatial"][:, 0] += number * step
        generated[f"s{number}"] = data
    return write(folder, **generated)


def notes(caplog, source: Path, target: Path, **options) -> list[str]:
    with caplog.at_level(logging.WARNING):
        run(source, target, **options)
    return [record.getMessage() for record in caplog.records if record.name.endswith("stage2")]


def metadata(folder: Path) -> Metadata:
    return DataFolder(folder).metadata()


def test_extents_of_parts_are_those_of_the_whole_slice():
    rng = np.random.default_rng(0)
    at = rng.normal(size=(50, 3))
    parts = [at[:7], at[7:30], at[30:]]
    records = [
        {
            "slice": 4,
            "count": len(part),
            "mean": part.mean(0).tolist(),
            "minimum": part.min(0).tolist(),
            "maximum": part.max(0).tolist(),
        }
        for part in parts
    ]
    (extent,) = slice_extents(records).values()
    np.testing.assert_allclose(extent.center, at.mean(0)[:2])
    np.testing.assert_allclose(extent.size, np.linalg.norm(np.ptp(at, axis=0)[:2]))


def test_the_distance_of_centres_is_in_units_of_a_slice():
    extents = {n: SliceExtent(np.array([x, 0.0]), 10.0) for n, x in enumerate((-20.0, 20.0))}
    assert center_distance(extents) == 2.0  # each lies 20 from the middle, two slices' size
    still = {n: SliceExtent(np.zeros(2), 0.0) for n in range(2)}
    assert center_distance(still) == 0.0


def test_slices_of_other_units_are_named_with_their_sizes(tmp_path, caplog):
    said = notes(caplog, slices_at(tmp_path / "in", scales=(1, 1, 6.5)), tmp_path / "out")
    assert any("s2 is 6 times as large as" in line or "s2 is 7 times" in line for line in said)
    assert any("same units (micrometres, pixels)?" in line for line in said)


def test_slices_of_similar_size_get_no_word_about_units(tmp_path, caplog):
    said = notes(caplog, slices_at(tmp_path / "in", scales=(1, 2, 4)), tmp_path / "out")
    assert not any("units" in line for line in said)


def test_cells_that_all_lie_at_one_position_are_said(tmp_path, caplog):
    said = notes(caplog, slices_at(tmp_path / "in", scales=(1, 0, 1)), tmp_path / "out")
    assert any("slice s1: all its cells lie at one position" in line for line in said)


def test_slices_that_look_registered_get_a_hint_to_say_so(tmp_path, caplog):
    said = notes(caplog, slices_at(tmp_path / "in"), tmp_path / "out")
    assert any("preprocess with --common_frame" in line for line in said)
    assert not metadata(tmp_path / "out").shares_frame


def test_slices_side_by_side_get_no_hint(tmp_path, caplog):
    assert notes(caplog, slices_at(tmp_path / "in", step=4000), tmp_path / "out") == []


def test_a_common_frame_that_is_said_of_slices_side_by_side_is_doubted(tmp_path, caplog):
    source = slices_at(tmp_path / "in", step=4000)
    said = notes(caplog, source, tmp_path / "out", common_frame=True)
    assert any("leave the flag out" in line for line in said)
    assert metadata(tmp_path / "out").shares_frame


def test_a_z_spacing_larger_than_a_slice_is_said(tmp_path, caplog):
    options = {"common_frame": True, "z_spacing": 5000.0}
    said = notes(caplog, slices_at(tmp_path / "in"), tmp_path / "out", **options)
    assert any("--z_spacing 5000 is larger than a slice" in line for line in said)


@pytest.mark.parametrize(
    ("options", "dims", "frame"),
    [
        ({}, 2, False),
        ({"common_frame": True}, 2, True),
        ({"position_is_3d": True}, 3, True),
    ],
)
def test_the_processed_data_know_whether_slices_share_a_frame(tmp_path, options, dims, frame):
    run(slices_at(tmp_path / "in", dims=dims), tmp_path / "out", **options)
    result = metadata(tmp_path / "out")
    assert result.shares_frame == result.has_common_frame == frame
    assert result.common_frame == bool(options.get("common_frame"))


def test_one_slice_has_a_frame_of_its_own_that_no_other_shares(tmp_path):
    run(write(tmp_path / "in", one=make_slice(40)), tmp_path / "out")
    result = metadata(tmp_path / "out")
    assert result.shares_frame
    assert not result.has_common_frame


def test_older_metadata_without_the_word_share_no_frame(tmp_path):
    run(slices_at(tmp_path / "in"), tmp_path / "out")
    record = metadata_of(tmp_path / "out")
    del record["common_frame"]
    record.pop("record_sha256", None)
    (tmp_path / "out/metadata.json").write_text(json.dumps(record))
    assert not metadata(tmp_path / "out").shares_frame


def test_random_sets_of_slices_without_a_frame_are_refused_with_the_reason(tmp_path):
    run(slices_at(tmp_path / "in"), tmp_path / "out")
    with pytest.raises(InputError) as caught:
        create_dataloaders(tmp_path / "out", 16, set_draw="random")
    message = str(caught.value)
    assert "\n" not in message
    for words in ("set_draw random", "3 2D slices share no frame", "auto", "--common_frame"):
        assert words in message


@pytest.mark.parametrize(
    ("cells", "options", "streaming", "draw"),
    [
        (60, {}, False, "slice"),
        (60, {}, True, "slice"),
        (60, {"common_frame": True}, False, "random"),  # small slices of one frame
        (300, {"common_frame": True}, False, "slice"),
        (300, {"common_frame": True}, True, "random"),  # no other stream from this layout
        (300, {"common_frame": True, "layout": "slice"}, True, "slice"),
    ],
)
def test_auto_mixes_slices_only_in_one_frame_and_where_it_must(
    tmp_path, cells, options, streaming, draw
):
    run(slices_at(tmp_path / "in", cells=cells), tmp_path / "out", **options)
    result = metadata(tmp_path / "out")
    assert resolve_set_draw("auto", result, "out", streaming=streaming) == draw


def test_auto_of_one_small_slice_is_that_slice(tmp_path):
    run(write(tmp_path / "in", one=make_slice(40)), tmp_path / "out")
    result = metadata(tmp_path / "out")
    assert resolve_set_draw("auto", result, "out", streaming=False) == "slice"


def test_batches_of_auto_never_mix_slices_without_a_frame(tmp_path):
    run(slices_at(tmp_path / "in"), tmp_path / "out")
    training = create_dataloaders(tmp_path / "out", 16, set_size=8, num_workers=0)[0]
    for batch in training:
        for mask, numbers in zip(batch.node_mask, batch.slice_id, strict=True):
            assert len(numbers[mask].unique()) <= 1
