"""Synthetic data to train on: settings enter, a processed folder of simulated tissue leaves."""

from pathlib import Path

from alphastomics.config import Config
from alphastomics.preprocessing.commands import preprocess
from alphastomics.simulate import write_tissue


def synthetic_folder(config: Config, folder: Path, *, overwrite: bool = False) -> Path:
    """Simulate a tissue below `folder` and preprocess it, as the config says; return where it is.

    What an earlier call with the same settings left there is used; what one with others left is
    refused, or replaced where asked for.
    """
    seed = config.seed.global_seed
    write_tissue(config.simulation, seed, folder / "slices", overwrite=overwrite)
    preprocess(
        config.data.preprocessing,
        input_dir=folder / "slices",
        output_dir=folder / "processed",
        gene_list_file=None,
        seed=seed,
        overwrite=overwrite,
        scheduler=None,
    )
    return folder / "processed"
