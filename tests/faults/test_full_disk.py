"""A disk that runs full: one line that names the file, only whole files, and then it goes on."""

import errno
import os
import subprocess
from pathlib import Path

import pytest

from alphastomics.io import files
from tests.faults.children import leftovers, run
from tests.faults.conftest import Tiny
from tests.faults.door import MISTAKE, attempt


def writers(tiny: Tiny) -> dict[str, list[object]]:
    model = ["--checkpoint", tiny.checkpoint, "--config", tiny.config]
    return {
        "simulate": ["simulate", "--output_dir", "out", "--cells", 30, "--genes", 20],
        "preprocess": ["preprocess", "--input_dir", tiny.slices, "--output_dir", "out"],
        "train": ["train", "--config", tiny.config],
        "sample": ["sample", *model, "--input_data", tiny.slice, "--output", "made.h5ad"],
        "extract": ["extract", *model, "--data_dir", tiny.processed, "--output", "made.npz"],
        "extract h5ad": ["extract", *model, "--input_data", tiny.slice, "--output", "made.h5ad"],
    }


@pytest.mark.parametrize("name", ["simulate", "preprocess", "train", "sample", "extract"])
@pytest.mark.parametrize("good", [0, 2])
def test_a_write_that_fails_is_one_line_and_leaves_whole_files(
    name, good, tiny, sandbox, work, monkeypatch
):
    """The first writes succeed, and then none."""
    flush, written = files.flush_to_disk, []

    def full(path: Path) -> None:
        if path.is_file():
            written.append(path)
            if len(written) > good:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(path)

    with monkeypatch.context() as patched:
        patched.setattr(files, "flush_to_disk", full)
        outcome = attempt(writers(tiny)[name], sandbox)
    if len(written) <= good:  # it writes fewer files than that
        assert outcome.status == 0
        return
    assert outcome.status == MISTAKE
    assert "Traceback" not in outcome.err
    assert outcome.err.splitlines()[-1].startswith("alphastomics: ")
    assert "No space left on device" in outcome.err.splitlines()[-1]
    assert leftovers(work) == []
    again = writers(tiny)[name] + (["--resume", "last"] if name == "train" else [])
    assert attempt(again, sandbox).status == 0


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of a few kilobytes, where that is permitted."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("mounting is not permitted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("output", ["made.npz", "made.pt", "made.h5"])
@pytest.mark.parametrize("room", [6_000, 16_000])
def test_embeddings_that_find_no_room_are_one_line(output, room, tiny, door, small_disk):
    (small_disk / "filler").write_bytes(bytes(48 * 1024 - room))
    given = ("--checkpoint", tiny.checkpoint, "--data_dir", tiny.processed)
    outcome = door("extract", *given, "--output", small_disk / output)
    assert outcome.status == MISTAKE, outcome.err
    assert "Traceback" not in outcome.err
    assert "No space left on device" in outcome.err.splitlines()[-1]
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simulate", "preprocess", "train", "sample", "extract"])
def test_a_disk_that_is_really_full(name, tiny, small_disk):
    (small_disk / "filler").write_bytes(bytes(40_000))
    status, err = run(*writers(tiny)[name], cwd=small_disk)
    assert status == 2, err
    assert "No space left on device" in err.splitlines()[-1]
    assert leftovers(small_disk) == []


@pytest.mark.parametrize("name", ["extract", "extract h5ad"])
def test_files_that_may_not_grow_are_not_left_in_part(name, tiny, work):
    """A limit on the size of files is noticed by writes inside libraries too."""
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))"
    )
    status, err = run(*writers(tiny)[name], cwd=work, code=code)
    assert status == 2, err
    assert "Traceback" not in err
    assert list(work.iterdir()) == []
