"""Embeddings of a file of cells: it enters; an .h5ad with `obsm["X_alphastomics"]` leaves.

The file is read twice in ranges of rows, first for the moments of each gene in each slice, then to
embed the cells; so memory is bounded by a range. A range's cells of one slice are dealt out to sets
at random. Rows keep the file's order.
"""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64

from alphastomics.config import Config, ExtractConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.randomness import stream_seed
from alphastomics.errors import InputError
from alphastomics.extract.files import stored, write_obsm
from alphastomics.extract.folder import (
    ExtractRequest,
    embedding,
    extract_summary,
    loaded_module,
    require_finite_rows,
)
from alphastomics.extract.latents import (
    LATENT_MODES,
    ExtractMode,
    TrainingScale,
    add_surroundings,
    log_mode,
    training_scale,
)
from alphastomics.io.files import replacing, require_output, require_space
from alphastomics.io.h5ad import require_storable, write_anndata
from alphastomics.io.progress import track
from alphastomics.preprocessing.anndata_file import is_group
from alphastomics.preprocessing.cell_source import SourceOptions
from alphastomics.preprocessing.cell_table import CellTable
from alphastomics.preprocessing.formats.h5ad import AnnDataSource
from alphastomics.preprocessing.formats.registry import opened_source
from alphastomics.preprocessing.inspection import size_of
from alphastomics.preprocessing.normalize import (
    Moments,
    merged,
    moments_of_sparse,
    standard_deviation,
    standardized,
)
from alphastomics.preprocessing.owned import require_not_read
from alphastomics.preprocessing.query_fit import Query, opened_query
from alphastomics.utils.dataholder import DataHolder

logger = logging.getLogger(__name__)

ROWS_AT_A_TIME = 20_000


def extract_h5ad(config: Config, request: ExtractRequest) -> dict[str, Any]:
    """Write a copy of the file with an embedding per cell; return a summary."""
    path = request.input_data
    assert path is not None
    output = chosen_h5ad_output(config.extract, path, request.given)
    require_output(output, overwrite=request.overwrite)
    # The input itself may be the output: all that it holds stays, and embeddings are added.
    require_not_read(output, request.checkpoint)
    if "max_samples" in request.given:
        raise InputError("--max_samples: counts with --data_dir; a file is embedded whole")
    module, genes, mode = loaded_module(config, request.checkpoint)
    trained = module.config
    batch_size = (config if "batch_size" in request.given else trained).training.batch_size
    set_size = trained.data.loading.set_size or batch_size
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
        rows = Path(scratch) / "rows"
        shape = embed_h5ad_cells(module, genes, path, config, mode, set_size, rows)
        log_mode(config.extract.mode, mode)
        options = SourceOptions.of(config.data.preprocessing)
        require_space(output.parent, rows.stat().st_size + size_of(options, path))
        with replacing(output) as partial:
            copy_as_h5ad(path, options, partial)
            with h5py.File(partial, "r+") as file:
                keys = write_obsm(file, stored(rows, shape))
    return {**extract_summary(output, mode, shape, set_size, "slice"), "keys": keys}


def copy_as_h5ad(source: Path, options: SourceOptions, target: Path) -> None:
    """Copy a file as it is; another format is read whole and written as .h5ad."""
    if source.suffix == ".h5ad":
        shutil.copyfile(source, target)
        return
    with opened_source(source, options) as cells:
        data = cells.to_anndata()
    require_storable(source, data, "remove it")
    write_anndata(target, data, compression=None)


def embed_h5ad_cells(
    module: AlphaSTomicsModule,
    genes: list[str],
    path: Path,
    config: Config,
    mode: ExtractMode,
    set_size: int,
    target: Path,
) -> tuple[int, ...]:
    """Write the embeddings of an AnnData file's cells to a file of rows; return their shape."""
    options = config.data.preprocessing
    first = ROWS_AT_A_TIME
    with opened_query(path, genes, module.normalization, options, first) as query:
        if isinstance(query.reader.source, AnnDataSource):
            require_own_obsm(path, query.reader.source.root)
        if not query.dims:
            key = query.form.position_key
            logger.info("%s: no obsm[%r]: cells are embedded by expression alone", path, key)
        seed = config.seed.global_seed
        if mode != "niche":
            return embed_file(module, query, mode, seed, set_size, target)[0]
        alone = target.with_name(f"{target.name}_alone")
        shape, position, slice_id = embed_file(module, query, mode, seed, set_size, alone)
        return add_surroundings(*(alone, shape, position if query.dims else None, slice_id, target))


def chosen_h5ad_output(settings: ExtractConfig, path: Path, given: frozenset[str]) -> Path:
    """Return the output file: the one named, or one beside the input; it is an .h5ad."""
    if not path.exists():
        raise InputError(f"{path}: no such file")
    default = ExtractConfig()
    named = "output" in given or settings.output != default.output
    output = Path(settings.output) if named else path.with_name(f"{path.stem}_embedded.h5ad")
    if output.suffix != ".h5ad":
        raise InputError(f"--output {output}: with --input_data it must end in .h5ad")
    if "format" in given and settings.format != "h5ad":
        raise InputError(f"--format {settings.format}: with --input_data it is h5ad; leave it out")
    return output


def require_own_obsm(path: Path, root: Any) -> None:
    """Refuse a file into whose copy no embedding could be written."""
    if "obsm" not in root:
        raise InputError(f"{path}: obsm is missing: save the file again with anndata")
    in_hdf5 = isinstance(root, h5py.Group)
    if in_hdf5 and not isinstance(root.get("obsm", getlink=True), h5py.HardLink):
        raise InputError(
            f"{path}: obsm is a link, and may lead into another file, which is not ours to "
            "write: save the file again with anndata"
        )
    if not is_group(root["obsm"]):
        raise InputError(f"{path}: obsm is no group: save the file again with anndata")


def ranges_of(query: Query) -> Iterator[CellTable]:
    """Read a file in ranges of rows."""
    cells = query.reader.num_cells
    for start in range(0, cells, ROWS_AT_A_TIME):
        yield query.reader.read(query.form, start, min(start + ROWS_AT_A_TIME, cells))


def moments_of(query: Query) -> list[Moments]:
    """Gather mean and std of each gene in each slice, range by range."""
    genes = len(query.measured)
    moments = [Moments(0, np.zeros(genes), np.zeros(genes))] * len(query.reader.slices)
    for cells in ranges_of(query):
        for number in np.unique(cells.slice_id).tolist():
            part = moments_of_sparse(cells.sparse[cells.rows_of(number)])
            moments[number] = merged(moments[number], part)
    return moments


def embed_file(
    module: AlphaSTomicsModule,
    query: Query,
    mode: ExtractMode,
    seed: int,
    set_size: int,
    target: Path,
) -> tuple[tuple[int, ...], Float[np.ndarray, "N 3"], Int64[np.ndarray, " N"]]:
    """Append the embeddings of all rows to a file, range by range.

    Return their shape, and position and slice of each cell.
    """
    moments = moments_of(query) if query.scale else None
    scale = None
    if moments is not None and mode in LATENT_MODES:
        scale = scale_of_query(module, query, moments)
    total = query.reader.num_cells
    width: tuple[int, ...] = ()
    positions, slices = [], []
    with track("extract", total, "cells") as advance, target.open("wb") as file:
        for cells in ranges_of(query):
            embeddings: np.ndarray | None = None
            start = int(cells.cell_id[0])
            for rows in sets_of(cells.slice_id, set_size, stream_seed(seed, "extract", start)):
                chosen = cells.take(rows)
                number = int(chosen.slice_id[0])
                moment = None if moments is None else moments[number]
                expression = standardized(chosen.sparse, moment, query.measured)
                batch = batch_of_set(
                    expression, chosen.position.astype(np.float32), query.measured, number
                ).to(module.device)
                has_position = bool(query.dims)
                hidden = embedding(module, batch, mode, has_position=has_position, scale=scale)[0]
                states = hidden.float().cpu().numpy()
                require_finite_rows(states)
                if embeddings is None:
                    embeddings = np.empty((len(cells), *states.shape[1:]), np.float32)
                embeddings[rows] = states
                advance(len(rows))
            assert embeddings is not None
            positions.append(cells.position)
            slices.append(cells.slice_id)
            width = embeddings.shape[1:]
            file.write(embeddings.tobytes())
    return (total, *width), np.concatenate(positions), np.concatenate(slices)


def scale_of_query(
    module: AlphaSTomicsModule, query: Query, moments: list[Moments]
) -> TrainingScale:
    """Return what brings the slices of a file to the scale of training."""
    mean = np.stack([part.mean for part in moments])
    std = np.stack([standard_deviation(part) for part in moments])
    measured = np.broadcast_to(query.measured, mean.shape)
    return training_scale(module, mean, std, measured, query.reader.slices)


def sets_of(
    codes: Int64[np.ndarray, " N"], set_size: int, seed: int
) -> Iterator[Int64[np.ndarray, " M"]]:
    """Deal out the cells of each slice to sets of at most `set_size`, of similar size."""
    random = np.random.default_rng(seed)
    for number in np.unique(codes):
        rows = random.permutation(np.flatnonzero(codes == number))
        yield from np.array_split(rows, -(-len(rows) // set_size))


def batch_of_set(
    expression: Float32[np.ndarray, "M G"],
    position: Float[np.ndarray, "M 3"],
    measured: Bool[np.ndarray, " G"],
    slice_id: int = 0,
) -> DataHolder:
    """Wrap the cells of one set, all of one slice."""
    values, coordinates, genes = map(torch.from_numpy, (expression, position, measured))
    mask = torch.ones(1, len(expression), dtype=torch.bool)
    cells = DataHolder.of(values[None], coordinates[None], mask)
    number = torch.full_like(cells.slice_id, slice_id)
    return replace(cells, measured_genes=genes[None], slice_id=number)


@contextmanager
def encoder_alone(module: AlphaSTomicsModule, mode: str) -> Iterator[None]:
    """Leave out the layers while the encoder alone is asked for: nothing after it is needed."""
    trunk = module.average.trunk
    layers = trunk.layers
    if mode == "encoder":
        trunk.layers = torch.nn.ModuleList()
    try:
        yield
    finally:
        trunk.layers = layers
