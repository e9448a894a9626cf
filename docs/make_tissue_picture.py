"""Train on one slice, generate new tissue, and plot both for the README: types and three genes.

    python docs/make_tissue_picture.py DATA

DATA is a folder with the seqFISH slices of benchmarks/defaults.py as h5ad files. The settings are
the defaults.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SLICE, GENES = "embryo2_z2", 3
# As many types as colours can separate; the others are drawn in grey.
SHOWN_TYPES = 10


def real_and_new(folder: Path) -> tuple[Any, Any]:
    """Train on a slice, and generate as many cells as it has."""
    import anndata

    from alphastomics import AlphaSTomics

    real = anndata.read_h5ad(next(folder.rglob(f"{SLICE}.h5ad")))
    model = AlphaSTomics(real, cell_type_key="cell_type").train()
    return real, model.generate(real.n_obs)


def spatial_genes(real: Any) -> list[str]:
    """Name the genes whose neighbours correlate most, no two with the same pattern."""
    import numpy as np

    from alphastomics.evaluation.neighbours import morans_i, spatial_neighbours

    values = normalized(real)
    graph = spatial_neighbours(np.asarray(real.obsm["spatial"], np.float64), k=10)
    order = np.argsort(-np.asarray(morans_i(values, graph)))
    chosen: list[int] = []
    for gene in order:
        similar = [np.corrcoef(values[:, gene], values[:, other])[0, 1] for other in chosen]
        if all(r < 0.1 for r in similar):
            chosen.append(int(gene))
        if len(chosen) == GENES:
            break
    return [real.var_names[gene] for gene in chosen]


def normalized(cells: Any) -> Any:
    """Return log-normalised counts."""
    import numpy as np

    counts = cells.X.toarray() if hasattr(cells.X, "toarray") else np.asarray(cells.X)
    total = np.maximum(counts.sum(1, keepdims=True), 1)
    return np.log1p(counts / total * 1e4).astype(np.float32)


def by_types(new: Any, real: Any, types: list[str]) -> Any:
    """Rotate new tissue so that its types lie where those of the real one do (Kabsch 1976)."""
    import numpy as np

    def centres(cells: Any) -> tuple[Any, Any]:
        position = np.asarray(cells.obsm["spatial"], np.float64)[:, :2]
        position = position - position.mean(0)
        kinds = cells.obs["cell_type"].astype(str).to_numpy()
        return position, np.stack([position[kinds == kind].mean(0) for kind in types])

    (position, of_new), (_, of_real) = centres(new), centres(real)
    left, _, right = np.linalg.svd(of_new.T @ of_real)
    return position @ left @ right


def draw(real: Any, new: Any, path: Path) -> None:
    """Draw real tissue above new tissue: cell types, then each gene on one scale."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    import numpy as np
    from make_pictures import saved

    genes = spatial_genes(real)
    frequent = list(real.obs["cell_type"].astype(str).value_counts().index[:SHOWN_TYPES])
    palette = dict(zip(frequent, plt.get_cmap("tab10").colors, strict=False))
    true = np.asarray(real.obsm["spatial"], np.float64)
    rows = {"real": (real, true - true.mean(0)), "new": (new, by_types(new, real, frequent))}
    figure, panels = plt.subplots(2, 1 + GENES, figsize=(9, 8), sharex=True, sharey=True)
    for axes, (name, (cells, position)) in zip(panels, rows.items(), strict=True):
        types = cells.obs["cell_type"].astype(str)
        colours = [palette.get(kind, (0.8, 0.8, 0.8)) for kind in types]
        values = normalized(cells)[:, [list(cells.var_names).index(gene) for gene in genes]]
        shown = [colours, *values.T]
        for panel, colour, title in zip(axes, shown, ["cell types", *genes], strict=True):
            scale = {}
            if title != "cell types":
                scale = {"vmin": 0, "vmax": np.log1p(1e3), "cmap": "viridis"}
            panel.scatter(*position.T, c=colour, s=1.2, linewidths=0, **scale)
            panel.set(title=f"{name}: {title}", aspect="equal")
            panel.axis("off")
    figure.tight_layout()
    saved(figure, path)


def main() -> None:
    """Read the command line, train, draw."""
    # As the command line does, before torch is imported: threads that wait must not spin.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--keep", type=Path, help="keep the new tissue as this h5ad")
    parser.add_argument("--new", type=Path, help="draw an h5ad that was kept")
    arguments = parser.parse_args()
    import anndata

    if arguments.new:
        real = anndata.read_h5ad(next(arguments.data.rglob(f"{SLICE}.h5ad")))
        new = anndata.read_h5ad(arguments.new)
    else:
        real, new = real_and_new(arguments.data)
    if arguments.keep:
        new.write_h5ad(arguments.keep)
    path = ROOT / "docs" / "pictures" / "new_tissue.png"
    draw(real, new, path)
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
