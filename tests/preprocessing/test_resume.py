"""Interrupted anywhere, the same command finishes the work with the same bytes."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from alphastomics.errors import InputError
from alphastomics.io.files import partial_of
from alphastomics.preprocessing import resume
from tests.preprocessing.tissue import digests, files_in, make_slice, metadata_of, run, write

SETTINGS = {"max_cells_per_file": 400, "max_shard_size": 500, "cell_type_key": "cell_type"}
CHILD = """
import json, sys
from pathlib import Path
from alphastomics.config import PreprocessingConfig
from alphastomics.preprocessing.commands import preprocess
if __name__ == "__main__":
    print("ready", flush=True)
    preprocess(
        PreprocessingConfig(**json.loads(sys.argv[3])),
        input_dir=Path(sys.argv[1]),
        output_dir=Path(sys.argv[2]),
        gene_list_file=None,
        seed=42,
        overwrite=False,
        scheduler=None,
    )
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slices")
    for number, form in enumerate(["csr", "csc", "dense", "csr"]):
        data = make_slice(1500, 60, number, form, types=["a", "b"])
        write(folder, **{f"s{number}": data})
    return folder


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], float]:
    """The digests of an uninterrupted run, and how long it takes."""
    folder = tmp_path_factory.mktemp("whole")
    process = child(source, folder / "out", {})
    started = time.monotonic()
    assert process.wait() == 0
    return digests(folder / "out"), time.monotonic() - started


def child(source: Path, target: Path, options: dict) -> subprocess.Popen:
    """Start a run in a process of its own; returns when it is about to begin."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(source), str(target), json.dumps(SETTINGS | options)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    return process


def kill_at(moment: float, source: Path, target: Path, options: dict) -> bool:
    """Run, kill without warning after some time; tell whether that interrupted it."""
    process = child(source, target, options)
    try:
        return process.wait(moment) != 0
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return True


@pytest.mark.parametrize(
    ("kills", "workers"),
    [
        (3, 1),
        pytest.param(10, 1, marks=pytest.mark.slow),
        pytest.param(5, 2, marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_moments_the_rerun_gives_the_same_bytes(
    source, whole, tmp_path, kills, workers
):
    expected, seconds = whole
    moments = np.random.default_rng(kills).uniform(0.05, 1.0, kills) * seconds
    interrupted = 0
    for number, moment in enumerate(moments):
        target = tmp_path / str(number)
        interrupted += kill_at(float(moment), source, target, {"workers": workers})
        run(source, target, **SETTINGS)
        assert digests(target) == expected
        assert not [name for name in files_in(target) if name.endswith(".partial")]
    assert interrupted > 0


def test_killed_again_and_again_it_still_gets_done(source, whole, tmp_path):
    expected, seconds = whole
    for _ in range(3):
        kill_at(seconds * 0.6, source, tmp_path / "out", {})
    run(source, tmp_path / "out", **SETTINGS)
    assert digests(tmp_path / "out") == expected


def test_finished_pieces_are_not_done_again(source, whole, tmp_path, monkeypatch):
    expected, _ = whole
    stop = RuntimeError("interrupted")
    written: list[str] = []
    write_marker = resume.write_marker

    def write_some(path: Path, value: object) -> None:
        if len(written) == 9:
            raise stop
        written.append(path.name)
        write_marker(path, value)

    for module in ("chunks", "shards", "transpose"):
        monkeypatch.setattr(f"alphastomics.preprocessing.{module}.write_marker", write_some)
    for _ in range(20):
        before = list(written)
        written.clear()
        try:
            run(source, tmp_path / "out", **SETTINGS)
            break
        except RuntimeError:
            assert not set(written) & set(before)
    assert digests(tmp_path / "out") == expected


def test_a_finished_folder_is_recognised_and_left_as_it_is(source, tmp_path):
    run(source, tmp_path, **SETTINGS)
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in files_in(tmp_path)}
    assert run(source, tmp_path, **SETTINGS)["state"] == "was finished before"
    assert run(source, tmp_path, workers=2, **SETTINGS)["state"] == "was finished before"
    assert times == {name: (tmp_path / name).stat().st_mtime_ns for name in files_in(tmp_path)}


def test_a_shard_that_was_lost_or_altered_is_made_again(source, whole, tmp_path):
    expected, _ = whole
    run(source, tmp_path, **SETTINGS)
    shards = metadata_of(tmp_path)["splits"]["train"]["shards"]
    (tmp_path / shards[0]["file"]).unlink()
    shutil.rmtree(tmp_path / "_intermediate_slices")
    run(source, tmp_path, **SETTINGS)
    assert digests(tmp_path) == expected
    path = tmp_path / shards[1]["file"]
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    assert run(source, tmp_path, **SETTINGS)["state"] == "finished"
    assert digests(tmp_path) == expected


def test_other_flags_inputs_and_seeds_are_refused_with_what_differs(tmp_path):
    source = write(tmp_path / "in", one=make_slice(seed=1), two=make_slice(seed=2))
    run(source, tmp_path / "out")
    before = digests(tmp_path / "out")

    def refused(words: str, **options) -> None:
        with pytest.raises(InputError) as caught:
            run(source, tmp_path / "out", **options)
        assert words in str(caught.value)
        assert "--overwrite" in str(caught.value)

    refused("flags.z_spacing was 10.0 and is now 5.0", z_spacing=5.0)
    refused("seed was 42 and is now 7", seed=7)
    refused("layout was 'shuffled' and is now 'slice'", layout="slice")
    write(source, two=make_slice(seed=3))
    refused("two.h5ad has changed")
    (source / "two.h5ad").unlink()
    refused("two.h5ad is gone")
    write(source, two=make_slice(seed=2), three=make_slice(seed=3))
    refused("three.h5ad is new")
    assert digests(tmp_path / "out") == before
    run(source, tmp_path / "out", overwrite=True)
    assert len(metadata_of(tmp_path / "out")["slices"]) == 3


@pytest.mark.parametrize("stage", ["chunks", "shards"])
def test_an_unfinished_folder_refuses_other_flags_too(source, tmp_path, monkeypatch, stage):
    def stop(path: Path, value: object) -> None:
        raise RuntimeError("interrupted")

    with monkeypatch.context() as patched:
        patched.setattr(f"alphastomics.preprocessing.{stage}.write_marker", stop)
        with pytest.raises(RuntimeError):
            run(source, tmp_path / "out", **SETTINGS)
    with pytest.raises(InputError, match="max_cells_per_file was 400 and is now 399"):
        run(source, tmp_path / "out", **SETTINGS | {"max_cells_per_file": 399})


def test_overwriting_with_bad_input_keeps_the_old_result(tmp_path):
    source = write(tmp_path / "in", one=make_slice())
    run(source, tmp_path / "out")
    before = digests(tmp_path / "out")
    (source / "one.h5ad").write_bytes(b"broken")
    with pytest.raises(InputError):
        run(source, tmp_path / "out", overwrite=True)
    assert digests(tmp_path / "out") == before


def test_bad_input_that_is_mended_needs_no_overwrite(tmp_path):
    data = make_slice(form="dense")
    data.X[3, 3] = np.nan
    source = write(tmp_path / "in", one=data)
    with pytest.raises(InputError):
        run(source, tmp_path / "out")
    write(source, one=make_slice())
    run(source, tmp_path / "out")


def test_killed_before_its_first_whole_file_it_starts_again(tmp_path):
    source = write(tmp_path / "in", one=make_slice())
    middle = tmp_path / "out/_intermediate_slices"
    middle.mkdir(parents=True)
    partial_of(middle / "request.json").write_text("{")
    run(source, tmp_path / "out")
    assert not list(middle.glob(".*"))
