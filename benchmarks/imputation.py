"""Hidden genes, cell types and domains of real slices, beside k-NN, ridge, logistic regression.

    python benchmarks/imputation.py DATA [--sets NAME ...] [--labels NAME ...] [--seeds 0 1 2]

A fifth of the genes is hidden from the query, another fifth for each seed. Scores are r by gene, of
log-normalised values. Half of the cells of a single slice train. The estimate comes from the
training cells, so that the network is trained for one update. k-NN takes the mean of the nearest
cells by 50 principal components of the shared genes, with the k that is best on the query itself.
`+ spatial` adds the components' mean over the 20 nearest cells in space; `in space` takes the
labels of the nearest training cells, where training and query have one frame.
"""

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scanpy as sc
from scipy.spatial import cKDTree
from sklearn import __version__ as sklearn_version
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor

from alphastomics import AlphaSTomics, __version__
from alphastomics.config.auto import with_settings
from alphastomics.config.file import parse_document
from alphastomics.diffusion_model.train import TrainRequest, train
from alphastomics.fit import plan_for
from alphastomics.main import main as alphastomics
from benchmarks.defaults import read_slice

IMPUTED: dict[str, dict[str, Any]] = {
    "BY3": {"train": ["BY3"], "query": None},
    "embryo2 -> embryo1_z2": {"train": ["embryo2_z2", "embryo2_z5"], "query": "embryo1_z2"},
    "osmFISH": {"train": ["ssctx"], "query": None},
}
LABELLED: dict[str, dict[str, Any]] = {
    "embryo2 -> embryo1_z2": {"train": ["embryo2_z2", "embryo2_z5"], "query": "embryo1_z2"},
    "Moffitt -0.09 -> -0.29": {
        "train": ["animal1_bregma-0.09"],
        "query": "animal1_bregma-0.29",
    },
    "osmFISH, domains": {"train": ["ssctx"], "query": None, "label": "region", "frame": True},
    "BY3, domains": {"train": ["BY3"], "query": None, "label": "layer", "frame": True},
    "serial 0.04 + 0.14 -> 0.09, domains": {
        "train": ["section_0.04", "section_0.14"],
        "query": "section_0.09",
        "label": "domain",
        "frame": True,
    },
}
UNLABELLED = "unlabelled"  # in a column of labels
AROUND = 20
NEIGHBOURS = (5, 10, 20, 50, 100, 200)
FEW = {"training.max_epochs": 1, "training.position_head_updates": 1, "expression.updates": 1}


def slices_of(folder: Path, chosen: dict[str, Any], seed: int) -> tuple[list[Any], Any]:
    """Return training slices and a query: of a single slice, half of its cells each."""
    slices = [read_slice(folder, name, seed) for name in chosen["train"]]
    if chosen["query"] is not None:
        return slices, read_slice(folder, chosen["query"], seed)
    half = slices[0].n_obs // 2
    return [slices[0][:half].copy()], slices[0][half:].copy()


def trained(folder: Path, slices: list[Any], label: str = "cell_type") -> AlphaSTomics:
    """Preprocess the slices, with a column of labels, and train a network for a moment."""
    (folder / "slices").mkdir()
    for number, data in enumerate(slices):
        data.write_h5ad(folder / "slices" / f"slice_{number}.h5ad")
    words = ["--input_dir", folder / "slices", "--output_dir", folder / "processed"]
    words += ["--train_ratio", 1, "--val_ratio", 0]
    if label in slices[0].obs:
        words += ["--cell_type_key", label]
    assert alphastomics(["preprocess", *map(str, words)]) == 0
    document = {
        "data": {"processed_data_dir": str(folder / "processed")},
        "logging": {"save_dir": str(folder), "exp_name": "run"},
    }
    config = with_settings(plan_for(parse_document(document, "benchmark")).config, FEW)
    train(config, TrainRequest(overwrite=True), has_validation=False)
    return AlphaSTomics.load(folder / "run")


def normalized(data: Any) -> Any:
    """Return log-normalised values."""
    copy = data.copy()
    sc.pp.normalize_total(copy, target_sum=1e4)
    sc.pp.log1p(copy)
    return copy.X.toarray() if hasattr(copy.X, "toarray") else np.asarray(copy.X)


def standardized(values: np.ndarray) -> np.ndarray:
    """Standardise the genes of a slice."""
    std = values.std(0)
    return (values - values.mean(0)) / np.where(std > 0, std, 1)


def r_by_gene(predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Return Pearson's r of every gene; 0 where it does not vary."""
    a, b = predicted - predicted.mean(0), true - true.mean(0)
    size = np.sqrt((a**2).sum(0) * (b**2).sum(0))
    return np.where(size > 0, (a * b).sum(0) / np.maximum(size, 1e-12), 0)


def shared_components(slices: list[Any], query: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return 50 principal components of the query's genes, each slice standardised."""
    genes = query.var_names
    known = np.concatenate([standardized(normalized(data[:, genes])) for data in slices])
    pca = PCA(min(50, *known.shape), random_state=0).fit(known)
    return pca.transform(known), pca.transform(standardized(normalized(query)))


def baselines(slices: list[Any], query: Any, hidden: list[str]) -> dict[str, np.ndarray]:
    """Predict hidden genes by k-NN, for each k, and by ridge regression."""
    known, asked = shared_components(slices, query)
    target = np.concatenate([normalized(data)[:, data.var_names.get_indexer(hidden)]
                             for data in slices])  # fmt: skip
    result = {
        f"k-NN {k}": KNeighborsRegressor(k).fit(known, target).predict(asked) for k in NEIGHBOURS
    }
    ridge = RidgeCV(alphas=np.logspace(0, 4, 9)).fit(known, target)
    return result | {"ridge": ridge.predict(asked)}


def impute_one(folder: Path, name: str, seed: int) -> dict[str, Any]:
    """Hide genes, impute them, and score all methods."""
    slices, whole = slices_of(folder, IMPUTED[name], seed)
    order = np.random.default_rng(seed).permutation(whole.n_vars)
    hidden = sorted(whole.var_names[order[: whole.n_vars // 5]])
    query = whole[:, ~whole.var_names.isin(hidden)].copy()
    true = normalized(whole)[:, whole.var_names.get_indexer(hidden)]
    with tempfile.TemporaryDirectory() as scratch:
        model = trained(Path(scratch), slices)
        begun = time.perf_counter()
        made = model.impute(query, genes=hidden, seed=seed)
        seconds = time.perf_counter() - begun
    # The unit of the result: shares of what the query measured.
    plain = whole.X.toarray() if hasattr(whole.X, "toarray") else np.asarray(whole.X)
    total = plain[:, ~whole.var_names.isin(hidden)].sum(1, keepdims=True)
    at = whole.var_names.get_indexer(hidden)
    in_unit = np.log1p(plain[:, at] / np.maximum(total, 1e-12) * 1e4)
    error = np.abs(made.X - in_unit)
    std, interval = made.layers["imputed_std"], made.var["interval_90"].to_numpy()
    r = {"AlphaSTomics": r_by_gene(made.X, true)}
    r |= {name: r_by_gene(p, true) for name, p in baselines(slices, query, hidden).items()}
    means = {method: float(values.mean()) for method, values in r.items()}
    best = max((m for m in means if m.startswith("k-NN")), key=means.__getitem__)
    return {
        "r by gene": means,
        "best k-NN": means[best],
        "genes better than the best k-NN": float((r["AlphaSTomics"] > r[best]).mean()),
        "expected r": float(made.var["expected_r"].mean()),
        "expected and true r, correlation": float(
            np.corrcoef(made.var["expected_r"], r["AlphaSTomics"])[0, 1]
        ),
        "within interval_90": float((error <= interval * std).mean()),
        "error over std": float(np.sqrt((error**2).mean() / (std**2).mean())),
        "seconds": seconds,
    }


def calibration_error(probability: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error, in ten bins of the largest probability."""
    largest = probability.max(1)
    bins = np.minimum((largest * 10).astype(int), 9)
    gaps = [abs(largest[bins == b].sum() - right[bins == b].sum()) for b in range(10)]
    return float(sum(gaps) / len(right))


def label_scores(names: np.ndarray, probability: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Score probabilities of types."""
    right = names[probability.argmax(1)] == true
    return {"accuracy": float(right.mean()), "calibration": calibration_error(probability, right)}


def with_surroundings(components: np.ndarray, slices: list[Any]) -> np.ndarray:
    """Add the mean of the nearest cells in space, slice by slice."""
    parts = np.split(components, np.cumsum([data.n_obs for data in slices])[:-1])
    means = []
    for values, data in zip(parts, slices, strict=True):
        at = np.asarray(data.obsm["spatial"])
        means.append(values[cKDTree(at).query(at, k=AROUND + 1)[1][:, 1:]].mean(1))
    return np.hstack([components, np.concatenate(means)])


def label_baselines(
    slices: list[Any], query: Any, labels: np.ndarray, chosen: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Fit k-NN, for each k, and logistic regression to labelled training cells.

    Yields the method, the names of the labels, and their probabilities for the query.
    """
    known, asked = shared_components(slices, query)
    features = {"": (known, asked)}
    if "label" in chosen:
        both = with_surroundings(known, slices), with_surroundings(asked, [query])
        features[" + spatial"] = both
    if "frame" in chosen:
        at = [np.asarray(data.obsm["spatial"]) for data in slices]
        features[" in space"] = np.concatenate(at), np.asarray(query.obsm["spatial"])
    has_label = labels != UNLABELLED
    for kind, (fitted, given) in features.items():
        methods = {f"k-NN {k}{kind}": KNeighborsClassifier(k) for k in NEIGHBOURS}
        if kind != " in space":
            methods[f"logistic regression{kind}"] = LogisticRegression(max_iter=300)
        for method, classifier in methods.items():
            probability = classifier.fit(fitted[has_label], labels[has_label]).predict_proba(given)
            yield method, classifier.classes_, probability


def label_one(folder: Path, name: str, seed: int) -> dict[str, Any]:
    """Predict labels of a query, and score all methods on the cells that have one."""
    chosen = LABELLED[name]
    label = chosen.get("label", "cell_type")
    slices, query = slices_of(folder, chosen, seed)
    true = query.obs.pop(label).astype(str).to_numpy()
    labels = np.concatenate([data.obs[label].astype(str) for data in slices])
    # The position is that in the plane, and cells without a label have none at all.
    for data in [*slices, query]:
        data.obsm = {"spatial": data.obsm["spatial"]}
    if "label" in chosen:
        for data in slices:
            text = data.obs[label].astype(object)
            data.obs[label] = text.where(text != UNLABELLED).astype("category")
    with tempfile.TemporaryDirectory() as scratch:
        model = trained(Path(scratch), slices, label)
        begun = time.perf_counter()
        model.predict_labels(query, seed=seed)
        seconds = time.perf_counter() - begun
    record = query.uns["cell_type_probabilities"]
    ours = (
        "AlphaSTomics",
        np.asarray(record["names"]),
        query.obsm["cell_type_probabilities"],
    )
    counted = true != UNLABELLED if "label" in chosen else np.ones(len(true), dtype=bool)
    result = {
        method: label_scores(names, probability[counted], true[counted])
        for method, names, probability in (ours, *label_baselines(slices, query, labels, chosen))
    }
    return {"scores": result, "expected": record["expected_accuracy"], "seconds": seconds}


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--sets", nargs="*", default=list(IMPUTED))
    parser.add_argument("--labels", nargs="*", default=list(LABELLED))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    logging.getLogger("alphastomics").setLevel(logging.WARNING)
    results: dict[str, Any] = {"version": __version__, "scikit-learn": sklearn_version, "runs": {}}
    jobs = [(impute_one, "impute", name) for name in asked.sets]
    jobs += [(label_one, "label", name) for name in asked.labels]
    for act, kind, name in jobs:
        for seed in asked.seeds:
            result = act(asked.data, name, seed)
            results["runs"][f"{kind}: {name}, seed {seed}"] = result
            print(kind, name, seed, json.dumps(result), flush=True)
            if asked.json:
                asked.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
