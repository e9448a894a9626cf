"""Small networks of every kind, and a loss that reaches all they predict."""

from alphastomics.attn_model import Model
from alphastomics.config import LayerConfig

SETTINGS = {
    "gated": LayerConfig(),
    "elementwise": LayerConfig(gate="elementwise", use_qk_norm=False),
    "plain": LayerConfig(gate="none"),
    "linear": LayerConfig(attention="linear"),
    "moe": LayerConfig(use_moe=True, moe_z_loss_weight=0.1),
    "linear_moe": LayerConfig(attention="linear", use_moe=True, moe_balance="bias"),
}
GENES = 6


def make(settings=SETTINGS["gated"], **sizes):
    sizes = {"d_model": 16, "n_heads": 2, "n_layers": 2, "dropout": 0.0, **sizes}
    return Model(GENES, settings=settings, **sizes)


def loss_of(prediction):
    squares = prediction.expression.square().sum() + prediction.position.square().sum()
    return squares + prediction.aux.penalty
