"""Embeddings by scVI, CellCharter and scVIVA, in an environment of their own.

    pip install "setuptools<81" scvi-tools==1.4.2 cellcharter==0.3.7 igraph
    python benchmarks/embedding_peers.py cells.h5ad out.npz --methods cellcharter scviva

cells.h5ad holds all slices, training and test, with counts in X, `obs["slice_id"]` and 2D
`obsm["spatial"]`; all of it is seen in training, as users of these programs do. Settings are the
programs' defaults, with the slice as batch. CellCharter aggregates scVI's latents over three
layers of Delaunay neighbours, as its tutorial does. scVIVA needs a label for each cell: clusters
(Leiden) of scVI's latents, since labels of a test slice are not known.
"""

import argparse
import json
import time
from pathlib import Path

import anndata
import numpy as np

METHODS = ("scvi", "cellcharter", "scviva")


def add_scvi(data: anndata.AnnData) -> None:
    """Train scVI with its defaults and keep its latents."""
    import scvi

    scvi.model.SCVI.setup_anndata(data, batch_key="slice_id")
    model = scvi.model.SCVI(data)
    model.train(accelerator="cpu", enable_progress_bar=False)
    data.obsm["X_scVI"] = model.get_latent_representation()


def cellcharter_of(data: anndata.AnnData) -> np.ndarray:
    """Aggregate scVI's latents over spatial neighbours."""
    import cellcharter
    import squidpy

    squidpy.gr.spatial_neighbors(data, library_key="slice_id", coord_type="generic", delaunay=True)
    cellcharter.gr.remove_long_links(data)
    cellcharter.gr.aggregate_neighbors(
        data, n_layers=3, use_rep="X_scVI", out_key="X_cellcharter", sample_key="slice_id"
    )
    return np.asarray(data.obsm["X_cellcharter"])


def scviva_of(data: anndata.AnnData) -> np.ndarray:
    """Train scVIVA with its defaults on clusters in place of cell types."""
    import scanpy
    from scvi.external import SCVIVA

    scanpy.pp.neighbors(data, use_rep="X_scVI")
    scanpy.tl.leiden(data, key_added="cluster", flavor="igraph", n_iterations=2)
    SCVIVA.preprocessing_anndata(data, sample_key="slice_id", labels_key="cluster")
    SCVIVA.setup_anndata(data, batch_key="slice_id", sample_key="slice_id", labels_key="cluster")
    model = SCVIVA(data)
    model.train(accelerator="cpu", enable_progress_bar=False)
    return np.asarray(model.get_latent_representation())


def main() -> None:
    """Embed the cells of one file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cells", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    import scvi

    scvi.settings.seed = asked.seed
    data = anndata.read_h5ad(asked.cells)
    data.obs["slice_id"] = data.obs["slice_id"].astype("category")
    embeddings, seconds = {}, {}
    begun = time.process_time()
    add_scvi(data)
    seconds["scvi"] = time.process_time() - begun
    if "scvi" in asked.methods:
        embeddings["scvi"] = np.asarray(data.obsm["X_scVI"])
    for name, function in (("cellcharter", cellcharter_of), ("scviva", scviva_of)):
        if name in asked.methods:
            begun = time.process_time()
            embeddings[name] = function(data)
            seconds[name] = time.process_time() - begun + seconds["scvi"]
        print("CPU seconds", json.dumps(seconds), flush=True)
        np.savez(asked.out, **embeddings)


if __name__ == "__main__":
    main()
