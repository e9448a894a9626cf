"""Embeddings of slices that no training saw: types, domains, mixing, beside PCA and peers.

    python benchmarks/embeddings.py DATA --cache DIR [--sets NAME ...] [--json out.json]
        [--peers_python /path/to/python --peers cellcharter scviva]

DATA is a folder with the slices as h5ad files, anywhere below it. A model is trained with nothing
set, every mode embeds the training and the test slices, with positions and without, and
`embedding_scores.py` says what each score is. PCA is scanpy's way: all slices together normalised,
log1p, scaled, 50 components; or, as the model has it, each slice scaled by itself and the
components those of the training slices. `+ spatial` adds the mean of the 20 nearest cells.
Where no hidden states are asked for, the network is trained for a moment alone: `latent` and
`niche` are of the count model. Models and embeddings of peers are kept in DIR and taken from there
the next time; what peers need is in `embedding_peers.py`; clusters by Leiden need `pip install
igraph`. Of SETS the last three are those that settings were chosen on.
"""

import argparse
import json
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import scanpy
import torch
from scipy.spatial import cKDTree
from sklearn.decomposition import PCA

from alphastomics import AlphaSTomics, __version__, fit
from alphastomics.generation import baselines
from benchmarks.defaults import FEWEST_TREE_CELLS, read_slice
from benchmarks.embedding_peers import METHODS
from benchmarks.embedding_scores import domain_scores, mixing, type_accuracy

SERIAL = {"common_frame": True, "position": "spatial3d", "domain": "domain"}
SETS: dict[str, dict[str, Any]] = {
    "embryo2 -> embryo1_z2": {"train": ["embryo2_z2", "embryo2_z5"], "test": "embryo1_z2"},
    "Moffitt -0.09 -> -0.29": {"train": ["animal1_bregma-0.09"], "test": "animal1_bregma-0.29"},
    "serial 0.04 + 0.14 -> 0.09": {
        "train": ["section_0.04", "section_0.14"],
        "test": "section_0.09",
        **SERIAL,
    },
    # Settings were chosen on these.
    "embryo2_z2 -> embryo2_z5": {"train": ["embryo2_z2"], "test": "embryo2_z5"},
    "osmFISH, half -> half": {"train": ["ssctx"], "test": None, "domain": "region"},
    "serial 0.04 -> 0.14": {"train": ["section_0.04"], "test": "section_0.14", **SERIAL},
}
LATENTS = ("latent", "niche")
MODES = (*LATENTS, "encoder", "transformer", "all_layers")
COMPONENTS, AROUND = 50, 20
Pair = tuple[np.ndarray, np.ndarray]


def slices_of(folder: Path, chosen: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return training slices and the test slice; a single slice is cut in two by its x."""
    train = [read_slice(folder, name, 0) for name in chosen["train"]]
    if chosen["test"] is not None:
        test = read_slice(folder, chosen["test"], 0)
    else:
        (whole,) = train
        left = whole.obsm["spatial"][:, 0] < np.median(whole.obsm["spatial"][:, 0])
        train, test = [whole[left].copy()], whole[~left].copy()
        test.obs["slice_id"] = f"{whole.obs['slice_id'].iloc[0]}, other half"
    for data in [*train, test]:
        data.obsm["spatial"] = np.asarray(data.obsm[chosen.get("position", "spatial")])
        for key in [key for key in data.obsm if key != "spatial"]:
            del data.obsm[key]
    return train, test


def model_of(
    train: list[Any], chosen: dict[str, Any], folder: Path, *, needs_network: bool
) -> AlphaSTomics:
    """Train with nothing set, the network only if it is needed, or take the model that was."""
    if folder.is_dir():
        return AlphaSTomics.load(folder)
    settings: dict[str, Any] = {"common_frame": True} if chosen.get("common_frame") else {}
    if not needs_network:
        settings |= {"max_epochs": 1, "position_head_updates": 1}
    # The verdict's regressors change no model and take as long.
    fit.VERDICT_TREE_CELLS = baselines.REGRESSION_CELLS = FEWEST_TREE_CELLS
    model = AlphaSTomics(train, seed=0, **settings).train()
    model.save(folder)
    return model


def embedded(model: AlphaSTomics, data: Any, mode: str, *, positions: bool) -> np.ndarray:
    """Embed a slice by one mode; layers side by side."""
    cells = data.copy()
    if not positions:
        del cells.obsm["spatial"]
    return model.get_latent_representation(cells, mode=mode).reshape(data.n_obs, -1)


def of_slices(train: list[Any], test: Any, embed: Callable[[Any], np.ndarray]) -> Pair:
    """Embed training slices, one below the other, and the test slice."""
    return np.concatenate([embed(data) for data in train]), embed(test)


def normalised(data: Any) -> Any:
    """Normalise as scanpy does."""
    data = data.copy()
    scanpy.pp.normalize_total(data, target_sum=1e4)
    scanpy.pp.log1p(data)
    return data


def pca(train: list[Any], test: Any) -> dict[str, Pair]:
    """Return components of all slices together, and those of training slices alone."""
    slices = [normalised(data) for data in [*train, test]]
    sizes = np.cumsum([data.n_obs for data in slices])
    number = min(COMPONENTS, test.n_vars - 1)
    whole = anndata.concat(slices)
    scanpy.pp.scale(whole)
    together = PCA(number, random_state=0).fit_transform(dense(whole))
    for data in slices:
        scanpy.pp.scale(data)
    alone = PCA(number, random_state=0).fit(np.concatenate([dense(one) for one in slices[:-1]]))
    parts = np.split(together, sizes[:-1]), [alone.transform(dense(one)) for one in slices]
    result: dict[str, Pair] = {}
    for name, components in zip(("PCA", "PCA, scaled by slice"), parts, strict=True):
        wide = [
            np.hstack([values, around(values, data)])
            for values, data in zip(components, slices, strict=True)
        ]
        result[name] = np.concatenate(components[:-1]), components[-1]
        result[f"{name} + spatial"] = np.concatenate(wide[:-1]), wide[-1]
    return result


def dense(data: Any) -> np.ndarray:
    """Return the matrix of an AnnData."""
    return data.X.toarray() if hasattr(data.X, "toarray") else np.asarray(data.X)


def around(values: np.ndarray, data: Any) -> np.ndarray:
    """Return the mean of the nearest cells in space."""
    at = np.asarray(data.obsm["spatial"])
    return values[cKDTree(at).query(at, k=AROUND + 1)[1][:, 1:]].mean(1)


def peers(train: list[Any], test: Any, target: Path, asked: argparse.Namespace) -> dict[str, Pair]:
    """Return the embeddings of other programs, which run in an environment of their own."""
    if not target.exists() and asked.peers_python is not None:
        cells = anndata.concat([*train, test])
        cells.obs_names_make_unique()
        cells.obsm["spatial"] = np.asarray(cells.obsm["spatial"])[:, :2]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cells.h5ad"
            cells.write_h5ad(path)
            script = Path(__file__).with_name("embedding_peers.py")
            command = [asked.peers_python, script, path, target, "--methods", *asked.peers]
            subprocess.run([str(word) for word in command], check=True)
    if not target.exists():
        return {}
    with np.load(target) as file:
        return {name: (file[name][: -test.n_obs], file[name][-test.n_obs :]) for name in file}


def run(name: str, chosen: dict[str, Any], asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Score every embedding of a set."""
    train, test = slices_of(asked.data, chosen)
    types = of_slices(train, test, lambda data: data.obs["cell_type"].astype(str).to_numpy())
    slug = "".join(letter if letter.isalnum() else "_" for letter in name)
    embeddings = pca(train, test) | peers(train, test, asked.cache / f"{slug}.npz", asked)
    needs_network = not set(asked.modes) <= set(LATENTS)
    folder = asked.cache / (slug if needs_network else f"{slug}_latents")
    model = model_of(train, chosen, folder, needs_network=needs_network)
    for mode in asked.modes:
        for positions in (True, False):
            label = f"{mode}, {'with' if positions else 'without'} positions"
            embeddings[label] = of_slices(
                train,
                test,
                lambda data: embedded(model, data, mode, positions=positions),  # noqa: B023 - called at once
            )
    result: dict[str, dict[str, Any]] = {}
    for label, (known, query) in embeddings.items():
        scores = type_accuracy(known, types[0], query, types[1])
        scores["mixing"] = mixing(known, types[0], query, types[1])
        if "domain" in chosen:
            scores |= domain_scores(query, test.obs[chosen["domain"]].astype(str).to_numpy())
        result[label] = {"width": query.shape[1], **scores}
        shown = " ".join(f"{key} {value:.3f}" for key, value in scores.items())
        print(f"{name:<28}{label:<32}{shown}", flush=True)
    return result


def main() -> None:
    """Run the sets that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--cache", type=Path, required=True, help="folder of models and peers")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--peers_python", type=Path)
    parser.add_argument("--peers", nargs="+", choices=METHODS, default=["cellcharter"])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    asked.cache.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"version": __version__, "torch": torch.__version__, "sets": {}}
    for name in asked.sets:
        results["sets"][name] = run(name, SETS[name], asked)
        if asked.json:
            asked.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
