"""Processed folders that were altered, given to the commands that read one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Tiny
from tests.faults.door import done, refused


def readers(tiny: Tiny, folder: Path) -> dict[str, list[object]]:
    model = ["--checkpoint", tiny.checkpoint, "--config", tiny.config]
    return {
        "train": ["train", "--config", tiny.config, "--data_dir", folder],
        "test": ["test", *model, "--data_dir", folder],
        "sample": ["sample", *model, "--input_data", folder, "--output", "made.h5ad"],
        "extract": ["extract", *model, "--data_dir", folder, "--output", "made.npz"],
        "report": ["report", tiny.run, "--data_dir", folder, "--output", "made.html"],
    }


def put(*keys: str | int, value: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for key in keys[:-1]:
            metadata = metadata[key]
        metadata[keys[-1]] = value

    return change


SHARD = ("splits", "train", "shards", 0)
METADATA: dict[str, Callable[[Any], object]] = {
    "another version": put("format_version", value=2),
    "version of text": put("format_version", value="1"),
    "genes gone": lambda m: m.pop("genes"),
    "fewer genes": lambda m: m["genes"].pop(),
    "genes counted wrongly": put("num_genes", value=7),
    "genes of numbers": put("genes", value=[1, 2, 3]),
    "unknown key": put("surprise", value=1),
    "splits gone": put("splits", value={}),
    "a split gone": lambda m: m["splits"].pop("train"),
    "splits of words": put("splits", value="many"),
    "slices gone": put("slices", value=[]),
    "panel outside": put("slices", 0, "panel", value=99),
    "missing gene outside": put("panels", 0, "missing", value=[99]),
    "statistics of NaN": put("position_statistics", "scale", value=None),
    "scale of zero": put("position_statistics", "scale", value=0.0),
    "more cells than there are": put("splits", "train", "cells", value=10**9),
    "negative cells": put("splits", "train", "cells", value=-1),
    "row groups that lie": put(*SHARD, "row_groups", value=[1, 1]),
    "huge row groups": put(*SHARD, "row_groups", value=[10**12]),
    "shard elsewhere": put(*SHARD, "file", value="../../outside/precious.txt"),
    "shard at the root": put(*SHARD, "file", value="/etc/passwd"),
    "shard without name": put(*SHARD, "file", value=""),
    "shard that is a folder": put(*SHARD, "file", value="data"),
    "a gene twice": lambda m: m["genes"].__setitem__(0, m["genes"][1]),
    "too few cell types": put("cell_types", value=["a"]),
    "other digest": put(*SHARD, "sha256", value="0" * 64),
    "other size": put(*SHARD, "bytes", value=1),
    "other storage": put("storage", value="sparse"),
    "other layout": put("layout", value="slice"),
}
TRAIN_ONLY = ("train", "extract")


@pytest.mark.parametrize("command", TRAIN_ONLY)
@pytest.mark.parametrize("name", METADATA)
def test_metadata_that_was_altered_is_refused(name, command, tiny, door, own_processed):
    path = own_processed / "metadata.json"
    metadata = json.loads(path.read_text())
    METADATA[name](metadata)
    path.write_text(json.dumps(metadata))
    refused(door(*readers(tiny, own_processed)[command]))


TEXTS = {
    "empty": b"",
    "list": b"[]",
    "half": b'{"format_version": 1, "genes"',
    "binary": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "huge number": b'{"format_version": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("command", ["train", "test", "sample", "extract", "report"])
@pytest.mark.parametrize("name", TEXTS)
def test_metadata_that_is_no_metadata_is_refused(name, command, tiny, door, own_processed):
    (own_processed / "metadata.json").write_bytes(TEXTS[name])
    refused(door(*readers(tiny, own_processed)[command]), "metadata.json")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def swap(path: Path) -> None:
    shutil.copy(path.with_name("test.parquet"), path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize("command", ["train", "test", "extract"])
@pytest.mark.parametrize("spoil", [Path.unlink, flip, cut, swap, folder, loop])
def test_a_shard_that_was_altered_is_refused(spoil, command, tiny, door, own_processed):
    spoil(own_processed / "data/train.parquet")
    refused(door(*readers(tiny, own_processed)[command]), "train.parquet")


DATASETS: dict[str, Callable[[Any], object]] = {
    "genes gone": lambda d: d.pop("genes"),
    "parts gone": lambda d: d.pop("parts"),
    "request gone": lambda d: d.pop("request"),
    "slices gone": put("slices", value=[]),
    "part elsewhere": put("parts", 0, "file", value="../../outside/precious.txt"),
    "part at the root": put("parts", 0, "file", value="/etc/passwd"),
    "other digest": put("parts", 0, "sha256", value="0" * 64),
    "runs that lie": put("parts", 0, "runs", value=[[7, 0, 5]]),
    "cells that lie": put("slices", 0, "cells", value=10**12),
    "no number": put("slices", 0, "cells", value="many"),
    "other statistics": put("statistics_sha256", value="0" * 64),
}


@pytest.mark.parametrize("name", DATASETS)
def test_the_output_of_stage1_that_was_altered_is_refused(name, tiny, door, work):
    source = Path(shutil.copytree(tiny.stage1, work / "stage1"))
    dataset = json.loads((source / "dataset.json").read_text())
    DATASETS[name](dataset)
    (source / "dataset.json").write_text(json.dumps(dataset))
    refused(door("stage2", "--input_dirs", source, "--output_dir", "out"))


@pytest.mark.parametrize("name", ["report.json", "metrics.csv", "config.yaml"])
@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_run_folder_with_a_broken_file_is_refused_or_reported(name, text, tiny, door, own_run):
    # Nothing depends on status.json: it is broken beside the log, which is shown alone.
    for broken in {"metrics.csv": ("metrics.csv", "status.json")}.get(name, (name,)):
        (own_run / broken).write_text(text, encoding="latin-1")
    few = ("--num_steps", 1, "--num_samples", 1, "--input_data", tiny.slice)
    outcome = door("report", own_run, *few, "--output", "made.html")
    if name == "metrics.csv" or (name, text) == ("config.yaml", ""):
        done(outcome)
    else:
        refused(outcome, name)
