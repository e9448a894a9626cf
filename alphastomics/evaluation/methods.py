"""Compared methods: the model, baselines, oracles that have seen the truth, real tissue, chance."""

from collections.abc import Mapping
from typing import Literal

MethodKind = Literal["model", "baseline", "oracle", "reference", "chance"]
MODEL, MODEL_SAMPLE = "alphastomics", "alphastomics sample"
ASSIGNED, WITHOUT_ANCHORS = "alphastomics, assigned", "alphastomics without anchors"
CENTROIDS, TRUE_EXPRESSION = "class centroid oracle", "true expression"
KNOWN_HALF = "half of the slice known"
SAME_SLICE, OTHER_HALF, OTHER_SLICE = "real, same slice", "real, other half", "real, other slice"
SHUFFLED, SHUFFLED_GENES = "shuffled", "genes shuffled"
# All that is not listed is a baseline.
KINDS: Mapping[str, MethodKind] = {
    MODEL: "model",
    MODEL_SAMPLE: "model",
    ASSIGNED: "model",
    WITHOUT_ANCHORS: "model",
    CENTROIDS: "oracle",
    KNOWN_HALF: "oracle",
    TRUE_EXPRESSION: "oracle",
    SAME_SLICE: "reference",
    OTHER_HALF: "reference",
    OTHER_SLICE: "reference",
    SHUFFLED: "chance",
    SHUFFLED_GENES: "chance",
}


def kind_of(method: str) -> MethodKind:
    """Say what a compared method is."""
    return KINDS.get(method, "baseline")


def competes(method: str) -> bool:
    """Say whether a method could be best: it has not seen the truth, and is not chance."""
    return kind_of(method) in ("model", "baseline")
