"""--overwrite removes only what the program wrote, never an input, and only when replaced."""

import hashlib
import json
import shutil
from pathlib import Path

import anndata
import numpy as np
import pytest

from alphastomics.preprocessing import resume
from tests.faults.conftest import Tiny
from tests.faults.door import DONE, done, refused


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def with_nan(source: Path, target: Path) -> None:
    """Write a slice in which one count is NaN: seen only when X is read."""
    data = anndata.read_h5ad(source)
    data.X = np.asarray(data.X.toarray() if hasattr(data.X, "toarray") else data.X, np.float32)
    data.X[3, 3] = np.nan
    target.parent.mkdir(parents=True, exist_ok=True)
    data.write_h5ad(target)


# D1: where the input lies in the output, and the words of the refusal without the flag.
INPUT_PLACES = ["out/data", "out/data/deeper", "out/_intermediate_slices"]


@pytest.mark.parametrize("flags", [(), ("--overwrite",)], ids=["plain", "overwrite"])
@pytest.mark.parametrize("place", INPUT_PLACES)
def test_preprocess_never_removes_its_input(place, flags, tiny: Tiny, door, work):
    shutil.copytree(tiny.slices, work / place)
    before = contents(work / place)
    outcome = door("preprocess", "--input_dir", place, "--output_dir", "out", *flags)
    left = contents(work / place)
    assert before.items() <= left.items()
    refused(outcome, "choose another --output_dir")
    assert "--overwrite to remove" not in outcome.err


STAGE1_PLACES = [("in", "in"), ("in/deeper", "in"), ("in", "in/out")]


@pytest.mark.parametrize(("source", "target"), STAGE1_PLACES, ids=str)
def test_stage1_overwrite_keeps_inputs_and_foreign_files(source, target, tiny: Tiny, door, work):
    shutil.copytree(tiny.slices, work / source)
    (work / target).mkdir(exist_ok=True)
    (work / target / "notes.txt").write_text("mine")
    before = contents(work)
    command = ("stage1", "--input_dir", source, "--output_dir", target)
    outcome = door(*command, "--gene_list_file", tiny.genes, "--overwrite")
    refused(outcome, "not removed by --overwrite")
    assert contents(work) == before


def test_foreign_files_beside_a_finished_dataset_survive_overwriting(tiny: Tiny, door, work):
    command = ("stage1", "--input_dir", tiny.slices, "--output_dir", "out")
    done(door(*command, "--gene_list_file", tiny.genes))
    (work / "out/notes.txt").write_text("mine")
    (work / "out/part-notes.arrow").write_text("mine")
    flags = ("--z_spacing", 5, "--overwrite")
    done(door(*command, "--gene_list_file", tiny.genes, *flags))
    assert (work / "out/notes.txt").read_text() == "mine"
    assert (work / "out/part-notes.arrow").read_text() == "mine"
    assert json.loads((work / "out/dataset.json").read_text())["request"]["flags"]["z_spacing"] == 5


@pytest.mark.parametrize("place", ["out/data/stage1", "out/_intermediate_slices/shuffle/stage1"])
def test_stage2_never_removes_its_input(place, tiny: Tiny, door, work):
    shutil.copytree(tiny.stage1, work / place)
    before = contents(work)
    line = ("stage2", "--input_dirs", place, "--output_dir", "out", "--overwrite")
    refused(door(*line))
    assert contents(work) == before


def test_stage2_into_its_own_input_keeps_it_and_foreign_files(tiny: Tiny, door, work):
    shutil.copytree(tiny.stage1, work / "one")
    line = ("stage2", "--input_dirs", "one", "--output_dir", "one")
    done(door(*line))
    (work / "one/data/notes.txt").write_text("mine")
    before = contents(work / "one")
    done(door(*line, "--overwrite"))
    assert before == contents(work / "one")


def test_stage2_overwrites_no_shard_that_it_did_not_write(tiny: Tiny, door, work):
    done(door("stage2", "--input_dirs", tiny.stage1, "--output_dir", "out"))
    (work / "out/data/train-00001.parquet").write_text("mine")
    before = contents(work)
    smaller = ("--max_shard_size", 20, "--overwrite")
    refused(
        door("stage2", "--input_dirs", tiny.stage1, "--output_dir", "out", *smaller),
        "train-00001.parquet",
    )
    assert contents(work) == before


def test_overwriting_with_another_number_of_shards_removes_old_ones_alone(tiny: Tiny, door, work):
    command = ("stage2", "--input_dirs", tiny.stage1, "--output_dir", "out")
    done(door(*command, "--max_shard_size", 20))
    (work / "out/data/mine.parquet").write_text("mine")
    done(door(*command, "--overwrite"))
    assert sorted(path.name for path in (work / "out/data").iterdir()) == [
        "mine.parquet",
        "test.parquet",
        "train.parquet",
        "validation.parquet",
    ]
    assert not (work / "out/_intermediate_slices").exists()


@pytest.mark.parametrize("command", ["stage1", "preprocess"])
def test_overwriting_with_a_nan_keeps_the_old_result(command, tiny: Tiny, door, work):
    flags = ("--gene_list_file", tiny.genes)
    done(door(command, "--input_dir", tiny.slices, "--output_dir", "out", *flags))
    before = contents(work / "out")
    with_nan(tiny.slice, work / "bad/slice_0.h5ad")
    again = (command, "--input_dir", "bad", "--output_dir", "out", *flags, "--overwrite")
    refused(door(*again), "NaN")
    assert contents(work / "out") == before


def test_a_lost_shard_and_a_damaged_part_cost_no_sound_shard(tiny: Tiny, door, work):
    shutil.copytree(tiny.stage1, work / "one")
    command = ("stage2", "--input_dirs", "one", "--output_dir", "out", "--max_shard_size", 20)
    done(door(*command))
    (work / "out/data/train-00000.parquet").unlink()
    part = next((work / "one").glob("part-*.arrow"))
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    before = contents(work / "out")
    refused(door(*command), part.name)
    assert contents(work / "out") == before
    shutil.copytree(tiny.stage1, work / "one", dirs_exist_ok=True)
    done(door(*command))
    assert (work / "out/data/train-00000.parquet").is_file()


def test_simulate_overwrites_only_its_own_slices(door, work):
    own = ("simulate", "--output_dir", "out", "--cells", 30, "--genes", 20)
    (work / "out").mkdir()
    (work / "out/slice_0.h5ad").write_text("mine")
    refused(door(*own, "--slices", 2, "--overwrite"), "slice_0.h5ad")
    (work / "out/slice_0.h5ad").unlink()
    done(door(*own, "--slices", 3))
    (work / "out/slice_brain.h5ad").write_text("mine")
    done(door(*own, "--slices", 2, "--overwrite"))
    assert sorted(path.name for path in (work / "out").glob("*.h5ad")) == [
        "slice_0.h5ad",
        "slice_1.h5ad",
        "slice_brain.h5ad",
    ]


def test_test_never_replaces_a_page_beside_its_scores(tiny: Tiny, door, work):
    (work / "mine.html").write_text("mine")
    given = ("--checkpoint", tiny.checkpoint, "--config", tiny.config)
    refused(door("test", *given, "--output", "mine.json"), "mine.html", "--overwrite")
    assert (work / "mine.html").read_text() == "mine"


def test_no_record_makes_overwriting_remove_files_elsewhere(tiny: Tiny, door, sandbox, work):
    """A folder from elsewhere may hold left-over work, with checksums that hold."""
    victim = sandbox / "outside/precious.txt"
    shuffle = work / "out/_intermediate_slices/shuffle"
    shuffle.mkdir(parents=True)
    digest = hashlib.sha256(victim.read_bytes()).hexdigest()
    for away in ("../../outside/precious.txt", str(victim)):
        for name, record in (
            ("request.json", {"seed": 0}),
            ("replaced.json", {"files": [away, 3]}),
            ("shard-train-00000.json", {"file": away, "sha256": digest}),
            ("shard-test-00000.json", {"file": 5}),
        ):
            resume.write_marker(shuffle / name, record)
        line = ("stage2", "--input_dirs", tiny.stage1, "--output_dir", "out", "--overwrite")
        done(door(*line))
        assert victim.read_text() == "precious"
        shutil.rmtree(work / "out")
        shuffle.mkdir(parents=True)


@pytest.mark.parametrize("command", ["stage1", "simulate"])
def test_hidden_files_of_others_are_no_left_over_work(command, tiny: Tiny, door, work):
    lines = {
        "stage1": ("--input_dir", tiny.slices, "--gene_list_file", tiny.genes),
        "simulate": ("--cells", 30, "--genes", 20, "--slices", 2),
    }
    line = (command, "--output_dir", "out", *lines[command])
    done(door(*line))
    (work / "out/.download.partial").write_text("mine")
    (work / "out/.dataset.json.0123abcd.partial").write_text("of a killed run")
    assert door(*line, "--overwrite").status == DONE
    assert [path.name for path in (work / "out").glob(".*")] == [".download.partial"]


@pytest.mark.parametrize("command", ["sample", "test", "extract", "reference"])
def test_no_output_replaces_what_the_command_reads(command, tiny: Tiny, door, work):
    shutil.copy(tiny.slice, work / "in.h5ad")
    shutil.copy(tiny.checkpoint, work / "model.ckpt")
    shutil.copytree(tiny.processed, work / "processed")
    before = contents(work)
    given = ("--checkpoint", "model.ckpt", "--config", tiny.config)
    cells = ("--input_data", "in.h5ad")
    place = ("--sample_mode", "expr_to_pos", "--input_data", tiny.slices / "slice_1.h5ad")
    lines = {
        "sample": ("sample", *given, *cells, "--output", work / "in.h5ad"),
        "test": ("test", *given, "--data_dir", "processed", "--output", "processed/metadata.json"),
        "extract": (
            *("extract", *given, "--data_dir", "processed"),
            *("--output", "processed/scaling.npz"),
        ),
        "reference": ("sample", *given, *place, "--reference", "in.h5ad", "--output", "in.h5ad"),
    }
    refused(door(*lines[command], "--overwrite"), "is read by this command")
    assert contents(work) == before
