"""Embeddings of an AnnData file: it enters; an .h5ad with `obsm["X_alphastomics"]` leaves.

The file is read twice in ranges of rows, first for the moments of each gene in each slice, then to
embed the cells; so memory is bounded by a range. A range's cells of one slice are dealt out to sets
at random. Rows keep the file's order.
"""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from scipy.sparse import csr_array

from alphastomics.config import Config, ExtractConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.randomness import stream_seed
from alphastomics.errors import InputError
from alphastomics.extract.files import write_obsm
from alphastomics.extract.folder import (
    ExtractRequest,
    embedding,
    extract_summary,
    loaded_module,
    require_finite_rows,
    stored,
)
from alphastomics.io.files import replacing, require_output, require_space
from alphastomics.io.h5ad import require_storable, write_anndata
from alphastomics.io.progress import track
from alphastomics.preprocessing.anndata_file import (
    SUFFIXES,
    Expression,
    Frame,
    Positions,
    is_group,
    read_whole,
)
from alphastomics.preprocessing.genes import Alignment, align, require_unique
from alphastomics.preprocessing.inspection import SLICE_KEY, size_of, slice_codes, slice_names
from alphastomics.preprocessing.normalize import (
    Moments,
    log_normalized,
    merged,
    moments_of_sparse,
    standard_deviation,
)
from alphastomics.preprocessing.owned import require_not_read
from alphastomics.preprocessing.query_fit import check_genes, needs_normalizing
from alphastomics.preprocessing.subprocess_reader import in_subprocess
from alphastomics.utils.dataholder import DataHolder

logger = logging.getLogger(__name__)

ROWS_AT_A_TIME = 20_000
LEAST_CELLS = 2
# What a module that was not trained by `train` is taken to have seen.
DEFAULT_NORMALIZATION = {"log_normalize": True, "scale": True}


class Source(NamedTuple):
    """An open file, and how its cells become those of the checkpoint."""

    path: Path
    expression: Expression
    positions: Positions | None
    alignment: Alignment
    measured: Bool[np.ndarray, " G"]
    slice_id: Int64[np.ndarray, " N"]
    num_slices: int
    log_normalize: bool
    whole: csr_array | None

    def values(self, start: int, stop: int) -> csr_array:
        """Return the checkpoint's genes of some rows, normalised but not standardised."""
        counts = self.expression.rows(start, stop) if self.whole is None else self.whole[start:stop]
        if self.log_normalize:
            if counts.nnz and counts.data.min() < 0:
                raise InputError(
                    f"{self.path}: X has negative values, but the model was trained on counts: put "
                    "counts into X"
                )
            counts = log_normalized(counts)
        return self.alignment.apply(counts)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Cut the rows into ranges."""
        for start in range(0, len(self.slice_id), ROWS_AT_A_TIME):
            yield start, min(start + ROWS_AT_A_TIME, len(self.slice_id))


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
    module, genes = loaded_module(config, request.checkpoint)
    mode, trained = config.extract.mode, module.config
    batch_size = (config if "batch_size" in request.given else trained).training.batch_size
    set_size = trained.data.loading.set_size or batch_size
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
        rows = Path(scratch) / "rows"
        shape = embed_h5ad_cells(module, genes, path, config, set_size, rows)
        require_space(output.parent, rows.stat().st_size + size_of(path))
        with replacing(output) as partial:
            copy_as_h5ad(path, partial)
            with h5py.File(partial, "r+") as file:
                keys = write_obsm(file, stored(rows, shape))
    return {**extract_summary(output, mode, shape, set_size, "slice"), "keys": keys}


def copy_as_h5ad(source: Path, target: Path) -> None:
    """Copy a file as it is; another container is read whole and written as .h5ad."""
    if source.suffix == ".h5ad":
        shutil.copyfile(source, target)
        return
    data = read_whole(source)
    require_storable(source, data, "remove it")
    write_anndata(target, data, compression=None)


def embed_h5ad_cells(
    module: AlphaSTomicsModule,
    genes: list[str],
    path: Path,
    config: Config,
    set_size: int,
    target: Path,
) -> tuple[int, ...]:
    """Write the embeddings of an AnnData file's cells to a file of rows; return their shape."""
    normalization = module.normalization or DEFAULT_NORMALIZATION
    with source_of(path, genes, normalization, config) as source:
        moments = moments_of(source) if normalization["scale"] else None
        return embed_file(module, source, moments, config, set_size, target)


def chosen_h5ad_output(settings: ExtractConfig, path: Path, given: frozenset[str]) -> Path:
    """Return the output file: the one named, or one beside the input; it is an .h5ad."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: expected an {' or '.join(SUFFIXES)} file for --input_data")
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


@contextmanager
def source_of(
    path: Path, genes: list[str], normalization: dict[str, Any], config: Config
) -> Iterator[Source]:
    """Open a file and check that it can be embedded."""
    key = config.data.preprocessing.position_key
    with in_subprocess(path) as root:
        obs, var = Frame(path, root, "obs"), Frame(path, root, "var")
        cells, file_genes = len(obs), var.names(0, len(var)).to_pylist()
        if cells < LEAST_CELLS:
            raise InputError(f"{path}: {cells} cell(s); at least {LEAST_CELLS} are needed")
        require_unique(file_genes, f"{path}: var_names", "make them unique and save the file again")
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
        positions = positions_of(path, root, key, cells)
        alignment = align(file_genes, genes, path)
        measured = np.ones(len(genes), dtype=bool)
        measured[alignment.missing()] = False
        slices = slice_names(obs, cells) if SLICE_KEY in obs.columns else (path.stem,)
        codes = np.zeros(cells, dtype=np.int64)
        if SLICE_KEY in obs.columns:
            codes = slice_codes(obs, slices, 0, cells)
        expression = Expression(path, root, cells, len(file_genes))
        # By columns there are no rows to be had but all.
        whole = expression.whole() if expression.kind == "csc" else None
        first = expression.rows(0, min(cells, ROWS_AT_A_TIME)) if whole is None else whole
        normalize = normalization["log_normalize"] and needs_normalizing(
            first,
            path,
            has_log1p="uns" in root and "log1p" in root["uns"],
            asked=config.data.preprocessing.log_normalize,
            as_it_is=bool(normalization.get("fractions")),
        )
        check_genes(int(measured.sum()), genes, path)
        yield Source(
            *(path, expression, positions, alignment, measured, codes, len(slices)),
            bool(normalize),
            whole,
        )


def positions_of(path: Path, root: Any, key: str, cells: int) -> Positions | None:
    """Open the coordinates; dissociated cells have none, and are embedded by expression alone."""
    if key not in root["obsm"]:
        logger.info("%s: no obsm[%r]: cells are embedded by expression alone", path, key)
        return None
    positions = Positions(path, root, key, cells)
    if positions.columns not in (2, 3):
        raise InputError(f"{path}: obsm[{key!r}] has {positions.columns} columns, not 2 or 3")
    return positions


def moments_of(source: Source) -> list[Moments]:
    """Gather mean and std of each gene in each slice, range by range."""
    genes = len(source.measured)
    empty = Moments(0, np.zeros(genes), np.zeros(genes))
    moments = [empty] * source.num_slices
    for start, stop in source.ranges():
        values, codes = source.values(start, stop), source.slice_id[start:stop]
        for number in np.unique(codes):
            part = moments_of_sparse(values[np.flatnonzero(codes == number)])
            moments[number] = merged(moments[number], part)
    return moments


def embed_file(
    module: AlphaSTomicsModule,
    source: Source,
    moments: list[Moments] | None,
    config: Config,
    set_size: int,
    target: Path,
) -> tuple[int, ...]:
    """Append the embeddings of all rows to a file, range by range; return their shape."""
    seed, mode = config.seed.global_seed, config.extract.mode
    width: tuple[int, ...] = ()
    with track("extract", len(source.slice_id), "cells") as advance, target.open("wb") as file:
        for start, stop in source.ranges():
            has_position = source.positions is not None
            position = np.zeros((stop - start, 3), np.float32)
            if source.positions is not None:
                coordinates = source.positions.rows(start, stop)
                position[:, : coordinates.shape[1]] = coordinates
            values, codes = source.values(start, stop), source.slice_id[start:stop]
            embeddings: np.ndarray | None = None
            for rows in sets_of(codes, set_size, stream_seed(seed, "extract", start)):
                moment = None if moments is None else moments[codes[rows[0]]]
                expression = standardised(values[rows], moment, source.measured)
                batch = batch_of_set(expression, position[rows], source.measured)
                hidden = embedding(
                    module, batch.to(module.device), mode, has_position=has_position
                )[0]
                states = hidden.float().cpu().numpy()
                require_finite_rows(states)
                if embeddings is None:
                    embeddings = np.empty((stop - start, *states.shape[1:]), np.float32)
                embeddings[rows] = states
                advance(len(rows))
            assert embeddings is not None
            width = embeddings.shape[1:]
            file.write(embeddings.tobytes())
    return (len(source.slice_id), *width)


def sets_of(
    codes: Int64[np.ndarray, " N"], set_size: int, seed: int
) -> Iterator[Int64[np.ndarray, " M"]]:
    """Deal out the cells of each slice to sets of at most `set_size`, of similar size."""
    random = np.random.default_rng(seed)
    for number in np.unique(codes):
        rows = random.permutation(np.flatnonzero(codes == number))
        yield from np.array_split(rows, -(-len(rows) // set_size))


def standardised(
    values: csr_array, moments: Moments | None, measured: Bool[np.ndarray, " G"]
) -> Float32[np.ndarray, "M G"]:
    """Return dense values, standardised as in training where it was; 0 where not measured."""
    dense = values.toarray().astype(np.float64)
    if moments is not None:
        dense = (dense - moments.mean) / standard_deviation(moments)
    dense[:, ~measured] = 0
    return dense.astype(np.float32)


def batch_of_set(
    expression: Float32[np.ndarray, "M G"],
    position: Float[np.ndarray, "M 3"],
    measured: Bool[np.ndarray, " G"],
) -> DataHolder:
    """Wrap the cells of one set."""
    none = torch.full((1, len(expression)), -1, dtype=torch.int64)
    return DataHolder(
        expression=torch.from_numpy(expression)[None],
        positions=torch.from_numpy(position)[None],
        node_mask=torch.ones_like(none, dtype=torch.bool),
        cell_type=none,
        slice_id=none,
        cell_id=none,
        panel=torch.zeros_like(none),
        measured_genes=torch.from_numpy(measured)[None],
    )
