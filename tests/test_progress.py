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


@pytest.mark.parametrize("notebook", [True, False])
def test_a_notebook_gets_a_bar_though_nothing_is_logged(notebook, monkeypatch, capsys):
    if notebook:
        monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    else:
        monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    with track("train", 4, "cells") as advance:
        advance(4)
    assert ("train: 100%" in capsys.readouterr().err) == notebook
