"""What a test is expected to take: it grows with cells and tasks, and is said before the work."""

import logging
from pathlib import Path

import numpy as np

from alphastomics.config import SamplingConfig
from alphastomics.generation.cells import read_processed, some_cells
from alphastomics.generation.commands import load_for_use
from alphastomics.generation.commands import test as score
from alphastomics.generation.expected_time import expected_time, spelled
from alphastomics.tasks import EXPR_TO_POS, JOINT, POS_TO_EXPR
from tests.generation.conftest import SETTINGS, checkpoint


def test_fewer_tasks_and_cells_take_less_time(workspace: Path):
    module, genes = load_for_use(checkpoint(workspace))
    cells = read_processed(workspace / "processed", genes, "test")
    known = read_processed(workspace / "processed", genes, "train")
    settings = SamplingConfig(num_steps=50, num_samples=8)
    every = expected_time(module, cells, known, settings, (EXPR_TO_POS, POS_TO_EXPR, JOINT))
    new = expected_time(module, cells, known, settings, (JOINT,))
    assert new.network < every.network
    assert new.baselines == 0 < every.baselines
    assert new.scores < every.scores
    few = expected_time(
        module, some_cells(cells, np.arange(12)), None, settings, (EXPR_TO_POS, POS_TO_EXPR)
    )
    assert few.baselines == 0
    assert few.scores < every.scores
    assert every.total == sum(every)


def test_durations_are_spelled_in_the_unit_that_suits_them():
    words = [spelled(seconds) for seconds in (0.2, 12.0, 89.0, 95.0, 600.0, 7200.0)]
    assert words == ["1 s", "10 s", "90 s", "2 minutes", "10 minutes", "2.0 hours"]


def test_the_time_is_said_before_the_work(workspace: Path, tmp_path: Path, caplog):
    with caplog.at_level(logging.INFO):
        score(
            SETTINGS,
            checkpoint=checkpoint(workspace, "expr_to_pos"),
            input_data=workspace / "processed",
            split="test",
            output=tmp_path / "scores.json",
        )
    lines = [record.getMessage() for record in caplog.records]
    said = next(n for n, line in enumerate(lines) if line.startswith("test: expr_to_pos of "))
    worked = next(n for n, line in enumerate(lines) if line.startswith("score expr_to_pos"))
    assert said < worked
    assert "in 2 slice(s) takes about" in lines[said]
