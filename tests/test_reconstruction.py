"""The recipe for placing cells, kept: on simulated tissue it beats plain regressors by a margin."""

from pathlib import Path

import anndata
import numpy as np
import pytest

from alphastomics import AlphaSTomics
from alphastomics.config import SimulationConfig
from alphastomics.evaluation.baselines import regressed_positions
from alphastomics.evaluation.scores import position_scores
from alphastomics.generation.cells import InputCells
from alphastomics.simulate import write_tissue

PRESET = Path(__file__).parent.parent / "configs" / "reconstruct.yaml"
# The recipe at the size of a test.
SMALL = {"d_model": 64, "n_layers": 2, "batch_size": 600, "set_size": 600, "max_epochs": 40}


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> list[anndata.AnnData]:
    folder = tmp_path_factory.mktemp("tissue")
    write_tissue(SimulationConfig(cells=600, slices=3, genes=80), 7, folder, overwrite=True)
    return [anndata.read_h5ad(path) for path in sorted(folder.glob("*.h5ad"))]


def placed_scores(
    model: AlphaSTomics, data: anndata.AnnData, **sampling: object
) -> dict[str, float]:
    placed = model.predict_positions(data.copy(), num_samples=2, **sampling)
    return position_scores(placed.astype(np.float32), data.obsm["spatial"].astype(np.float32), None)


def by_regressor(model: AlphaSTomics, slices: list[anndata.AnnData]) -> dict[str, float]:
    cells: list[InputCells] = [model._cells(data, model.config) for data in slices]
    assert cells[0].position is not None
    found = regressed_positions(
        cells[1].expression, cells[0].expression, cells[0].position, regressor="knn", seed=0
    )
    true = slices[1].obsm["spatial"].astype(np.float32)
    return position_scores(np.asarray(found, np.float32)[:, :2], true, None)


def test_the_preset_places_an_unseen_slice_better_than_a_regressor(
    slices: list[anndata.AnnData],
) -> None:
    model = AlphaSTomics(slices[::2], PRESET, **SMALL).train()
    ours = placed_scores(model, slices[1], num_steps=1)
    regressed = by_regressor(model, slices)
    assert ours["spearman_mean"] > regressed["spearman_mean"] + 0.03
    assert ours["procrustes"] < regressed["procrustes"]
    assert ours["knn_preservation"] > 1.1 * regressed["knn_preservation"]
    # More steps draw from the posterior; with this recipe that costs little.
    drawn = placed_scores(model, slices[1], num_steps=20, product="sample")
    assert drawn["spearman_mean"] > 0.7 * ours["spearman_mean"]
