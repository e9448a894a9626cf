"""Inputs without positions: inspections enter; their order, words and the gene list leave.

Dissociated cells teach genes and types. What is learned of positions comes from slices alone, so
that dissociated cells are numbered after all slices and change nothing about them.
"""

import logging
from collections.abc import Sequence

from alphastomics.errors import InputError
from alphastomics.preprocessing.formats.registry import FORMATS, format_of
from alphastomics.preprocessing.genes import union_of
from alphastomics.preprocessing.inspection import USES, Inspection

logger = logging.getLogger(__name__)


def slices_first(inspections: Sequence[Inspection]) -> list[Inspection]:
    """Return the inputs in their order, those without positions after all others."""
    return sorted(inspections, key=lambda inspection: not inspection.has_positions)


def require_slices(inspections: Sequence[Inspection], position_key: str) -> None:
    """Refuse inputs none of which has positions."""
    if any(inspection.has_positions for inspection in inspections):
        return
    first = inspections[0]
    lacking = "they have no positions"
    if FORMATS[format_of(first.path, first.options)].has_positions:
        there = ", ".join(first.position_keys) or "none"
        lacking = f"obsm[{position_key!r}] is missing (keys of obsm: {there})"
    others = "" if len(inspections) == 1 else ", and no other input has positions either"
    raise InputError(
        f"{first.path}: its cells have no positions: {lacking}{others}. Training needs slices with "
        f"positions: if these are slices, name their coordinates with --position_key; else {USES}"
    )


def default_genes(inspections: Sequence[Inspection]) -> list[str]:
    """Return the sorted union of the genes of slices; of dissociated cells alone, of all.

    A whole transcriptome beside a panel would make the network many times as large, by genes that
    no slice measured.
    """
    slices = [inspection for inspection in inspections if inspection.has_positions]
    return union_of(inspection.genes for inspection in slices or inspections)


def say_what_they_teach(inspections: Sequence[Inspection], genes: Sequence[str]) -> None:
    """Warn of every input without positions, and say what becomes of its cells and genes."""
    listed = set(genes)
    for inspection in inspections:
        if inspection.has_positions:
            continue
        there = ", ".join(inspection.position_keys) or "none"
        shared = len(listed & set(inspection.genes))
        logger.warning(
            "%s: its %d cells have no positions (keys of obsm: %s): they teach genes and types "
            "alone, in the split 'reference'; if this is a slice, put its coordinates into "
            "obsm['spatial']. %d of its %d genes are in the gene list of %d genes%s",
            *(inspection.path, inspection.cells, there, shared, len(inspection.genes), len(genes)),
            "" if shared == len(inspection.genes) else "; a gene list of your own may have more",
        )
