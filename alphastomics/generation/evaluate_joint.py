"""Scores of new tissue: as many new cells as each real slice has, beside real and shuffled tissue.

What two real tissues differ by is the reference: cells of the same slice that were not looked at
(of training, or the other half), and another slice. Chance is that real tissue, shuffled.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Int64

from alphastomics.diffusion_model.randomness import stream_seed
from alphastomics.evaluation.clusters import TypedCells, clustered
from alphastomics.evaluation.methods import (
    MODEL,
    OTHER_HALF,
    OTHER_SLICE,
    SAME_SLICE,
    SHUFFLED,
    SHUFFLED_GENES,
)
from alphastomics.evaluation.metric import NEIGHBOURS
from alphastomics.evaluation.registry import tissue_scores
from alphastomics.evaluation.tissue import (
    Tissue,
    measured_part,
    shuffled_genes,
    shuffled_positions,
)
from alphastomics.generation.cells import InputCells, in_unit, unit_of
from alphastomics.generation.depth import cell_totals
from alphastomics.generation.generate import Generated
from alphastomics.preprocessing.shard_reader import Scaling

NUM_CLUSTERS = 10  # stand in for cell types where there are none


def joint_scores(
    generated: Generated,
    cells: InputCells,
    known: InputCells | None,
    seed: int,
    *,
    with_slow: bool = True,
) -> dict[str, dict[str, float]]:
    """Return {method: {metric: value}}, mean over slices by their number of cells."""
    new_cells = replace(cells, expression=generated.expression, scaling=generated.scaling)
    typed = cells if known is None else known
    finder = type_finder(typed, seed)
    totals: dict[str, dict[str, float]] = {}
    weights: dict[str, dict[str, float]] = {}
    for number in range(len(cells.slice_names)):
        rows = cells.rows_of(number)
        unit = unit_of(cells, number)
        compared, others = references(cells, known, number, seed)
        # As many cells as the real tissue has, so that neighbours are as near.
        ours = rows[: len(compared.position)]
        position = generated.position[ours, : cells.dims]
        counted = cell_totals(new_cells, ours)
        new = {MODEL: Tissue(in_unit(new_cells, ours, unit), position, counted), **others}
        new |= by_chance(next(iter(others.values())), seed)
        genes = usable_genes(cells, typed, number)
        for name, tissue in new.items():
            scores = tissue_scores(
                measured_part(tissue, genes),
                measured_part(compared, genes),
                finder(genes),
                seed=seed,
                with_slow=with_slow,
            )
            sums, weight = totals.setdefault(name, {}), weights.setdefault(name, {})
            for metric, value in scores.items():  # a slice may lack one
                sums[metric] = sums.get(metric, 0.0) + value * len(rows)
                weight[metric] = weight.get(metric, 0.0) + len(rows)
    return {
        name: {metric: value / weights[name][metric] for metric, value in sums.items()}
        for name, sums in totals.items()
    }


def type_finder(typed: InputCells, seed: int) -> Callable[[Bool[np.ndarray, " G"]], TypedCells]:
    """Return a way to the typed cells by some genes, which are looked at once for each panel."""
    types = types_of(typed, seed)
    known_types: dict[bytes, TypedCells] = {}

    def types_for(genes: Bool[np.ndarray, " G"]) -> TypedCells:
        key = genes.tobytes()
        if key not in known_types:
            k = min(NEIGHBOURS, len(types))
            known_types[key] = TypedCells(typed.expression[:, genes], types, k=k, seed=seed)
        return known_types[key]

    return types_for


def types_of(cells: InputCells, seed: int) -> np.ndarray:
    """Return cell types, or clusters instead."""
    if cells.cell_type is not None:
        return cells.cell_type.astype(str)
    number = min(NUM_CLUSTERS, len(cells.names))
    return clustered(cells.expression, num_clusters=number, seed=seed).astype(str)


def usable_genes(cells: InputCells, typed: InputCells, number: int) -> Bool[np.ndarray, " G"]:
    """Return the genes that the slice measured, and of the typed cells at least some."""
    both = cells.measured[number] & typed.measured.all(0)
    return both if both.any() else cells.measured[number]


def tissue_of(cells: InputCells, rows: Int64[np.ndarray, " M"], unit: Scaling | None) -> Tissue:
    """Return real cells as a tissue, in the dimensions they have."""
    assert cells.position is not None
    position = cells.position[rows, : cells.dims]
    return Tissue(in_unit(cells, rows, unit), position, cell_totals(cells, rows))


def references(
    cells: InputCells, known: InputCells | None, number: int, seed: int
) -> tuple[Tissue, dict[str, Tissue]]:
    """Return the real tissue to compare with, and real tissues of other cells."""
    random = np.random.default_rng(stream_seed(seed, "reference", number))
    rows, unit = cells.rows_of(number), unit_of(cells, number)
    tissues: dict[str, Tissue] = {}

    def add(name: str, source: InputCells, choose: Callable[[str], bool]) -> None:
        for other, slice_name in enumerate(source.slice_names):
            there = source.rows_of(other)
            if choose(slice_name) and len(there) > NEIGHBOURS:
                # As many cells as the slice has: neighbours are as near as the cells are dense.
                tissues[name] = tissue_of(source, random.permutation(there)[: len(rows)], unit)
                return

    mine = cells.slice_names[number]
    if known is not None and known.position is not None:
        add(SAME_SLICE, known, lambda name: name == mine)
    add(OTHER_SLICE, cells, lambda name: name != mine)
    if OTHER_SLICE not in tissues and known is not None and known.position is not None:
        add(OTHER_SLICE, known, lambda name: name != mine)
    if tissues:
        return tissue_of(cells, rows, unit), tissues
    halves = np.array_split(random.permutation(rows), 2)
    tissues[OTHER_HALF] = tissue_of(cells, halves[1], unit)
    return tissue_of(cells, halves[0], unit), tissues


def by_chance(real: Tissue, seed: int) -> dict[str, Tissue]:
    """Shuffle real tissue: its positions alone, or each gene by itself."""
    generator = torch.Generator().manual_seed(seed)
    return {
        SHUFFLED: shuffled_positions(real, generator),
        SHUFFLED_GENES: shuffled_genes(real, generator),
    }
