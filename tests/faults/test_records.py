"""Every file that is read back is compared with a digest, in a record that has one itself."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphastomics.errors import InputError
from alphastomics.preprocessing import resume
from alphastomics.preprocessing.commands import stage2
from alphastomics.preprocessing.datasets import merge
from tests.faults.conftest import Tiny
from tests.faults.door import done, refused
from tests.preprocessing.tissue import cells_of, digests, make_slice, metadata_of, run, write

SETTINGS = {"max_cells_per_file": 15, "max_shard_size": 30}


class Cut(Exception):
    """Stands for a machine that dies."""


def flipped(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place // 8 % len(content)] ^= 1 << place % 8
    path.write_bytes(content)


def resealed(path: Path, document: dict[str, Any]) -> None:
    """Write a record with a checksum that holds: it tells of accidents, not of intent."""
    path.write_text(json.dumps(resume.with_checksum(document)))


def merged(inputs: list[Path], target: Path, *, cut: bool) -> None:
    """Run stage2, or begin it and stop before its first shard."""
    from alphastomics.config import PreprocessingConfig

    with pytest.MonkeyPatch.context() as patch:
        if cut:
            stop = Cut()

            def dying(task):
                raise stop

            patch.setattr("alphastomics.preprocessing.stage2.write_shard", dying)
        stage2(
            PreprocessingConfig(**SETTINGS),
            input_dirs=inputs,
            output_dir=target,
            seed=1,
            overwrite=False,
            scheduler=None,
        )


def dataset(folder: Path, seed: int) -> Path:
    """Make stage 1's output of one slice."""
    # The name of a dataset is that of its input: the same for all.
    source = write(folder.parent / f"{folder.name}_{seed}/in", only=make_slice(40, 12, seed))
    run(source, folder, **SETTINGS)
    return folder / "_intermediate_slices"


def test_the_order_of_datasets_is_part_of_what_a_killed_stage2_was_asked_for(tmp_path):
    one, two = dataset(tmp_path / "one", 1), dataset(tmp_path / "two", 2)
    with pytest.raises(Cut):
        merged([one, two], tmp_path / "out", cut=True)
    with pytest.raises(InputError, match="begun with other inputs"):
        merged([two, one], tmp_path / "out", cut=False)
    merged([one, two], tmp_path / "out", cut=False)
    merged([one, two], tmp_path / "whole", cut=False)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_datasets_of_one_name_are_told_apart_by_their_content(tmp_path):
    one, two = dataset(tmp_path / "a/same", 1), dataset(tmp_path / "b/same", 2)
    with pytest.raises(Cut):
        merged([one, two], tmp_path / "out", cut=True)
    shutil.rmtree(tmp_path / "a/same")
    corrected = dataset(tmp_path / "a/same", 3)
    with pytest.raises(InputError, match="begun with other inputs"):
        merged([corrected, two], tmp_path / "out", cut=False)


def left_over(tmp_path: Path) -> tuple[Path, Path]:
    """Merge one dataset, and begin the same once more; return the dataset and what is left."""
    source = dataset(tmp_path / "one", 1)
    merged([source], tmp_path / "whole", cut=False)
    with pytest.raises(Cut):
        merged([source], tmp_path / "out", cut=True)
    return source, tmp_path / "out/_intermediate_slices/shuffle"


@pytest.mark.parametrize("number", [0, 8, 10])
def test_a_flipped_bit_in_a_left_over_sorted_part_changes_nothing(number, tmp_path):
    source, shuffle = left_over(tmp_path)
    left = sorted(shuffle.glob("sorted-*"))
    flipped(left[number % len(left)], int(np.random.default_rng(number).integers(1 << 20)))
    merged([source], tmp_path / "out", cut=False)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_other_values_in_a_left_over_sorted_part_change_nothing(tmp_path):
    source, shuffle = left_over(tmp_path)
    for path in shuffle.glob("sorted-*.arrow"):
        with pa.ipc.open_file(path.read_bytes()) as reader:
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, reader.schema) as writer:
            for batch in batches:
                names = pa.array(["another"] * len(batch))
                place = batch.schema.get_field_index("obs_name")
                writer.write_batch(batch.set_column(place, batch.schema.field(place), names))
    merged([source], tmp_path / "out", cut=False)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.mark.parametrize("pattern", ["part-*.arrow", "part-*.npz", "part-*.json", "*.rows"])
def test_a_flipped_bit_in_left_over_work_of_stage1_changes_nothing(pattern, tmp_path):
    source = write(tmp_path / "in", only=make_slice(40, 12, 1, "csc"))
    run(source, tmp_path / "whole", **SETTINGS)
    with pytest.MonkeyPatch.context() as patch:

        def dying(*_arguments):
            raise Cut

        patch.setattr("alphastomics.preprocessing.stage1.dataset_of", dying)
        with pytest.raises(Cut):
            run(source, tmp_path / "out", **SETTINGS)
    left = sorted((tmp_path / "out/_intermediate_slices/.stage1-work").glob(pattern))
    assert left
    for path in left:
        flipped(path, 8 * (path.stat().st_size // 2) + 3)
    run(source, tmp_path / "out", **SETTINGS)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_the_scaling_of_sparse_storage_is_compared_with_its_checksum(tiny: Tiny, door, work):
    command = ("preprocess", "--input_dir", tiny.slices, "--output_dir", "out")
    done(door(*command, "--storage", "sparse"))
    flipped(work / "out/scaling.npz", 8 * 600)
    line = ("train", "--config", tiny.config, "--data_dir", "out")
    refused(door(*line), "scaling.npz", "checksum")


def fewer_cells(document: dict[str, Any]) -> None:
    for record in document["slices"]:
        record["cells_per_split"]["train"] -= 5


def moved_cells(document: dict[str, Any]) -> None:
    for record, change in zip(document["slices"], (3, -3), strict=False):
        record["cells_per_split"]["train"] += change
        record["cells_per_split"]["validation"] -= change


EDITS = {
    "fewer cells": fewer_cells,
    "cells moved": moved_cells,
    "a split unknown": lambda d: d["slices"][0]["cells_per_split"].update(other=1),
    "a negative count": lambda d: d["slices"][0]["cells_per_split"].update(test=-1),
    "another name": lambda d: d["slices"][0].update(name="other"),
    "another scale": lambda d: d["position_statistics"].update(scale=1.0),
}


@pytest.mark.parametrize("flags", [(), ("--streaming",)], ids=["in memory", "streaming"])
@pytest.mark.parametrize("edit", EDITS)
def test_edited_counts_are_never_trained_on(edit, flags, tiny: Tiny, door, own_processed):
    path = own_processed / "metadata.json"
    document = json.loads(path.read_text())
    EDITS[edit](document)
    path.write_text(json.dumps(document))
    line = ("train", "--config", tiny.config, "--data_dir", own_processed)
    refused(door(*line, *flags), "metadata.json")


def leaves(value: Any, where: tuple = ()) -> list[tuple]:
    """List the places of all plain values."""
    items = (
        value.items() if isinstance(value, dict) else
        enumerate(value) if isinstance(value, list) else []
    )  # fmt: skip
    return [place for key, inner in items for place in leaves(inner, (*where, key))] or [where]


ODD = ["x", -1, 1.5, None, [], {}, 10**30, True]


def test_no_altered_dataset_json_ends_in_an_accident(tiny: Tiny, tmp_path):
    shutil.copytree(tiny.stage1, tmp_path / "one")
    path = tmp_path / "one/dataset.json"
    whole = json.loads(path.read_text())
    whole.pop(resume.CHECKSUM_KEY)
    places = leaves(whole)
    rng = np.random.default_rng(0)
    for place in [places[i] for i in rng.integers(0, len(places), 150)]:
        document = json.loads(json.dumps(whole))
        inner = document
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = ODD[int(rng.integers(len(ODD)))]
        resealed(path, document)
        try:
            merge([tmp_path / "one"])
        except InputError as error:
            assert "dataset.json" in str(error) or "gene" in str(error)
    flipped(path, 8 * 400)
    with pytest.raises(InputError):
        merge([tmp_path / "one"])


def of_type(name: str, kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        column = table[name]
        values = pa.array([None] * len(column), kind)
        return table.set_column(table.schema.get_field_index(name), name, values)

    return change


def renumbered(name: str, number: int) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index(name)
        values = pa.array([number] * len(table), table.schema.field(name).type)
        return table.set_column(place, table.schema.field(name), values)

    return change


COLUMNS: dict[str, Callable[[pa.Table], pa.Table]] = {
    "cell ids of text": of_type("cell_id", pa.string()),
    "positions of text": of_type("position", pa.list_(pa.string())),
    "positions gone": lambda table: table.drop_columns(["position"]),
    "slices that are not there": renumbered("slice_id", 99),
    "cell types that are not there": renumbered("cell_type", 99),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_shard_of_another_kind_with_a_fitting_checksum_is_refused(
    name, tiny: Tiny, door, own_processed
):
    path = own_processed / "metadata.json"
    document = json.loads(path.read_text())
    shard = document["splits"]["train"]["shards"][0]
    file = own_processed / shard["file"]
    pq.write_table(COLUMNS[name](pq.read_table(file)), file)
    shard["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    shard["bytes"] = file.stat().st_size
    resealed(path, document)
    outcome = door("train", "--config", tiny.config, "--data_dir", own_processed)
    refused(outcome, "train.parquet")


PARTS = {**COLUMNS, "another cell": renumbered("cell_id", 3)}
PARTS.pop("slices that are not there")  # they are numbered anew


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_another_kind_with_a_fitting_checksum_is_refused(name, tiny: Tiny, door, work):
    shutil.copytree(tiny.stage1, work / "one")
    path = work / "one/dataset.json"
    document = json.loads(path.read_text())
    part = document["parts"][0]
    file = work / "one" / part["file"]
    table = PARTS[name](pa.ipc.open_file(file.read_bytes()).read_all())
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    part["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    resealed(path, document)
    refused(door("stage2", "--input_dirs", "one", "--output_dir", "out"), part["file"])


@pytest.mark.parametrize("content", ["[]", "5", "{}", '{"files": 3}', '["a", "b"]', '"x"'])
def test_odd_records_of_unfinished_work_are_done_again(content, tmp_path):
    source, shuffle = left_over(tmp_path)
    for name in ("sorted-000000.json", "replaced.json"):
        (shuffle / name).write_text(content)
    merged([source], tmp_path / "out", cut=False)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_every_cell_is_still_there_exactly_once(tmp_path):
    source = write(tmp_path / "in", one=make_slice(40, 12, 1), two=make_slice(50, 12, 2))
    run(source, tmp_path / "out", **SETTINGS)
    assert len(cells_of(tmp_path / "out")) == 90
    record = metadata_of(tmp_path / "out")
    assert record[resume.CHECKSUM_KEY] == resume.checksum_of(record)
