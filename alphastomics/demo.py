"""The main job on a synthetic tissue: a folder and a seed enter, every step's output leaves."""

import logging
from pathlib import Path
from typing import Any

from alphastomics.config import PreprocessingConfig, SimulationConfig
from alphastomics.simulate import write_tissue

logger = logging.getLogger(__name__)

TISSUE = SimulationConfig(cells=2000, slices=5, genes=200)


def run_demo(folder: Path, seed: int) -> dict[str, Any]:
    """Simulate a tissue and preprocess it, as far as this version goes; say where things are."""
    slices = folder / "slices"
    processed = folder / "processed"
    logger.info("demo 1/2: simulate %d slices of %d cells", TISSUE.slices, TISSUE.cells)
    write_tissue(TISSUE, seed, slices, overwrite=False)
    logger.info("demo 2/2: preprocess")
    from alphastomics.preprocessing.commands import preprocess

    summary = preprocess(
        PreprocessingConfig(cell_type_key="cell_type", layout="slice"),
        input_dir=slices,
        output_dir=processed,
        gene_list_file=None,
        seed=seed,
        overwrite=False,
        scheduler=None,
    )
    return {"slices": str(slices), "processed": str(processed), "summary": summary}
