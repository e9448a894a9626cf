"""How many cells can be predicted: time and memory until a method fails, on simulated tissue.

    python -m benchmarks.peers.scale . --limit 600 --memory 16 --seeds 0 --json rows.json

A slice of KNOWN_CELLS cells is known, and all cells of another one are predicted, without taking a
part of them. Ours is given with its training. Scores are of SCORED_CELLS cells at random: they say
that a method did its work.
"""

from functools import partial
from pathlib import Path

import numpy as np

from alphastomics.config import SimulationConfig
from alphastomics.simulate import simulate_slice
from benchmarks.peers import positions
from benchmarks.peers.processes import Method, Task, main
from benchmarks.peers.slices import Split, part_of, split_of

KNOWN_CELLS, GENES, SCORED_CELLS = 4096, 200, 1500
SIZES = ["1024", "4096", "16384", "65536", "262144"]
NAMES = ["AlphaSTomics", "ExtraTrees, sqrt", "CeLEry", "Tangram", "novoSpaRc", "moscot"]


def read_simulated(_folder: Path, cells: str, seed: int) -> Split:
    """Simulate a known slice and one of so many cells."""
    sizes = KNOWN_CELLS, int(cells)
    known, asked = (
        simulate_slice(SimulationConfig(slices=2, genes=GENES, cells=size), seed, index)
        for index, size in enumerate(sizes)
    )
    return split_of([known], [asked], {}, seed)


def whole(name: str, split: Split, seed: int) -> np.ndarray:
    """Predict all cells: nothing is done for a part of them."""
    positions.PART_KNOWN, positions.PART_CELLS = KNOWN_CELLS, len(split.cells.slice_id)
    return positions.METHODS[name].run(split, seed)


def score(split: Split, position: np.ndarray, seed: int) -> dict[str, dict[str, float]]:
    """Score some of the cells."""
    positions.PART_CELLS = SCORED_CELLS
    rows = part_of(split.cells, SCORED_CELLS, seed)
    position = np.where(np.isin(np.arange(len(position)), rows)[:, None], position, np.nan)
    found = positions.score(split, position, seed)
    return {"some": next(iter(found.values()))}


METHODS = {name: Method(partial(whole, name), *positions.METHODS[name][1:]) for name in NAMES}
TASK = Task("scale", METHODS, SIZES, read_simulated, score, positions.SHOWN)

if __name__ == "__main__":
    main(TASK, __doc__)
