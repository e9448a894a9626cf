"""Monitoring: every name is logged, each warning comes when forced, and a healthy run is quiet."""

import logging

import lightning.pytorch as pl
import pytest
import torch

from alphastomics.attn_model.routing import RouterStatistics
from alphastomics.config.file import parse_document
from alphastomics.diffusion_model import AlphaSTomicsModule
from alphastomics.diffusion_model import monitor as monitoring
from alphastomics.diffusion_model.monitor import (
    ADVICE,
    LOOKS_BEFORE_WARNING,
    Episodes,
    Monitor,
    norm_of,
)
from alphastomics.utils.dataholder import DataHolder
from tests.diffusion_model.conftest import logged

EXPERTS = {"use_moe": True, "num_experts": 4, "moe_top_k": 1}
NAMES = {
    "moe/expert_entropy_normalized",
    "moe/expert_collapse_warning",
    "moe/avg_aux_loss",
    "moe/expert_usage_std",
    "gate/activation_mean",
    "gate/activation_std",
    "gate/no_filtering_warning",
    "grad/moe_gate_grad_norm",
    "grad/moe_gate_grad_overflow",
    "grad/time_modulation_grad_norm",
    "time_cond/modulation_l2_norm",
    "time_cond_epoch/modulation_l2_norm",
    "grad/adaln_grad_norm",
    "adaln/modulation_l2_norm",
    "adaln_epoch/modulation_l2_norm",
    "train/loss",
    "val/loss",
}


ONE_PROCESS = pl.Trainer(
    logger=False, accelerator="cpu", devices=1, enable_checkpointing=False, barebones=False
)


def stepped(layer: dict | None = None) -> AlphaSTomicsModule:
    """Return a module after one forward and backward pass."""
    torch.manual_seed(0)
    document = {
        "model": {"d_model": 16, "n_heads": 2, "n_layers": 2},
        "TransformerLayer_setting": {**EXPERTS, **(layer or {})},
    }
    module = AlphaSTomicsModule(parse_document(document, "test"), 6)
    cells = DataHolder.of(
        torch.randn(2, 30, 6), torch.randn(2, 30, 3), torch.ones(2, 30, dtype=torch.bool)
    )
    module.last = module.score(cells, module.draw(cells, "test"))
    module.last.terms.total.backward()
    return module


def test_every_documented_name_is_logged_in_a_run(run, caplog):
    with caplog.at_level(logging.WARNING, "alphastomics"):
        folder = run("watched", TransformerLayer_setting=EXPERTS)
    names = {name for _, _, name, _ in logged(folder)}
    assert names >= NAMES
    for probe in (
        "moe_by_time/expression/t0.1/layer0/expert0",
        "gate_by_layer/position/t0.9/layer1",
    ):
        assert probe in names
    assert [name for name in names if name.endswith("_warning")] != []
    assert not [record for record in caplog.records if "monitor" in record.name]


def test_a_healthy_step_warns_of_nothing(caplog):
    module, monitor = stepped(), Monitor(1)
    values = {
        **monitor.expert_values(ONE_PROCESS, module),
        **monitor.gate_values(ONE_PROCESS, module),
        **monitor.gradient_values(module),
        **monitor.modulation_values(module),
    }
    flags = {name: value for name, value in values.items() if name in ADVICE}
    assert set(flags) == set(ADVICE)
    assert set(flags.values()) == {0.0}
    assert caplog.records == []
    assert values["gate/activation_mean"] == pytest.approx(0.5, abs=0.05)
    assert 0.5 < values["moe/expert_entropy_normalized"] <= 1


def collapse(module: AlphaSTomicsModule) -> None:
    assert module.last is not None
    aux = module.last.prediction.aux
    counts = torch.tensor([[60.0, 0, 0, 0]] * 2)
    routing = RouterStatistics(counts, *aux.routing[1:])
    prediction = module.last.prediction._replace(aux=aux._replace(routing=routing))
    module.last = module.last._replace(prediction=prediction)


def test_a_collapsed_router_warns_once_in_words(caplog):
    module, monitor = stepped(), Monitor(1)
    collapse(module)
    for _ in range(3):
        values = monitor.expert_values(ONE_PROCESS, module)
    assert values["moe/expert_collapse_warning"] == 1.0
    assert values["moe/expert_entropy_normalized"] == 0.0
    assert values["moe/expert_usage_std"] == pytest.approx(0.75**0.5 / 2)
    assert len(caplog.records) == 1
    assert "moe_load_balance_loss_weight" in caplog.text


def test_a_saturated_gate_warns(caplog):
    module, monitor = stepped(), Monitor(1)
    assert module.last is not None
    aux = module.last.prediction.aux
    gates = tuple(torch.full_like(gate, 0.99) for gate in aux.gates)
    prediction = module.last.prediction._replace(aux=aux._replace(gates=gates))
    module.last = module.last._replace(prediction=prediction)
    values = monitor.gate_values(ONE_PROCESS, module)
    assert values["gate/no_filtering_warning"] == 1.0
    assert values["gate/activation_mean"] == pytest.approx(0.99)
    assert "filter nothing" in caplog.text


def test_an_exploding_router_gradient_warns(caplog):
    module, monitor = stepped(), Monitor(1)
    for parameter in module.model.router_parameters().values():
        parameter.grad = torch.full_like(parameter, 100.0)
    values = monitor.gradient_values(module)
    assert values["grad/moe_gate_grad_overflow"] == 1.0
    assert "very large" in caplog.text


def test_a_router_gradient_that_stays_small_warns_and_one_that_dips_does_not(caplog):
    module, monitor = stepped(), Monitor(1)
    for parameter in module.model.router_parameters().values():
        parameter.grad = torch.full_like(parameter, 1e-6)
    flags = [
        monitor.gradient_values(module)["grad/moe_gate_grad_vanishing"]
        for _ in range(LOOKS_BEFORE_WARNING)
    ]
    assert flags == [0.0] * (LOOKS_BEFORE_WARNING - 1) + [1.0]
    assert "hardly learns" in caplog.text


def test_a_frozen_time_modulation_warns_and_a_growing_one_does_not(caplog):
    module, monitor = stepped(), Monitor(1)
    for _ in range(LOOKS_BEFORE_WARNING):
        values = monitor.modulation_values(module)
    assert values["time_cond/frozen_warning"] == 1.0
    assert "does not change" in caplog.text
    with torch.no_grad():
        module.model.router_time_modulations()[0].weight.add_(0.1)
    assert monitor.modulation_values(module)["time_cond/frozen_warning"] == 0.0


def test_the_modulation_of_the_routers_is_told_from_that_of_the_layers():
    module, monitor = stepped(), Monitor(1)
    with torch.no_grad():
        for number, layer in enumerate(module.model.trunk.layers):
            layer.time_modulation.weight.fill_(5.0)
            layer.router_time_modulation.weight[0, 0] = 1.0 + 2 * number
    values = monitor.modulation_values(module)
    assert values["time_cond/modulation_l2_norm"] == pytest.approx((1 + 3) / 2)
    assert values["adaln/modulation_l2_norm"] > 100
    off, quiet = stepped({"time_gate_modulation": False}), Monitor(1)
    assert set(quiet.modulation_values(off)) == {"adaln/modulation_l2_norm"}
    assert "grad/time_modulation_grad_norm" not in quiet.gradient_values(off)


def test_both_slow_warnings_can_fire_within_three_hundred_steps():
    assert (LOOKS_BEFORE_WARNING - 1) * monitoring.GRADIENT_EVERY < 300
    module, monitor = stepped(), Monitor(1)
    for number in range(LOOKS_BEFORE_WARNING):
        with torch.no_grad():
            module.model.router_time_modulations()[0].weight[0, 0] = 1 + 1e-6 * number
        values = monitor.modulation_values(module)
    assert values["time_cond/frozen_warning"] == 1.0


def test_an_episode_is_said_again_only_after_it_has_ended(caplog):
    episodes = Episodes()
    name = "moe/expert_collapse_warning"
    for happening in (True, True, False, True):
        episodes.update(name, happening=happening, detail="")
    assert len(caplog.records) == 2


def test_a_norm_is_that_of_all_numbers_together():
    assert norm_of([torch.tensor([3.0]), torch.tensor([[4.0]])]) == pytest.approx(5.0)
    assert norm_of([]) == 0.0


def test_the_state_of_the_warnings_survives_a_checkpoint():
    monitor, other = Monitor(1), Monitor(1)
    monitor.episodes.active.add("gate/no_filtering_warning")
    monitor.small_gradients = 3
    monitor.norms.extend([1.0, 2.0])
    other.load_state_dict(monitor.state_dict())
    assert other.state_dict() == monitor.state_dict()


def test_the_thresholds_are_the_contracts():
    assert monitoring.ENTROPY_FLOOR == 0.5
    assert monitoring.GATE_CEILING == 0.95
    assert (monitoring.GRADIENT_CEILING, monitoring.GRADIENT_FLOOR) == (10.0, 0.01)
    assert monitoring.GRADIENT_EVERY == 100
