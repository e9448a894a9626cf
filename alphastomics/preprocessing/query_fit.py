"""A query for a model: a file of cells enters; how to read them as in training, and words, leave.

The same for `sample`, `test`, `extract` and the notebook: a query that was normalised before,
shares few genes with the model, or is in other units, gives results that look right.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool
from scipy.sparse import csr_array

from alphastomics.config import PreprocessingConfig
from alphastomics.errors import InputError
from alphastomics.preprocessing.cell_source import CellSource, SourceOptions, usual_position_key
from alphastomics.preprocessing.genes import align
from alphastomics.preprocessing.inspection import slice_name
from alphastomics.preprocessing.reader import CellForm, CellReader
from alphastomics.preprocessing.subprocess_reader import in_subprocess

logger = logging.getLogger(__name__)

# log(1 + 1e4), a cell with one gene alone, is 9.2; counts of real cells reach further.
LARGEST_LOG_VALUE = 12.0
# Shares of the model's genes.
FEW_GENES, VERY_FEW_GENES = 0.5, 0.1
# Micrometres and pixels, or millimetres, differ by more.
UNIT_RATIO = 5.0
# Of counts a cell: slices and animals of one study differ by up to two.
DEPTH_RATIO = 4.0
SHOWN_VALUES = 100_000
LEAST_CELLS = 2
# What a module that was not trained by `train` is taken to have seen.
DEFAULT_NORMALIZATION = {"log_normalize": True, "scale": True}


class Query(NamedTuple):
    """An open file of cells, and what they are to become.

    `measured` are the model's genes that the file has; with `scale`, values are to be standardised
    within their slice; `dims` counts the coordinates, 0 without any.
    """

    reader: CellReader
    form: CellForm
    measured: Bool[np.ndarray, " G"]
    scale: bool
    dims: int


@contextmanager
def opened_query(
    path: Path,
    genes: Sequence[str],
    normalization: Mapping[str, Any] | None,
    options: PreprocessingConfig,
    first_rows: int | None = None,
    *,
    partial: bool = False,
    checks_genes: bool = True,
) -> Iterator[Query]:
    """Open a file whose cells a model is asked about, and check that they fit it.

    Parameters
    ----------
    path
        A file or folder of cells, in any of the formats.
    genes, normalization
        The model's genes, and what was done to its training cells.
    options
        Where in the file the cells are, and whether they were normalised before.
    first_rows
        Rows that say whether the values are counts; None asks all.
    partial
        Some cells may have no position (NaN).
    checks_genes
        Say so where few of the genes are there.
    """
    trained = normalization or DEFAULT_NORMALIZATION
    with in_subprocess(path, SourceOptions.of(options)) as source:
        say_notes(path, source)
        key = usual_position_key(source.position_keys, options)
        reader = checked_reader(source, path, key)
        alignment = align(reader.genes, genes, path)
        positions = reader.positions(key)
        if positions is None and options.pixel_size is not None:
            logger.warning("%s: has no positions: --pixel_size is not used for it", path)
        if positions is not None and positions.columns not in (2, 3):
            raise InputError(
                f"{path}: {positions.field} has {positions.columns} columns, not 2 or 3"
            )
        stop = min(reader.num_cells, first_rows or reader.num_cells)
        # Values as the user has them, for a training that nobody knows: nothing to compare with.
        as_said = normalization is None and not options.log_normalize
        normalize = trained["log_normalize"] and not as_said
        normalize = normalize and needs_normalizing(
            reader.counts(0, stop),
            path,
            has_log1p=source.has_log1p,
            asked=options.log_normalize,
            as_it_is=bool(trained.get("fractions")),
        )
        measured = np.ones(len(genes), dtype=bool)
        measured[alignment.missing()] = False
        if checks_genes:
            check_genes(int(measured.sum()), genes, path)
        types = reader.names_that_occur(options.cell_type_key) or ()
        form = CellForm(alignment, bool(normalize), key, options.cell_type_key, types, partial)
        dims = 0 if positions is None else positions.columns
        yield Query(reader, form, measured, bool(trained["scale"]), dims)


def checked_reader(source: CellSource, path: Path, position_key: str) -> CellReader:
    """Return a reader of cells whose files agree, and which are enough."""
    source.verify()
    is_slice = not source.is_dissociated(position_key)
    reader = CellReader(source, slice_name(path.name), has_positions=is_slice)
    require_enough(reader.num_cells, path)
    return reader


def say_notes(path: Path, source: CellSource) -> None:
    """Log what was left out or chosen of an input, and what looks wrong."""
    for note in source.notes:
        logger.info("%s: %s", path, note)
    for warning in source.warnings:
        logger.warning("%s: %s", path, warning)


def require_enough(cells: int, where: object) -> None:
    """Refuse inputs that make no tissue."""
    if cells < LEAST_CELLS:
        raise InputError(f"{where}: {cells} cell(s); at least {LEAST_CELLS} are needed")


def needs_normalizing(
    counts: csr_array, path: Path, *, has_log1p: bool, asked: bool, as_it_is: bool
) -> bool:
    """Say whether a query's values are counts, to be normalised as in training.

    Parameters
    ----------
    counts
        The values of the query.
    path
        What to call it.
    has_log1p
        Whether its `uns` says that scanpy's log1p was applied.
    asked
        Whether the user leaves that to us; False says that it was done before.
    as_it_is
        Whether training normalised such values as they were, counts or not: so must we.
    """
    if len(counts.data) and float(counts.data.min()) < 0:
        raise InputError(
            f"{path}: X has negative values, but the model was trained on log-normalised counts, "
            "which have none: scaled or centred values cannot be brought to them; put counts into X"
        )
    values = counts.data[:SHOWN_VALUES]
    fractions = bool(len(values)) and bool((values != np.round(values)).any())
    largest = float(counts.data.max()) if len(counts.data) else 0.0
    if not asked:
        if not fractions and largest > LARGEST_LOG_VALUE:
            logger.warning(
                "%s: X looks like counts (whole numbers, largest %.3g), yet --skip-log-normalize "
                "says that it is log-normalised: leave it out if that is wrong",
                *(path, largest),
            )
        return False
    if as_it_is:
        return True
    if fractions and (has_log1p or largest <= LARGEST_LOG_VALUE):
        logger.warning(
            "%s: X looks log-normalised already (%s, largest value %.3g): it is not normalised "
            "again; put counts into X if that is wrong",
            path,
            "uns['log1p'] is there" if has_log1p else "no whole numbers",
            largest,
        )
        return False
    if fractions:
        logger.warning(
            "%s: X holds values that are no counts (largest %.3g); they are normalised as counts "
            "are: give --skip-log-normalize if that was done before",
            path,
            largest,
        )
    return True


def num_empty(values: csr_array) -> int:
    """Count the cells that have no value but zero."""
    there = np.concatenate([[0], np.cumsum(values.data != 0)])[values.indptr]
    return int((np.diff(there) == 0).sum())


def check_empty_cells(empty: int, cells: int, where: object) -> None:
    """Warn of cells without any count of the model's genes; refuse a query of nothing else."""
    if empty == cells:
        raise InputError(
            f"{where}: none of its {cells} cells has a count of the model's genes: put the counts "
            "into X, and check that the file is the right one"
        )
    if empty:
        logger.warning(
            "%s: %d of %d cells have no count of the model's genes: what is predicted from their "
            "expression says nothing; leave them out",
            *(where, empty, cells),
        )


def check_genes(measured: int, genes: Sequence[str], path: Path) -> None:
    """Warn of a query that shares few genes with the model; refuse one that shares none."""
    if measured == 0:
        raise InputError(
            f"{path}: has none of the model's {len(genes)} genes (first: {genes[0]!r}): name its "
            "genes as the training data does, in var_names"
        )
    share = measured / len(genes)
    if share >= FEW_GENES:
        return
    logger.warning(
        "%s: has %d of the model's %d genes, %.0f %%: results are unreliable%s; preprocess with "
        "the genes that both have (--gene_list_file) and train again",
        path,
        measured,
        len(genes),
        100 * share,
        ", expect them near chance" if share < VERY_FEW_GENES else "",
    )


def size_of(position: np.ndarray) -> float:
    """Root mean square of the coordinates about their mean, over the axes that vary."""
    centred = position.astype(np.float64) - position.mean(0, dtype=np.float64)
    varying = max(int((centred**2).sum(0).astype(bool).sum()), 1)
    return float(np.sqrt((centred**2).sum() / (len(position) * varying)))


def check_units(position: np.ndarray, scale: float, slice_name: str) -> None:
    """Warn of a slice whose size is not that of the training slices, as in other units."""
    size = size_of(position)
    if size > 0 and not 1 / UNIT_RATIO <= size / scale <= UNIT_RATIO:
        logger.warning(
            "slice %s is %.3g times the size of the training slices: are its coordinates in the "
            "same units (micrometres, pixels)?",
            slice_name,
            size / scale,
        )


def check_depth(median: float, trained: tuple[float, float], slice_name: str) -> None:
    """Warn of a slice whose cells have far more or fewer counts than those of training slices.

    Parameters
    ----------
    median
        The median of the counts of its cells.
    trained
        The least and the largest such number of the training slices, over the same genes.
    slice_name
        What to call it.
    """
    least, most = trained
    if least / DEPTH_RATIO <= median <= DEPTH_RATIO * most:
        return
    advice = (
        "reduce them to that depth (scanpy.pp.downsample_counts)"
        if median > most
        else "train on slices of such cells"
    )
    logger.warning(
        "slice %s has %.3g counts a cell, the training slices %.3g to %.3g over the same genes: "
        "results are less reliable than the verdict says; %s",
        *(slice_name, median, least, most, advice),
    )
