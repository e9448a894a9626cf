"""The commands `sample` and `test`: paths and settings enter, files and summaries leave."""

import json
import logging
from pathlib import Path
from typing import Any

import torch

from alphastomics.config import Config, Mode
from alphastomics.diffusion_model.checkpoint import load_module
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.errors import InputError
from alphastomics.files import write_text
from alphastomics.generation.cells import (
    Blank,
    InputCells,
    blank_cells,
    read_h5ad,
    read_processed,
    read_pt,
)
from alphastomics.generation.evaluate import evaluate
from alphastomics.generation.generate import as_tissue, generate, require_mode
from alphastomics.generation.output import refuse_existing, write_h5ad, write_pt

logger = logging.getLogger(__name__)

# What a module that was not trained by `train` is taken to have seen.
DEFAULT_NORMALIZATION = {"log_normalize": True, "scale": True}


def load_for_use(checkpoint: Path) -> tuple[AlphaSTomicsModule, list[str]]:
    """Load a module onto the GPU, if there is one."""
    module, genes = load_module(checkpoint)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return module.to(device), genes


def read_cells(
    path: Path, module: AlphaSTomicsModule, genes: list[str], config: Config, split: str
) -> InputCells:
    """Read whatever the user gave."""
    if path.is_dir() and path.suffix != ".zarr":
        return read_processed(path, genes, split)
    if path.suffix == ".pt":
        return read_pt(path, len(genes))
    if path.suffix in (".h5ad", ".zarr"):
        if not path.exists():
            raise InputError(f"{path}: no such file")
        return read_h5ad(path, genes, module.normalization or DEFAULT_NORMALIZATION, config)
    raise InputError(f"{path}: expected a .h5ad or .pt file, or a processed folder")


def default_output(source: Path | None) -> Path:
    """Name the output beside the input; new tissue goes into the working folder."""
    if source is None:
        return Path("generated.h5ad")
    if source.is_dir() and source.suffix != ".zarr":
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
) -> dict[str, Any]:
    """Generate cells for an input, or from nothing (`blank`), and write them."""
    mode = config.sampling.mode
    require_source(input_data, blank, mode)
    target = default_output(input_data) if output is None else output
    if target.suffix not in (".h5ad", ".pt"):
        raise InputError(f"{target}: expected an --output that ends in .h5ad or .pt")
    refuse_existing(target, overwrite=overwrite)
    module, genes = load_for_use(checkpoint)
    if input_data is None:
        assert blank is not None
        cells = blank_cells(blank, len(genes), dims=3)
    else:
        cells = read_cells(input_data, module, genes, config, split)
    require_mode(module, mode, cells)
    made = generate(module, cells, mode, config.sampling, config.seed.global_seed)
    if input_data is None:
        cells, made = as_tissue(cells, made)
    if target.suffix == ".pt":
        write_pt(target, made, cells)
    else:
        source = input_data if input_data and input_data.suffix == ".h5ad" else None
        write_h5ad(target, source, made, cells, genes, mode)
    return {
        "output": str(target),
        "mode": mode,
        "cells": len(cells.names),
        "slices": len(cells.slice_names),
        "dims": cells.dims,
    }


def blank_of(num_cells: int | None, num_slices: int | None) -> Blank | None:
    """Read what the flags say of new tissue."""
    if num_cells is None:
        if num_slices is not None:
            raise InputError("--num_slices: counts with --num_cells; leave it out")
        return None
    return Blank(num_cells, 1 if num_slices is None else num_slices)


def require_source(input_data: Path | None, blank: Blank | None, mode: Mode) -> None:
    """Refuse a call that does not say what to generate for, or says it twice."""
    if (input_data is None) == (blank is None):
        raise InputError("sample: give --input_data, or --num_cells to make new tissue, not both")
    if blank is not None and mode != "joint":
        raise InputError(f"--num_cells: makes new tissue, --sample_mode joint; {mode} needs input")


def test(
    config: Config, *, checkpoint: Path, input_data: Path, split: str, output: Path | None
) -> dict[str, Any]:
    """Score a checkpoint in every mode it can, beside the baselines; write the scores as JSON."""
    module, genes = load_for_use(checkpoint)
    cells = read_cells(input_data, module, genes, config, split)
    known = read_processed(input_data, genes, "train") if input_data.is_dir() else None
    scores = evaluate(module, cells, known, config.sampling, config.seed.global_seed)
    target = checkpoint.with_name(f"{checkpoint.stem}_scores.json") if output is None else output
    write_text(target, json.dumps(scores, indent=2) + "\n")
    return {"output": str(target), **scores}
