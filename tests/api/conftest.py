"""A small tissue as AnnData, and a model trained on it in the notebook's way."""

from pathlib import Path

import anndata
import pytest

from alphastomics import AlphaSTomics
from alphastomics.config import SimulationConfig
from alphastomics.simulate import write_tissue

TINY = {
    "model": {"d_model": 16, "n_heads": 2, "n_layers": 2},
    "training": {"batch_size": 64, "max_epochs": 2, "learning_rate": 1e-3},
    "data": {
        # As on the command line: the notebook trains on all cells where nothing is said.
        "preprocessing": {"cell_type_key": "cell_type", "train_ratio": 0.8, "val_ratio": 0.1},
        "loading": {"num_workers": 0},
    },
    "sampling": {"num_steps": 3, "num_samples": 2},
    "distributed": {"devices": 0},
}


@pytest.fixture(scope="session")
def slice_files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("notebook") / "slices"
    settings = SimulationConfig(cells=90, slices=2, genes=24, panel_share=0.8)
    write_tissue(settings, 5, folder, overwrite=False)
    return folder


@pytest.fixture
def slices(slice_files: Path) -> list[anndata.AnnData]:
    """Fresh copies: the verbs write into them."""
    return [anndata.read_h5ad(path) for path in sorted(slice_files.glob("*.h5ad"))]


@pytest.fixture(scope="session")
def model(slice_files: Path) -> AlphaSTomics:
    """A joint model; tests must not train it further."""
    slices = [anndata.read_h5ad(path) for path in sorted(slice_files.glob("*.h5ad"))]
    return AlphaSTomics(slices, TINY).train()
