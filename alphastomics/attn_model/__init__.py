"""The network: noisy cells enter, predicted clean cells leave."""

from alphastomics.attn_model.gated_attention import GatedMultiHeadAttention
from alphastomics.attn_model.model import Model
from alphastomics.attn_model.moe import MixtureOfExperts
from alphastomics.attn_model.prediction import Prediction
from alphastomics.attn_model.transformer import GatedSelfAttentionModel
from alphastomics.attn_model.transformer_layer import TransformerLayer

__all__ = [
    "GatedMultiHeadAttention",
    "GatedSelfAttentionModel",
    "MixtureOfExperts",
    "Model",
    "Prediction",
    "TransformerLayer",
]
