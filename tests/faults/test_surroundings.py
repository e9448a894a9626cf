"""Odd surroundings: environment variables, streams, limits and places, around sound commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from tests.faults.children import ROOT, leftovers
from tests.faults.conftest import Tiny
from tests.faults.door import refused

LAUNCHER = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_NTASKS", "SLURM_PROCID"]


@pytest.mark.parametrize("name", LAUNCHER)
def test_a_launchers_variable_that_is_no_number_is_refused(name, door, monkeypatch):
    monkeypatch.setenv(name, "abc")
    refused(door("info", "--num_genes", 5), f"{name} is 'abc'")


def test_a_slurm_job_that_lightning_cannot_use_is_refused(tiny, door, monkeypatch):
    for name, value in {"NTASKS": "2", "JOB_NAME": "x", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    refused(door("train", "--config", tiny.config), "SLURM", "--ntasks")


class Unreachable(MemoryFileSystem):
    """A far place whose library has errors of its own, as the Hub's client has."""

    protocol = "unreachable"

    def cat_file(self, path, start=None, end=None, **_options):
        raise LookupError("no route to host")


@pytest.mark.parametrize("command", ["train", "info", "extract"])
def test_a_far_place_that_cannot_be_reached_is_refused(command, tiny, door):
    register_implementation("unreachable", Unreachable, clobber=True)
    model = ["--checkpoint", tiny.checkpoint] if command == "extract" else []
    outcome = door(command, *model, "--data_dir", "unreachable://owner/name")
    refused(outcome, "there is no such folder here", "no route to host")


def shell(line: str, tiny: Tiny, cwd: Path, **environment: str | None) -> tuple[int, str]:
    """Run a line of the shell, in which $GO is the program; return the status and what was said."""
    model = f"--checkpoint {tiny.checkpoint} --config {tiny.config}"
    known: dict[str, str | None] = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GO": f"{sys.executable} -m alphastomics",
        "SAMPLE": f"sample {model} --input_data {tiny.slice} --output made.h5ad",
        "PREPROCESS": f"preprocess --input_dir {tiny.slices} --output_dir out",
        "TRAIN": f"train --config {tiny.config}",
        **environment,
    }
    found = subprocess.run(
        ["bash", "-c", line],
        cwd=cwd,
        env={name: value for name, value in known.items() if value is not None},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "Traceback" not in found.stderr, found.stderr
    assert leftovers(cwd) == []
    return found.returncode, found.stderr


GONE = "mkdir d; cd d; rmdir ../d; "
SOUND = {
    "no stdout": ("$GO config >&-", {}),
    "no stderr": ("$GO $PREPROCESS 2>&-", {}),
    "no stdin": ("$GO $PREPROCESS <&-", {}),
    "a full stderr": ("$GO $PREPROCESS 2>/dev/full", {}),
    "a reader that leaves": ("set -o pipefail; $GO config | true", {}),
    "a width of letters": ("$GO --help", {"COLUMNS": "abc"}),
    "a language that is none": ("$GO $PREPROCESS", {"LANG": "xx_YY.z", "LC_ALL": "xx_YY.z"}),
    "no place for temporary files": ("$GO $PREPROCESS", {"TMPDIR": "/nowhere"}),
}
SOUND_BUT_SLOW = {
    "no stream at all": ("$GO $SAMPLE <&- >&- 2>&-", {}),
    "threads of letters": ("$GO $SAMPLE", {"OMP_NUM_THREADS": "abc", "MKL_NUM_THREADS": "x"}),
    "no home": ("$GO $SAMPLE", {"HOME": None, "TERM": "dumb"}),
    "a home that cannot be written": ("$GO $TRAIN", {"HOME": "/proc"}),
    "warnings raised": ("$GO $TRAIN", {"PYTHONWARNINGS": "error"}),
    "devices that are none": ("$GO $SAMPLE", {"CUDA_VISIBLE_DEVICES": "junk,-7"}),
    "few open files": ("ulimit -n 40; $GO $SAMPLE", {}),
    "modules of ours in the working folder": (
        "for name in h5py anndata scipy; do echo 'raise SystemExit(9)' > $name.py; done; "
        f"{sys.prefix}/bin/alphastomics $SAMPLE",
        {},
    ),
}
UNSOUND = {
    "a working folder that is gone": (GONE + "$GO config", {}, "working folder was deleted"),
    "a full stdout": ("$GO config >/dev/full", {}, "No space left on device"),
}
UNSOUND_AND_SLOW = {
    "little memory": ("ulimit -v 900000; $GO $SAMPLE", {}, "not enough memory"),
    "a Hub that is nowhere": (
        "$GO train --data_dir owner/name",
        {"HF_ENDPOINT": "nonsense"},
        "there is no such folder here",
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_odd_surroundings_change_nothing(name, tiny, tmp_path):
    line, environment = SOUND[name]
    assert shell(line, tiny, tmp_path, **environment)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND_BUT_SLOW)
def test_odd_surroundings_of_the_network_change_nothing(name, tiny, tmp_path):
    line, environment = SOUND_BUT_SLOW[name]
    status, err = shell(line, tiny, tmp_path, **environment)
    assert status == 0, err


@pytest.mark.parametrize("name", UNSOUND)
def test_surroundings_in_which_nothing_can_be_done_are_told_in_one_line(name, tiny, tmp_path):
    line, environment, words = UNSOUND[name]
    status, err = shell(line, tiny, tmp_path, **environment)
    assert status == 2
    assert words in err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSOUND_AND_SLOW)
def test_surroundings_that_fail_on_the_way_are_told_in_one_line(name, tiny, tmp_path):
    line, environment, words = UNSOUND_AND_SLOW[name]
    status, err = shell(line, tiny, tmp_path, **environment)
    assert status == 2, err
    assert words in err.splitlines()[-1]
