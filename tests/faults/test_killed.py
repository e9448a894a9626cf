"""Killed at any moment, and given again: the result is that of an undisturbed run."""

import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.faults.children import digests, leftovers, run, start, strike
from tests.faults.conftest import Tiny

KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
STATUS = {KILL: -9, TERM: 143, INT: 130}


def jobs(tiny: Tiny) -> dict[str, tuple[list[object], tuple[str, ...]]]:
    """Name the command of each kind of work, and the files that make its result."""
    model = ["--checkpoint", tiny.checkpoint, "--config", tiny.config]
    given = ["--input_data", tiny.slice, "--output", "made.h5ad"]
    return {
        "preprocess": (
            ["preprocess", "--input_dir", tiny.slices, "--output_dir", "out"],
            ("out/metadata.json", "out/data/*", "out/scaling.npz"),
        ),
        "train": (
            ["train", "--config", tiny.config, "--epochs", 30, "--resume", "last"],
            ("outputs/*/export/model.safetensors", "outputs/*/metrics.csv"),
        ),
        "sample": (
            ["sample", *model, *given, "--num_steps", 200],
            ("made.h5ad",),
        ),
        "extract": (
            ["extract", *model, "--data_dir", tiny.processed, "--output", "cells.npz"],
            ("cells.npz",),
        ),
    }


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """The result of each job undisturbed, and how long it takes; made when it is asked for."""
    known: dict[str, tuple[dict[str, str], float]] = {}

    def result(name: str) -> tuple[dict[str, str], float]:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            argv, files = jobs(tiny)[name]
            began = time.monotonic()
            status, err = run(*argv, cwd=folder)
            assert status == 0, err
            known[name] = digests(folder, *files), time.monotonic() - began
        return known[name]

    return result


def struck_and_run_again(
    name: str, number: signal.Signals, share: float, tiny: Tiny, whole, work: Path
) -> bool:
    """Strike at a share of a job's time, run it again, compare; tell whether the blow hit."""
    expected, seconds = whole(name)
    argv, files = jobs(tiny)[name]
    status, err = strike(start(*argv, cwd=work), number, share * seconds)
    assert status in (0, STATUS[number], -number), err
    assert "Traceback" not in err
    if number != KILL and status != 0:
        assert [item for item in leftovers(work) if "partial" in item] == []
    # Struck on its way out, after its one file was whole: that is not written over.
    done_before = name in ("sample", "extract") and digests(work, *files) == expected
    again, err = run(*argv, cwd=work)
    assert again == (2 if done_before else 0), err
    assert digests(work, *files) == expected
    return status != 0


SHORT = [
    ("preprocess", KILL, 0.9),
    # Three starts of torch; tests/diffusion_model/test_resume.py has the quick way to the same.
    pytest.param("train", TERM, 0.8, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "number", "share"), SHORT, ids=lambda value: str(value))
def test_struck_once_and_given_again(name, number, share, tiny, whole, work):
    struck_and_run_again(name, number, share, tiny, whole, work)


@pytest.mark.slow
@pytest.mark.parametrize("number", [KILL, TERM, INT], ids=lambda number: number.name)
@pytest.mark.parametrize("name", ["preprocess", "train", "sample", "extract"])
def test_struck_at_random_moments_and_given_again(name, number, tiny, whole, tmp_path):
    rng = np.random.default_rng([number, len(name)])
    hits = 0
    for place, share in enumerate(rng.uniform(0.3, 1.0, 3)):
        work = tmp_path / str(place)
        work.mkdir()
        hits += struck_and_run_again(name, number, float(share), tiny, whole, work)
    assert hits > 0


@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_its_checkpoint_keeps_the_last_whole_one(tiny, tmp_path):
    argv, _ = jobs(tiny)["train"]
    code = """
import os
from alphastomics.io import files
whole = files.flush_to_disk
def dying(path, seen=[0]):
    seen[0] += path.name.startswith(".last.ckpt")
    if seen[0] == 3:
        os.kill(os.getpid(), 9)
    whole(path)
files.flush_to_disk = dying
"""
    status, err = run(*argv, cwd=tmp_path, code=code)
    assert status == -9, err
    last = tmp_path / "outputs/alphastomics/checkpoints/last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] > 0
    assert run(*argv, cwd=tmp_path)[0] == 0
