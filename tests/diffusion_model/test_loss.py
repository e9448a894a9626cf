"""The losses: equal to loops, blind to the frame, safe at coincident cells."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alphastomics.config import Config, LossConfig, MaskingConfig
from alphastomics.diffusion_model import distance
from alphastomics.diffusion_model.distance import distance_loss
from alphastomics.diffusion_model.loss import (
    Cells,
    DualModalLoss,
    Entries,
    LossTerms,
    aligned_loss,
)
from alphastomics.geometry import aligned_sets
from tests.diffusion_model.reference import (
    distance_loss_naive,
    expression_loss_naive,
    kabsch_naive,
)


def cells(num_sets=3, num_cells=7, num_genes=4, seed=0):
    gen = torch.Generator().manual_seed(seed)
    shape = (num_sets, num_cells)

    def draw(*size):
        return torch.randn(*size, generator=gen, dtype=torch.float64)

    predicted = Cells(draw(*shape, num_genes), draw(*shape, 3))
    true = Cells(draw(*shape, num_genes), draw(*shape, 3))
    mask = torch.rand(*shape, generator=gen) < 0.7
    mask[-1] = False
    genes = torch.rand(*shape, num_genes, generator=gen) < 0.6
    return predicted, true, mask, genes


def rotation(seed: int = 0) -> torch.Tensor:
    q, _ = torch.linalg.qr(
        torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)).double()
    )
    return q * torch.linalg.det(q)


@given(st.integers(1, 3), st.integers(1, 9), st.integers(0, 99), st.sampled_from([1, 7, 1 << 20]))
def test_distance_loss_and_gradient_equal_the_loop(num_sets, num_cells, seed, pairs):
    predicted, true, mask, _ = cells(num_sets, num_cells, 2, seed)
    values = []
    for loss in (distance_loss, distance_loss_naive):
        position = predicted.position.clone().requires_grad_()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distance, "PAIRS_AT_A_TIME", pairs)
            value = loss(position, true.position, mask)
        value.backward()
        values.append((value.detach(), position.grad))
    torch.testing.assert_close(values[0], values[1])


def test_distance_loss_of_three_cells_by_hand():
    # A 3-4-5 triangle predicted as one point: errors 3, 4, 5.
    true = torch.tensor([[[0.0, 0, 0], [3, 0, 0], [3, 4, 0]]])
    value = distance_loss(torch.zeros(1, 3, 3), true, torch.ones(1, 3, dtype=torch.bool))
    assert float(value) == pytest.approx((9 + 16 + 25) / 3)


def test_coincident_cells_give_a_finite_gradient():
    position = torch.zeros(1, 4, 3, requires_grad=True)
    true = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(0))
    distance_loss(position, true, torch.ones(1, 4, dtype=torch.bool)).backward()
    assert torch.isfinite(position.grad).all()


def test_near_cells_keep_their_distance_far_from_the_origin():
    true = torch.tensor([[[1000.0, 0, 0], [1000.01, 0, 0]]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert float(distance_loss(torch.zeros(1, 2, 3), true, mask)) == pytest.approx(1e-4, rel=0.01)


@pytest.mark.parametrize("kind", ["distance", "aligned", "both"])
def test_the_position_loss_is_blind_to_the_frame(kind: str):
    predicted, true, mask, _ = cells()
    loss = DualModalLoss(position_loss=kind)
    moved = Cells(predicted.expression, predicted.position @ rotation().T + 5.0)
    one, other = (loss(each, true, Entries(mask)).position for each in (predicted, moved))
    torch.testing.assert_close(one, other)
    assert float(one) > 0.1


def test_mirror_images_count_unless_reflection_is_allowed():
    _, true, _, _ = cells(1, 9)
    mask = torch.ones(1, 9, dtype=torch.bool)
    mirrored = true.position * torch.tensor([1.0, 1.0, -1.0])
    assert float(aligned_loss(mirrored, true.position, mask, reflection=True)) < 1e-20
    assert float(aligned_loss(mirrored, true.position, mask, reflection=False)) > 0.1


@pytest.mark.parametrize("reflection", [True, False])
def test_alignment_equals_scipys(reflection: bool):
    for seed in range(5):
        predicted, true, _, _ = cells(1, 12, seed=seed)
        mask = torch.ones(1, 12, dtype=torch.bool)
        found = aligned_sets(true.position, predicted.position, mask, reflection=reflection)[0]
        wanted = kabsch_naive(
            true.position[0].numpy(), predicted.position[0].numpy(), reflection=reflection
        )
        np.testing.assert_allclose(found.numpy(), wanted, atol=1e-7)


def test_flat_sets_and_single_cells_align_without_nan():
    planar = torch.randn(1, 6, 3, generator=torch.Generator().manual_seed(1))
    planar[..., 2] = 0
    mask = torch.ones(1, 6, dtype=torch.bool)
    rotated = planar @ rotation().float().T
    assert float(aligned_loss(rotated, planar, mask, reflection=False)) < 1e-10
    one = torch.ones(1, 1, 3)
    assert float(aligned_loss(one, one * 3, mask[:, :1], reflection=True)) == 0


def test_the_alignments_own_derivative_adds_nothing():
    predicted, true, mask, _ = cells(1, 8)
    mask[:] = True

    def loss(position):
        return aligned_loss(position, true.position, mask, reflection=False)

    position = predicted.position.requires_grad_()
    assert torch.autograd.gradcheck(loss, (position,), atol=1e-5)


def test_expression_loss_equals_the_loop_over_real_cells_and_measured_genes():
    predicted, true, mask, genes = cells()
    terms = DualModalLoss()(predicted, true, Entries(mask, genes))
    wanted = expression_loss_naive(predicted.expression, true.expression, mask, genes)
    assert float(terms.expression) == pytest.approx(wanted)


def test_the_total_is_the_weighted_sum_of_its_terms():
    predicted, true, mask, genes = cells()
    hidden = Entries(mask, genes, None, genes, mask[..., None].expand(-1, -1, 3))
    terms = DualModalLoss(2.0, 3.0, 0.5)(predicted, true, hidden, torch.tensor(0.25))
    wanted = 2 * terms.expression + 3 * terms.position + 0.5 * terms.masked + 0.25
    torch.testing.assert_close(terms.total, wanted)


def test_every_term_has_a_weight_and_those_of_a_config_are_used():
    section = {"lambda_expression": 2.0, "lambda_position": 3.0, "reflection": False}
    config = Config(loss=LossConfig(**section), masking=MaskingConfig(reconstruction_weight=0.25))
    loss = DualModalLoss.from_config(config)
    assert loss.weights == {"expression": 2.0, "position": 3.0, "masked": 0.25, "balance": 1.0}
    assert list(loss.weights) == [name for name in LossTerms._fields if name != "total"]
    assert not loss.reflection


@pytest.mark.parametrize("kind", ["distance", "aligned"])
def test_padding_and_unmeasured_genes_change_nothing_even_when_not_finite(kind: str):
    predicted, true, mask, genes = cells()
    loss = DualModalLoss(position_loss=kind)
    before = loss(predicted, true, Entries(mask, genes))
    spoilt = Cells(
        torch.where(mask[..., None] & genes, predicted.expression, torch.inf),
        torch.where(mask[..., None], predicted.position, 1e6),
    )
    after = loss(spoilt, true, Entries(mask, genes))
    torch.testing.assert_close(after, before)


def test_a_given_modality_is_not_scored():
    predicted, true, mask, _ = cells(2)
    mask[:] = True
    noised = torch.tensor([[True, False], [False, True]])
    terms = DualModalLoss()(predicted, true, Entries(mask, None, noised))
    one, two = (
        DualModalLoss()(
            Cells(*(part[index : index + 1] for part in predicted)),
            Cells(*(part[index : index + 1] for part in true)),
            Entries(mask[index : index + 1]),
        )
        for index in (0, 1)
    )
    torch.testing.assert_close(terms.expression, one.expression)
    torch.testing.assert_close(terms.position, two.position)


def test_masked_reconstruction_sees_hidden_entries_alone_and_the_clean_values():
    predicted, true, mask, _ = cells(2)
    mask[:] = True
    hidden = torch.zeros_like(true.expression, dtype=torch.bool)
    hidden[0, 0, 0] = True
    terms = DualModalLoss()(predicted, true, Entries(mask, hidden_expression=hidden))
    wanted = (predicted.expression[0, 0, 0] - true.expression[0, 0, 0]) ** 2
    torch.testing.assert_close(terms.masked, wanted)


def test_an_empty_batch_has_loss_zero_and_gradient_zero():
    predicted, true, mask, genes = cells()
    position = predicted.position.requires_grad_()
    expression = predicted.expression.requires_grad_()
    for kind in ("distance", "aligned"):
        loss = DualModalLoss(position_loss=kind)
        total = loss(Cells(expression, position), true, Entries(mask & False, genes)).total
        total.backward()
        assert float(total.detach()) == 0
    assert float(position.grad.abs().sum() + expression.grad.abs().sum()) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("num_cells", [1, 2, 63, 64, 65, 1000])
def test_the_gpu_kernel_equals_the_cpu(num_cells: int):
    predicted, true, mask, _ = cells(3, num_cells)
    results = []
    for device in ("cpu", "cuda"):
        position = predicted.position.to(device, torch.float32).requires_grad_()
        value = distance_loss(position, true.position.to(device, torch.float32), mask.to(device))
        value.backward()
        results.append((value.detach().cpu(), position.grad.cpu()))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)
