"""The whole network: a function of sets and times that padding, order and company cannot move."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from alphastomics.attn_model import GatedSelfAttentionModel, Model, TransformerLayer
from alphastomics.attn_model.accounting import account
from alphastomics.config import Config, LayerConfig, ModelConfig
from alphastomics.errors import InputError
from tests.attn_model.test_gated_attention import LargestTensor

SETTINGS = {
    "gated": LayerConfig(),
    "elementwise": LayerConfig(gate="elementwise", use_qk_norm=False),
    "plain": LayerConfig(gate="none"),
    "linear": LayerConfig(attention="linear"),
    "moe": LayerConfig(use_moe=True, moe_z_loss_weight=0.1),
    "linear_moe": LayerConfig(attention="linear", use_moe=True, moe_balance="bias"),
}
GENES = 6
ROOT = Path(__file__).parents[2]


def make(settings=SETTINGS["gated"], **sizes):
    sizes = {"d_model": 16, "n_heads": 2, "n_layers": 2, "dropout": 0.0, **sizes}
    return Model(GENES, settings=settings, **sizes)


@pytest.fixture(params=SETTINGS.values(), ids=SETTINGS.keys())
def model(request, awaken):
    """Give a network of each kind in float64, with nothing left at its zero start."""
    return awaken(make(request.param)).double().eval()


@pytest.fixture
def batch(ragged_mask):
    """Draw expression, positions, two times and a ragged mask."""
    expression, position = torch.randn(3, 7, GENES).double(), torch.randn(3, 7, 3).double()
    return expression, position, torch.rand(3, 2).double(), ragged_mask


def loss_of(prediction):
    squares = prediction.expression.square().sum() + prediction.position.square().sum()
    return squares + prediction.aux.penalty


def test_permuting_cells_permutes_the_prediction(model, batch):
    expression, position, time, mask = batch
    order = torch.randperm(7)
    straight = model(*batch)
    permuted = model(expression[:, order], position[:, order], time, mask[:, order])
    torch.testing.assert_close(permuted[:2], (straight[0][:, order], straight[1][:, order]))


def test_padding_and_other_sets_change_nothing(model, batch):
    expression, position, time, mask = batch
    crowd = model(*batch)
    for b, real in enumerate(mask[:2]):
        alone = model(expression[b : b + 1, real], position[b : b + 1, real], time[b : b + 1])
        torch.testing.assert_close(crowd.expression[b, real], alone.expression[0])
        torch.testing.assert_close(crowd.position[b, real], alone.position[0])


def test_whatever_padding_holds_is_ignored_and_gets_no_gradient(model, batch):
    expression, position, time, mask = batch
    wild = [value.clone().requires_grad_() for value in (expression, position)]
    with torch.no_grad():
        for value in wild:
            value[~mask] = float("nan")
    prediction = model(*wild, time, mask)
    torch.testing.assert_close(prediction[:2], model(*batch)[:2])
    loss_of(prediction).backward()
    assert all((value.grad[~mask] == 0).all() for value in wild)
    assert all(value.grad[mask].abs().sum() > 0 for value in wild)


def test_padding_and_empty_sets_are_zero_and_every_gradient_is_finite(model, batch):
    prediction = model.train()(*batch)
    assert (prediction.expression[~batch[3]] == 0).all()
    assert (prediction.position[~batch[3]] == 0).all()
    loss_of(prediction).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_a_mask_without_padding_is_no_mask(model, batch):
    full = torch.ones_like(batch[3])
    torch.testing.assert_close(model(*batch[:3], full)[:2], model(*batch[:3])[:2], rtol=0, atol=0)


def test_one_cell_is_a_set(model):
    prediction = model(
        torch.randn(1, 1, GENES).double(), torch.randn(1, 1, 3).double(), torch.rand(1, 1).double()
    )
    assert prediction.expression.isfinite().all()
    torch.testing.assert_close(prediction.position, torch.zeros(1, 1, 3).double())


def test_moving_the_whole_tissue_changes_nothing_and_positions_come_back_centred(model, batch):
    expression, position, time, mask = batch
    moved = model(expression, position + torch.tensor([5.0, -3.0, 2.0]).double(), time, mask)
    still = model(*batch)
    torch.testing.assert_close(moved[:2], still[:2])
    torch.testing.assert_close(still.position.sum(1), torch.zeros(3, 3).double())


def test_every_cell_hears_every_other_real_one(model, batch):
    expression, position, time, mask = batch
    louder = expression.clone()
    louder[0, 2] += 1
    change = (model(louder, position, time, mask).expression - model(*batch).expression).abs()
    assert (change[0].sum(-1) > 0).tolist() == mask[0].tolist()
    assert (change[1:] == 0).all()


def test_one_shared_time_is_the_same_time_twice(model, batch):
    expression, position, time, mask = batch
    shared = time[:, :1]
    torch.testing.assert_close(
        model(expression, position, shared, mask)[:2],
        model(expression, position, shared.repeat(1, 2), mask)[:2],
    )


@pytest.mark.parametrize("modality", [0, 1])
def test_the_time_of_each_modality_moves_both_predictions(model, batch, modality):
    expression, position, time, mask = batch
    later = time.clone()
    later[:, modality] += 0.1
    moved, still = model(expression, position, later, mask), model(*batch)
    for after, before in zip(moved[:2], still[:2], strict=True):
        assert (after - before)[0].abs().max() > 1e-6


def test_time_is_felt_at_the_start_already():
    model = make().eval()
    expression, position = torch.randn(1, 9, GENES), torch.randn(1, 9, 3)
    early, late = (model(expression, position, torch.full((1, 1), t)) for t in (0.1, 0.9))
    assert (early.expression - late.expression).abs().max() > 1e-4


def test_time_reaches_every_depth_through_its_own_layer(awaken, batch):
    model = awaken(make(SETTINGS["moe"], n_layers=5)).double().eval()
    time = torch.rand(3, 16, dtype=torch.float64)
    cells = torch.randn(3, 7, 16, dtype=torch.float64)
    for layer in model.trunk.layers:
        moved = layer(cells, time + 0.1, batch[3]).cells - layer(cells, time, batch[3]).cells
        assert moved[0].abs().max() > 1e-3


def test_time_reaches_the_last_layer_when_no_other_may_pass_it_on(awaken, batch):
    model = awaken(make(n_layers=4)).double().eval()
    trunk = model.trunk
    cells = torch.randn(3, 7, 16, dtype=torch.float64)
    outputs = []
    for moment in (0.2, 0.7):
        time = trunk.time_in(torch.full((3, 1), moment, dtype=torch.float64))
        outputs.append(trunk.layers[-1](cells, time, batch[3]).cells)
    assert (outputs[0] - outputs[1])[:2].abs().max() > 1e-3


def test_a_layer_starts_as_the_identity():
    layer = TransformerLayer(16, 2, settings=SETTINGS["moe"]).eval()
    cells = torch.randn(2, 5, 16)
    torch.testing.assert_close(layer(cells, torch.randn(2, 16)).cells, cells)


def test_time_moves_the_router_only_after_training_has_moved_its_weights():
    layer = TransformerLayer(16, 2, settings=SETTINGS["moe"]).eval()
    cells, times = torch.randn(2, 5, 16), torch.randn(2, 2, 16)
    before = [layer(cells, time).routing.probability for time in times]
    torch.testing.assert_close(*before)
    torch.nn.init.normal_(layer.router_time_modulation.weight)
    after = [layer(cells, time).routing.probability for time in times]
    assert (after[0] - after[1]).abs().max() > 0.01
    still = LayerConfig(use_moe=True, time_gate_modulation=False)
    assert TransformerLayer(16, 2, settings=still).router_time_modulation is None


def test_hidden_features_are_not_seen_and_not_taken_for_zeros(model, batch):
    expression, position, time, mask = batch
    hidden, hidden_position = torch.rand(3, 7, GENES) < 0.4, torch.rand(3, 7, 3) < 0.4
    hidden[0, 0, 0] = hidden_position[0, 0, 0] = True
    masks = {"expression_hidden": hidden, "position_hidden": hidden_position}
    seen = model(*batch, **masks)
    other = expression.masked_fill(hidden, float("nan")), position.masked_fill(hidden_position, 7.0)
    torch.testing.assert_close(model(*other, time, mask, **masks)[:2], seen[:2])
    zeros = expression.masked_fill(hidden, 0), position.masked_fill(hidden_position, 0)
    as_zero = model(*zeros, time, mask)
    assert (as_zero.expression - seen.expression).abs().max() > 1e-4
    for name in masks:
        one = model(*zeros, time, mask, **{name: masks[name]})
        assert (one.position - as_zero.position).abs().max() > 1e-4, name


def test_unmeasured_genes_are_not_seen_and_not_taken_for_zeros(model, batch):
    expression, position, time, mask = batch
    measured = torch.ones(3, GENES, dtype=torch.bool)
    measured[0, :2] = False
    seen = model(*batch, gene_mask=measured)
    wild = expression.clone()
    wild[0, :, :2] = float("nan")
    torch.testing.assert_close(model(wild, position, time, mask, gene_mask=measured)[:2], seen[:2])
    wild[0, :, :2] = 0
    as_zero = model(wild, position, time, mask)
    assert (as_zero.expression - seen.expression)[0].abs().max() > 1e-4
    torch.testing.assert_close(as_zero.expression[1], seen.expression[1])


def test_hidden_states_are_given_on_request_with_padding_at_zero(model, batch):
    assert model(*batch).aux.hidden_states == ()
    states = model(*batch, output_hidden_states=True).aux.hidden_states
    assert [tuple(state.shape) for state in states] == [(3, 7, 16)] * 3
    assert all((state[~batch[3]] == 0).all() for state in states)


def test_no_tensor_grows_with_the_square_of_the_cells(model):
    cells = torch.randn(1, 1000, GENES).double(), torch.randn(1, 1000, 3).double()
    mask = torch.rand(1, 1000) < 0.9
    with LargestTensor() as largest:
        loss_of(model(*cells, torch.rand(1, 2).double(), mask)).backward()
    assert largest.numel <= 1000 * 200


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
    assert account(model, 1024)["parameters_expression"] < 2.1 * 20_000 * 32
    expression, hidden = torch.randn(1, 9, 20_000), torch.rand(1, 9, 20_000) < 0.3
    prediction = model(expression, torch.randn(1, 9, 3), torch.rand(1, 2), expression_hidden=hidden)
    assert prediction.expression.shape == (1, 9, 20_000)


def test_the_documented_model_returns_expression_position_and_time(batch, awaken):
    expression, position, time, mask = batch
    network = awaken(GatedSelfAttentionModel(GENES, d_model=16, n_heads=2, n_layers=1)).double()
    out, placed, time_out = network.eval()(expression, time[:, :1], position)
    assert (out.shape, placed.shape) == (expression.shape, position.shape)
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


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gated", "moe"])
def test_on_a_gpu_the_compiled_model_equals_the_eager_one(name):
    settings = SETTINGS[name]
    model = Model(64, d_model=128, n_heads=4, n_layers=2, settings=settings).cuda().eval()
    inputs = torch.randn(2, 333, 64).cuda(), torch.randn(2, 333, 3).cuda(), torch.rand(2, 2).cuda()
    mask = torch.rand(2, 333).cuda() < 0.8
    compiled = torch.compile(model)
    with torch.autocast("cuda", torch.bfloat16):
        got, want = compiled(*inputs, mask), model(*inputs, mask)
    loss_of(got).backward()
    assert (got.expression - want.expression).norm() <= 0.05 * want.expression.norm()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
