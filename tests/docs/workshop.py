"""A folder with all that the pages name: slices, cells, a processed folder, a trained run."""

import shutil
from pathlib import Path
from typing import Any

import anndata
import h5py
import numpy as np
import pandas as pd
import torch
import yaml

from alphastomics.attn_model.model import Model
from alphastomics.config import LayerConfig, SimulationConfig
from alphastomics.main import main
from alphastomics.simulate import write_tissue

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
    """Files as Xenium, Vizgen and Visium HD write them."""
    names = [f"cell-{number}" for number in range(CELLS)]
    places = np.random.default_rng(0).uniform(0, 100, (CELLS, 2))
    write_10x(folder / "cell_feature_matrix.h5", names)
    centroids = pd.DataFrame(places, columns=["x_centroid", "y_centroid"])
    centroids.assign(cell_id=names).to_parquet(folder / "cells.parquet")
    counts = pd.DataFrame(1, index=names, columns=["Sox2", "Pax6", "Blank-1"])
    counts.to_csv(folder / "cell_by_gene.csv")
    centres = pd.DataFrame(places, index=names, columns=["center_x", "center_y"])
    centres.to_csv(folder / "cell_metadata.csv")
    bins = folder / "binned_outputs" / "square_008um"
    (bins / "spatial").mkdir(parents=True)
    write_10x(bins / "filtered_feature_bc_matrix.h5", names)
    arrays = pd.DataFrame(
        np.arange(2 * CELLS).reshape(CELLS, 2), columns=["array_col", "array_row"]
    )
    arrays.assign(barcode=names).to_parquet(bins / "spatial" / "tissue_positions.parquet")


def write_10x(path: Path, barcodes: list[str]) -> None:
    """One count of one gene in every cell, in the layout of 10x's third version."""
    with h5py.File(path, "w") as file:
        matrix = file.create_group("matrix")
        matrix["barcodes"] = np.array(barcodes, dtype="S")
        matrix["data"] = np.ones(len(barcodes), np.int32)
        matrix["indices"] = np.zeros(len(barcodes), np.int64)
        matrix["indptr"] = np.arange(len(barcodes) + 1)
        matrix["shape"] = np.array([2, len(barcodes)], np.int32)
        features = matrix.create_group("features")
        features["id"] = np.array(["ENSG1", "ENSG2"], dtype="S")
        features["name"] = np.array(["Sox2", "Pax6"], dtype="S")
        features["feature_type"] = np.array(["Gene Expression"] * 2, dtype="S")
        features["genome"] = np.array(["mm10"] * 2, dtype="S")


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
