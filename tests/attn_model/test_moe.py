"""Mixture of experts: equal to a loop over cells, counted, balanced, deaf to padding."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alphastomics.attn_model import MixtureOfExperts, dispatch
from alphastomics.attn_model.accounting import active_parameters, total_parameters
from alphastomics.attn_model.layers import FeedForward
from alphastomics.attn_model.routing import (
    BIAS_STEP,
    balance_loss,
    normalized_use_entropy,
    route,
    router_statistics,
)
from alphastomics.errors import InputError
from tests.attn_model.reference import moe_naive

# (experts, top_k, size, width of cells): k = 1, k = E, one expert, widths off the 16-byte grid.
SHAPES = [
    (4, 2, "split", 8),
    (4, 1, "full", 8),
    (3, 3, "split", 12),
    (1, 1, "split", 8),
    (5, 2, "full", 7),
]


def make(num_experts=4, top_k=2, size="split", d_model=8, **settings):
    d_ff = 4 * num_experts
    moe = MixtureOfExperts(d_model, d_ff, num_experts, top_k, expert_size=size, **settings)
    with torch.no_grad():
        moe.router.weight.mul_(3)
    return moe.eval()


def gradients(moe, cells, shift, outputs, probe):
    inputs = [cells, shift, *(p for name, p in moe.named_parameters() if "noise" not in name)]
    mixed, balance = outputs
    return torch.autograd.grad((mixed * probe).sum() + balance, inputs, materialize_grads=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_experts_equal_the_loop_over_cells_in_values_and_all_gradients(shape, dtype, ragged_mask):
    moe = make(*shape).to(dtype)
    cells = torch.randn(3, 7, moe.d_model, dtype=dtype, requires_grad=True)
    shift = torch.randn(3, moe.num_experts, dtype=dtype, requires_grad=True)
    probe = torch.randn(3, 7, moe.d_model, dtype=dtype)
    mixed, statistics = moe(cells, ragged_mask, shift)
    fast = mixed, statistics.balance_loss
    naive = moe_naive(moe, cells, ragged_mask, shift)
    torch.testing.assert_close(fast, tuple(naive))
    torch.testing.assert_close(
        gradients(moe, cells, shift, fast, probe), gradients(moe, cells, shift, naive, probe)
    )


@given(
    st.integers(1, 6).flatmap(
        lambda experts: st.tuples(
            st.just(experts),
            st.lists(st.lists(st.integers(0, experts - 1), min_size=2, max_size=2), min_size=1),
        )
    )
)
def test_a_plan_is_a_permutation_that_gathers_each_experts_assignments_in_order(case):
    num_experts, choices = case
    choice = torch.tensor(choices)
    plan = dispatch.plan_dispatch(choice, num_experts)
    rows = torch.arange(choice.numel())
    assert torch.equal(plan.order.sort().values, rows)
    assert torch.equal(plan.order[plan.inverse], rows)
    naive = sorted(range(choice.numel()), key=lambda row: choice.flatten()[row].item())
    assert plan.order.tolist() == naive
    ends = [(choice <= expert).sum().item() for expert in range(num_experts)]
    assert plan.ends.tolist() == ends


def test_the_grouped_product_and_the_one_an_expert_agree(monkeypatch):
    moe, cells = make(), torch.randn(2, 9, 8)
    assert dispatch._grouped_mm_serves(moe.up_weight)
    grouped, _ = moe(cells)
    monkeypatch.setattr(dispatch, "_GROUPED_MM", None)
    torch.testing.assert_close(moe(cells)[0], grouped)


def test_an_expert_without_cells_gets_no_gradient_and_harms_nobody():
    moe = make(4, 1).double()
    with torch.no_grad():
        moe.router.weight.zero_()
    shift = torch.tensor([[9.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    cells = torch.randn(1, 6, 8, dtype=torch.float64)
    mixed, statistics = moe(cells, None, shift)
    mixed.sum().backward()
    assert statistics.counts.tolist() == [6, 0, 0, 0]
    assert (moe.up_weight.grad[1:] == 0).all()
    assert moe.up_weight.grad[0].abs().sum() > 0
    everyone = torch.ones(1, 6, dtype=torch.bool)
    torch.testing.assert_close(mixed, moe_naive(moe, cells, everyone, shift)[0])


def test_no_cell_is_dropped_when_all_choose_the_same_expert():
    moe = make(4, 2)
    same = torch.randn(1, 1, 8).expand(1, 50, 8)
    mixed, statistics = moe(same)
    torch.testing.assert_close(mixed, mixed[:, :1].expand_as(mixed))
    assert sorted(statistics.counts.tolist()) == [0, 0, 50, 50]


def test_permuting_cells_permutes_the_output(ragged_mask):
    moe, cells, order = make(), torch.randn(3, 7, 8), torch.randperm(7)
    permuted, _ = moe(cells[:, order], ragged_mask[:, order])
    torch.testing.assert_close(permuted, moe(cells, ragged_mask)[0][:, order])


def test_padding_is_never_counted_and_comes_back_as_zeros_whatever_it_holds(ragged_mask):
    moe, cells = make(), torch.randn(3, 7, 8)
    wild = cells.masked_fill(~ragged_mask[..., None], float("nan")).requires_grad_()
    mixed, statistics = moe(wild, ragged_mask)
    assert statistics.counts.sum() == 2 * ragged_mask.sum()
    assert statistics.num_cells == ragged_mask.sum()
    assert (mixed[~ragged_mask] == 0).all()
    (mixed.sum() + statistics.balance_loss).backward()
    assert (wild.grad[~ragged_mask] == 0).all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in moe.parameters())
    alone, alone_statistics = moe(cells[:1, ragged_mask[0]])
    torch.testing.assert_close(mixed[0, ragged_mask[0]], alone[0])
    both, crowd_statistics = moe(cells[[0, 1]], ragged_mask[[0, 1]])
    torch.testing.assert_close(both[0], mixed[0])
    torch.testing.assert_close(crowd_statistics.balance_loss, statistics.balance_loss)
    assert alone_statistics.num_cells == 4


def test_an_all_padded_batch_gives_zeros_and_a_balance_loss_of_zero():
    moe, cells = make(), torch.randn(2, 3, 8, requires_grad=True)
    mixed, statistics = moe(cells, torch.zeros(2, 3, dtype=torch.bool))
    (mixed.sum() + statistics.balance_loss + statistics.z_loss).backward()
    assert (mixed == 0).all()
    assert statistics.balance_loss == 0
    assert cells.grad.isfinite().all()
    assert moe.get_moe_stats()["normalized_entropy"] == pytest.approx(1)


def test_the_balance_loss_of_three_cells_is_the_number_worked_by_hand():
    # Softmax of (log 3, 0) is (3/4, 1/4). Top-1: two cells choose expert 0, one expert 1.
    # f = (2/3, 1/3); P = (3/4 + 3/4 + 1/4, 1/4 + 1/4 + 3/4) / 3 = (7/12, 5/12).
    # L = 2 (2/3 * 7/12 + 1/3 * 5/12) = 19/18.
    logits = torch.tensor([[math.log(3), 0.0], [math.log(3), 0.0], [0.0, math.log(3)]])
    choice, weight = route(logits, torch.zeros(2), 1)
    statistics = router_statistics(logits, choice, torch.ones(3))
    assert statistics.counts.tolist() == [2, 1]
    assert weight.flatten().tolist() == [1, 1, 1]
    assert statistics.balance_loss.item() == pytest.approx(19 / 18)
    # z: every log-partition is log(3 + 1).
    assert statistics.z_loss.item() == pytest.approx(math.log(4) ** 2)


def test_the_balance_loss_is_one_when_even_and_the_number_of_experts_when_collapsed():
    cells = torch.tensor(12.0)
    even = balance_loss(torch.full((4,), 6.0), torch.full((4,), 3.0), cells)
    collapsed = balance_loss(torch.tensor([12.0, 0, 0, 0]), torch.tensor([12.0, 0, 0, 0]), cells)
    assert even.item() == pytest.approx(1)
    assert collapsed.item() == pytest.approx(4)


def test_statistics_of_two_ranks_add_up_to_those_of_the_whole_batch():
    moe, cells = make(), torch.randn(4, 6, 8)
    parts = [moe(half)[1] for half in cells.split(2)]
    whole = moe(cells)[1]
    for name in ("counts", "probability", "num_cells"):
        total = getattr(parts[0], name) + getattr(parts[1], name)
        torch.testing.assert_close(total, getattr(whole, name))


def test_the_documented_parameter_counts_come_out():
    moe = MixtureOfExperts(128, 256, 4, 2)
    assert total_parameters(FeedForward(128, 256)) == 65_920
    assert total_parameters(moe) == 67_328
    assert active_parameters(moe) == 34_176


def test_split_experts_share_the_width_and_full_ones_have_it_each():
    assert MixtureOfExperts(16, 32, 4, 2).up_weight.shape == (4, 16, 8)
    assert MixtureOfExperts(16, 32, 4, 2, expert_size="full").up_weight.shape == (4, 16, 32)


def test_noise_acts_in_training_only_and_its_scale_learns():
    moe, cells = make(), torch.randn(1, 40, 8)
    torch.testing.assert_close(moe(cells)[0], moe(cells)[0], rtol=0, atol=0)
    moe.train()
    first, second = moe(cells), moe(cells)
    assert not torch.equal(first[0], second[0])
    first[1].balance_loss.backward()
    assert moe.noise.weight.grad.abs().sum() > 0


def test_a_shift_of_the_logits_moves_cells_to_the_experts_it_favours():
    moe, cells = make(), torch.randn(2, 30, 8)
    shift = torch.zeros(2, 4)
    torch.testing.assert_close(moe(cells, None, shift)[0], moe(cells)[0])
    shift[1, 3] = 50.0
    moe(cells, None, shift)
    assert moe.get_moe_stats()["expert_counts"][3] >= 30


def test_statistics_tell_expert_use_entropy_and_losses_of_the_last_step():
    moe, cells = make(), torch.randn(2, 30, 8)
    with pytest.raises(InputError, match="no step to report"):
        moe.get_moe_stats()
    moe(torch.randn(1, 4, 8))
    _, statistics = moe(cells)
    stats = moe.get_moe_stats()
    use = stats["expert_usage"]
    torch.testing.assert_close(use, statistics.counts / 120)
    entropy = -sum(float(u) * math.log(u) for u in use if u > 0)
    assert stats["entropy"].item() == pytest.approx(entropy, rel=1e-5)
    assert stats["normalized_entropy"].item() == pytest.approx(entropy / math.log(4), rel=1e-5)
    assert stats["balance_loss"].item() == pytest.approx(statistics.balance_loss.item())
    assert not any(value.requires_grad for value in stats.values())


def test_entropy_is_one_for_even_use_and_zero_for_collapse_and_one_for_a_single_expert():
    counts = torch.tensor([[5.0, 5.0], [10.0, 0.0]])
    torch.testing.assert_close(normalized_use_entropy(counts), torch.tensor([1.0, 0.0]))
    assert normalized_use_entropy(torch.tensor([[7.0]])).item() == 1


def test_bias_balancing_evens_the_load_and_leaves_the_weights_of_the_chosen_alone():
    moe = make(4, 1, balance="bias")
    with torch.no_grad():
        moe.router.weight.mul_(0.1)
    cells = torch.randn(1, 400, 8)
    lopsided = torch.tensor([[0.5, 0.0, 0.0, -0.5]])
    before = moe(cells, None, lopsided)[1].counts
    for _ in range(1500):
        moe.update_balance_bias(moe(cells, None, lopsided)[1].counts)
    after = moe(cells, None, lopsided)[1].counts
    assert normalized_use_entropy(before) < 0.7
    assert normalized_use_entropy(after) > 0.98
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    choice, weight = route(logits, torch.tensor([-5.0, 0.0, 0.0]), 2)
    assert choice.tolist() == [[1, 2]]
    torch.testing.assert_close(weight, torch.tensor([[1.0, 0.0]]).softmax(-1))


def test_one_update_of_the_bias_is_one_step_towards_the_mean_and_travels_with_the_state():
    moe = make(4, 2, balance="bias")
    moe.update_balance_bias(torch.tensor([4.0, 0.0, 2.0, 2.0]))
    assert moe.state_dict()["balance_bias"].tolist() == pytest.approx([-BIAS_STEP, BIAS_STEP, 0, 0])
    with pytest.raises(InputError, match="expected balance 'bias'"):
        make().update_balance_bias(torch.zeros(4))


def test_bf16_stays_within_two_percent_of_float32_with_the_same_choices():
    moe, cells = make(4, 2, d_model=64), torch.randn(2, 50, 64)
    exact, exact_statistics = moe(cells)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, statistics = moe(cells)
    assert torch.equal(statistics.counts, exact_statistics.counts)
    assert (rounded.float() - exact).norm() <= 0.02 * exact.norm()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 5}, r"top_k: expected 1 to num_experts \(4\), got 5"),
        ({"top_k": 0}, "top_k"),
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts": 3}, r"d_ff: expected a multiple of num_experts \(3\)"),
        ({"expert_size": "half"}, "expert_size: expected one of split, full; got 'half'"),
        ({"balance": "luck"}, "balance: expected one of loss, bias; got 'luck'"),
    ],
)
def test_impossible_settings_are_refused(settings, message, as_in_production):
    with pytest.raises(InputError, match=message):
        MixtureOfExperts(16, 32, **settings)


def test_wrong_input_is_refused_with_what_was_expected_and_what_came(as_in_production):
    moe, cells = make(), torch.randn(2, 5, 8)
    for wrong, message in [
        ((cells[..., :6],), r"cells: expected shape \(B, N, 8\), got \(2, 5, 6\)"),
        ((cells.half(),), "expected torch.float32 as the model's weights, got torch.float16"),
        ((cells, torch.ones(2, 5)), "node_mask: expected torch.bool"),
        ((cells, None, torch.zeros(2, 3)), r"logit_shift: expected shape \(2, 4\), got \(2, 3\)"),
    ]:
        with pytest.raises(InputError, match=message):
            moe(*wrong)


@pytest.mark.gpu
def test_on_a_gpu_the_experts_equal_the_cpu():
    moe = MixtureOfExperts(256, 1024, 8, 2).eval()
    cells, mask = torch.randn(2, 333, 256), torch.rand(2, 333) < 0.8
    want, want_statistics = moe(cells, mask)
    got, statistics = moe.cuda()(cells.cuda(), mask.cuda())
    torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(statistics.counts.cpu(), want_statistics.counts)
    with torch.autocast("cuda", torch.bfloat16):
        rounded, _ = moe(cells.cuda(), mask.cuda())
    assert (rounded.float().cpu() - want).norm() <= 0.02 * want.norm()
