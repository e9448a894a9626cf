"""Intervals of expression hold the share of values that they promise, gene by gene."""

import anndata
import numpy as np
import pytest

from alphastomics.generation.intervals import IntervalFit, bins_of, conformal_ends, least_for
from alphastomics.generation.spatial_context import SpatialContext
from tests.generation.test_anchors import placed
from tests.generation.test_spatial_context import cells_of, on_a_plane

LEVELS = (0.5, 0.8, 0.9, 0.95)


def test_ends_by_hand():
    errors = np.arange(1.0, 20.0)  # 19 of them
    assert conformal_ends(errors, 0.9) == (1, 19)
    assert conformal_ends(errors, 0.5) == (5, 15)
    assert np.isnan(conformal_ends(errors, 0.95)).all()
    assert (least_for(0.5), least_for(0.9), least_for(0.95)) == (3, 19, 39)
    bins = bins_of(np.arange(100.0), np.tile([-1.0, 1.0], 50), 0.5)
    np.testing.assert_array_equal(bins.edges, [50])
    np.testing.assert_array_equal(bins.low, [-1, -1])


def skewed(rng: np.random.Generator, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Predictions, and errors that are the wider and the more skewed the higher these are."""
    predicted = rng.gamma(2.0, size=(cells, 6))
    return predicted, predicted * (rng.exponential(size=predicted.shape) - 1)


@pytest.mark.parametrize("level", LEVELS)
def test_every_gene_is_covered_where_it_is_expected_low_and_where_high(level):
    rng = np.random.default_rng(0)
    predicted, error = skewed(rng, 3000)
    counted = rng.random(predicted.shape) < 0.8
    error = np.where(counted, error, 1e6)  # what was not measured says nothing
    new, new_error = skewed(rng, 3000)
    low, high = IntervalFit(predicted, error, counted, level, 0).about(new)
    inside = (low <= new + new_error) & (new + new_error <= high)
    np.testing.assert_allclose(inside.mean(0), level, atol=0.03)
    for rows in (new < np.median(new), new > np.quantile(new, 0.9)):
        assert inside[rows].mean() == pytest.approx(level, abs=0.04)


def test_a_gene_of_too_few_cells_has_no_interval():
    rng = np.random.default_rng(0)
    predicted, error = skewed(rng, 60)
    counted = np.ones_like(predicted, dtype=bool)
    counted[30:, 0] = False
    low, high = IntervalFit(predicted, error, counted, 0.95, 0).about(predicted)
    assert np.isnan(low[:, 0]).all()
    assert np.isnan(high[:, 0]).all()
    assert np.isfinite(low[:, 1:]).all()


@pytest.mark.parametrize("level", LEVELS)
def test_hidden_cells_of_a_tissue_lie_within(level):
    rng = np.random.default_rng(1)
    position = on_a_plane(2500, rng)
    rate = np.exp(2 * np.sin(position[:, :1] * rng.uniform(2, 9, size=8)))
    counts = np.log1p(rng.poisson(rate)).astype(np.float32)
    known, hidden = slice(500, None), slice(500)
    context = SpatialContext(
        cells_of(position[known], counts[known]), across_slices=False, seed=0, level=level
    )
    low, high = context.intervals.about(context.predict(position[hidden]))
    inside = (low <= counts[hidden]) & (counts[hidden] <= high)
    # Counts are few different numbers: some lie on an end.
    assert inside.mean() == pytest.approx(level, abs=0.03)


def test_layers_hold_intervals_only_where_they_are_calibrated(workspace, tmp_path):
    data = anndata.read_h5ad(workspace / "slices/slice_0.h5ad")
    known = np.isin(np.arange(data.n_obs), np.random.default_rng(1).permutation(90)[:60])
    data[known].copy().write_h5ad(tmp_path / "known.h5ad")
    asked = data[~known].copy()
    asked.obs_names = [f"asked_{name}" for name in asked.obs_names]
    options = {"mode": "pos_to_expr", "anchors": str(tmp_path / "known.h5ad")}
    result = placed(workspace, asked, tmp_path, **options)
    low, high = (result.layers[key] for key in ("generated_low", "generated_high"))
    measured = np.isfinite(low)
    assert measured.any()
    assert (low <= high)[measured].all()
    record = result.uns["alphastomics"]["pos_to_expr"]
    assert record["interval_level"] == 0.9
    assert record["interval_calibrated_by"] == "known cells of the slice that were left out"
    # A sample has none, and does not keep those of the estimate.
    again = placed(workspace, result, tmp_path, estimator="sample", mode="pos_to_expr")
    assert "generated_low" not in again.layers
    assert "interval_level" not in again.uns["alphastomics"]["pos_to_expr"]
