"""A small processed tissue, and a run on it."""

import csv
from pathlib import Path

import pytest
import torch

from alphastomics.config import Config, PreprocessingConfig, SimulationConfig
from alphastomics.config.file import parse_document
from alphastomics.diffusion_model.run_folder import RunFolder
from alphastomics.diffusion_model.train import TrainRequest, train
from alphastomics.preprocessing.commands import preprocess
from alphastomics.simulate import write_tissue


@pytest.fixture(scope="session")
def processed(tmp_path_factory) -> Path:
    """Three slices of a small tissue whose panels differ, each as it lies on its slide."""
    return processed_tissue(tmp_path_factory.mktemp("tissue"), common_frame=False)


@pytest.fixture(scope="session")
def processed_in_one_frame(tmp_path_factory) -> Path:
    """The same tissue in atlas coordinates."""
    return processed_tissue(tmp_path_factory.mktemp("atlas"), common_frame=True)


def processed_tissue(folder: Path, *, common_frame: bool) -> Path:
    """Simulate and preprocess a small tissue, ready to train on."""
    settings = SimulationConfig(
        cells=120, slices=3, genes=24, panel_share=0.9, common_frame=common_frame
    )
    write_tissue(settings, 5, folder / "slices", overwrite=False)
    preprocess(
        PreprocessingConfig(
            cell_type_key="cell_type", layout="slice", train_ratio=0.7, common_frame=common_frame
        ),
        input_dir=folder / "slices",
        output_dir=folder / "processed",
        gene_list_file=None,
        seed=1,
        overwrite=False,
        scheduler=None,
    )
    return folder / "processed"


def tiny_config(processed: Path, save_dir: Path, **sections) -> Config:
    """A network of two narrow layers, trained for a few steps."""
    document: dict = {
        "model": {"d_model": 16, "n_heads": 2, "n_layers": 2},
        "training": {
            "batch_size": 64,
            "max_epochs": 2,
            "learning_rate": 1e-3,
            "position_head_updates": 5,
        },
        "data": {"processed_data_dir": str(processed), "loading": {"num_workers": 0}},
        "logging": {"save_dir": str(save_dir), "log_every_n_steps": 1, "save_every_n_steps": 1},
        "distributed": {"devices": 0},
    }
    for section, values in sections.items():
        merged = document.setdefault(section, {})
        for key, value in values.items():
            both = isinstance(value, dict) and key in merged
            merged[key] = {**merged[key], **value} if both else value
    return parse_document(document, "test")


@pytest.fixture
def run(processed: Path, tmp_path: Path):
    """Train with the tiny config; the same name is the same run folder."""

    def start(name: str = "run", request: TrainRequest = TrainRequest(), **sections):  # noqa: B008 - it is a constant
        sections.setdefault("logging", {})
        sections["logging"] = {**sections["logging"], "exp_name": name}
        config = tiny_config(processed, tmp_path, **sections)
        train(config, request)
        return RunFolder(tmp_path / name)

    return start


def weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    """Return the last checkpoint's tensors."""
    content = torch.load(folder.last, weights_only=True)
    optimizer = content["optimizer_states"][0]["state"]
    moments = {f"{n}.{k}": v for n, each in optimizer.items() for k, v in each.items()}
    return {**content["state_dict"], **moments}


def logged(folder: RunFolder) -> list[tuple[str, ...]]:
    """Return all that a run logged."""
    with folder.metrics.open(newline="") as file:
        return sorted(tuple(row.values()) for row in csv.DictReader(file))


def equal(one: dict, other: dict) -> bool:
    """Compare tensors bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
