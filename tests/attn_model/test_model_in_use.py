"""The network in use: built, compiled, rounded, watched, copied, and given wrong input."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from alphastomics.attn_model import GatedSelfAttentionModel, Model
from alphastomics.attn_model.accounting import account
from alphastomics.config import Config, LayerConfig, ModelConfig
from alphastomics.errors import InputError
from tests.attn_model.alone import run_alone
from tests.attn_model.models import GENES, SETTINGS, loss_of, make

ROOT = Path(__file__).parents[2]


def test_checkpointing_changes_memory_alone(batch, awaken):
    plain = awaken(make(SETTINGS["moe"], dropout=0.2)).double().train()
    frugal = make(
        LayerConfig(use_moe=True, moe_z_loss_weight=0.1, activation_checkpointing=True), dropout=0.2
    )
    frugal = frugal.double().train()
    frugal.load_state_dict(plain.state_dict())
    for model in (plain, frugal):
        torch.manual_seed(3)
        loss_of(model(*batch)).backward()
    for left, right in zip(plain.parameters(), frugal.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)


def test_bf16_stays_within_five_percent_of_float32_and_answers_in_float32(batch, awaken):
    for name, settings in SETTINGS.items():
        model = make(settings).eval()
        expression, position, time = (value.float() for value in batch[:3])
        exact = model(expression, position, time, batch[3])
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(expression, position, time, batch[3])
        for got, want in zip(rounded[:2], exact[:2], strict=True):
            assert got.dtype == torch.float32
            assert (got - want).norm() <= 0.05 * want.norm(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_converted_whole_to_half_precision_runs(dtype, batch):
    for settings in SETTINGS.values():
        model = make(settings).to(dtype)
        prediction = model(*(value.to(dtype) for value in batch[:3]), batch[3])
        loss_of(prediction).backward()
        assert prediction.position.dtype == dtype
        assert prediction.expression.isfinite().all()


ONE_GRAPH = """
import torch
from alphastomics.attn_model import Model
from alphastomics.config import LayerConfig

for settings in ({"gate": "elementwise"}, {"attention": "linear", "use_qk_norm": False},
                 {"use_moe": True, "activation_checkpointing": True}):
    torch.manual_seed(0)
    model = Model(6, d_model=16, n_heads=2, n_layers=1, dropout=0, settings=LayerConfig(**settings))
    compiled = torch.compile(model.eval(), backend="aot_eager", fullgraph=True)
    inputs = torch.randn(2, 7, 6), torch.randn(2, 7, 3), torch.rand(2, 2)
    mask = torch.rand(2, 7) < 0.7
    with torch.autocast("cpu", torch.bfloat16):
        got, want = compiled(*inputs, mask), model(*inputs, mask)
        (got.expression.square().sum() + got.position.square().sum()).backward()
    torch.testing.assert_close(got[:2], want[:2], rtol=0.05, atol=0.02)
    assert all(p.grad is not None for n, p in model.named_parameters() if "noise" not in n)
    if settings.get("use_moe"):
        assert model.mixtures()[0].get_moe_stats()["expert_counts"].sum() == 2 * mask.sum()
"""


def test_the_whole_model_is_one_graph_without_breaks():
    # In a process of its own: the shape annotations that the tests check are no part of a graph.
    command = [sys.executable, "-c", ONE_GRAPH]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_auxiliary_losses_are_weighted_and_averaged_over_layers(batch, awaken):
    model = awaken(make(LayerConfig(use_moe=True, moe_z_loss_weight=0.5))).double().eval()
    aux = model(*batch).aux
    stats = [moe.get_moe_stats() for moe in model.mixtures()]
    balance = sum(layer["balance_loss"] for layer in stats) / 2
    z_loss = sum(layer["z_loss"] for layer in stats) / 2
    torch.testing.assert_close(aux.penalty.detach(), 0.01 * balance + 0.5 * z_loss)
    torch.testing.assert_close(aux.balance_loss, balance)
    assert aux.routing.counts.shape == (2, 4)
    assert model(*batch).aux.routing.counts.sum() == 2 * 2 * batch[3].sum()


def test_balancing_by_bias_adds_no_balance_loss_and_updates_every_layer(batch):
    model = make(SETTINGS["linear_moe"]).double()
    aux = model(*batch).aux
    assert aux.penalty == 0
    assert aux.balance_loss > 0
    model.update_balance_bias(aux.routing.counts)
    assert all(moe.balance_bias.abs().sum() > 0 for moe in model.mixtures())
    dense = make().double()
    assert dense(*batch).aux.penalty == 0
    assert dense(*batch).aux.routing is None


def test_monitored_weights_are_found_by_name_and_modulations_start_at_zero():
    model = make(SETTINGS["moe"])
    assert len(model.router_parameters()) == 2
    modulations = model.time_modulation_parameters()
    assert {"trunk.layers.1.router_time_modulation.weight"} <= modulations.keys()
    assert {"trunk.layers.1.time_modulation.weight"} <= modulations.keys()
    assert all((value == 0).all() for value in modulations.values())


def test_a_used_model_can_be_copied_and_its_state_restored(batch, awaken):
    model = awaken(make(SETTINGS["moe"])).double().eval()
    want = model(*batch)
    twin, other = copy.deepcopy(model), make(SETTINGS["moe"]).double().eval()
    other.load_state_dict(model.state_dict())
    for same in (twin, other):
        torch.testing.assert_close(same(*batch)[:2], want[:2], rtol=0, atol=0)


def test_twenty_thousand_genes_need_no_second_matrix_of_their_size():
    model = Model(20_000, d_model=32, n_heads=2, n_layers=1)
    # One matrix in, one out, and the few numbers of each gene's curve.
    curves = model.trunk.gene_curve.mixing.numel()
    assert curves == 24 * 20_000
    assert account(model, 1024)["parameters_expression"] - curves < 2.1 * 20_000 * 32
    expression, hidden = torch.randn(1, 9, 20_000), torch.rand(1, 9, 20_000) < 0.3
    prediction = model(expression, torch.randn(1, 9, 3), torch.rand(1, 2), expression_hidden=hidden)
    assert prediction.expression.shape == (1, 9, 20_000)


def test_the_documented_model_returns_expression_position_and_time(batch, awaken):
    expression, position, time, mask = batch
    network = awaken(GatedSelfAttentionModel(GENES, d_model=16, n_heads=2, n_layers=1)).double()
    out, predicted, time_out = network.eval()(expression, time[:, :1], position)
    assert (out.shape, predicted.shape) == (expression.shape, position.shape)
    assert torch.equal(time_out, time[:, :1])
    masked, _, _ = network(expression, time[:, :1], position, mask)
    torch.testing.assert_close(masked[1], out[1])
    assert isinstance(make().trunk, GatedSelfAttentionModel)


def test_a_configuration_builds_its_model():
    config = Config(model=ModelConfig(d_model=32, n_heads=4, n_layers=3, num_genes=GENES))
    model = Model.from_config(config, GENES)
    assert len(model.trunk.layers) == 3
    assert Model.from_config(config).num_genes == GENES
    with pytest.raises(InputError, match="got 7 from the data and 6 from"):
        Model.from_config(config, 7)
    with pytest.raises(InputError, match="expected one number of genes"):
        Model.from_config(Config())


def test_wrong_input_is_refused_with_what_was_expected_and_what_came(as_in_production):
    model = make()
    expression, position, time = torch.randn(2, 5, GENES), torch.randn(2, 5, 3), torch.rand(2, 1)
    mask = torch.ones(2, 5, dtype=torch.bool)
    for wrong, message in [
        ((expression[..., :4], position, time), r"expression: expected shape \(B, N, 6\), got"),
        ((expression[0], position, time), r"expression: expected shape \(B, N, 6\), got \(5, 6\)"),
        ((expression, position[..., :2], time), r"position: expected shape \(2, 5, 3\), got"),
        ((expression, position[:, :4], time), r"position: expected shape \(2, 5, 3\), got"),
        (
            (expression, position, time[:, 0]),
            r"diffusion_time: expected shape \(2, T\), got \(2,\)",
        ),
        ((expression, position, torch.rand(2, 3)), r"expected shape \(B, 1\).*got \(2, 3\)"),
        ((expression, position, torch.ones(2, 1).long()), "diffusion_time: expected a floating"),
        ((expression, position, time, mask.float()), "node_mask: expected torch.bool"),
        ((expression, position, time, mask[:1]), r"node_mask: expected shape \(2, 5\), got \(1, 5"),
        ((expression.double(), position, time), "expected torch.float32 as the model's weights"),
        ((expression, position.to("meta"), time), "position: expected on cpu, got on meta"),
    ]:
        with pytest.raises(InputError, match=message):
            model(*wrong)
    for name, value, message in [
        ("gene_mask", torch.ones(2, 4).bool(), r"gene_mask: expected shape \(2, 6\), got \(2, 4\)"),
        ("expression_hidden", torch.zeros(2, 5, GENES), "expression_hidden: expected torch.bool"),
        ("position_hidden", mask, r"position_hidden: expected shape \(2, 5, 3\), got \(2, 5\)"),
    ]:
        with pytest.raises(InputError, match=message):
            model(expression, position, time, **{name: value})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"d_model": 10, "n_heads": 4}, "multiple of n_heads"),
        ({"n_layers": 0}, "n_layers: expected at least 1, got 0"),
        ({"dropout": 1.0}, "dropout"),
        ({"d_ff": 30, "settings": SETTINGS["moe"]}, "d_ff: expected a multiple of num_experts"),
    ],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(InputError, match=message):
        make(**sizes)


def test_sizes_are_a_section_of_the_config_or_keywords_of_it():
    size = ModelConfig(d_model=32, n_heads=4, n_layers=1, smoothing_rounds=2)
    keywords = {"d_model": 32, "n_heads": 4, "n_layers": 1, "smoothing_rounds": 2}
    shapes = [
        {name: value.shape for name, value in model.state_dict().items()}
        for model in (Model(GENES, size=size), Model(GENES, **keywords))
    ]
    assert shapes[0] == shapes[1]
    with pytest.raises(TypeError, match="d_modell"):
        Model(GENES, d_modell=32)


COMPILED = """
import torch
from alphastomics.attn_model import Model
from alphastomics.config import LayerConfig

for settings in (LayerConfig(), LayerConfig(use_moe=True)):
    torch.manual_seed(0)
    model = Model(64, d_model=128, n_heads=4, n_layers=2, settings=settings).cuda().eval()
    inputs = torch.randn(2, 333, 64).cuda(), torch.randn(2, 333, 3).cuda(), torch.rand(2, 2).cuda()
    mask = torch.rand(2, 333).cuda() < 0.8
    with torch.autocast("cuda", torch.bfloat16):
        got, want = torch.compile(model)(*inputs, mask), model(*inputs, mask)
    assert (got.expression - want.expression).norm() <= 0.05 * want.expression.norm()
    (got.expression.square().sum() + got.position.square().sum() + got.aux.penalty).backward()
    # The routers' noise is for training alone: without it its weights get no gradient.
    trained = [p for name, p in model.named_parameters() if not name.endswith("noise.weight")]
    assert all(parameter.grad.isfinite().all() for parameter in trained)
"""


@pytest.mark.gpu
def test_on_a_gpu_the_compiled_model_equals_the_eager_one():
    run_alone(COMPILED)
