"""Fitting the position head: what it learns, that it is repeatable, and who has it."""

import numpy as np
import pytest
import torch

from alphastomics.attn_model.position_head import PositionHead
from alphastomics.diffusion_model.position_fit import (
    POWER,
    SOFT_SQUARE,
    RegressionCells,
    fit_ensemble,
    robust_loss,
    targets,
)
from alphastomics.preprocessing.cell_table import CellTable

CELLS, GENES = 600, 8


def advance(finished: int, *, note=None) -> None:
    """Count nothing."""


def cells(seed: int = 0) -> RegressionCells:
    """Cells whose position is a curve of their expression."""
    generator = torch.Generator().manual_seed(seed)
    expression = torch.randn(CELLS, GENES, generator=generator)
    position = torch.stack(
        [expression[:, 0], expression[:, 1] * expression[:, 2], torch.zeros(CELLS)], dim=1
    )
    return RegressionCells(expression, expression.repeat(1, 2), position)


@pytest.mark.parametrize("kind", ["plain", "own", "smoothed"])
def test_unseen_cells_are_predicted_better_than_by_a_linear_fit(kind):
    torch.manual_seed(0)
    ensemble = getattr(PositionHead(GENES, 2 * GENES), kind)
    train, test = cells(0), cells(1)
    fit_ensemble(ensemble, train, 400, advance)
    ensemble.eval()
    expected = ensemble(test.expression[None], test.smoothed[None]).mean(0)
    error = (expected - test.position).square().mean()
    linear = torch.linalg.lstsq(train.expression, train.position).solution
    by_line = (test.expression @ linear - test.position).square().mean()
    assert error < 0.6 * by_line
    assert not any(weight.requires_grad for weight in ensemble.parameters())


def test_the_same_seed_gives_the_same_head():
    heads = []
    for _ in range(2):
        torch.manual_seed(0)
        head = PositionHead(GENES, 2 * GENES)
        fit_ensemble(head.own, cells(), 5, advance)
        heads.append(head.own.state_dict())
    for name, weight in heads[0].items():
        assert torch.equal(weight, heads[1][name])


def test_targets_are_centred_rotated_and_to_scale_by_hand():
    position = np.array([[0.0, 0, 0], [4, 2, 0], [10, 0, 0], [14, 6, 0]])
    numbers = np.array([0, 0, 1, 1], np.int32)
    nothing = np.zeros(4, np.int32)
    table = CellTable(
        np.zeros((4, 1), np.float32), position, nothing, numbers, nothing.astype(np.int64)
    )
    before = position.copy()
    mirror = torch.diag(torch.tensor([-1.0, 1.0, 1.0], dtype=torch.float64))
    rotation = torch.stack([torch.eye(3, dtype=torch.float64), mirror])
    by_slice = targets(table, rotation, 2.0, mixed=False)
    assert by_slice.tolist() == [[-1, -0.5, 0], [1, 0.5, 0], [1, -1.5, 0], [-1, 1.5, 0]]
    mixed = targets(table, rotation, 2.0, mixed=True)
    assert mixed.tolist() == [[-3.5, -1, 0], [-1.5, 0, 0], [-1.5, -1, 0], [-3.5, 2, 0]]
    assert np.array_equal(table.position, before)


def test_the_loss_by_hand():
    expected = torch.tensor([[0.0, 0, 0], [3, 4, 0]])
    by_hand = ((SOFT_SQUARE) ** POWER + (25 + SOFT_SQUARE) ** POWER) / 2
    loss = robust_loss(expected, torch.zeros(2, 3))
    torch.testing.assert_close(loss, torch.tensor(by_hand))


def test_cells_of_two_regions_are_expected_in_the_larger_one_not_between():
    torch.manual_seed(0)
    position = torch.zeros(CELLS, 3)
    position[:, 0] = torch.where(torch.arange(CELLS) < 0.7 * CELLS, 1.0, -1.0)
    ensemble = PositionHead(GENES, 2 * GENES).own
    constant = torch.zeros(CELLS, GENES)
    fit_ensemble(ensemble, RegressionCells(constant, constant, position), 300, advance)
    ensemble.eval()
    expected = ensemble(constant[None, :1], None).mean(0)[0]
    # Least squares would say 0.4.
    assert 0.8 < expected[0] < 1.2
