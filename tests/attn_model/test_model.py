"""The whole network: a function of sets and times that padding, order and company cannot move."""

import pytest
import torch

from alphastomics.attn_model import TransformerLayer
from alphastomics.config import LayerConfig
from tests.attn_model.models import GENES, SETTINGS, loss_of, make
from tests.attn_model.test_gated_attention import LargestTensor


@pytest.fixture(params=SETTINGS.values(), ids=SETTINGS.keys())
def model(request, awaken):
    """Give a network of each kind in float64, with nothing left at its zero start."""
    return awaken(make(request.param)).double().eval()


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


def test_a_layer_alone_does_not_see_what_padding_holds(model, ragged_mask):
    layer, time = model.trunk.layers[0], torch.randn(3, 16, dtype=torch.float64)
    cells = torch.randn(3, 7, 16, dtype=torch.float64)
    wild = cells.masked_fill(~ragged_mask[..., None], float("nan"))
    want = layer(cells, time, ragged_mask).cells[ragged_mask]
    torch.testing.assert_close(layer(wild, time, ragged_mask).cells[ragged_mask], want)


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
