"""Checkpoints written beside the training: as of the moment they were asked for, complete."""

from pathlib import Path

import pytest
import torch

from alphastomics.diffusion_model import background_save
from alphastomics.diffusion_model.background_save import BackgroundCheckpointIO, same_file


def test_a_checkpoint_is_of_the_moment_it_was_asked_for(tmp_path):
    files, weight = BackgroundCheckpointIO(), torch.ones(3)
    files.save_checkpoint({"weight": weight, "steps": [weight[:1]]}, tmp_path / "last.ckpt")
    weight += 1
    files.wait()
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert content["weight"].tolist() == [1, 1, 1]
    assert content["steps"][0].tolist() == [1]


def test_checkpoints_are_held_back_and_replaced_until_a_write_is_due(tmp_path, monkeypatch):
    last, first, second = (tmp_path / name for name in ("last.ckpt", "first.ckpt", "second.ckpt"))
    written = []
    save = background_save.ChecksummedCheckpointIO.save_checkpoint
    monkeypatch.setattr(
        background_save.ChecksummedCheckpointIO,
        "save_checkpoint",
        lambda self, content, path: (written.append(path), save(self, content, path)),
    )
    files = BackgroundCheckpointIO()
    files.save_checkpoint({"step": 1}, last)
    files.keep(last, first)
    files.write_if_due()
    assert list(tmp_path.iterdir()) == []
    files.save_checkpoint({"step": 2}, last)
    files.keep(last, second)
    files.remove(first)  # which no longer is among the best
    files.written_at -= background_save.SECONDS_BETWEEN_WRITES
    files.write_if_due()
    files.wait()
    assert written == [second]
    assert sorted(tmp_path.iterdir()) == [last, second]
    assert torch.load(second, weights_only=True)["step"] == 2
    assert second.samefile(last)


def test_a_run_that_is_killed_between_two_writes_has_every_file_that_the_last_counts_on(
    tmp_path, monkeypatch
):
    last, first, second = (tmp_path / name for name in ("last.ckpt", "first.ckpt", "second.ckpt"))
    order = []
    replacing = Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda path, target: (order.append(target), replacing(path, target))[1]
    )
    files = BackgroundCheckpointIO()
    for step, name in enumerate((first, second)):
        files.save_checkpoint({"step": step}, last)
        files.keep(last, name)
    files.save_checkpoint({"step": 2}, last)
    files.wait()
    assert order == [first, second, last]


def test_what_follows_a_checkpoint_waits_for_it_and_for_its_success(tmp_path):
    files, seen = BackgroundCheckpointIO(), []
    files.save_checkpoint({"a": 1}, tmp_path / "last.ckpt")
    files.then(lambda: seen.append((tmp_path / "last.ckpt").exists()))
    files.wait()
    assert seen == [True]
    (tmp_path / "file").touch()
    files.save_checkpoint({"a": 1}, tmp_path / "file" / "last.ckpt")  # a file is no folder
    files.then(lambda: seen.append(True))
    with pytest.raises(OSError, match="file"):
        files.wait()
    assert seen == [True]
    files.wait()  # said once


@pytest.mark.parametrize("links", [True, False])
def test_a_second_name_outlives_the_first(tmp_path: Path, monkeypatch, links: bool):
    if not links:
        monkeypatch.setattr(background_save.os, "link", refuse)
    first, second = tmp_path / "last.ckpt", tmp_path / "best.ckpt"
    first.write_text("one")
    second.write_text("old")
    same_file(first, second)
    assert first.samefile(second) == links
    replacement = tmp_path / "new"
    replacement.write_text("two")
    replacement.replace(first)
    assert second.read_text() == "one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", "last.ckpt"]


def refuse(*_args: object) -> None:
    """Stand in for a file system without links."""
    raise OSError("no links here")
