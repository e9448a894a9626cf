"""What is known beside a query: a model, a query and perhaps a reference enter; their cells leave.

Known cells are those that the model was trained on, with or without positions, where their
processed folder is found, and those of a reference, which may be dissociated and may have genes
that the model does not know.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from alphastomics.config import Config
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.errors import InputError
from alphastomics.generation.cells import InputCells, read_processed, read_pt, read_query
from alphastomics.generation.gene_features import GeneCells, gene_cells, joined
from alphastomics.generation.notices import is_processed
from alphastomics.generation.training_cells import dissociated_cells, training_cells
from alphastomics.preprocessing.cell_source import SourceOptions
from alphastomics.preprocessing.query_fit import DEFAULT_NORMALIZATION, check_empty_cells
from alphastomics.preprocessing.subprocess_reader import in_subprocess

logger = logging.getLogger(__name__)

# Training cells, or cells of a reference, that are looked at.
MOST_CELLS = 50_000
# Where nobody named a column of cell types.
USUAL_TYPE_KEY = "cell_type"
# Fewer genes in common say little.
LEAST_SHARED = 10


class Source(NamedTuple):
    """A file or folder of cells, and the settings to read it with; the split of a processed one."""

    path: Path
    config: Config
    split: str = "test"


class Gathered(NamedTuple):
    """A query, and what is known beside it.

    Attributes
    ----------
    genes
        Names of all genes: the model's, then those that a reference adds.
    cells, query
        The query as the model reads it, and in the unit that users know.
    known
        Cells of training slices and of a reference; None without any.
    dissociated
        Cells without positions of the training data; None without any.
    is_log
        Whether values are logarithms of shares.
    """

    genes: list[str]
    cells: InputCells
    query: GeneCells
    known: GeneCells | None
    dissociated: GeneCells | None
    is_log: bool

    def everything(self) -> GeneCells | None:
        """Return known cells, with dissociated ones of the training data."""
        parts = [part for part in (self.known, self.dissociated) if part is not None]
        return joined(parts) if parts else None

    def panels(self) -> Iterator[np.ndarray]:
        """Yield the rows of query cells whose slices measured the same genes."""
        kinds = np.unique(self.query.measured, axis=0, return_inverse=True)[1].reshape(-1)
        for kind in range(kinds.max() + 1):
            yield np.flatnonzero(kinds[self.query.slice_id] == kind)


class Contents(NamedTuple):
    """Genes of a file of cells, and the columns of its obs."""

    genes: list[str]
    columns: list[str]


def contents_of(source: Source) -> Contents:
    """Look into a file of cells."""
    with in_subprocess(source.path, SourceOptions.of(source.config.data.preprocessing)) as cells:
        return Contents([str(gene) for gene in cells.genes], list(cells.obs.columns))


def gather(
    module: AlphaSTomicsModule,
    genes: list[str],
    query: Source,
    reference: Source | None,
    near: Sequence[Path],
    wanted: Sequence[str] | None = None,
) -> Gathered:
    """Read a query, the training cells and a reference.

    Parameters
    ----------
    module, genes
        The model and its genes.
    query, reference
        Where their cells are.
    near
        Where to look for the training cells beside the recorded folder.
    wanted
        Genes that are asked for; None are all. Others of the reference count where the query has
        them.
    """
    is_file = query.path.suffix != ".pt" and not is_processed(query.path)
    extra: list[str] = []
    if reference is not None:
        require_file_of_cells(reference.path)
        useful = (
            None if wanted is None else {*wanted, *(contents_of(query).genes if is_file else ())}
        )
        offered = set(contents_of(reference).genes) - set(genes)
        extra = sorted(offered if useful is None else offered & useful)
    every = [*genes, *extra]
    cells = read_asked(module, query, every) if is_file else read_prepared(query, genes)
    parts = []
    known = training_cells(module, genes, near)
    if known is not None:
        parts.append(gene_cells(known, len(every), some_rows(known)))
    without = dissociated_cells(module, genes, near)
    dissociated = None if without is None else reference_cells(without, len(every))
    asked = gene_cells(cells, len(every))
    if reference is not None:
        parts.append(read_reference(module, every, reference))
        if not (parts[-1].measured.any(0) & asked.measured.any(0)).any():
            raise InputError(
                f"{reference.path}: shares no gene with the input: name its genes as the input "
                "does, in var_names"
            )
    log_normalized = (module.normalization or DEFAULT_NORMALIZATION)["log_normalize"]
    others = [] if dissociated is None else [dissociated]
    is_log = bool(log_normalized) and all(
        part.values.min(initial=0) >= 0 for part in (asked, *parts, *others)
    )
    known_parts = joined(parts) if parts else None
    return Gathered(every, cells, asked, known_parts, dissociated, is_log)


def read_asked(module: AlphaSTomicsModule, query: Source, genes: list[str]) -> InputCells:
    """Read a query from a file of cells; its types are what is asked for."""
    require_file_of_cells(query.path)
    untyped = with_type_key(query.config, None)
    cells = read_query(query.path, genes, module.normalization, untyped, checks_genes=False)
    check_empty_cells(cells.num_empty, len(cells), query.path)
    return cells


def read_prepared(query: Source, genes: list[str]) -> InputCells:
    """Read a query that is normalised already: tensors, or a processed folder."""
    if query.path.suffix == ".pt":
        return read_pt(query.path, len(genes))
    return read_processed(query.path, genes, query.split)


def require_file_of_cells(path: Path) -> None:
    """Refuse what is no file or folder of cells."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder, seen from the working folder")
    if path.suffix == ".pt" or is_processed(path):
        raise InputError(f"{path}: a reference is a file of cells, such as .h5ad")


def some_rows(cells: InputCells) -> np.ndarray:
    """Choose some of very many cells, in order."""
    return np.sort(np.random.default_rng(0).permutation(len(cells.slice_id))[:MOST_CELLS])


def with_type_key(config: Config, key: str | None) -> Config:
    """Return settings that read cell types from another column, or none."""
    reading = config.data.preprocessing.model_copy(update={"cell_type_key": key})
    data = config.data.model_copy(update={"preprocessing": reading})
    return config.model_copy(update={"data": data})


def read_reference(module: AlphaSTomicsModule, genes: list[str], source: Source) -> GeneCells:
    """Read the cells of a reference; their types, where they stand where those of training did."""
    options = source.config.data.preprocessing
    columns = contents_of(source).columns
    named = options.cell_type_key or module.config.data.preprocessing.cell_type_key
    key: str | None = named or USUAL_TYPE_KEY
    if key not in columns:
        if module.type_names:
            logger.warning(
                "%s: has no column obs[%r]: its cells say nothing of types; name the column with "
                "data.preprocessing.cell_type_key",
                *(source.path, key),
            )
        key = None
    config = with_type_key(source.config, key)
    cells = read_query(source.path, genes, module.normalization, config, checks_genes=False)
    check_empty_cells(cells.num_empty, len(cells), source.path)
    return reference_cells(cells, len(genes))


def reference_cells(cells: InputCells, num_genes: int) -> GeneCells:
    """Take some of the cells of a reference, in the unit that users know."""
    # Whatever its slices are called, they are none of the query's.
    names = [f"reference: {name}" for name in cells.slice_names]
    return gene_cells(replace(cells, slice_names=names), num_genes, some_rows(cells))


def require_shared(query: GeneCells, known: GeneCells) -> None:
    """Refuse a query that shares no gene with known cells; warn of one that shares few."""
    measured = query.measured[query.slice_id[0]]
    shared = int((measured & known.measured.any(0)).sum())
    if shared == 0:
        raise InputError(
            "the query shares no gene with the training cells: name its genes as the training data "
            "does, in var_names"
        )
    if shared < LEAST_SHARED:
        logger.warning(
            "the query shares %d gene(s) with the known cells: they say little of others", shared
        )
