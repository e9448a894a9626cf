"""Positions of a query that lacks genes: learned again from those that it has."""

from dataclasses import replace

import anndata
import numpy as np
import pytest
import torch

from alphastomics import AlphaSTomics
from alphastomics.evaluation.registry import position_scores
from alphastomics.generation import panel_head
from alphastomics.generation.panel_head import lacks_genes, refitted, targets
from alphastomics.generation.training_cells import training_cells
from alphastomics.geometry import best_rotation

GENES, CELLS = 24, 400
SETTINGS = {
    "model": {"d_model": 16, "n_heads": 2, "n_layers": 1},
    "training": {"max_epochs": 1, "position_head_updates": 150, "mode": "expr_to_pos"},
    "sampling": {"num_samples": 1, "num_steps": 2},
}


def tissue(seed: int, turn: float) -> anndata.AnnData:
    """Return cells in a plane, rotated; each gene marks a place of its own."""
    random = np.random.default_rng(seed)
    place = random.uniform(-1, 1, (CELLS, 2)) * [1.0, 0.6]
    centres = np.random.default_rng(99).uniform(-1, 1, (GENES, 2)) * [1.0, 0.6]
    rate = 12 * np.exp(-4 * ((place[:, None] - centres) ** 2).sum(-1)) + 0.3
    data = anndata.AnnData(random.poisson(rate).astype(np.float32))
    data.var_names = [f"g{number}" for number in range(GENES)]
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    data.obsm["spatial"] = 100 * place @ rotation.T
    return data


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> AlphaSTomics:
    slices = [tissue(seed, turn) for seed, turn in ((0, 0.0), (1, 2.0))]
    folder = tmp_path_factory.mktemp("panel") / "model"
    return AlphaSTomics(slices, SETTINGS, folder=folder, seed=0).train()


def spearman(predicted: np.ndarray, data: anndata.AnnData) -> float:
    true = data.obsm["spatial"].astype(np.float32)
    return position_scores(predicted.astype(np.float32), true)["spearman_mean"]


def test_positions_of_half_the_genes_are_learned_from_these(model, caplog, monkeypatch):
    whole = tissue(2, 1.0)
    query = whole[:, : GENES // 2].copy()
    del query.obsm["spatial"]
    with monkeypatch.context() as patch:
        patch.setattr("alphastomics.generation.predict.fitted_to_panel", lambda module, *_: module)
        before = spearman(model.predict_positions(query.copy()), whole)
    with caplog.at_level("INFO"):
        first = model.predict_positions(query.copy())
    assert "12 of the model's 24 genes were measured: positions are learned again" in caplog.text
    assert spearman(first, whole) > before + 0.05
    caplog.clear()
    again = model.predict_positions(query.copy())
    assert "learned again" not in caplog.text  # kept for the same panel
    np.testing.assert_array_equal(first, again)
    # Genes that the query lacks say nothing, whoever has them.
    module = model._trained().module
    (fitted,) = panel_head._refitted[module].values()
    values = torch.randn(1, 300, 3 * GENES)
    other = values.clone()
    lacking = torch.tensor([gene not in query.var_names for gene in model._trained().genes])
    other[..., lacking.repeat(3)] += 5
    own = [fitted.average.position_head.own(each[..., :GENES], None) for each in (values, other)]
    torch.testing.assert_close(own[0], own[1])
    networks = fitted.average.position_head.smoothed
    both = [networks(each[..., :GENES], each) for each in (values, other)]
    torch.testing.assert_close(both[0], both[1])
    # Cells of all genes are predicted as they were.
    head = model._trained().module.average.position_head
    weights = head.smoothed.own.clone()
    model.predict_positions(whole[:50].copy())
    assert (weights == model._trained().module.average.position_head.smoothed.own).all()


def test_a_query_with_nearly_all_genes_or_without_training_cells_keeps_the_model(model):
    trained = model._trained()
    known = training_cells(trained.module, trained.genes)
    assert known is not None
    few = known.measured.copy()
    few[:, :2] = False
    part = replace(known, measured=few)
    assert not lacks_genes(trained.module, part)
    few[:, :6] = False
    assert lacks_genes(trained.module, part)
    assert refitted(trained.module, part, None, 0) is trained.module
    # A training slice has no more genes than the query: the head knows such cells.
    assert refitted(trained.module, part, part, 0) is trained.module
    few[0] = True  # slices of several panels
    assert not lacks_genes(trained.module, part)


def test_training_slices_are_learned_in_the_frame_that_the_model_has(model):
    trained = model._trained()
    known = training_cells(trained.module, trained.genes)
    rows = [known.rows_of(number) for number in range(2)]
    target = targets(trained.module, known, rows)
    # The same places of both slices come together, though one is rotated by two radians.
    markers = np.stack([known.expression[part].T @ target[part] for part in rows])
    assert np.corrcoef(markers[0].ravel(), markers[1].ravel())[0, 1] > 0.9
    for part in rows:
        centred = known.position[part] - known.position[part].mean(0)
        rotation = best_rotation(
            *(torch.from_numpy(values) for values in (centred, target[part])), reflection=True
        ).numpy()
        np.testing.assert_allclose(centred @ rotation.T, target[part], atol=1e-6)
