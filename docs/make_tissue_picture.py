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
DPI = 76


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
    import anndata
    import matplotlib.pyplot as plt
    import numpy as np
    import pandas as pd
    from make_pictures import saved

    from alphastomics import pl

    genes = spatial_genes(real)
    frequent = list(real.obs["cell_type"].astype(str).value_counts().index[:SHOWN_TYPES])
    true = np.asarray(real.obsm["spatial"], np.float64)
    position = {"real": true - true.mean(0), "new": by_types(new, real, frequent)}
    # Both as slices of one AnnData: a gene then has one scale for both.
    tissues = {"real": real, "new": new}
    columns = [list(cells.var_names) for cells in tissues.values()]
    both = anndata.AnnData(
        np.concatenate(
            [
                normalized(cells)[:, [names.index(gene) for gene in genes]]
                for cells, names in zip(tissues.values(), columns, strict=True)
            ]
        ),
        var=pd.DataFrame(index=genes),
    )
    types = np.concatenate([cells.obs["cell_type"].astype(str) for cells in tissues.values()])
    both.obs["cell type"] = pd.Categorical(types, frequent)
    both.obs["tissue"] = np.repeat(list(tissues), [cells.n_obs for cells in tissues.values()])
    both.obsm["spatial"] = np.concatenate(list(position.values()))
    figure, axes = plt.subplots(
        2, 1 + GENES, figsize=(13, 8), sharex=True, sharey=True, layout="constrained"
    )
    for column, color in zip(axes.T, ["cell type", *genes], strict=True):
        pl.tissue(both, color, slice_key="tissue", ax=column)
        for panel, name in zip(column, tissues, strict=True):
            panel.set_title(f"{name}: {color}")
            panel.axis("off")
    # A few new cells lie far out: the real tissue says how large the panels are.
    low, high = position["real"].min(0), position["real"].max(0)
    margin = 0.15 * (high - low)
    for panel in axes.flat:
        panel.set_xlim(low[0] - margin[0], high[0] + margin[0])
        ends = low[1] - margin[1], high[1] + margin[1]
        panel.set_ylim(*(ends[::-1] if panel.yaxis_inverted() else ends))
    saved(figure, path, dpi=DPI)


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
