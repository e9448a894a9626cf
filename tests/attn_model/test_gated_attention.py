"""Gated attention: equal to loops, blind to padding and order, careful with memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alphastomics.attn_model import GatedMultiHeadAttention
from alphastomics.attn_model.linear_attention import LinearMultiHeadAttention
from alphastomics.errors import InputError
from tests.attn_model.reference import attention_naive, linear_kernel, softmax_kernel

GATES = ("none", "headwise", "elementwise")
KINDS = [(gate, norm) for gate in (*GATES, "linear") for norm in (True, False)]


def make(gate: str, use_qk_norm: bool, d_model: int = 12, n_heads: int = 3):
    if gate == "linear":
        return LinearMultiHeadAttention(d_model, n_heads, use_qk_norm=use_qk_norm)
    return GatedMultiHeadAttention(d_model, n_heads, gate_type=gate, use_qk_norm=use_qk_norm)


def kernel(gate: str):
    return linear_kernel if gate == "linear" else softmax_kernel


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-{'qk_norm' if kind[1] else 'no_norm'}")
def attention(request, awaken):
    """Give each kind of attention in float64, with its gate's weights off zero."""
    module = awaken(make(*request.param)).double()
    module.kernel = kernel(request.param[0])
    return module


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


def test_attention_equals_the_loops_in_values_and_all_gradients(attention, ragged_mask):
    cells = torch.randn(3, 7, 12, dtype=torch.float64, requires_grad=True)
    probe = torch.randn(3, 7, 12, dtype=torch.float64)
    inputs = [cells, *attention.parameters()]
    fast = attention(cells, ragged_mask)
    naive = attention_naive(attention, cells, ragged_mask, attention.kernel)
    torch.testing.assert_close(fast, naive)
    fast_grads = torch.autograd.grad((fast * probe).sum(), inputs)
    naive_grads = torch.autograd.grad((naive * probe).sum(), inputs)
    for fast_grad, naive_grad in zip(fast_grads, naive_grads, strict=True):
        torch.testing.assert_close(fast_grad, naive_grad)


def test_attention_without_a_mask_equals_the_loops(attention):
    cells = torch.randn(2, 5, 12, dtype=torch.float64)
    everyone = torch.ones(2, 5, dtype=torch.bool)
    naive = attention_naive(attention, cells, everyone, attention.kernel)
    torch.testing.assert_close(attention(cells), naive)
    torch.testing.assert_close(attention(cells, everyone), naive)


def test_permuting_cells_permutes_the_output(attention, ragged_mask):
    cells, order = torch.randn(3, 7, 12, dtype=torch.float64), torch.randperm(7)
    permuted = attention(cells[:, order], ragged_mask[:, order])
    torch.testing.assert_close(permuted, attention(cells, ragged_mask)[:, order])


def test_padding_and_other_sets_change_nothing(attention):
    cells = torch.randn(1, 5, 12, dtype=torch.float64)
    alone = attention(cells)
    crowd = torch.randn(4, 11, 12, dtype=torch.float64)
    mask = torch.rand(4, 11) < 0.5
    crowd[2, 3:8], mask[2] = cells[0], False
    mask[2, 3:8] = True
    torch.testing.assert_close(attention(crowd, mask)[2, 3:8], alone[0])


def test_whatever_padding_holds_is_ignored_even_nan(attention, ragged_mask):
    cells = torch.randn(3, 7, 12, dtype=torch.float64)
    wild = cells.clone()
    wild[~ragged_mask] = float("nan")
    wild.requires_grad_()
    out = attention(wild, ragged_mask)
    torch.testing.assert_close(out, attention(cells, ragged_mask))
    out.square().sum().backward()
    assert (wild.grad[~ragged_mask] == 0).all()
    assert wild.grad.isfinite().all()


def test_padding_and_empty_sets_come_back_as_zeros_with_finite_gradients(attention, ragged_mask):
    cells = torch.randn(3, 7, 12, dtype=torch.float64, requires_grad=True)
    out = attention(cells, ragged_mask)
    assert (out[~ragged_mask] == 0).all()
    out.square().sum().backward()
    assert all(value.grad.isfinite().all() for value in (cells, *attention.parameters()))


def test_one_cell_attends_to_itself_alone(attention):
    cell = torch.randn(1, 1, 12, dtype=torch.float64)
    out, weights = attention(cell, output_attentions=True)
    torch.testing.assert_close(weights, torch.ones_like(weights))
    everyone = torch.ones(1, 1, dtype=torch.bool)
    torch.testing.assert_close(out, attention_naive(attention, cell, everyone, attention.kernel))


def test_returned_weights_are_those_of_the_output(attention, ragged_mask):
    cells = torch.randn(3, 7, 12, dtype=torch.float64)
    out, weights = attention(cells, ragged_mask, output_attentions=True)
    heads = attention.project(cells)
    mixed = weights @ heads.value
    if heads.gate_logits is not None:
        mixed = mixed * heads.gate_logits.sigmoid().unflatten(2, (3, -1)).transpose(1, 2)
    again = attention.out_projection(mixed.transpose(1, 2).flatten(2))
    torch.testing.assert_close(out[ragged_mask], again[ragged_mask])
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert (weights[0][..., ~ragged_mask[0]] == 0).all()


def test_no_tensor_grows_with_the_square_of_the_cells(attention):
    cells = torch.randn(1, 1500, 12, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(1, 1500) < 0.9
    with LargestTensor() as largest:
        attention(cells, mask).sum().backward()
    assert largest.numel <= cells.numel() * 4


@pytest.mark.parametrize("gate", ["headwise", "elementwise"])
def test_every_gate_starts_at_one_half(gate):
    _, gates = make(gate, True).attend(torch.randn(2, 5, 12), None)
    torch.testing.assert_close(gates, torch.full_like(gates, 0.5))


def test_a_headwise_gate_is_one_number_a_head_and_an_elementwise_gate_one_an_element():
    cells = torch.randn(2, 5, 12)
    assert make("headwise", True).attend(cells, None)[1].shape == (2, 3, 5, 1)
    assert make("elementwise", True).attend(cells, None)[1].shape == (2, 3, 5, 4)
    assert make("none", True).attend(cells, None)[1] is None


def test_qk_norm_bounds_the_logits_however_large_the_cells():
    module = make("headwise", True)
    heads = module.project(1e4 * torch.randn(1, 50, 12))
    logits = heads.query @ heads.key.mT / 4**0.5
    assert logits.abs().max() <= 4**0.5 + 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_stays_within_two_percent_of_float32(kind, ragged_mask):
    module = make(*kind, d_model=64, n_heads=4)
    cells = torch.randn(3, 7, 64)
    exact = module(cells, ragged_mask)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = module(cells, ragged_mask)
    assert (rounded.float() - exact).norm() <= 0.02 * exact.norm()


@pytest.mark.parametrize(("d_model", "n_heads"), [(10, 3), (8, 0), (0, 1)])
def test_a_width_that_heads_do_not_divide_is_refused(d_model, n_heads):
    with pytest.raises(InputError, match="d_model"):
        GatedMultiHeadAttention(d_model, n_heads)


def test_an_unknown_gate_is_refused_with_the_known_ones(as_in_production):
    with pytest.raises(InputError, match="none, headwise, elementwise; got 'sigmoid'"):
        GatedMultiHeadAttention(12, 3, gate_type="sigmoid")


def test_wrong_input_is_refused_with_what_was_expected_and_what_came(as_in_production):
    module, cells = make("headwise", True), torch.randn(2, 5, 12)
    for wrong, message in [
        ((cells[0],), r"cells: expected shape \(B, N, 12\), got \(5, 12\)"),
        ((cells[..., :8],), r"expected shape \(B, N, 12\), got \(2, 5, 8\)"),
        ((cells.long(),), "cells: expected a floating point dtype, got torch.int64"),
        ((cells.double(),), "expected torch.float32 as the model's weights, got torch.float64"),
        ((cells.to("meta"),), "cells: expected on cpu, got on meta"),
        ((cells[:, :0],), "at least one cell"),
        ((cells.numpy(),), "expected a torch.Tensor, got ndarray"),
        ((cells, torch.ones(2, 5)), "node_mask: expected torch.bool, got torch.float32"),
        ((cells, torch.ones(2, 4).bool()), r"node_mask: expected shape \(2, 5\), got \(2, 4\)"),
    ]:
        with pytest.raises(InputError, match=message):
            module(*wrong)


def test_an_attention_map_too_large_to_hold_is_refused():
    with pytest.raises(InputError, match="at most 4096 cells, got 4097"):
        make("none", True, d_model=2, n_heads=1)(torch.randn(1, 4097, 2), output_attentions=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_padded_attention_equals_the_cpu_in_linear_memory(dtype):
    module = make("headwise", True, d_model=256, n_heads=4).to(dtype)
    cells, mask = torch.randn(2, 333, 256).to(dtype), torch.rand(2, 333) < 0.7
    want = module.float()(cells.float(), mask)
    module = module.to("cuda", dtype)
    got = module(cells.cuda(), mask.cuda()).float().cpu()
    assert (got - want).norm() <= (0.02 if dtype == torch.bfloat16 else 1e-3) * want.norm()
    torch.cuda.reset_peak_memory_stats()
    many = torch.randn(1, 32768, 256, device="cuda", dtype=dtype, requires_grad=True)
    module(many, torch.rand(1, 32768, device="cuda") < 0.9).sum().backward()
    assert torch.cuda.max_memory_allocated() < 32768 * 32768
