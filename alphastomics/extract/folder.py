"""Embeddings: a checkpoint and a processed folder enter, a file with a row per cell leaves.

A cell's latent is that of the count model. For the hidden states every cell is given cleanly (both
times 0) to the averaged network, in sets drawn as in training. Rows are in the order of `cell_id`.
They wait on the disk, not in memory, until the file is written.
"""

import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from alphastomics.config import Config, ExtractConfig
from alphastomics.diffusion_model.checkpoint import load_module, require_same_genes
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.randomness import seed_everything
from alphastomics.errors import InputError
from alphastomics.extract.files import BLOCK_ROWS, WRITERS, Column, stored
from alphastomics.extract.latents import (
    LATENT_MODES,
    ExtractMode,
    TrainingScale,
    add_surroundings,
    log_mode,
    resolve_mode,
    training_scale,
)
from alphastomics.io.files import replacing, require_output, require_space
from alphastomics.io.progress import track
from alphastomics.preprocessing.batch_loader import BatchLoader, create_dataloaders
from alphastomics.preprocessing.folder import DataFolder
from alphastomics.preprocessing.owned import require_not_read
from alphastomics.preprocessing.schema import SPLITS, Metadata
from alphastomics.preprocessing.shard_reader import ShardReader
from alphastomics.utils.dataholder import DataHolder

logger = logging.getLogger(__name__)

LABEL_BYTES = 256  # of a cell beside its embedding: names and numbers
Labels = dict[str, np.ndarray]  # numbers of each embedded cell, by their names in the file


class ExtractRequest(NamedTuple):
    """What a caller asks for beside the settings.

    Attributes
    ----------
    checkpoint
        Checkpoint of a trained model.
    input_data
        An .h5ad file to embed, instead of the processed folder.
    given
        Names of the flags that the caller gave.
    overwrite
        Replace an output that exists.
    """

    checkpoint: Path
    given: frozenset[str] = frozenset()
    overwrite: bool = False
    input_data: Path | None = None


def extract(config: Config, request: ExtractRequest) -> dict[str, Any]:
    """Write an embedding per cell; return a summary."""
    output = chosen_output(config.extract, request.given)
    require_output(output, overwrite=request.overwrite)
    require_not_read(output, request.checkpoint, Path(config.data.processed_data_dir))
    module, genes, mode = loaded_module(config, request.checkpoint)
    folder = DataFolder(config.data.processed_data_dir)
    metadata = folder.metadata()
    require_same_genes(genes, metadata.genes, request.checkpoint, folder.where)
    kept = cells_to_embed(metadata, config.extract.max_samples, folder.where)
    if metadata.references:
        logger.warning(
            "%s: the %d dissociated cells of its split 'reference' are left out: embed their file "
            "with --input_data",
            *(folder.where, metadata.reference_cells),
        )
    # Neighbours are among all cells, whichever are kept.
    counts = cells_to_embed(metadata, None, folder.where) if mode == "niche" else kept
    batch_size = config.training.batch_size if "batch_size" in request.given else None
    loaders = make_split_loaders(module.config, metadata, config, batch_size, module.device)
    log_mode(config.extract.mode, mode)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
        unordered, ordered = Path(scratch) / "drawn", Path(scratch) / "ordered"
        shape, labels = embed_cells(module, mode, loaders, counts, unordered)
        if mode == "niche":
            alone, unordered = unordered, Path(scratch) / "surrounded"
            where = labels["position"], labels["slice_id"]
            shape = add_surroundings(alone, shape, *where, unordered)
        order = rows_in_order(labels, kept)
        sort_rows(unordered, ordered, shape, order)
        shape = (len(order), *shape[1:])
        labels = {name: column[order] for name, column in labels.items()}
        require_space(output.parent, ordered.stat().st_size + LABEL_BYTES * shape[0])
        verify = config.data.loading.verify_checksums
        names = cell_names(folder, metadata, labels["cell_id"], verify=verify)
        content = columns(labels, names, metadata, mode)
        with replacing(output) as partial:
            WRITERS[output.suffix](partial, stored(ordered, shape), content)
    shown = loaders[0].shape.set_size, loaders[0].draw.kind
    return extract_summary(output, mode, shape, *shown)


def loaded_module(
    config: Config, checkpoint: Path
) -> tuple[AlphaSTomicsModule, list[str], ExtractMode]:
    """Load what embeds cells onto the GPU, if there is one; return it, its genes and the mode."""
    module, genes = load_module(checkpoint)
    mode = resolve_mode(config.extract.mode, module)
    seed_everything(config.seed.global_seed, deterministic=config.seed.deterministic)
    if mode == "encoder":
        module.average.trunk.layers = torch.nn.ModuleList()  # nothing after it is needed
    return module.to("cuda" if torch.cuda.is_available() else "cpu"), genes, mode


def extract_summary(
    output: Path, mode: ExtractMode, shape: tuple[int, ...], set_size: int, set_draw: str
) -> dict[str, Any]:
    """Say what was written."""
    return {
        "output": str(output),
        "extract_mode": mode,
        "shape": list(shape),
        "set_size": set_size,
        "set_draw": set_draw,
    }


def chosen_output(settings: ExtractConfig, given: frozenset[str]) -> Path:
    """Return the output file; its ending is the format's.

    An output that was not named takes the ending of the format, a format that was not named that
    of the output, and two that were named must agree.
    """
    default = ExtractConfig()
    output = Path(settings.output)
    if "output" not in given and settings.output == default.output:
        return output.with_suffix(f".{settings.format}")
    if output.suffix not in WRITERS:
        raise InputError(
            f"--output {output}: must end in {', '.join(WRITERS)}; "
            f"for the format {settings.format} name it {output.name}.{settings.format}"
        )
    named = "format" in given or settings.format != default.format
    if named and output.suffix != f".{settings.format}":
        raise InputError(
            f"--format {settings.format}: does not agree with --output {output}; leave --format "
            f"out, or name the output {output.with_suffix(f'.{settings.format}')}"
        )
    return output


def cells_to_embed(metadata: Metadata, limit: int | None, where: str) -> list[int]:
    """Return how many cells of each split are embedded: all, or `limit` in proportion."""
    totals = [metadata.splits[split].cells for split in SPLITS]
    total = sum(totals)
    if total == 0:
        raise InputError(f"{where}: has no cells; preprocess slices that have some")
    limit = total if limit is None else min(limit, total)
    ends = [limit * sum(totals[: index + 1]) // total for index in range(len(totals))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def make_split_loaders(
    trained: Config,
    metadata: Metadata,
    config: Config,
    batch_size: int | None,
    device: torch.device,
) -> tuple[BatchLoader, BatchLoader, BatchLoader]:
    """Return a loader of each split, with the sets of the checkpoint's own config.

    Shards are streamed, save for sets of one slice from a folder whose layout mixes slices.
    """
    sets, reading = trained.data.loading, config.data.loading
    return create_dataloaders(
        config.data.processed_data_dir,
        trained.training.batch_size if batch_size is None else batch_size,
        streaming=sets.set_draw == "random" or metadata.layout == "slice",
        buffer_size=sets.buffer_size,
        num_workers=reading.num_workers,
        set_size=sets.set_size,
        set_draw=sets.set_draw,
        seed=config.seed.global_seed,
        rank=0,
        world_size=1,
        verify_checksums=reading.verify_checksums,
        device=device if device.type == "cuda" else None,
    )


@torch.inference_mode()
def embedding(
    module: AlphaSTomicsModule,
    batch: DataHolder,
    mode: ExtractMode,
    *,
    has_position: bool = True,
    scale: TrainingScale | None = None,
) -> Float[Tensor, "B N D"] | Float[Tensor, "B N L D"]:
    """Return the latents of cells, or the hidden states of clean cells: nothing is drawn.

    `latent` and `niche` are the latents of the count model, on the scale of training. Hidden states
    are those of both modalities at time 0: `encoder` is what enters the first layer, `transformer`
    what leaves the last, and `all_layers` all of them in a row: L is the number of layers + 1.
    Cells without a position have it at the time of pure noise, all at its mean.
    """
    if mode in LATENT_MODES:
        counts = module.average.count_model
        assert counts is not None
        values = batch.expression
        if scale is not None:
            values = scale.apply(values, batch.slice_id)
        return counts.latents(values, batch.gene_mask)
    times = torch.zeros(len(batch.node_mask), 2, dtype=torch.int64, device=batch.node_mask.device)
    position = (
        module.inner_positions(batch, None) if has_position else torch.zeros_like(batch.positions)
    )
    if not has_position:
        times[:, 1] = module.noise_model.num_timesteps
    prediction = module.average(
        batch.expression,
        position,
        module.noise_model.network_time(times, batch.expression.dtype),
        batch.node_mask,
        gene_mask=batch.gene_mask,
        output_hidden_states=True,
    )
    states = prediction.aux.hidden_states
    if mode == "all_layers":
        return torch.stack(states, dim=2)
    return states[0] if mode == "encoder" else states[-1]


def embed_cells(
    module: AlphaSTomicsModule,
    mode: ExtractMode,
    loaders: Sequence[BatchLoader],
    counts: Sequence[int],
    unordered: Path,
) -> tuple[tuple[int, ...], Labels]:
    """Append the embeddings of cells to a file as they are drawn; return its shape and labels.

    The first `counts` cells that each split draws are kept; no set is drawn after them.
    """
    parts_of_labels: list[Labels] = []
    width: tuple[int, ...] = ()
    scale = scale_of_folder(module, loaders[0]) if mode in LATENT_MODES else None
    with track("extract", sum(counts), "cells") as advance, unordered.open("wb") as file:
        for split, (loader, count) in enumerate(zip(loaders, counts, strict=True)):
            for batch, rows in rows_to_keep(loader, count):
                values = embedding(module, batch.to(module.device), mode, scale=scale).cpu()
                kept = values[batch.node_mask][: len(rows)].float().numpy()
                require_finite_rows(kept)
                file.write(kept.tobytes())
                width = kept.shape[1:]
                parts_of_labels.append(labels_of(batch, rows, split))
                advance(len(rows))
    labels = {
        name: np.concatenate([part[name] for part in parts_of_labels])
        for name in parts_of_labels[0]
    }
    assert len(np.unique(labels["cell_id"])) == sum(counts), "a cell was drawn twice, or not at all"
    return (sum(counts), *width), labels


def scale_of_folder(module: AlphaSTomicsModule, loader: BatchLoader) -> TrainingScale | None:
    """Return what brings the slices of a folder to the scale of training; None: they have one."""
    reader = loader.reader
    if reader.scaling is None:
        return None
    measured = reader.measured_genes[reader.panel_of_slice]
    names = [record.name for record in loader.metadata.slices]
    return training_scale(module, *reader.scaling, measured, names)


def require_finite_rows(values: np.ndarray) -> None:
    """Refuse embeddings that are no numbers: NaN never leaves."""
    if not np.isfinite(values).all():
        raise InputError(
            "extract: the network made values that are not finite: coordinates or expression are "
            "extreme (other units than in training?), or the training diverged"
        )


def rows_to_keep(
    loader: BatchLoader, count: int
) -> Iterator[tuple[DataHolder, Int64[np.ndarray, " M"]]]:
    """Yield batches, and which of their rows hold the cells to keep, until `count` are found."""
    left = count
    if not left:
        return
    for batch in loader:
        rows = batch.node_mask.flatten().nonzero().flatten().numpy()[:left]
        if len(rows):
            yield batch, rows
        left -= len(rows)
        if not left:
            return


def labels_of(batch: DataHolder, rows: Int64[np.ndarray, " M"], split: int) -> Labels:
    """Return the labels of the cells in some rows of a batch."""
    return {
        "cell_id": batch.cell_id.flatten().numpy()[rows],
        "slice_id": batch.slice_id.flatten().numpy()[rows].astype(np.int32),
        "cell_type": batch.cell_type.flatten().numpy()[rows].astype(np.int32),
        "position": batch.positions.flatten(0, 1).numpy()[rows],
        "split": np.full(len(rows), split, dtype=np.int8),
    }


def rows_in_order(labels: Labels, kept: Sequence[int]) -> Int64[np.ndarray, " N"]:
    """Return the rows of the first cells of each split that are kept, by their `cell_id`."""
    parts = [np.flatnonzero(labels["split"] == split)[:n] for split, n in enumerate(kept)]
    rows = np.concatenate(parts)
    return rows[np.argsort(labels["cell_id"][rows], kind="stable")]


def sort_rows(
    unordered: Path, ordered: Path, shape: tuple[int, ...], order: Int64[np.ndarray, " N"]
) -> None:
    """Write the rows of a file to another in the order given, and remove the first."""
    rows = stored(unordered, shape)
    # Written, not mapped: a full disk is then an error that says so, and not a dead process.
    with ordered.open("wb") as file:
        for start in range(0, len(order), BLOCK_ROWS):
            file.write(np.asarray(rows[order[start : start + BLOCK_ROWS]]).tobytes())
    unordered.unlink()


def cell_names(
    folder: DataFolder, metadata: Metadata, cell_id: Int64[np.ndarray, " N"], *, verify: bool
) -> list[str]:
    """Return the names that cells had in their h5ad files; `cell_id` is sorted."""
    names = [""] * len(cell_id)
    for split in SPLITS:
        reader = ShardReader(folder, metadata, split, verify=verify)
        for numbers, obs_names in map(reader.names, reader.pieces):
            rows = np.searchsorted(cell_id, numbers).clip(max=len(cell_id) - 1)
            matches = np.flatnonzero(cell_id[rows] == numbers)
            wanted = obs_names.take(pa.array(matches)).to_pylist()
            for row, name in zip(rows[matches].tolist(), wanted, strict=True):
                names[row] = name
    return names


def columns(
    labels: Labels, names: list[str], metadata: Metadata, mode: ExtractMode
) -> dict[str, Column]:
    """Return all that is written beside the embedding, under its names."""
    return {
        "cell_id": labels["cell_id"],
        "obs_name": names,
        "slice_id": labels["slice_id"],
        "slice_names": [record.name for record in metadata.slices],
        "cell_type": labels["cell_type"],
        "cell_type_names": metadata.cell_types or [],
        "split": labels["split"],
        "split_names": list(SPLITS),
        "extract_mode": mode,
    }
