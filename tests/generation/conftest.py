"""A small tissue, and two checkpoints trained on it for a moment."""

from pathlib import Path

import numpy as np
import pytest

from alphastomics.config import Config, PreprocessingConfig, SamplingConfig, SimulationConfig
from alphastomics.diffusion_model.run_folder import RunFolder
from alphastomics.diffusion_model.train import TrainRequest, train
from alphastomics.preprocessing.commands import preprocess
from alphastomics.simulate import write_tissue
from tests.diffusion_model.conftest import tiny_config

QUICK = SamplingConfig(num_steps=4, num_samples=2)
SETTINGS = Config(
    sampling=QUICK,
    data={"preprocessing": PreprocessingConfig(cell_type_key="cell_type")},
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def workspace(tmp_path_factory) -> Path:
    """Slices, a processed folder, and a joint and a specialised checkpoint."""
    folder = tmp_path_factory.mktemp("generation")
    tissue = SimulationConfig(cells=90, slices=2, genes=24, panel_share=0.8)
    write_tissue(tissue, 5, folder / "slices", overwrite=False)
    preprocess(
        PreprocessingConfig(cell_type_key="cell_type", train_ratio=0.5, val_ratio=0.1),
        input_dir=folder / "slices",
        output_dir=folder / "processed",
        gene_list_file=None,
        seed=1,
        overwrite=False,
        scheduler=None,
    )
    for mode in ("joint", "expr_to_pos"):
        training = {"mode": mode, "batch_size": 45, "max_epochs": 1}
        logging = {"exp_name": mode}
        train(
            tiny_config(folder / "processed", folder, training=training, logging=logging),
            TrainRequest(),
        )
    return folder


def checkpoint(workspace: Path, mode: str = "joint") -> Path:
    return RunFolder(workspace / mode).last
