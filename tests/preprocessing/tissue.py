"""Small slices for the tests, the plain scanpy pipeline beside them, and ways to read results."""

import hashlib
import json
import warnings
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from scipy.sparse import csc_matrix, csr_matrix

from alphastomics.config import PreprocessingConfig
from alphastomics.errors import InputError
from alphastomics.preprocessing.commands import preprocess

FORMS = {"csr": csr_matrix, "csc": csc_matrix, "dense": np.asarray}


def make_slice(
    cells: int = 40,
    genes: list[str] | int = 12,
    seed: int = 0,
    form: str = "csr",
    dims: int = 2,
    slices: list[str] | None = None,
    types: list[str] | None = None,
    name: str = "cell",
) -> anndata.AnnData:
    """Draw counts and positions; some cells and genes have no counts at all."""
    rng = np.random.default_rng(seed)
    names = [f"g{i:03d}" for i in range(genes)] if isinstance(genes, int) else genes
    counts = rng.poisson(rng.gamma(0.5, 2, len(names)), (cells, len(names))).astype(np.float32)
    if cells > 3:
        counts[rng.integers(cells)] = 0
    obs = pd.DataFrame(index=[f"{name}_{seed}_{i}" for i in range(cells)])
    if slices is not None:
        obs["slice_id"] = pd.Categorical(rng.choice(slices, cells))
    if types is not None:
        obs["cell_type"] = pd.Categorical(rng.choice(types, cells), categories=types)
    var = pd.DataFrame(index=names)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*names are not unique")
        data = anndata.AnnData(FORMS[form](counts), obs=obs, var=var)
    data.obsm["spatial"] = rng.normal(0, 300, (cells, dims))
    return data


def write(folder: Path, **slices: anndata.AnnData) -> Path:
    """Write slices as h5ad files."""
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*names are not unique")
        for name, data in slices.items():
            data.write_h5ad(folder / f"{name}.h5ad")
    return folder


def run(source: Path, target: Path, *, seed: int = 42, genes: Path | None = None, **options):
    """Preprocess with some settings, in this process."""
    overwrite = options.pop("overwrite", False)
    scheduler = options.pop("scheduler", None)
    return preprocess(
        PreprocessingConfig(**options),
        input_dir=source,
        output_dir=target,
        gene_list_file=genes,
        seed=seed,
        overwrite=overwrite,
        scheduler=scheduler,
    )


def refused(source: Path, target: Path, *words: str, **options) -> str:
    """Run, expect a refusal in one line with these words, and nothing left behind."""
    with pytest.raises(InputError) as caught:
        run(source, target, **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    assert not target.exists(), files_in(target)
    return message


def metadata_of(folder: Path) -> dict:
    return json.loads((folder / "metadata.json").read_text())


def cells_of(folder: Path) -> pd.DataFrame:
    """Read all cells of a processed folder, with their split, by their cell id."""
    metadata = metadata_of(folder)
    frames = []
    for split, record in metadata["splits"].items():
        for shard in record["shards"]:
            frame = pq.read_table(folder / shard["file"]).to_pandas()
            frames.append(frame.assign(split=split))
    return pd.concat(frames).sort_values("cell_id").reset_index(drop=True)


def expression_of(folder: Path, cells: pd.DataFrame) -> np.ndarray:
    """Return (N, G) values of dense or sparse storage, by the rule that metadata.json states."""
    metadata = metadata_of(folder)
    if metadata["storage"] == "dense":
        return np.stack(cells["expression"].to_numpy())
    values = np.zeros((len(cells), metadata["num_genes"]), dtype=np.float32)
    if metadata["normalization"]["scale"]:
        scaling = np.load(folder / "scaling.npz")
        zero = ((0 - scaling["mean"]) / scaling["std"]).astype(np.float32)
        values = zero[cells["slice_id"].to_numpy()]
    for row, (index, value) in enumerate(
        zip(cells["gene_index"], cells["gene_value"], strict=True)
    ):
        values[row, index] = value
    return values


def in_scanpy(data: anndata.AnnData, *, log: bool, scale: bool) -> None:
    """Run the plain scanpy pipeline, in place."""
    import scanpy

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some cells have zero counts")
        if log:
            scanpy.pp.normalize_total(data, target_sum=1e4)
            scanpy.pp.log1p(data)
        if scale:
            scanpy.pp.scale(data)


def by_scanpy(data: anndata.AnnData, genes: list[str], *, log: bool, scale: bool) -> np.ndarray:
    """Normalise one slice with scanpy, then align it to the gene list; missing genes are 0."""
    data = data.copy()
    data.X = data.X.toarray() if hasattr(data.X, "toarray") else np.array(data.X)
    in_scanpy(data, log=log, scale=scale)
    aligned = np.zeros((data.n_obs, len(genes)), dtype=np.float32)
    for column, gene in enumerate(genes):
        if gene in data.var_names:
            aligned[:, column] = data[:, gene].X[:, 0]
    return aligned


def by_hand(data: anndata.AnnData, genes: list[str]) -> np.ndarray:
    """Do what scanpy does in float64, where its own variance of equal values may be negative."""
    counts = np.asarray(data.X.toarray() if hasattr(data.X, "toarray") else data.X, dtype=float)
    total = counts.sum(axis=1, keepdims=True)
    values = np.log1p(counts / np.where(total == 0, 1, total) * 1e4)
    std = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
    values = (values - values.mean(axis=0)) / np.where(std < 1e-6, 1, std)
    frame = pd.DataFrame(values, columns=data.var_names)
    return frame.reindex(columns=genes, fill_value=0).to_numpy()


def digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file that a processed folder is made of."""
    paths = [*folder.glob("data/*"), folder / "metadata.json", *folder.glob("scaling.npz")]
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }


def files_in(folder: Path) -> list[str]:
    """List every file below a folder, hidden ones too."""
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )
