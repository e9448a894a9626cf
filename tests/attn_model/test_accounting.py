"""The books: parameters add up, and FLOPs are those that torch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from alphastomics.attn_model import Model
from alphastomics.attn_model.accounting import (
    account,
    active_parameters,
    feed_forward_share,
    parameters_by_part,
    total_parameters,
)
from alphastomics.config import LayerConfig

KINDS = [
    LayerConfig(),
    LayerConfig(gate="elementwise", use_moe=True),
    LayerConfig(attention="linear"),
]


@pytest.mark.parametrize("settings", KINDS)
def test_parts_add_up_to_all_parameters(settings):
    model = Model(11, d_model=16, n_heads=2, n_layers=2, settings=settings)
    assert sum(parameters_by_part(model).values()) == total_parameters(model)


def test_a_cell_meets_k_of_the_experts_and_all_else():
    settings = LayerConfig(use_moe=True, num_experts=4, moe_top_k=1)
    model = Model(11, d_model=16, n_heads=2, n_layers=2, settings=settings)
    expert = 16 * 16 + 16 + 16 * 16 + 16
    assert total_parameters(model) - active_parameters(model) == 2 * 3 * expert
    dense = Model(11, d_model=16, n_heads=2, n_layers=2)
    assert active_parameters(dense) == total_parameters(dense)


def test_the_share_of_the_feed_forward_is_that_of_the_documented_counts():
    size = {"d_model": 128, "n_heads": 2, "n_layers": 2, "d_ff": 256}
    plain = LayerConfig(use_moe=True, num_experts=4, moe_top_k=2, time_gate_modulation=False)
    assert feed_forward_share(Model(11, **size, settings=plain)) == 34_176 / 67_328
    assert feed_forward_share(Model(11, **size)) == 1


@pytest.mark.parametrize("settings", KINDS[:1] + KINDS[2:])
def test_flops_are_those_that_torch_counts(settings):
    set_size, sizes = 512, {"d_model": 32, "n_heads": 2, "n_layers": 2}
    model = Model(20, settings=settings, **sizes)
    cells = torch.randn(1, set_size, 20), torch.randn(1, set_size, 3), torch.rand(1, 2)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*cells)
    counted = counter.get_total_flops()
    # Torch's counter knows no CPU attention kernel; the few products a set are not a cell's.
    unseen = 2 * 2 * 2 * 32 * set_size * set_size if settings.attention == "softmax" else 0
    ours = account(model, set_size)["flops_per_cell_forward"] * set_size
    assert ours == pytest.approx(counted + unseen, rel=0.02)


def test_a_step_costs_three_forward_passes_and_a_set_all_its_cells():
    costs = account(Model(11, d_model=16, n_heads=2, n_layers=1), 100)
    assert costs["flops_per_cell_step"] == 3 * costs["flops_per_cell_forward"]
    assert costs["flops_per_set_step"] == 100 * costs["flops_per_cell_step"]


def test_a_model_of_any_size_is_counted_without_memory():
    with torch.device("meta"):
        model = Model(20_000, d_model=4096, n_heads=32, n_layers=48)
    assert account(model, 1024)["parameters_total"] > 10**10
