"""What is compared: configurations of a layer, and what was once expected of them."""

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

from alphastomics.config import LayerConfig
from alphastomics.config.file import LAYER_SECTION, parse_document


class Configuration(NamedTuple):
    """A name and the keys of `TransformerLayer_setting` that make it."""

    name: str
    layer: Mapping[str, Any]


# The four differ in these two switches; gate, QK-norm and experts are what BASE_CONFIG says.
SWITCHES = ("use_gated_attention", "use_moe")
EXPERTS: dict[str, Any] = {"use_moe": True}
GATED: dict[str, Any] = {"use_gated_attention": True}
LINEAR: dict[str, Any] = {"use_gated_attention": False}
DENSE: dict[str, Any] = {"use_moe": False}

BASELINE = "Baseline"
FOUR = (
    Configuration(BASELINE, LINEAR | DENSE),
    Configuration("Gated", GATED | DENSE),
    Configuration("MoE", LINEAR | EXPERTS),
    Configuration("Gated + MoE", GATED | EXPERTS),
)


def gates() -> list[Configuration]:
    """Return every gate of softmax attention, with and without QK-norm."""
    return [
        Configuration(
            f"{gate} gate, {'QK-norm' if norm else 'no QK-norm'}",
            {"use_gated_attention": True, "gate_type": gate, "use_qk_norm": norm} | DENSE,
        )
        for gate, norm in product(("headwise", "elementwise", "none"), (True, False))
    ]


def mixtures() -> list[Configuration]:
    """Return every number and size of experts, in gated layers."""
    return [
        Configuration(
            f"Gated + MoE {experts} top-{top_k} {size}",
            GATED
            | EXPERTS
            | {
                "num_experts": experts,
                "moe_top_k": top_k,
                "moe_expert_size": size,
            },
        )
        for experts, top_k, size in product((4, 8, 16), (1, 2), ("split", "full"))
    ]


def chosen(*, full: bool, layer: Mapping[str, Any] | None = None) -> list[Configuration]:
    """Return the four, or all; the four stand first, and none is there twice.

    Parameters
    ----------
    full
        Every gate, and every number and size of experts, too.
    layer
        `TransformerLayer_setting` of BASE_CONFIG, which the four share.
    """
    if not full:
        return list(FOUR)

    def made(configuration: Configuration) -> LayerConfig:
        return parse_document({LAYER_SECTION: {**(layer or {}), **configuration.layer}}, "").layer

    known = [made(one) for one in FOUR]
    return [*FOUR, *(one for one in gates() + mixtures() if made(one) not in known)]


# Change in per cent, from and to, that the project's origin announced without measuring it.
EXPECTED: dict[str, dict[str, tuple[float, float]]] = {
    "Gated": {"expression_mse": (-10.0, -5.0), "distance_mse": (-15.0, -10.0)},
    "MoE": {"expression_mse": (-20.0, -10.0), "distance_mse": (-20.0, -10.0)},
    "Gated + MoE": {"expression_mse": (-30.0, -15.0), "distance_mse": (-30.0, -15.0)},
}
