"""Whole files, visible work, and one seed for all."""

import errno
import hashlib
import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from alphastomics.diffusion_model.randomness import seed_everything
from alphastomics.io.files import replacing, sha256_of, write_text
from alphastomics.io.progress import ProgressLines, track


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "result.txt"
    write_text(path, "old")
    with pytest.raises(RuntimeError, match="midway"), replacing(path) as partial:  # noqa: PT012
        partial.write_text("half")
        raise RuntimeError("midway")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_finished_write_replaces_the_old_file(tmp_path: Path):
    path = tmp_path / "result.txt"
    write_text(path, "old")
    write_text(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_named_by_the_file_that_did_not_fit(tmp_path: Path):
    path = tmp_path / "large"
    with pytest.raises(OSError, match="large") as refusal, replacing(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert refusal.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []


def test_the_digest_is_that_of_hashlib(tmp_path: Path):
    content = bytes(range(256)) * 10_000
    (tmp_path / "x").write_bytes(content)
    assert sha256_of(tmp_path / "x") == hashlib.sha256(content).hexdigest()


def test_progress_says_done_share_rate_and_time_left():
    lines = ProgressLines("stage 1", 1000, "cells")
    lines.done = 250
    assert (
        lines.line(lines.started + 5.0) == "stage 1: 250/1,000 cells (25%), 50 cells/s, 15 s left"
    )


def test_progress_is_silent_in_a_library_and_ends_with_a_line_at_the_door(caplog):
    with track("work", 3, "cells") as advance:
        advance(3)
    assert caplog.records == []
    with caplog.at_level(logging.INFO, "alphastomics"), track("work", 3, "cells") as advance:
        advance(3)
    assert caplog.messages[-1].startswith("work: 3 cells in ")


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def test_one_seed_sets_every_generator():
    seed_everything(5, deterministic=False)
    first = draws()
    seed_everything(5, deterministic=False)
    assert draws() == first
    seed_everything(6, deterministic=False)
    assert all(one != other for one, other in zip(draws(), first, strict=True))


def test_deterministic_is_switched_on_and_off():
    seed_everything(5, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    seed_everything(5, deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled()
