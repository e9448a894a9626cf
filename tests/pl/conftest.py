"""Cells whose predicted positions are a known motion of the true ones."""

from collections.abc import Iterator

import anndata
import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix

from alphastomics.pl.position_maps import PREDICTED, STD

CELLS, GENES = 40, 3


def rotation(angle: float) -> np.ndarray:
    """A rotation in the plane, mirrored."""
    return np.array([[np.cos(angle), np.sin(angle)], [np.sin(angle), -np.cos(angle)]])


@pytest.fixture
def cells() -> anndata.AnnData:
    """Two slices; each is predicted right but for its pose, and one cell is 5 off before."""
    random = np.random.default_rng(0)
    true = random.normal(size=(CELLS, 2)) * (3, 1) + 50
    predicted = np.concatenate([true[:25] @ rotation(1.0), true[25:] @ rotation(-2.0)]) - 7
    counts = random.poisson(2.0, size=(CELLS, GENES)).astype(np.float32)
    obs = pd.DataFrame(
        {
            "slice_id": pd.Categorical(["b"] * 25 + ["a"] * 15),
            "cell_type": pd.Categorical(random.choice(["neuron", "glia"], CELLS)),
            "depth": random.random(CELLS),
        },
        index=[f"cell{n}" for n in range(CELLS)],
    )
    data = anndata.AnnData(csr_matrix(counts), obs=obs, var=pd.DataFrame(index=["g0", "g1", "g2"]))
    data.obsm["spatial"] = true
    data.obsm[PREDICTED] = predicted
    data.obsm[STD] = np.abs(random.normal(size=(CELLS, 2))) + 0.1
    return data


@pytest.fixture(autouse=True)
def _off_screen(monkeypatch) -> Iterator[None]:
    """Figures without a screen, closed after the test."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    yield
    plt.close("all")
