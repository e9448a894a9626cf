"""Damaged files: refused in one line, without a crash or a standstill."""

import signal
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

from alphastomics.preprocessing import subprocess_reader
from tests.preprocessing.tissue import make_slice, refused, write


def test_files_that_are_no_hdf5_or_cut_short(tmp_path):
    source = write(tmp_path / "in", one=make_slice(cells=300))
    content = (source / "one.h5ad").read_bytes()
    (source / "one.h5ad").write_bytes(b"obs,var\n1,2\n")
    refused(source, tmp_path / "out", "one.h5ad: is not an HDF5 file")
    (source / "one.h5ad").write_bytes(b"")
    refused(source, tmp_path / "out", "one.h5ad: is not an HDF5 file")
    for length in (1000, len(content) // 2, len(content) - 100):
        (source / "one.h5ad").write_bytes(content[:length])
        refused(source, tmp_path / "out", "one.h5ad", "cannot be read")


def change(path: Path, dataset: str, place: int, value: int) -> None:
    with h5py.File(path, "r+") as file:
        file[dataset][place] = value


@pytest.mark.parametrize("form", ["csr", "csc"])
@pytest.mark.parametrize(
    ("dataset", "place", "value"),
    [
        ("X/indices", 5, 10**6),
        ("X/indices", 5, -3),
        ("X/indptr", 4, 10**6),
        ("X/indptr", 4, -1),
        ("X/indptr", 0, 3),
    ],
)
def test_indices_that_point_outside_are_found_before_they_are_followed(
    tmp_path, form, dataset, place, value
):
    source = write(tmp_path / "in", one=make_slice(form=form))
    change(source / "one.h5ad", dataset, place, value)
    refused(source, tmp_path / "out", "one.h5ad: X")


def test_parts_of_x_that_do_not_fit_one_another(tmp_path):
    source = write(tmp_path / "in", one=make_slice())
    with h5py.File(source / "one.h5ad", "r+") as file:
        file["X"].attrs["shape"] = [41, 12]
    refused(source, tmp_path / "out", "one.h5ad: X has shape (41, 12)", "40 cells x 12 genes")
    source = write(tmp_path / "in", one=make_slice(slices=["a"]))
    change(source / "one.h5ad", "obs/slice_id/codes", 2, 5)
    refused(source, tmp_path / "out", "one.h5ad: obs['slice_id'] has codes without a category")


FLIPS = """
import sys
from pathlib import Path
import numpy as np
from alphastomics.errors import InputError
from alphastomics.preprocessing import subprocess_reader
from tests.preprocessing.tissue import run
subprocess_reader.PATIENCE_SECONDS = 10.0
source, target, rounds = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
whole = bytearray((source / "one.h5ad").read_bytes())
rng = np.random.default_rng(int(sys.argv[4]))
for number in range(rounds):
    place = int(rng.integers(len(whole)))
    print(place, flush=True)
    flipped = bytearray(whole)
    flipped[place] ^= 1 << int(rng.integers(8))
    (source / "one.h5ad").write_bytes(flipped)
    try:
        run(source, target / str(number), cell_type_key="cell_type")
    except InputError as error:
        assert "\\n" not in str(error)
"""


@pytest.mark.parametrize(
    "rounds", [30, pytest.param(400, marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("form", ["csr", "dense"])
def test_a_flipped_bit_anywhere_is_refused_in_one_line_or_harmless(tmp_path, form, rounds):
    source = write(tmp_path / "in", one=make_slice(form=form, types=["a"], slices=["x", "y"]))
    command = [sys.executable, "-c", FLIPS, str(source), str(tmp_path / "out"), str(rounds), "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=Path.cwd()
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("child", "word"), [("import time; time.sleep(60)", "hang"), ("import os; os.abort()", "crash")]
)
def test_a_file_that_stops_or_kills_the_hdf5_library_is_refused(tmp_path, monkeypatch, child, word):
    monkeypatch.setattr("alphastomics.preprocessing.subprocess_reader.CHILD", child)
    monkeypatch.setattr("alphastomics.preprocessing.subprocess_reader.PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr("alphastomics.preprocessing.subprocess_reader.BYTES_PER_SECOND", 1e9)
    monkeypatch.setattr(
        "alphastomics.preprocessing.subprocess_reader.READER", subprocess_reader.SubprocessReader()
    )
    source = write(tmp_path / "in", one=make_slice())
    refused(source, tmp_path / "out", "one.h5ad", f"makes the HDF5 library {word}")


def test_the_child_of_a_parent_that_was_killed_ends_without_a_word():
    child = subprocess.Popen(
        [sys.executable, "-c", subprocess_reader.CHILD.format(path=sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    child.stdout.close()
    child.stdin.write(b'["walk", {"path": "nowhere.h5ad", "options": {}}]\n')
    child.stdin.close()
    assert child.wait(60) == 0
    assert child.stderr.read() == b""
    child.stderr.close()


def test_the_child_leaves_an_interruption_to_its_parent():
    child = subprocess.Popen(
        [sys.executable, "-c", subprocess_reader.CHILD.format(path=sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    child.stdin.write(b'["walk", {"path": "nowhere.h5ad", "options": {}}]\n')
    child.stdin.flush()
    assert b"no such file" in child.stdout.readline()
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=60)[1] == b""
    assert child.returncode == 0
