"""Sections where none was measured: cells of neighbouring sections enter, new cells leave.

Positions follow the displacement interpolation of McCann (1997): as many cells of the section below
and of that above are matched by optimal transport, and a new cell lies on the way from one to the
other, so that outline and density go over into one another. Counts and cell types are a sample of
the niche model at these positions; their posterior mean comes from the measured cells around.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Float64
from scipy.spatial import cKDTree

from alphastomics.config import Config, SamplingConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.errors import InputError
from alphastomics.generation.assignment import as_many, matched
from alphastomics.generation.cells import InputCells
from alphastomics.generation.commands import (
    load_for_use,
    require_target,
    summary_of,
    with_trained_sampling,
)
from alphastomics.generation.generate import Generated, generate, require_mode
from alphastomics.generation.output import new_anndata, put_counts, put_into, write_cells
from alphastomics.generation.training_cells import (
    LEAST_KNOWN,
    NAME_FOLDER,
    predict_from_context,
    training_cells,
)
from alphastomics.preprocessing.owned import require_not_read
from alphastomics.tasks import POS_TO_EXPR

logger = logging.getLogger(__name__)

MODE = "virtual_section"
# Std of new positions about the way between two cells, in units of the local spacing of cells: half
# way between two sections of an embryo and of a brain, cells are then as far apart as in these.
JITTER = 0.1
# Section spacings beyond the measured range that are still answered.
FARTHEST = 1.0
SECTION_NAME = "virtual_{:g}"
# Flags of `sample` that say what else to generate.
UNUSED = {
    *("input_data", "num_slices", "sample_mode", "estimator", "num_samples", "split"),
    *("reference", "landmarks", "anchors", "frame_scale"),
}


class Neighbours(NamedTuple):
    """Cells (., 2) of the sections beside a z, and how far it lies from the lower one."""

    below: Float64[np.ndarray, "N 2"]
    above: Float64[np.ndarray, "M 2"]
    share: float


class Sections(NamedTuple):
    """Cells of new sections, a sample of their expression, and its posterior mean with a std."""

    cells: InputCells
    sample: Generated
    expected: Generated


def sample_sections(
    module: AlphaSTomicsModule,
    known: InputCells | None,
    z_values: Sequence[float],
    number: int | None,
    settings: SamplingConfig,
    seed: int,
) -> Sections:
    """Make sections, one for each z.

    Parameters
    ----------
    module
        The trained model.
    known
        The measured cells.
    z_values
        The z of each section, in the user's units.
    number
        Cells of a section; None: as many as its neighbours have.
    settings, seed
        How to sample.
    """
    known = require_sections(known)
    cells = blank_sections(known, z_values, number, seed)
    require_mode(module, POS_TO_EXPR.name, cells)
    single = settings.model_copy(update={"estimator": "sample", "num_samples": 1})
    # Planar sections are fitted as such, in whatever dimensions they came.
    planar = replace(cells, dims=2) if section_spacing(known)[1] == 0 else cells
    sample = generate(module, planar, POS_TO_EXPR.name, single, seed, purpose="virtual section")
    context = predict_from_context(module, cells, known, seed, settings.radius_level)
    mean, std = (np.where(context.covered, part, np.float32(np.nan)) for part in context[:2])
    expected = replace(sample, expression=mean, expression_std=std, counts=None, cell_type=None)
    return Sections(cells, sample, expected)


def as_anndata(sections: Sections, genes: Sequence[str], z_values: Sequence[float]) -> Any:
    """Write sections as `sample` writes new tissue, with the posterior mean as a layer."""
    cells, sample, expected = sections
    filled = replace(cells, expression=sample.expression, cell_type=sample.cell_type)
    data = new_anndata(filled, genes)
    put_counts(data, sample, cells)
    put_into(data, expected, cells, genes, POS_TO_EXPR.name)
    if cells.dims == 2:
        data.obsm["spatial3d"] = cells.position
    data.uns["alphastomics"] |= {"mode": MODE, "virtual_z": np.array(z_values, dtype=np.float64)}
    return data


def virtual_cells(
    module: AlphaSTomicsModule,
    genes: list[str],
    config: Config,
    near: Path,
    z_values: Sequence[float],
    number: int | None,
) -> tuple[InputCells, Any]:
    """Find the measured cells of a model, and make sections; `near` is a file of the run."""
    folders = (Path(config.data.processed_data_dir), near)
    known = training_cells(module, genes, folders, split=None)
    how = config.sampling, config.seed.global_seed
    sections = sample_sections(module, known, z_values, number, *how)
    return sections.cells, as_anndata(sections, genes, z_values)


def sample_virtual(
    config: Config,
    *,
    checkpoint: Path,
    z_values: Sequence[float],
    number: int | None,
    output: Path | None,
    overwrite: bool,
    given: Collection[str],
) -> dict[str, Any]:
    """Make virtual sections with a checkpoint, and write them; `given` names the flags."""
    for name in sorted(UNUSED & set(given)):
        raise InputError(f"--{name}: does nothing with --virtual_z; leave it out")
    target = Path("virtual.h5ad") if output is None else output
    if target.suffix == ".pt":
        raise InputError(f"{target}: virtual sections are written as .h5ad or .zarr")
    require_target(target, overwrite=overwrite)
    require_not_read(target, checkpoint)
    module, genes = load_for_use(checkpoint)
    config = with_trained_sampling(config, module)
    cells, data = virtual_cells(module, genes, config, checkpoint, z_values, number)
    assert cells.position is not None
    write_cells(target, data, cells.position, cells, is_predicted=False)
    return {**summary_of(target, POS_TO_EXPR.name, cells), "mode": MODE}


def require_sections(known: InputCells | None) -> InputCells:
    """Refuse a model whose measured cells are not there, or have no z."""
    if known is None:
        raise InputError(
            "virtual section: needs the measured cells around, but the processed folder of the "
            f"training is not there, or not as in training{NAME_FOLDER}"
        )
    assert known.position is not None
    if not known.common_frame or np.ptp(known.position[:, 2]) == 0:
        raise InputError(
            "virtual section: the model knows no z: train on 3D positions, or on aligned sections "
            "(preprocess --common_frame with obsm['spatial3d'] or --z_spacing)"
        )
    return known


def blank_sections(
    known: InputCells, z_values: Sequence[float], number: int | None, seed: int
) -> InputCells:
    """Return cells at the positions of all sections, of whose expression nothing is known."""
    names = [SECTION_NAME.format(z) for z in z_values]
    if len(set(names)) < len(names):
        raise InputError("virtual section: the same z is given twice: leave one out")
    if not all(map(np.isfinite, z_values)):
        raise InputError("virtual section: z must be a finite number")
    parts = []
    for z in z_values:
        planar = section_positions(known, float(z), number, seed)
        parts.append(np.column_stack([planar, np.full(len(planar), float(z))]))
    sizes, num_genes = [len(part) for part in parts], known.expression.shape[1]
    labels = np.repeat(np.array(names, dtype=object), sizes)
    return InputCells(
        expression=np.zeros((sum(sizes), num_genes), np.float32),
        position=np.concatenate(parts),
        cell_type=None,
        slice_id=np.repeat(np.arange(len(parts), dtype=np.int64), sizes),
        obs_name=pa.array([f"{name}_cell_{row}" for row, name in enumerate(labels)]),
        measured=np.ones((len(parts), num_genes), dtype=bool),
        dims=known.dims,
        slice_names=names,
        common_frame=True,
    )


def section_positions(
    known: InputCells, z: float, number: int | None, seed: int
) -> Float64[np.ndarray, "N 2"]:
    """Return positions of the cells of a section, with the neighbours' outline and density."""
    neighbours = neighbours_of(known, z)
    below, above, share = neighbours
    if number is None:
        number = round((1 - share) * len(below) + share * len(above))
    return positions_between(neighbours, number, seed)


def positions_between(neighbours: Neighbours, number: int, seed: int) -> Float64[np.ndarray, "N 2"]:
    """Match so many cells of both sections, and go part of the way from one to the other."""
    start, end = (as_many(side, number, seed) for side in neighbours[:2])
    way = end[matched(start, end)] - start
    position = start + neighbours.share * way
    near = min(7, number)
    spacing = cKDTree(position).query(position, k=near)[0][:, 1:].mean(1, keepdims=True)
    noise = np.random.default_rng(seed).standard_normal(position.shape)
    return position + JITTER * spacing * noise


def neighbours_of(known: InputCells, z: float) -> Neighbours:
    """Find the sections beside a z: the nearest measured one below, and that above.

    Of a volume a section is the cells within one spacing of its cells. Beyond the measured range
    both are the last section; one section spacing beyond, at most.
    """
    assert known.position is not None
    position = known.position.astype(np.float64)
    z_values = position[:, 2]
    spacing, thickness = section_spacing(known)
    low, high = float(z_values.min()), float(z_values.max())
    beyond = max(low - z, z - high)
    if beyond > FARTHEST * spacing * (1 + 1e-6):
        raise InputError(
            f"virtual section: z = {z:g} is {beyond:.3g} outside the measured range, {low:g} to "
            f"{high:g}: choose a z within it, or at most {spacing:.3g} (one section spacing) beyond"
        )
    if beyond > 1e-6 * spacing:
        logger.warning(
            "virtual section: z = %g lies outside the measured range, %g to %g: it is made from "
            "one neighbour alone",
            *(z, low, high),
        )
    at = min(max(z, low), high)
    top, bottom = z_values[z_values <= at].max(), z_values[z_values >= at].min()
    below = (z_values <= top) & (z_values >= top - thickness)
    above = (z_values >= bottom) & (z_values <= bottom + thickness)
    if min(below.sum(), above.sum()) < LEAST_KNOWN:
        raise InputError(
            f"virtual section: fewer than {LEAST_KNOWN} measured cells lie just below or above "
            f"z = {z:g}: choose another z"
        )
    ends = float(np.median(z_values[below])), float(np.median(z_values[above]))
    share = (at - ends[0]) / (ends[1] - ends[0]) if ends[1] > ends[0] else 0.0
    return Neighbours(position[below, :2], position[above, :2], min(max(share, 0.0), 1.0))


def section_spacing(known: InputCells) -> tuple[float, float]:
    """Return the distance of sections, and how thick one is: of a volume both are the cells'."""
    assert known.position is not None
    z_values, cells = np.unique(known.position[:, 2], return_counts=True)
    if np.median(cells) >= LEAST_KNOWN:  # cells of a section have its z
        return float(np.median(np.diff(z_values))), 0.0
    gap: Float[np.ndarray, " N"] = cKDTree(known.position).query(known.position, k=2)[0][:, 1]
    return (float(np.median(gap)),) * 2
