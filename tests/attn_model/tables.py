"""The tables of docs/gated-attention.md and docs/moe.md: settings enter, rows leave.

`python -m tests.attn_model.tables` prints them; a test compares them with the pages.
"""

import sys

from alphastomics.attn_model import MixtureOfExperts, Model
from alphastomics.attn_model.accounting import account, active_parameters, total_parameters
from alphastomics.attn_model.layers import FeedForward
from alphastomics.config import LayerConfig

NUM_GENES, SET_SIZE = 254, 1024
ATTENTIONS = {
    "softmax, gate none": LayerConfig(gate="none"),
    "softmax, gate headwise": LayerConfig(gate="headwise"),
    "softmax, gate elementwise": LayerConfig(gate="elementwise"),
    "linear": LayerConfig(attention="linear"),
}
# d_model, d_ff, experts, top-k, size: the contract's example, the defaults, the rule of thumb.
MIXTURES = [
    (128, 256, 4, 2, "split"),
    (256, 1024, 4, 1, "split"),
    (256, 1024, 4, 2, "split"),
    (256, 1024, 8, 2, "split"),
    (256, 1024, 16, 2, "split"),
    (256, 1024, 4, 2, "full"),
    (256, 1024, 8, 2, "full"),
]


def attention_table() -> str:
    """Count a default model with each attention: 254 genes, sets of 1024 cells."""
    lines = [
        "| attention | parameters of one | of the model | MFLOP a cell, forward |",
        "|---|---|---|---|",
    ]
    for name, settings in ATTENTIONS.items():
        model = Model(NUM_GENES, settings=settings)
        costs = account(model, SET_SIZE)
        one = costs["parameters_attention"] // len(model.trunk.layers)
        mflop = costs["flops_per_cell_forward"] / 1e6
        lines.append(f"| {name} | {one:,} | {costs['parameters_total']:,} | {mflop:.1f} |")
    return "\n".join(lines)


def mixture_table() -> str:
    """Count dense and sparse feed-forwards of one layer."""
    lines = [
        "| d_model | d_ff | experts | top-k | size | dense FFN | MoE, all | MoE, active |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for d_model, d_ff, experts, top_k, size in MIXTURES:
        moe = MixtureOfExperts(d_model, d_ff, experts, top_k, expert_size=size)
        dense = total_parameters(FeedForward(d_model, d_ff))
        counts = f"{dense:,} | {total_parameters(moe):,} | {active_parameters(moe):,}"
        lines.append(f"| {d_model} | {d_ff} | {experts} | {top_k} | {size} | {counts} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"{attention_table()}\n\n{mixture_table()}\n")
