"""Radii without anchors: how many cells of other slices lie within those that training calibrated.

    python benchmarks/radii.py [--slices 4] [--seeds 0 1 2] [--json out.json]

No public set here has three animals, one of which training could hold out and another be tested. So
slices are simulated, each in a pose and with a depth of its own. A model is trained on some with
nothing set, which holds one of them out, and two others are predicted. Their errors are those after
the best rotation, as the radii promise.
"""

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from alphastomics import AlphaSTomics
from alphastomics.config import SimulationConfig
from alphastomics.evaluation.position import aligned
from alphastomics.generation.left_out import errors_in
from alphastomics.generation.predict import predict_cells
from alphastomics.simulate import simulate

LEVELS = (0.5, 0.8, 0.9, 0.95)
TESTED = 2


def coverage(slices: int, cells: int, seed: int) -> list[dict[str, float]]:
    """Train on some simulated slices, and return what radii hold on two others."""
    size = SimulationConfig(cells=cells, slices=slices + TESTED)
    tissue = list(simulate(size, seed))
    model = AlphaSTomics(tissue[:slices], seed=seed).train()
    trained = model._trained()
    errors = errors_in(trained.record["verdict"], "verdict")
    assert errors is not None, "training held no slice out"
    rows = []
    for data in tissue[slices:]:
        query = model._cells(data, model.config)
        assert query.position is not None
        result: dict[str, float] = {}
        for level in LEVELS:
            settings = model.config.sampling.model_copy(update={"radius_level": level})
            found = predict_cells(
                trained.module, query, "expr_to_pos", settings, seed, errors=errors
            ).generated
            true = query.position[:, : query.dims]
            moved = aligned(found.position[:, : query.dims], true, scale=False, reflection=True)
            error = np.linalg.norm(moved.numpy() - true, axis=1)
            assert found.radii is not None
            result[f"held {level}"] = float((error <= found.radii.radius).mean())
            result["rank"] = float(spearmanr(error, found.radii.radius).statistic)
        rows.append(result)
        print(
            f"seed {seed}:", {name: round(value, 3) for name, value in result.items()}, flush=True
        )
    return rows


def main() -> None:
    """Measure each seed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--slices", type=int, default=4, help="to train on; one is held out")
    parser.add_argument("--cells", type=int, default=1500, help="of a slice")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    logging.getLogger("alphastomics").setLevel(logging.ERROR)
    runs: dict[int, Any] = {seed: coverage(asked.slices, asked.cells, seed) for seed in asked.seeds}
    if asked.json:
        asked.json.write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
