"""Radii by held-out slices: they hold on further slices, follow the cells, and are found again."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from alphastomics.errors import InputError
from alphastomics.generation.cells import Blank, InputCells, blank_cells
from alphastomics.generation.generate import Generated
from alphastomics.generation.left_out import (
    LeftOutErrors,
    dispersion_of,
    errors_of,
    read_errors,
    with_radii,
)

CELLS, GENES = 800, 12


def slice_of(seed: int) -> tuple[InputCells, Generated]:
    """Cells of two kinds: one is predicted well, the other all over the tissue; rotated."""
    rng = np.random.default_rng(seed)
    true = np.zeros((CELLS, 3))
    true[:, :2] = rng.uniform(-1, 1, size=(CELLS, 2))
    scattered = np.arange(CELLS) % 2 == 1
    kind = np.random.default_rng(0).normal(size=(2, GENES)) * 3
    along = np.random.default_rng(1).normal(size=(2, GENES))
    expression = kind[scattered.astype(int)] + 0.2 * rng.normal(size=(CELLS, GENES))
    expression[~scattered] += true[~scattered][:, :2] @ along
    noise = np.where(scattered[:, None], 0.6, 0.1) * rng.normal(size=(CELLS, 2))
    estimate = true.copy()
    estimate[:, :2] += noise
    estimate = estimate @ np.array([[0.0, 1, 0], [1, 0, 0], [0, 0, 1]]) + [5, 6, 0]
    blank = blank_cells(Blank(CELLS), GENES, dims=2)
    cells = replace(blank, expression=expression.astype(np.float32), position=true)
    zeros = np.zeros((CELLS, 3), np.float32)
    return cells, Generated(cells.expression, cells.expression, estimate.astype(np.float32), zeros)


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_radii_hold_on_another_slice_and_follow_the_cells(level):
    cells, generated = slice_of(11)
    back = (generated.position.astype(np.float64) - [5, 6, 0])[:, [1, 0, 2]]
    error = np.linalg.norm(back - cells.position, axis=1)
    scattered = np.arange(CELLS) % 2 == 1
    shares = []
    for seed in (1, 2, 3, 4):
        errors = errors_of(*slice_of(seed), "slice one")
        assert errors is not None
        radii = with_radii(cells, generated, errors, level).radii
        shares.append((error <= radii.radius).mean())
        assert radii.radius[scattered].mean() > 2 * radii.radius[~scattered].mean()
        assert radii.calibrated_by == "held out: slice one"
    assert np.mean(shares) == pytest.approx(level, abs=0.04)


def test_the_dispersion_is_that_of_neighbours_by_expression():
    cells, generated = slice_of(3)
    found = dispersion_of(cells, np.arange(CELLS), generated.position)
    scattered = np.arange(CELLS) % 2 == 1
    assert found[scattered].mean() > 2 * found[~scattered].mean()
    # Where the cells lie as a whole, and in which order they come, says nothing.
    order = np.random.default_rng(0).permutation(CELLS)
    moved = generated.position[order] + np.float32(100)
    again = dispersion_of(cells.take(order), np.arange(CELLS), moved)
    np.testing.assert_allclose(again, found[order], rtol=0.05)


def test_a_perfect_estimate_calibrates_nothing():
    cells, generated = slice_of(1)
    exact = replace(generated, position=cells.position.astype(np.float32))
    errors = errors_of(cells, exact, "slice one")
    assert errors is None or max(errors.scale(np.ones(1))) < 1e-3


def test_without_errors_there_are_no_radii():
    cells, generated = slice_of(1)
    assert with_radii(cells, generated, None, 0.9) is generated


def test_errors_are_found_in_a_run_and_in_an_exported_model(tmp_path: Path):
    errors = LeftOutErrors(held_out="slice b", constant=1.0, slope=2.0, errors=[0.5, 1.0])
    np.testing.assert_allclose(errors.scale(np.array([0.0, 2.0])), [1, 3])
    verdict = {"position_errors": errors.model_dump(), "sentences": []}
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    checkpoint = run / "checkpoints/last.ckpt"
    assert read_errors(checkpoint) is None
    (run / "verdict.json").write_text(json.dumps(verdict))
    assert read_errors(checkpoint) == read_errors(run) == errors
    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "record.json").write_text(json.dumps({"verdict": verdict}))
    assert read_errors(exported) == errors
    (exported / "record.json").write_text(
        json.dumps({"verdict": {"position_errors": {"slope": 1}}})
    )
    with pytest.raises(InputError, match="damaged: position_errors"):
        read_errors(exported)
