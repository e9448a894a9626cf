"""From cells to what a user gets: generated, brought to anchors or into a frame, assigned.

The one way of `sample` and of the notebook.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from alphastomics.config import Mode, SamplingConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.errors import InputError
from alphastomics.generation.anchors import (
    all_anchored,
    check_anchors,
    with_anchors,
    without_std,
)
from alphastomics.generation.assignment import as_many, assigned
from alphastomics.generation.cells import InputCells
from alphastomics.generation.frame import FrameFit, Landmarks, Reference, into_frame
from alphastomics.generation.generate import Generated, as_tissue, generate
from alphastomics.generation.left_out import LeftOutErrors, with_radii
from alphastomics.generation.panel_head import fitted_to_panel
from alphastomics.generation.section import predict_beside_section
from alphastomics.tasks import EXPR_TO_POS, TASKS

logger = logging.getLogger(__name__)

# Fewer anchors than this do not show an outline.
OUTLINE_ANCHORS = 100


class Predicted(NamedTuple):
    """Cells, what was generated for them, and how each slice was brought into a frame."""

    cells: InputCells
    generated: Generated
    frame_fits: Sequence[FrameFit]


def require_known(cells: InputCells, mode: Mode) -> None:
    """Refuse cells some of whose positions are not known where all of them are needed."""
    if cells.anchors is None or TASKS[mode] is EXPR_TO_POS:
        return
    missing = int(np.isnan(cells.anchors).any(1).sum())
    raise InputError(
        f"--sample_mode {mode}: {missing} of the cells have no position (NaN); predict them with "
        "--sample_mode expr_to_pos first, or leave these cells out"
    )


def require_placeable(
    cells: InputCells,
    mode: Mode,
    settings: SamplingConfig,
    frame: Landmarks | Reference | None,
    section: Reference | None,
) -> None:
    """Refuse cells of which nothing is asked, two frames, and an assignment onto nothing."""
    require_known(cells, mode)
    if cells.anchors is not None and np.isfinite(cells.anchors).all():
        raise InputError(
            "anchors: nothing to predict: every cell of the input has a known position; give the "
            "cells whose position you want, too"
        )
    if (cells.anchors is not None or section is not None) and frame is not None:
        raise InputError(
            "--reference, --landmarks: the input has anchors, which are a frame; leave one out"
        )
    if cells.anchors is not None and section is not None:
        raise InputError(
            f"{section.source}: is another section than the input, which has cells of known "
            "position itself: positions can lie in one frame only; leave one of both out"
        )
    if settings.estimator != "assigned":
        return
    if TASKS[mode] is not EXPR_TO_POS:
        raise InputError(f"--estimator assigned: is for positions, not for --sample_mode {mode}")
    if cells.anchors is None and section is None and not isinstance(frame, Reference):
        raise InputError(
            "--estimator assigned: puts cells onto the positions of a section: name it with "
            "--reference, or give --anchors, whose outline and density are then taken"
        )


def predict_cells(
    module: AlphaSTomicsModule,
    cells: InputCells,
    mode: Mode,
    settings: SamplingConfig,
    seed: int,
    *,
    known: InputCells | None = None,
    frame: Landmarks | Reference | None = None,
    section: Reference | None = None,
    scale: bool = False,
    errors: LeftOutErrors | None = None,
    is_new: bool = False,
    near: Sequence[Path] = (),
) -> Predicted:
    """Generate for all slices of the input, and bring positions to where they belong.

    Parameters
    ----------
    module, cells, mode, settings, seed
        As `generate` has them.
    known
        Cells in the frame of positions that expression is predicted at.
    section
        Another section of the tissue, whose cells are anchors of all slices.
    frame, scale
        What is known of the frame of the result, and whether the tissue may grow or shrink onto it.
    errors
        What training found on held-out slices: radii of those without anchors.
    is_new
        Whether the cells are made from nothing: none has a name of its own.
    near
        Where training cells may be, by which positions of another panel are learned.
    """
    require_placeable(cells, mode, settings, frame, section)
    require_anchored(module, cells, section)
    module = fitted_to_panel(module, cells, near, seed) if TASKS[mode] is EXPR_TO_POS else module
    if section is not None:
        return predict_in_section(module, cells, section, settings, seed)
    generated = generate(module, cells, mode, as_generated(settings, cells), seed, known)
    if is_new:
        cells, generated = as_tissue(cells, generated, planar=module.planar)
    reflection = module.config.loss.reflection
    if cells.anchors is not None:
        say_if_projected(module, cells)
        generated = with_anchors(cells, generated, settings, seed, reflection=reflection)
    elif TASKS[mode] is EXPR_TO_POS and settings.estimator != "sample":
        generated = with_radii(cells, generated, errors, settings.radius_level)
    frame_fits: list[FrameFit] = []
    if frame is not None:
        by_name = TASKS[mode].is_conditional and not is_new
        cells, generated, frame_fits = into_frame(
            cells, generated, frame, by_name=by_name, scale=scale, reflection=reflection
        )
        cells = replace(cells, position=generated.position) if is_new else cells
        generated = scaled_radii(cells, generated, frame_fits)
    if settings.estimator == "assigned":
        generated = put_onto(cells, generated, frame, seed)
    return Predicted(cells, generated, frame_fits)


def as_generated(settings: SamplingConfig, cells: InputCells) -> SamplingConfig:
    """Return settings of what anchors and an assignment begin with: the mean."""
    if cells.anchors is not None or settings.estimator == "assigned":
        settings = settings.model_copy(update={"estimator": "mean"})
    return without_std(settings) if all_anchored(cells) else settings


def require_anchored(
    module: AlphaSTomicsModule, cells: InputCells, section: Reference | None
) -> None:
    """Refuse anchors, or a section, that fix no frame, before anything is sampled."""
    if section is not None:
        assert section.cells.position is not None
        cells = replace(section.cells, anchors=section.cells.position.astype(np.float64))
    if cells.anchors is not None:
        scale, reflection = float(module.position_scale), module.config.loss.reflection
        check_anchors(cells, scale, reflection=reflection)


def predict_in_section(
    module: AlphaSTomicsModule,
    cells: InputCells,
    section: Reference,
    settings: SamplingConfig,
    seed: int,
) -> Predicted:
    """Predict positions in the frame of another section, or assign cells to its positions."""
    say_if_projected(module, section.cells)
    cells, generated = predict_beside_section(module, cells, section, settings, seed)
    if settings.estimator == "assigned":
        generated = put_onto(cells, generated, section, seed)
    return Predicted(cells, generated, [])


def say_if_projected(module: AlphaSTomicsModule, known: InputCells) -> None:
    """Warn where positions of a volume are asked for by two coordinates."""
    if known.dims == 2 and not module.planar:
        logger.warning(
            "anchors: have two coordinates, the model's tissue has three: predicted positions are "
            "projected onto the anchors' plane; give x, y and z where the tissue is a volume"
        )


def scaled_radii(
    cells: InputCells, generated: Generated, frame_fits: Sequence[FrameFit]
) -> Generated:
    """Let radii grow or shrink with their slices; they say nothing of the frame's own error."""
    if generated.radii is None:
        return generated
    scale = np.array([fit.transform.scale for fit in frame_fits])[cells.slice_id]
    by = f"{generated.radii.calibrated_by}; without the error of the frame"
    radii = generated.radii.changed(times=scale)._replace(calibrated_by=by)
    return replace(generated, radii=radii)


def put_onto(
    cells: InputCells, generated: Generated, frame: Landmarks | Reference | None, seed: int
) -> Generated:
    """Give each cell a position of the reference section, or one like those of the anchors."""
    position = generated.position.astype(np.float64)
    dims = cells.dims
    for number, name in enumerate(cells.slice_names):
        rows = cells.rows_of(number)
        free = rows if cells.anchors is None else rows[np.isnan(cells.anchors[rows]).any(1)]
        if not len(free) or (cells.anchors is not None and len(free) == len(rows)):
            continue
        available = available_positions(cells, rows, frame, len(free), name, seed)
        position[free, :dims] = assigned(position[free, :dims], available, seed)
    radii = generated.radii
    if radii is not None:
        # What holds about the estimate holds about another position within so much more.
        moved = np.linalg.norm(position - generated.position, axis=1)
        radii = radii.changed(plus=moved)
    return replace(generated, position=position, radii=radii)


def available_positions(
    cells: InputCells,
    rows: np.ndarray,
    frame: Landmarks | Reference | None,
    number: int,
    name: str,
    seed: int,
) -> np.ndarray:
    """Return positions for so many cells of a slice."""
    dims = cells.dims
    if cells.anchors is None:
        assert isinstance(frame, Reference)
        assert frame.cells.position is not None
        return frame.cells.position.astype(np.float64)[:, :dims]
    at = cells.anchors[rows]
    at = at[np.isfinite(at).all(1)][:, :dims]
    if len(at) < OUTLINE_ANCHORS:
        logger.warning(
            "slice %s: %d anchors show outline and density of a tissue roughly: assigned positions "
            "lie around them",
            *(name, len(at)),
        )
    # The anchors' own positions are taken.
    return as_many(at, len(at) + number, seed)[len(at) :]
