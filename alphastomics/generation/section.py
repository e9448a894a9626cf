"""A reference section: cells to predict and another section of the tissue enter, positions leave.

Each slice is predicted together with the section, whose cells are its anchors: all of them come out
in the frame of the section. Positions of the section are then available to an assignment.
"""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from scipy.spatial import cKDTree

from alphastomics.config import SamplingConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.errors import InputError
from alphastomics.generation.anchor_regression import expression_features
from alphastomics.generation.anchors import too_few, with_anchors, without_std
from alphastomics.generation.cells import InputCells, some_cells
from alphastomics.generation.frame import Reference, are_row_numbers
from alphastomics.generation.generate import Generated, generate
from alphastomics.generation.radii import SECTION
from alphastomics.preprocessing.query_fit import require_enough
from alphastomics.tasks import EXPR_TO_POS

logger = logging.getLogger(__name__)

# Cells of either section that are compared, and neighbours of each. Two planes of one embryo
# share 0.56, serial sections 0.53, two embryos 0.72.
COMPARED_CELLS, NEIGHBOURS, MOST_OWN = 1_000, 10, 0.65

# Why cells have no radius.
UNLIKE = "the reference section differs too much from the slices"
TRAINED_ON = "the model was trained on the reference section"


def is_section(cells: InputCells, known: InputCells) -> bool:
    """Tell a section of its own, with expression and positions, from cells of the query."""
    if are_row_numbers(cells.names) and are_row_numbers(known.names):
        return False
    return (
        known.position is not None
        and bool(known.expression.any())
        and set(cells.names).isdisjoint(known.names)
    )


def section_of(cells: InputCells, known: InputCells, source: str) -> Reference:
    """Make a reference section of another slice's cells; refuse several, or other genes."""
    number = len(known.slice_names)
    if number > 1:
        raise InputError(
            f"{source}: has {number} slices ({', '.join(known.slice_names[:3])}, …), and none of "
            "their cells is in the input; a reference section is one slice: leave the others out"
        )
    require_enough(len(known.names), source)
    for name, measured in zip(cells.slice_names, cells.measured, strict=True):
        if not (measured & known.measured[0]).any():
            raise InputError(f"{source}: shares no gene with slice {name}")
    logger.info(
        "%s: none of its %d cells is in the input: taken as a reference section of the same "
        "tissue, in whose frame all positions will be",
        *(source, len(known.names)),
    )
    return Reference(Path(source), known)


def beside_section(cells: InputCells, section: InputCells) -> InputCells:
    """Add the cells of a section to every slice, as its anchors; those of the query come first."""
    assert section.position is not None
    slices, more = len(cells.slice_names), len(section.names)
    measured = cells.measured & section.measured
    slice_id = np.concatenate([cells.slice_id, np.repeat(np.arange(slices), more)])
    expression = np.concatenate([cells.expression, *[section.expression] * slices])
    unknown = np.full((len(cells.names), 3), np.nan)
    return InputCells(
        expression=np.where(measured[slice_id], expression, np.float32(0)),
        position=None,
        anchors=np.concatenate([unknown, *[section.position.astype(np.float64)] * slices]),
        cell_type=None,
        slice_id=slice_id,
        obs_name=pa.array([str(row) for row in range(len(slice_id))]),
        measured=measured,
        dims=section.dims,
        slice_names=cells.slice_names,
    )


def slices_unlike(both: InputCells, number_asked: int) -> list[int]:
    """Say which slices differ so much from the section that its cells do not stand for theirs.

    Among as many cells of either, half of a cell's nearest cells by expression are of its own
    section where both have the same distribution.
    """
    unlike = []
    for number, name in enumerate(both.slice_names):
        rows = both.rows_of(number)
        sides = rows[rows < number_asked], rows[rows >= number_asked]
        few = min(COMPARED_CELLS, *map(len, sides))
        rng = np.random.default_rng(0)
        some = some_cells(both, np.concatenate([rng.permutation(side)[:few] for side in sides]))
        _, features = expression_features(some, np.arange(2 * few))
        is_section = np.arange(2 * few) >= few
        count = min(NEIGHBOURS, 2 * few - 1)
        near = cKDTree(features).query(features, k=range(2, count + 2))[1]
        share = float((is_section[near] == is_section[:, None]).mean())
        if share > MOST_OWN:
            unlike.append(number)
            logger.warning(
                "slice %s: differs from the section: %.0f %% of a cell's nearest cells by "
                "expression are of its own section, against 50 %% of equal distributions. The "
                "section gives the frame alone, and there are no radii",
                *(name, 100 * share),
            )
    return unlike


def predict_beside_section(
    module: AlphaSTomicsModule,
    cells: InputCells,
    section: Reference,
    settings: SamplingConfig,
    seed: int,
) -> tuple[InputCells, Generated]:
    """Predict the positions of all slices in the frame of a section.

    Parameters
    ----------
    module, cells, settings, seed
        As `generate` has them.
    section
        The section whose cells are anchors.
    """
    both = beside_section(cells, section.cells)
    generated = generate(module, both, EXPR_TO_POS.name, without_std(settings), seed)
    unlike = slices_unlike(both, len(cells.names))
    name = section.cells.slice_names[0]
    lacking = too_few("cells of the section", settings.radius_level)
    lacking = UNLIKE if unlike else lacking
    if name in module.slice_names:
        logger.warning(
            "section %s: the model was trained on a slice of this name, and errors on its cells "
            "say nothing of others: it gives the frame alone, and there are no radii",
            name,
        )
        unlike, lacking = list(range(len(cells.slice_names))), TRAINED_ON
    generated = with_anchors(
        *(both, generated, settings, seed),
        reflection=module.config.loss.reflection,
        frame_alone=unlike,
    )
    if len(unlike) < len(cells.slice_names):
        logger.info(
            "radii are as large as errors of left-out cells of the section: what differs between "
            "both sections is not counted, and cells may be further off"
        )
    assert generated.radii is not None
    asked = slice(len(cells.names))
    assert generated.radii.curve is not None
    radii = generated.radii._replace(
        radius=generated.radii.radius[asked],
        curve=generated.radii.curve[:, asked],
        calibrated_by=f"{SECTION}: {name}",
        anchored=None,
        # Where the section gives the frame alone, nothing is known of how far off cells are.
        lacking=lacking,
    )
    return replace(cells, dims=section.cells.dims), replace(
        generated,
        expression=cells.expression,
        expression_std=generated.expression_std[asked],
        position=generated.position[asked],
        position_std=generated.position_std[asked],
        radii=radii,
    )
