"""A folder with all that the pages name: slices, cells, a processed folder, a trained run."""

import shutil
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import torch
import yaml

from alphastomics.attn_model.model import Model
from alphastomics.config import LayerConfig, SimulationConfig
from alphastomics.main import main
from alphastomics.simulate import write_tissue
from tests.vendor_folders import some_cells, write_merscope, write_xenium

GENES, CELLS = 24, 150
# What the pages leave at the defaults, which are for a GPU, or for an hour.
SMALL: dict[str, dict[str, Any]] = {
    "model": {"d_model": 16, "n_heads": 2, "n_layers": 1},
    "training": {"batch_size": 64, "max_epochs": 1, "position_head_updates": 5},
    "sampling": {"num_steps": 2, "num_samples": 2},
    "logging": {"log_every_n_steps": 1},
}
SMALL_LOADING = {"set_size": 32, "num_workers": 0}


def build(folder: Path) -> None:
    """Fill an empty folder."""
    write_tissue(
        SimulationConfig(cells=CELLS, slices=3, genes=GENES), 5, folder / "slices", overwrite=False
    )
    (folder / "slices" / "simulation.json").unlink()
    write_settings(folder)
    write_cells(folder)
    write_vendors_files(folder)
    for command in (
        "preprocess --input_dir slices --output_dir processed --cell_type_key cell_type",
        "train --data_dir processed --exp_name mine",
    ):
        assert main(command.split()) == 0, command
    run = folder / "outputs" / "mine"
    shutil.copy(run / "checkpoints" / "last.ckpt", folder / "last.ckpt")
    shutil.copy(run / "checkpoints" / "last.ckpt", folder / "CKPT")
    shutil.copytree(run, folder / "outputs" / "alphastomics")


def write_settings(folder: Path) -> None:
    """The file that every command reads by itself, made small."""
    small = {**SMALL, "data": {"loading": SMALL_LOADING}}
    (folder / "config.yaml").write_text(yaml.safe_dump(small))
    # Of the page on several devices.
    (folder / "small.yaml").write_text(yaml.safe_dump(small))


def write_cells(folder: Path) -> None:
    """Slices under the names that the pages use, and two data sets for the stages."""
    slices = sorted((folder / "slices").glob("*.h5ad"))
    last = anndata.read_h5ad(slices[-1])
    last.write_h5ad(folder / "slice.h5ad")
    last.write_h5ad(folder / "positions.h5ad")
    last[:, 5:].copy().write_h5ad(folder / "panel.h5ad")
    tissue = anndata.concat([anndata.read_h5ad(path) for path in slices[:2]])
    tissue.obs["section"] = tissue.obs["slice_id"]
    tissue.write_h5ad(folder / "tissue.h5ad")
    last.obsm.clear()
    last.write_h5ad(folder / "dissociated.h5ad")
    (folder / "genes.txt").write_text("\n".join(last.var_names) + "\n")
    for name, path in zip(("brainA", "brainB"), slices, strict=False):
        (folder / name).mkdir()
        shutil.copy(path, folder / name)


def write_vendors_files(folder: Path) -> None:
    """Folders as instruments write them."""
    write_xenium(folder / "xenium_run", some_cells())
    write_merscope(folder / "runs/left", some_cells())
    write_merscope(folder / "runs/right", some_cells(seed=1))


def names_for(page: str) -> dict[str, Any]:
    """What a page takes for given: two sets of six cells, a network, true and predicted places."""
    width = {"moe.md": 128}.get(page, 256)
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(20, 2, generator=generator)
    return {
        "torch": torch,
        "model": Model(
            GENES, d_model=16, n_heads=2, n_layers=1, settings=LayerConfig(use_moe=page == "moe.md")
        ),
        "cells": torch.randn(2, 6, width, generator=generator),
        "expression": torch.randn(2, 6, GENES, generator=generator),
        "position": torch.randn(2, 6, 3, generator=generator),
        "times": torch.rand(2, 2, generator=generator),
        "diffusion_time": torch.rand(2, 2, generator=generator),
        "node_mask": torch.ones(2, 6, dtype=torch.bool),
        "true": true,
        "predicted": true + 0.1 * torch.randn(20, 2, generator=generator),
        "positions": true,
        "cell_types": np.arange(20) % 2,
        "measured_genes": torch.ones(2, dtype=torch.bool),
    }
