"""A look inside: what is recorded is what happened, and nothing is left behind."""

import pytest
import torch

from alphastomics.attn_model import Model, inspection
from alphastomics.attn_model.inspection import attention_received, gate_moments, record
from alphastomics.config import LayerConfig
from alphastomics.errors import InputError


@pytest.fixture
def model(awaken):
    """Give a gated model with experts, awake."""
    settings = LayerConfig(use_moe=True)
    return awaken(Model(5, d_model=16, n_heads=2, n_layers=3, settings=settings)).eval()


def cells(sets: int, count: int):
    return torch.randn(sets, count, 5), torch.randn(sets, count, 3)


def test_gates_and_expert_use_of_every_layer_are_recorded(model, ragged_mask):
    with record(model) as recording:
        prediction = model(*cells(3, 7), torch.rand(3, 1), ragged_mask)
    assert len(recording.layers) == 3
    for layer, gate, counts in zip(
        recording.layers, prediction.aux.gates, prediction.aux.routing.counts, strict=True
    ):
        torch.testing.assert_close(layer.gate, gate)
        torch.testing.assert_close(layer.expert_use, counts / counts.sum())
        assert layer.attention_received is None


def test_expert_use_differs_between_diffusion_times_and_modalities(model):
    batch, use = cells(1, 60), {}
    for times in [(0.1, 0.1), (0.9, 0.9), (0.1, 0.9)]:
        with record(model) as recording:
            model(*batch, torch.tensor([times]))
        use[times] = torch.stack([layer.expert_use for layer in recording.layers])
    values = list(use.values())
    assert not torch.equal(values[0], values[1])
    assert not torch.equal(values[1], values[2])


def test_gate_statistics_are_over_real_cells_only(model, ragged_mask):
    gate = torch.rand(3, 2, 7, 4)
    mean, std = gate_moments(gate, ragged_mask)
    real = gate.transpose(1, 2)[ragged_mask]
    torch.testing.assert_close((mean, std), (real.mean(), real.std(correction=0)))
    with record(model) as recording:
        model(*cells(3, 7), torch.rand(3, 1), ragged_mask)
    assert len(recording.gate_statistics()) == 3
    assert all(0 < mean < 1 and std > 0 for mean, std in recording.gate_statistics())


def test_attention_received_is_the_column_mean_of_the_map_in_any_block_size(
    model, ragged_mask, monkeypatch
):
    inputs = (*cells(3, 7), torch.rand(3, 1), ragged_mask)
    for block in (1, 2**24):
        monkeypatch.setattr(inspection, "WEIGHTS_AT_A_TIME", block)
        with record(model, attention="map") as recording:
            model(*inputs)
        for layer in recording.layers:
            for b in range(2):
                rows = layer.attention_map[b, :, ragged_mask[b]].mean((0, 1))
                torch.testing.assert_close(layer.attention_received[b], rows)
            assert (layer.attention_received[~ragged_mask] == 0).all()
        assert all(1 / 7 < share <= 1 for share in recording.largest_share())


def test_an_attention_sink_is_seen(model):
    layer = model.trunk.layers[0]
    with torch.no_grad():
        layer.attention.in_projection.weight[:32].zero_()
        layer.attention.in_projection.bias[:16] = 10.0
        layer.attention.in_projection.weight[16:32, 0] = 10.0
    batch = torch.randn(1, 30, 16)
    batch[..., 0] = -1
    batch[0, 4, 0] = 1
    assert attention_received(layer.attention, batch, None)[0, 4] > 0.9


def test_nothing_is_recorded_after_the_block_even_when_it_failed(model):
    with pytest.raises(RuntimeError, match="stop"), record(model) as recording:
        raise RuntimeError("stop")
    model(*cells(1, 4), torch.rand(1, 1))
    assert recording.layers == []
    assert not any(layer._forward_hooks for layer in model.trunk.layers)


def test_a_map_of_too_many_cells_is_refused(model):
    with (
        record(model, attention="map"),
        torch.no_grad(),
        pytest.raises(InputError, match="at most 4096 cells, got 4097"),
    ):
        model(*cells(1, 4097), torch.rand(1, 1))


def test_of_several_calls_the_last_is_recorded(model):
    known = cells(1, 6)
    with torch.no_grad(), record(model) as recording:
        model(*known, torch.tensor([[0.0, 1.0]]))
        model(*known, torch.tensor([[0.5, 0.1]]))
    with torch.no_grad(), record(model) as alone:
        model(*known, torch.tensor([[0.5, 0.1]]))
    assert recording.gate_statistics() == alone.gate_statistics()
