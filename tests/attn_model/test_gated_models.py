"""Gated attention inside the layer, the set transformer, the whole model and a training module."""

import pytest
import torch

from alphastomics.attn_model import GatedSelfAttentionModel, Model, TransformerLayer
from alphastomics.attn_model.linear_attention import LinearMultiHeadAttention
from alphastomics.config import LayerConfig
from alphastomics.diffusion_model import AlphaSTomicsModule
from alphastomics.errors import InputError
from alphastomics.utils.dataholder import DataHolder

GATES = ["headwise", "elementwise", "none"]
GENES = 7


def cells(num_cells: int = 9) -> dict:
    generator = torch.Generator().manual_seed(0)
    return {
        "expression": torch.randn(2, num_cells, GENES, generator=generator),
        "position": torch.randn(2, num_cells, 3, generator=generator),
        "time": torch.rand(2, 2, generator=generator),
    }


def moved(network: torch.nn.Module) -> torch.nn.Module:
    """Move the weights off their start, at which gates and time do nothing."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return network.eval()


@pytest.mark.parametrize("gate", GATES)
def test_the_documented_keywords_of_a_layer_are_its_settings(gate):
    layer = TransformerLayer(
        16, 2, use_gated_attention=True, gate_type=gate, use_qk_norm=gate == "headwise"
    )
    assert layer.attention.gate == gate
    assert (layer.attention.query_norm is not None) == (gate == "headwise")
    linear = TransformerLayer(16, 2, use_gated_attention=False)
    assert isinstance(linear.attention, LinearMultiHeadAttention)


def test_a_gate_on_linear_attention_is_refused():
    with pytest.raises(InputError, match="gate_type: linear attention has no gate"):
        TransformerLayer(16, 2, use_gated_attention=False, gate_type="headwise")


@pytest.mark.parametrize("gate", GATES)
def test_the_set_transformer_permutes_its_output_with_its_cells(gate):
    network = moved(
        GatedSelfAttentionModel(
            GENES, d_model=16, n_heads=2, n_layers=2, settings=LayerConfig(gate=gate)
        )
    )
    given = cells()
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    expression, position, time = network(given["expression"], given["time"], given["position"])
    again = network(given["expression"][:, order], given["time"], given["position"][:, order])
    torch.testing.assert_close(again[0], expression[:, order], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(again[1], position[:, order], atol=1e-5, rtol=1e-4)
    assert torch.equal(time, given["time"])


@pytest.mark.parametrize("gate", GATES)
def test_the_whole_model_reports_a_gate_for_every_layer_that_has_one(gate):
    model = moved(Model(GENES, d_model=16, n_heads=2, n_layers=2, settings=LayerConfig(gate=gate)))
    given = cells()
    gates = model(given["expression"], given["position"], given["time"]).aux.gates
    assert len(gates) == (0 if gate == "none" else 2)
    for values in gates:
        assert values.shape == (2, 2, 9, 1 if gate == "headwise" else 8)
        assert 0 < float(values.min()) < float(values.max()) < 1


@pytest.mark.parametrize("gate", ["headwise", "elementwise"])
def test_a_training_step_reaches_the_gates(gate):
    document = {
        "model": {"d_model": 16, "n_heads": 2, "n_layers": 2},
        "TransformerLayer_setting": {"gate_type": gate},
    }
    module = moved(AlphaSTomicsModule(document, GENES)).train()
    given = cells()
    batch = DataHolder.of(
        given["expression"], 100 * given["position"], torch.ones(2, 9, dtype=torch.bool)
    )
    module.score(batch, module.draw(batch, "test")).terms.total.backward()
    for layer in module.model.trunk.layers:
        gradient = layer.attention.in_projection.weight.grad[3 * 16 :]
        assert float(gradient.abs().max()) > 0
