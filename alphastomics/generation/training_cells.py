"""The training cells of a model, found again, and expression at a position from those around it.

A checkpoint knows its processed folder by a digest. Where it is still there, the training cells
serve as baselines, and expression at positions in their frame is predicted from them.
"""

import logging
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Bool, Float, Float32

from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.generation.cells import (
    BARE_POSITIONS,
    InputCells,
    read_processed,
    some_cells,
)
from alphastomics.generation.intervals import ExpressionIntervals
from alphastomics.generation.notices import is_processed
from alphastomics.generation.spatial_context import SpatialContext
from alphastomics.preprocessing.folder import DataFolder
from alphastomics.preprocessing.schema import METADATA_FILE, REFERENCE

logger = logging.getLogger(__name__)

# What intervals of expression are calibrated by.
SAME_SLICE = "known cells of the slice that were left out"
OTHER_SLICES = "known slices that were left out"
# Fewer known cells than this are no neighbourhood.
LEAST_KNOWN = 20
MISSING_CELLS = (
    "the training cells were not found (%s is not there, or not as in training): baselines that "
    "are fitted to them are left out"
)
NAME_FOLDER = "; name the processed folder of the training with --data_dir"

# Fitted contexts of each model, by the slices that they know: a notebook asks again and again.
_fitted: WeakKeyDictionary[AlphaSTomicsModule, dict[tuple[object, ...], SpatialContext]] = (
    WeakKeyDictionary()
)


class ContextPrediction(NamedTuple):
    """Expected expression, its std and intervals, and which values (N, G) have one."""

    expression: Float32[np.ndarray, "N G"]
    std: Float32[np.ndarray, "N G"]
    covered: Bool[np.ndarray, "N G"]
    intervals: ExpressionIntervals | None = None


def training_cells(
    module: AlphaSTomicsModule,
    genes: list[str],
    near: Sequence[Path] = (),
    *,
    split: str | None = "train",
) -> InputCells | None:
    """Read the cells that a model was trained on, if their processed folder is found.

    Parameters
    ----------
    module, genes
        The model and its genes.
    near
        Where to look beside the recorded path: processed folders, and files of the run, since a
        relative path counts from the folder that `train` was called in.
    split
        None: with the cells of that folder which training did not see.
    """
    where = training_folder(module, genes, near)
    return None if where is None else read_processed(where, genes, split)


def dissociated_cells(
    module: AlphaSTomicsModule, genes: list[str], near: Sequence[Path] = ()
) -> InputCells | None:
    """Read the cells without positions that a model was trained with, if there are any."""
    where = training_folder(module, genes, near)
    if where is None or not DataFolder(where).metadata().references:
        return None
    return read_processed(where, genes, REFERENCE)


def training_folder(
    module: AlphaSTomicsModule, genes: list[str], near: Sequence[Path]
) -> Path | None:
    """Find the processed folder that a model was trained on."""
    if module.training_digest is None:
        return None
    for where in _candidates(Path(module.config.data.processed_data_dir), near):
        if not (where / METADATA_FILE).is_file():
            continue
        metadata = DataFolder(where).metadata()
        if metadata.training_digest == module.training_digest and metadata.genes == genes:
            return where
        logger.info("%s: is not the processed folder of this training: not used", where)
    return None


def _candidates(recorded: Path, near: Sequence[Path]) -> Iterator[Path]:
    yield recorded
    yield from near
    if not recorded.is_absolute():
        yield from (parent / recorded for path in near for parent in path.resolve().parents)


def cells_for_baselines(
    module: AlphaSTomicsModule, genes: list[str], source: Path, near: Sequence[Path]
) -> InputCells | None:
    """Read the cells that baselines are fitted to: the training split of the source, or of the run.

    Where the run's cells are not found, say so: the model is then compared with chance alone.
    """
    if is_processed(source):
        return read_processed(source, genes, "train")
    known = training_cells(module, genes, near)
    if known is None:
        logger.warning(MISSING_CELLS + NAME_FOLDER, module.config.data.processed_data_dir)
    return known


def predict_from_context(
    module: AlphaSTomicsModule,
    cells: InputCells,
    known: InputCells | None,
    seed: int,
    level: float,
) -> ContextPrediction:
    """Predict expression at positions from the training cells around them, where there are any.

    Parameters
    ----------
    module
        The model, under which fitted contexts are remembered.
    cells
        Positions to predict for.
    known
        Training cells.
    seed, level
        Seed of the choice of cells where there are very many; the share that intervals hold.
    """
    shape = cells.expression.shape
    values, std = (np.zeros(shape, np.float32) for _ in range(2))
    covered = np.zeros(shape, dtype=bool)
    low, high = (np.full(shape, np.nan, np.float32) for _ in range(2))
    sources = set()
    if known is None or known.position is None or cells.position is None:
        return ContextPrediction(values, std, covered)
    for number, name in enumerate(cells.slice_names):
        chosen, across = known_around(name, known)
        if chosen.sum() < LEAST_KNOWN:
            logger.info(
                "slice %s: fewer than %d known cells lie in its frame: its expression is predicted "
                "by the network alone, which knows the position within the slice",
                *(name, LEAST_KNOWN),
            )
            continue
        rows = cells.rows_of(number)
        position = cells.position[rows]
        if cells.dims == 2 and not cells.common_frame:  # no height is known but its slice's
            position = at_height(position, name, known, chosen)
        if not is_among(position, known.position[chosen]):
            logger.warning(
                "slice %s: most of its positions lie outside the training cells of its frame: are "
                "they in the same coordinates? Its expression is predicted by the network alone",
                name,
            )
            continue
        context = fitted_context(module, known, chosen, seed, level, across=across)
        predicted = context.predict(position)
        values[rows] = predicted
        std[rows] = context.std
        # Genes that no known cell measured are left to the network.
        there = known.measured[np.unique(known.slice_id[chosen])].any(0)
        covered[np.ix_(rows, there)] = True
        low[rows], high[rows] = context.intervals.about(predicted)
        low[np.ix_(rows, ~there)] = high[np.ix_(rows, ~there)] = np.nan
        sources.add(OTHER_SLICES if context.across else SAME_SLICE)
    by = " and ".join(sorted(sources))
    intervals = None if np.isnan(low).all() else ExpressionIntervals(low, high, level, by)
    return ContextPrediction(values, std, covered, intervals)


def at_height(
    position: Float[np.ndarray, "N 3"], name: str, known: InputCells, chosen: np.ndarray
) -> Float[np.ndarray, "N 3"]:
    """Give planar positions the height of their slice, or the middle height of the known cells."""
    assert known.position is not None
    if name in known.slice_names:
        chosen = chosen & (known.slice_id == known.slice_names.index(name))
    position = position.copy()
    position[:, 2] = np.median(known.position[chosen, 2])
    return position


def is_among(position: np.ndarray, known: np.ndarray) -> bool:
    """Say whether most positions lie in the box of known cells, or less than its size beside it."""
    low, high = known.min(0), known.max(0)
    margin = (high - low).max()
    inside = ((position >= low - margin) & (position <= high + margin)).all(1)
    return bool(inside.mean() > 0.5)


def known_around(name: str, known: InputCells) -> tuple[Bool[np.ndarray, " M"], bool]:
    """Say which training cells lie in the frame of a slice, and whether it is none of theirs."""
    single = len(known.slice_names) == 1 and name == BARE_POSITIONS
    here = name in known.slice_names or single
    if known.common_frame:
        return np.ones(len(known.slice_id), dtype=bool), not here
    number = 0 if single else known.slice_names.index(name) if here else -1
    return known.slice_id == number, False


def fitted_context(
    module: AlphaSTomicsModule,
    known: InputCells,
    chosen: np.ndarray,
    seed: int,
    level: float,
    *,
    across: bool,
) -> SpatialContext:
    """Fit a context to some of the training cells, or remember it."""
    slices = tuple(np.unique(known.slice_id[chosen]).tolist())
    assert known.position is not None
    # Scores move all positions to an origin of their own, and users give cells of theirs.
    parts = (known.expression, known.position, known.measured)
    digest = tuple(zlib.crc32(np.ascontiguousarray(part).data) for part in parts)
    key = (slices, digest, across, seed, level)
    contexts = _fitted.setdefault(module, {})
    if key not in contexts:
        around = some_cells(known, np.flatnonzero(chosen))
        contexts[key] = SpatialContext(around, across_slices=across, seed=seed, level=level)
    return contexts[key]
