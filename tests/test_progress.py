"""Progress: what lines say of slow and of resumed work, and the bar of a notebook."""

import sys
from types import ModuleType

import pytest

from alphastomics.io.progress import ProgressLines, track


def test_a_slow_rate_does_not_read_as_zero():
    lines = ProgressLines("sample", 100, "network calls")
    lines.advance(2)
    assert "0.2 network calls/s" in lines.line(lines.started + 10)
    assert "2,000 network calls/s" in lines.line(lines.started + 0.001)


def test_the_time_left_of_a_resumed_run_counts_what_it_did_itself():
    lines = ProgressLines("train", 1_000, "cells", done=900)
    lines.advance(10)
    # 10 cells in 10 s, and 90 to go: the 900 of the run before say nothing of the rate.
    said = lines.line(lines.started + 10)
    assert said == "train: 910/1,000 cells (91%), 1 cells/s, 90 s left"


def test_the_time_left_follows_the_recent_rate(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("alphastomics.io.progress.time.monotonic", lambda: clock[0])
    lines = ProgressLines("sample", 3_000, "cells")
    for finished in (100,) * 10 + (10,) * 40:
        clock[0] += 1
        lines.advance(finished)
    # 10 s of 100 cells/s, then 40 s of 10: 1,600 are left at 10 cells/s.
    assert lines.line(50.0) == "sample: 1,400/3,000 cells (47%), 10 cells/s, 160 s left"
    clock[0] += 80  # one long step is a rate, too
    lines.advance(110)
    assert "1.4 cells/s" in lines.line(clock[0])


def test_one_unit_is_spelled_as_one(caplog):
    caplog.set_level("INFO")
    for number in (1, 2_000):
        lines = ProgressLines("write", number, "shards")
        lines.advance(number)
        lines.close()
    assert [line.partition(" in ")[0] for line in caplog.messages] == [
        "write: 1 shard",
        "write: 2,000 shards",
    ]


@pytest.mark.parametrize("notebook", [True, False])
def test_a_notebook_gets_a_bar_though_nothing_is_logged(notebook, monkeypatch, capsys):
    if notebook:
        monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    else:
        monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    with track("train", 4, "cells") as advance:
        advance(4)
    assert ("train: 100%" in capsys.readouterr().err) == notebook
