"""Files that are not what they are said to be, given to every command that reads one."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import Tiny
from tests.faults.door import refused

Spoil = Callable[[Path, bytes], None]


def missing(path: Path, _whole: bytes) -> None:
    assert not path.exists()


def empty(path: Path, _whole: bytes) -> None:
    path.write_bytes(b"")


def text(path: Path, _whole: bytes) -> None:
    path.write_text("just some words\n")


def nul_bytes(path: Path, _whole: bytes) -> None:
    path.write_bytes(bytes(4096))


def cut_in_half(path: Path, whole: bytes) -> None:
    path.write_bytes(whole[: len(whole) // 2])


def one_byte(path: Path, whole: bytes) -> None:
    path.write_bytes(whole[:1])


def folder(path: Path, _whole: bytes) -> None:
    path.mkdir()


def link_to_itself(path: Path, _whole: bytes) -> None:
    path.symlink_to(path)


def link_to_nothing(path: Path, _whole: bytes) -> None:
    path.symlink_to(path.with_name("nowhere"))


def pipe(path: Path, _whole: bytes) -> None:
    os.mkfifo(path)


def endless_device(path: Path, _whole: bytes) -> None:
    path.symlink_to("/dev/zero")


SPOILS: list[Spoil] = [
    missing,
    empty,
    text,
    nul_bytes,
    cut_in_half,
    one_byte,
    folder,
    link_to_itself,
    link_to_nothing,
    pipe,
    endless_device,
]


def readers(tiny: Tiny, bad: Path) -> dict[str, tuple[Path, list[object]]]:
    """Name every place where a command reads a file: what it expects there, and the command."""
    model = ["--checkpoint", tiny.checkpoint]
    sample = ["sample", *model, "--config", tiny.config, "--output", "made.h5ad"]
    places = ["--sample_mode", "expr_to_pos", "--input_data", tiny.slice]
    stage1 = ["stage1", "--input_dir", tiny.slices, "--output_dir", "made"]
    weights = tiny.export / "model.safetensors"
    return {
        "sample h5ad": (tiny.slice, [*sample, "--input_data", bad / "in.h5ad"]),
        "sample pt": (tiny.checkpoint, [*sample, "--input_data", bad / "in.pt"]),
        "sample reference": (tiny.slice, [*sample, *places, "--reference", bad / "in.h5ad"]),
        "sample landmarks": (tiny.config, [*sample, *places, "--landmarks", bad / "in.csv"]),
        "sample checkpoint": (
            tiny.checkpoint,
            ["sample", "--checkpoint", bad / "in.ckpt", "--input_data", tiny.slice],
        ),
        "test h5ad": (tiny.slice, ["test", *model, "--input_data", bad / "in.h5ad"]),
        "test checkpoint": (
            tiny.checkpoint,
            ["test", "--checkpoint", bad / "in.ckpt", "--data_dir", tiny.processed],
        ),
        "extract h5ad": (tiny.slice, ["extract", *model, "--input_data", bad / "in.h5ad"]),
        "extract checkpoint": (
            tiny.checkpoint,
            ["extract", "--checkpoint", bad / "in.ckpt", "--data_dir", tiny.processed],
        ),
        "extract weights": (
            weights,
            ["extract", "--checkpoint", bad, "--data_dir", tiny.processed],
        ),
        "report h5ad": (tiny.slice, ["report", tiny.run, "--input_data", bad / "in.h5ad"]),
        "report scores": (tiny.checkpoint, ["report", tiny.run, "--scores", bad / "in.json"]),
        "report checkpoint": (
            tiny.checkpoint,
            ["report", tiny.run, "--data_dir", tiny.processed, "--checkpoint", bad / "in.ckpt"],
        ),
        "train config": (tiny.checkpoint, ["train", "--config", bad / "in.yaml"]),
        "train resume": (
            tiny.checkpoint,
            ["train", "--config", tiny.config, "--resume", bad / "in.ckpt"],
        ),
        "info config": (tiny.checkpoint, ["info", "--config", bad / "in.yaml"]),
        "preprocess slice": (
            tiny.slice,
            ["preprocess", "--input_dir", bad, "--output_dir", "made"],
        ),
        "stage1 gene list": (
            tiny.checkpoint,
            [*stage1, "--gene_list_file", bad / "in.txt"],
        ),
        "stage2 dataset": (
            tiny.stage1 / "dataset.json",
            ["stage2", "--input_dirs", bad, "--output_dir", "made"],
        ),
        "upload checkpoint": (
            tiny.checkpoint,
            ["upload", "--checkpoint", bad / "in.ckpt", "--repo_id", "a/b", "--token", "hf_x"],
        ),
    }


NAMES = {
    "h5ad": "in.h5ad",
    "pt": "in.pt",
    "reference": "in.h5ad",
    "landmarks": "in.csv",
    "checkpoint": "in.ckpt",
    "weights": "model.safetensors",
    "scores": "in.json",
    "config": "in.yaml",
    "resume": "in.ckpt",
    "slice": "in.h5ad",
    "list": "in.txt",
    "dataset": "dataset.json",
}
READERS = [*readers(Tiny(Path()), Path())]
# An empty file of settings is one without settings: the defaults hold.
PAIRS = [
    pytest.param(reader, spoil, id=f"{reader}-{spoil.__name__}")
    for reader in READERS
    for spoil in SPOILS
    if (reader.rpartition(" ")[2], spoil) != ("config", empty)
]


@pytest.mark.parametrize(("reader", "spoil"), PAIRS)
def test_a_file_that_is_not_what_it_should_be(reader, spoil, tiny, door, work):
    bad = work / "bad"
    bad.mkdir()
    whole, argv = readers(tiny, bad)[reader]
    name = NAMES[reader.rpartition(" ")[2]]
    if name == "model.safetensors":
        shutil.copy(tiny.export / "config.json", bad)
    spoil(bad / name, whole.read_bytes())
    refused(door(*argv))
