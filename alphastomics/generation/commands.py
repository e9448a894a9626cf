"""The commands `sample` and `test`: paths and settings enter, files and summaries leave."""

import json
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from alphastomics.config import Config, Mode, SamplingConfig
from alphastomics.diffusion_model.checkpoint import load_module
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.run_folder import checkpoint_of
from alphastomics.errors import InputError
from alphastomics.generation.cells import Blank, InputCells, blank_cells
from alphastomics.generation.evaluate import evaluate
from alphastomics.generation.frame import (
    Landmarks,
    Reference,
    read_landmarks,
)
from alphastomics.generation.generate import (
    Generated,
    modes_of,
    require_mode,
)
from alphastomics.generation.left_out import read_errors
from alphastomics.generation.notices import is_processed, sample_notices
from alphastomics.generation.output import (
    UNCALIBRATED,
    read_original,
    write_generated,
    write_generated_pt,
)
from alphastomics.generation.predict import predict_cells, require_known
from alphastomics.generation.sources import (
    Known,
    Surroundings,
    given_positions,
    read_cells,
    with_known,
)
from alphastomics.generation.training_cells import cells_for_baselines, training_cells
from alphastomics.io.files import require_output, write_text
from alphastomics.io.spatialdata import STORE_SUFFIX, require_store
from alphastomics.io.vitessce import view_path
from alphastomics.preprocessing.owned import require_not_read
from alphastomics.preprocessing.query_fit import check_empty_cells
from alphastomics.tasks import EXPR_TO_POS, TASKS

logger = logging.getLogger(__name__)

# joint is the default: whoever forgets the mode would take new positions for those of the cells.
ONLY_THE_NUMBER = (
    "sample joint: of %s only the number of cells counts; predict their positions with "
    "--sample_mode expr_to_pos"
)

MOST_NEW_CELLS = 10**9  # made in one go, in memory


class FrameRequest(NamedTuple):
    """The frame of the output: a reference slice or landmarks, and whether sizes may change."""

    reference: Path | None
    landmarks: Path | None
    scale: bool


def load_for_use(checkpoint: Path) -> tuple[AlphaSTomicsModule, list[str]]:
    """Load a module onto the GPU, if there is one."""
    module, genes = load_module(checkpoint)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return module.to(device), genes


def with_trained_sampling(config: Config, module: AlphaSTomicsModule) -> Config:
    """Take from the model what the user leaves to us: the number of steps that suits it."""
    sampling = config.sampling
    if "num_steps" in sampling.model_fields_set:
        return config
    steps = module.config.sampling.num_steps
    return config.model_copy(update={"sampling": sampling.model_copy(update={"num_steps": steps})})


def default_output(source: Path | None) -> Path:
    """Name the output beside the input; new tissue goes into the working folder."""
    if source is None:
        return Path("generated.h5ad")
    if is_processed(source):
        return source.parent / f"{source.name}_generated.h5ad"
    ending = ".pt" if source.suffix == ".pt" else ".h5ad"
    return source.with_name(f"{source.stem}_generated{ending}")


def sample(
    config: Config,
    *,
    checkpoint: Path,
    input_data: Path | None,
    output: Path | None,
    split: str,
    overwrite: bool,
    blank: Blank | None = None,
    frame: FrameRequest | None = None,
    anchors: str | None = None,
    given: Collection[str] | None = None,
) -> dict[str, Any]:
    """Generate cells for an input, or from nothing (`blank`), and write them.

    With a `frame`, generated positions are returned in it; `anchors` names cells whose position is
    known, by a file or a column of obs. `given` names the flags of a command line: a mode that is
    not among them follows from the input; a flag without effect is named.
    """
    mode = config.sampling.task
    require_source(input_data, blank, mode, has_frame=frame is not None)
    target = default_output(input_data) if output is None else output
    require_target(target, overwrite=overwrite)
    known_from = None if anchors is None else Path(anchors)
    require_not_read(target, checkpoint, input_data, known_from, *(frame[:2] if frame else ()))
    module, genes = load_for_use(checkpoint)
    config = with_trained_sampling(config, module)
    if input_data is None:
        assert blank is not None
        cells = blank_cells(blank, len(genes), dims=3)
    else:
        cells = read_cells(input_data, module, genes, config, split)
        if given is not None and "sample_mode" not in given:
            mode = mode_for(cells, module, mode, has_anchors=anchors is not None)
    require_known(cells, mode)
    require_mode(module, mode, cells)
    known = None if frame is None else read_frame(frame, module, genes, config)
    # Before the work: what cannot be copied is refused at once.
    original = None if target.suffix == ".pt" else read_original(input_data, config)
    around = Surroundings(input_data, module, genes, config)
    cells, training, section = known_cells(cells, anchors, mode, around, checkpoint)
    has_section = section is not None
    used = given or (), mode, config.sampling, input_data, module, cells
    say_what_counts(*used, has_section=has_section)
    cells, generated, frame_fits = predict_cells(
        *(module, cells, mode, config.sampling, config.seed.global_seed),
        known=training,
        frame=known,
        section=section,
        scale=frame is not None and frame.scale,
        errors=read_errors(checkpoint),
        is_new=input_data is None,
        near=(Path(config.data.processed_data_dir), checkpoint),
    )
    if target.suffix == ".pt":
        write_generated_pt(target, generated, cells, frame_fits)
    else:
        write_generated(target, original, generated, cells, genes, mode, frame_fits)
    return summary_of(target, mode, cells)


def known_cells(
    cells: InputCells, anchors: str | None, mode: Mode, around: Surroundings, checkpoint: Path
) -> Known:
    """Read what is known beside the cells: anchors, a section, or training cells."""
    if not TASKS[mode].generates_expression:
        check_empty_cells(cells.num_empty, len(cells), around.source)
    if anchors is not None:
        return with_known(cells, anchors, mode, around)
    if not TASKS[mode].reads_training_cells:
        return Known(cells)
    near = (Path(around.config.data.processed_data_dir), checkpoint)
    return Known(cells, around=training_cells(around.module, around.genes, near))


def require_target(target: Path, *, overwrite: bool) -> None:
    """Refuse an output of another kind, or one that is there."""
    if target.suffix not in (".h5ad", ".zarr", ".pt"):
        raise InputError(f"{target}: expected an --output that ends in .h5ad, .zarr or .pt")
    if target.suffix == STORE_SUFFIX:
        require_store(target, overwrite=overwrite)
        target = view_path(target)
    require_output(target, overwrite=overwrite)


def summary_of(target: Path, mode: Mode, cells: InputCells) -> dict[str, Any]:
    """Say what was made."""
    return {
        "output": str(target),
        "mode": mode,
        "cells": len(cells.names),
        "slices": len(cells.slice_names),
        "dims": cells.dims,
    }


def say_what_counts(
    given: Collection[str],
    mode: Mode,
    settings: SamplingConfig,
    source: Path | None,
    module: AlphaSTomicsModule,
    cells: InputCells,
    *,
    has_section: bool,
) -> None:
    """Say which flags, and what of the input, are not used."""
    has_counts = module.average.count_model is not None
    for words in sample_notices(given, mode, settings, source, has_counts=has_counts):
        logger.warning("%s", words)
    if not TASKS[mode].is_conditional and source is not None:
        logger.info(ONLY_THE_NUMBER, source)
    if cells.anchors is not None:
        number = int(np.isfinite(cells.anchors).all(1).sum())
        logger.info("%d of %d cells have a known position: anchors", number, len(cells.anchors))
    elif TASKS[mode] is EXPR_TO_POS and settings.num_samples > 1 and not has_section:
        logger.warning("%s", UNCALIBRATED)


def mode_for(
    cells: InputCells, module: AlphaSTomicsModule, mode: Mode, *, has_anchors: bool = False
) -> Mode:
    """Return what a user who named no mode means: positions of dissociated cells, or of others.

    A model of one mode does what it can.
    """
    able = modes_of(module)
    if mode not in able:
        mode = able[0]
    elif TASKS[mode].is_conditional:
        return mode
    elif has_anchors or (cells.position is None and cells.expression.any()):
        mode = EXPR_TO_POS.name
    else:
        return mode
    logger.info("sample: no --sample_mode given: %s, by what the input and the model have", mode)
    return mode


def read_frame(
    frame: FrameRequest, module: AlphaSTomicsModule, genes: list[str], config: Config
) -> Landmarks | Reference:
    """Read what fixes the frame, before any work is done."""
    if frame.landmarks is not None:
        return read_landmarks(frame.landmarks)
    assert frame.reference is not None
    if frame.reference.suffix == ".pt" or is_processed(frame.reference):
        raise InputError(f"{frame.reference}: expected an .h5ad file for --reference")
    cells = read_cells(frame.reference, module, genes, config, "test")
    if cells.position is None:
        raise InputError(
            f"{frame.reference}: has no obsm[{config.data.preprocessing.position_key!r}]; "
            "a reference slice must lie in the frame"
        )
    return Reference(frame.reference, cells)


def frame_of(reference: Path | None, landmarks: Path | None, *, scale: bool) -> FrameRequest | None:
    """Read what the flags say of a frame."""
    if reference is None and landmarks is None:
        if scale:
            raise InputError("--frame_scale: counts with --reference or --landmarks; leave it out")
        return None
    return FrameRequest(reference, landmarks, scale)


def blank_of(num_cells: int | None, num_slices: int | None) -> Blank | None:
    """Read what the flags say of new tissue."""
    if num_cells is None:
        if num_slices is not None:
            raise InputError("--num_slices: counts with --num_cells; leave it out")
        return None
    slices = 1 if num_slices is None else num_slices
    if num_cells * slices > MOST_NEW_CELLS:
        raise InputError(f"--num_cells: {num_cells} x {slices} slices are more than fit in memory")
    return Blank(num_cells, slices)


def require_source(
    input_data: Path | None, blank: Blank | None, mode: Mode, *, has_frame: bool = False
) -> None:
    """Refuse a call that does not say what to generate for, or says it twice."""
    if has_frame and not TASKS[mode].generates_position:
        raise InputError("--reference, --landmarks: pos_to_expr has no positions; leave it out")
    if input_data is None and blank is None:
        new = ", or --num_cells to make new tissue" if not TASKS[mode].is_conditional else ""
        raise InputError(f"sample: {mode} needs cells: give --input_data{new}")
    if input_data is not None and blank is not None:
        raise InputError("sample: give --input_data, or --num_cells to make new tissue, not both")
    if blank is not None and TASKS[mode].is_conditional:
        raise InputError(f"--num_cells: makes new tissue, --sample_mode joint; {mode} needs input")


def scored_cells(input_data: Path, split: str) -> str:
    """Name the cells that are scored: a split of a processed folder, or a file."""
    return f"{input_data}, {split} split" if is_processed(input_data) else str(input_data)


def test(
    config: Config,
    *,
    checkpoint: Path,
    input_data: Path,
    split: str,
    output: Path | None,
    modes: Collection[Mode] | None = None,  # noqa: PT028 - a command
    anchors: str | None = None,  # noqa: PT028 - a command
    kept: dict[Mode, Generated] | None = None,  # noqa: PT028 - a command
) -> dict[str, Any]:
    """Score a checkpoint, in all modes that it can or in some, beside the baselines.

    The scores are written as JSON; `kept` is filled with what was generated, for the report.
    `anchors` names cells that are given, or another section; the others are scored.
    """
    checkpoint = checkpoint_of(checkpoint)
    target = checkpoint.with_name(f"{checkpoint.stem}_scores.json") if output is None else output
    require_output(target, overwrite=True)
    require_not_read(target, checkpoint, input_data)
    module, genes = load_for_use(checkpoint)
    config = with_trained_sampling(config, module)
    cells = read_cells(input_data, module, genes, config, split)
    cells, section = given_positions(
        cells, anchors, Surroundings(input_data, module, genes, config)
    )
    near = (Path(config.data.processed_data_dir), checkpoint)
    known = cells_for_baselines(module, genes, input_data, near)
    settings, seed, what = config.sampling, config.seed.global_seed, scored_cells(input_data, split)
    scores = evaluate(
        *(module, cells, known, settings, seed),
        what=what,
        modes=modes,
        kept=kept,
        says_time=True,
        section=section,
    )
    write_text(target, json.dumps(scores, indent=2) + "\n")
    return {"output": str(target), **scores}
