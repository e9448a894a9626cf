"""What a user names as cells or as known cells: a path or a column enters, `InputCells` leave."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from alphastomics.config import Config, Mode, SamplingConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.errors import InputError
from alphastomics.generation.cells import InputCells, read_processed, read_pt, read_query
from alphastomics.generation.depth import check_depth_of_slice
from alphastomics.generation.frame import Reference
from alphastomics.generation.known_positions import (
    anchors_of_cells,
    anchors_of_column,
    anchors_of_csv,
    known_in_slice,
)
from alphastomics.generation.notices import is_processed
from alphastomics.generation.output import read_original
from alphastomics.generation.section import is_section, section_of
from alphastomics.preprocessing.query_fit import check_empty_cells, check_units
from alphastomics.tasks import EXPR_TO_POS, TASKS

logger = logging.getLogger(__name__)


def read_cells(
    path: Path, module: AlphaSTomicsModule, genes: list[str], config: Config, split: str
) -> InputCells:
    """Read whatever the user gave, and say when its positions are in other units."""
    cells = read_source(path, module, genes, config, split)
    if cells.position is None and cells.anchors is None and module.is_volume:
        cells = replace(cells, dims=3)
    check_slices(cells, module)
    return cells


def check_slices(cells: InputCells, module: AlphaSTomicsModule) -> None:
    """Warn of slices whose size, or whose counts, are not those of the training slices."""
    for number, name in enumerate(cells.slice_names):
        rows = cells.rows_of(number)
        if cells.position is not None:
            check_units(cells.position[rows], float(module.position_scale), name)
        check_depth_of_slice(cells, number, module)


def read_source(
    path: Path, module: AlphaSTomicsModule, genes: list[str], config: Config, split: str
) -> InputCells:
    """Read a processed folder, tensors, or a file of cells."""
    if is_processed(path) and config.data.preprocessing.format is None:
        return read_processed(path, genes, split)
    if path.suffix == ".pt":
        return read_pt(path, len(genes))
    if not path.exists():
        hint = "" if path.suffix else "; run `alphastomics preprocess` first, or give --input_data"
        raise InputError(f"{path}: no such file or folder, seen from the working folder{hint}")
    return read_query(path, genes, module.normalization, config)


class Surroundings(NamedTuple):
    """What anchors are read with: the input, the model and its genes, the settings."""

    source: Path | None
    module: AlphaSTomicsModule
    genes: list[str]
    config: Config


class Known(NamedTuple):
    """The cells, with their anchors; known cells around positions; a section of the tissue."""

    cells: InputCells
    around: InputCells | None = None
    section: Reference | None = None


def with_known(cells: InputCells, anchors: str, mode: Mode, around: Surroundings) -> Known:
    """Take known cells from a file or a column: anchors, a section, or cells around positions."""
    path = Path(anchors)
    if not TASKS[mode].is_conditional:
        raise InputError(
            "--anchors: new tissue has none; give --sample_mode expr_to_pos, or leave it out"
        )
    if not path.exists():
        if TASKS[mode] is not EXPR_TO_POS:
            raise InputError(f"--anchors {anchors}: {mode} takes a file of cells with positions")
        original = read_original(around.source, around.config)
        if original is None:
            raise InputError(f"--anchors {anchors}: no such file")
        return Known(anchors_of_column(cells, original.obs, anchors))
    if path.suffix == ".csv" and TASKS[mode] is EXPR_TO_POS:
        size = around.config.data.preprocessing.pixel_size
        return Known(anchors_of_csv(cells, path, size))
    known = read_cells(path, around.module, around.genes, around.config, "test")
    if around.config.sampling.estimator == "sample" and TASKS[mode] is not EXPR_TO_POS:
        logger.warning("--anchors: samples of expression do not see them: not used")
    if TASKS[mode] is not EXPR_TO_POS:
        check_empty_cells(known.num_empty, len(known), path)
        return Known(cells, around=known_in_slice(cells, known, str(path)))
    return anchors_or_section(cells, known, str(path))


def given_positions(
    cells: InputCells, anchors: str | None, around: Surroundings
) -> tuple[InputCells, Reference | None]:
    """Take anchors or a section for cells that are scored; refuse an assignment without."""
    check_empty_cells(cells.num_empty, len(cells), around.source)
    if anchors is not None:
        cells, _, section = with_known(cells, anchors, EXPR_TO_POS.name, around)
        return cells, section
    require_assignable(around.config.sampling)
    return cells, None


def require_assignable(settings: SamplingConfig) -> None:
    """Refuse an assignment that is scored without anchors or a section."""
    if settings.estimator == "assigned":
        raise InputError(
            "--estimator assigned: puts cells onto the positions of a section, or around anchors: "
            "name them with --anchors, or choose --estimator mean"
        )


def anchors_or_section(cells: InputCells, known: InputCells, source: str) -> Known:
    """Tell cells of the query, which are anchors, from another section of the tissue."""
    if is_section(cells, known):
        check_empty_cells(known.num_empty, len(known), source)
        return Known(cells, section=section_of(cells, known, source))
    return Known(anchors_of_cells(cells, known, source))
