"""Slices drawn in chunks against the same slices drawn whole: the seam error and what it costs.

python benchmarks/seams.py CHECKPOINT SLICE.h5ad --sizes 150 300 600
"""

import argparse
from pathlib import Path

import numpy as np

from alphastomics.config import Config, SamplingConfig
from alphastomics.evaluation.position import rmsd
from alphastomics.evaluation.ranks import distance_spearman
from alphastomics.generation.commands import load_for_use
from alphastomics.generation.generate import generate
from alphastomics.generation.sources import read_cells


def main() -> None:
    """Print a row for each largest set: the seam, the way to the whole slice, the score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("slice", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[150, 300, 600])
    parser.add_argument("--estimator", choices=["mean", "sample"], default="mean")
    arguments = parser.parse_args()
    module, genes = load_for_use(arguments.checkpoint)
    cells = read_cells(arguments.slice, module, genes, Config(), "test")
    assert cells.position is not None
    true = cells.position[:, : cells.dims]
    radius = float(np.sqrt(((true - true.mean(0)) ** 2).sum(1).mean()))
    settings = SamplingConfig(estimator=arguments.estimator, num_steps=20, num_samples=4)
    whole = generate(module, cells, "expr_to_pos", settings, 0).position[:, : cells.dims]
    print(f"{len(true)} cells, radius {radius:.0f}; {arguments.product}")
    print("largest set, chunks, anchors, seam error, of the radius, from the whole, Spearman")
    for size in [len(true), *arguments.sizes]:
        one = settings.model_copy(update={"max_set_size": size})
        made = generate(module, cells, "expr_to_pos", one, 0)
        found = made.position[:, : cells.dims]
        seam = made.seams[0] if made.seams else None
        shown = "1, -, -, -" if seam is None else (
            f"{seam.chunks}, {seam.anchors}, {seam.rms:.1f}, {seam.relative:.3f}"
        )  # fmt: skip
        apart = rmsd(found, whole, reflection=True) / radius
        score = float(distance_spearman(found, true).nanmean())
        print(f"{size}, {shown}, {apart:.3f}, {score:.3f}", flush=True)


if __name__ == "__main__":
    main()
