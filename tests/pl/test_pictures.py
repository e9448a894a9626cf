"""Pictures: what reaches matplotlib is what the AnnData has, in the frame of the truth."""

import anndata
import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_array

import alphastomics
from alphastomics import pl
from alphastomics.diffusion_model.step import TERM_NAMES
from alphastomics.evaluation.position import aligned
from alphastomics.generation.output import ANCHOR_KEY, LAYER_KEY, POSITION_KEY, STD_KEY
from alphastomics.generation.radii import RADIUS_KEY
from alphastomics.pl import gene_maps, loss_curves, position_maps
from alphastomics.preprocessing.normalize import log_normalized

# What matplotlib and its dependencies say of one another is no matter of ours.
pytestmark = pytest.mark.filterwarnings("default:::matplotlib", "default:::pyparsing")


def points_of(axes) -> np.ndarray:
    return np.asarray(axes.collections[0].get_offsets())


def rows_of(cells: anndata.AnnData, name: str) -> np.ndarray:
    return np.flatnonzero(cells.obs["slice_id"] == name)


def test_the_keys_are_those_that_predictions_are_written_under():
    assert (position_maps.PREDICTED, position_maps.STD) == (POSITION_KEY, STD_KEY)
    assert (position_maps.ANCHOR, position_maps.RADIUS) == (ANCHOR_KEY, RADIUS_KEY)
    assert gene_maps.GENERATED == LAYER_KEY
    assert alphastomics.pl is pl


def test_each_slice_is_plotted_true_and_predicted_in_the_frame_of_the_truth(cells):
    axes = pl.positions(cells, "cell_type")
    assert axes.shape == (2, 2)
    # Slices in the order of their cells.
    for row, name in zip(axes, "ba", strict=True):
        true = cells.obsm["spatial"][rows_of(cells, name)]
        np.testing.assert_array_equal(points_of(row[0]), true)
        np.testing.assert_allclose(points_of(row[1]), true, atol=1e-9)
        assert [panel.get_title() for panel in row] == [f"{name}, true", f"{name}, predicted"]


def test_the_alignment_is_that_of_the_metrics(cells):
    noisy = cells.obsm["spatial_pred"] + np.random.default_rng(1).normal(size=(40, 2))
    cells.obsm["spatial_pred"] = noisy
    axes = pl.positions(cells)
    rows = rows_of(cells, "a")
    expected = aligned(noisy[rows], cells.obsm["spatial"][rows], scale=False, reflection=True)
    np.testing.assert_allclose(points_of(axes[1, 1]), expected.numpy(), atol=1e-9)


def test_cells_without_a_true_position_move_with_their_slice(cells):
    true = cells.obsm["spatial"].copy()
    cells.obsm["spatial"][:5] = np.nan
    np.testing.assert_allclose(points_of(pl.positions(cells)[0, 1]), true[:25], atol=1e-9)


def test_predictions_by_anchors_stay_where_they_are(cells):
    cells.obs[ANCHOR_KEY] = [True] * 5 + [False] * 35
    shown = points_of(pl.positions(cells)[0, 1])
    np.testing.assert_array_equal(shown, cells.obsm["spatial_pred"][:25])


def test_without_truth_the_prediction_is_plotted_alone_as_it_is(cells):
    del cells.obsm["spatial"]
    axes = pl.positions(cells, slice_key=None)
    assert axes.shape == (1, 1)
    np.testing.assert_array_equal(points_of(axes[0, 0]), cells.obsm["spatial_pred"])


def test_groups_have_the_colours_of_the_anndata_and_a_legend(cells):
    cells.uns["cell_type_colors"] = ["#ff0000", "#0000ff"]
    cells.obs.loc["cell0", "cell_type"] = np.nan
    axes = pl.tissue(cells, slice_key=None)
    colours = axes[0].collections[0].get_facecolors()
    expected = {"glia": "#ff0000", "neuron": "#0000ff"}
    for number, kind in enumerate(cells.obs["cell_type"]):
        colour = expected.get(kind, "lightgrey")
        np.testing.assert_allclose(colours[number], matplotlib.colors.to_rgba(colour))
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["glia", "neuron"]


def test_a_group_has_its_colour_in_whatever_order_the_groups_are(cells):
    before = pl.tissue(cells, slice_key=None)[0]
    cells.obs["cell_type"] = cells.obs["cell_type"].cat.reorder_categories(["neuron", "glia"])
    after = pl.tissue(cells, slice_key=None)[0]
    colours = [axes.collections[0].get_facecolors() for axes in (before, after)]
    np.testing.assert_array_equal(*colours)
    shown = [
        {handle.get_label(): handle.get_color() for handle in axes.get_legend().legend_handles}
        for axes in (before, after)
    ]
    assert list(shown[1]) == ["neuron", "glia"]
    for name in shown[0]:
        np.testing.assert_array_equal(shown[0][name], shown[1][name])


@pytest.mark.parametrize("count", [10, 20, 50])
def test_each_of_many_groups_has_a_colour_of_its_own(cells, count):
    cells.obs["group"] = pd.Categorical([f"{n % count:02d}" for n in range(40)])
    colours = pl.tissue(cells, "group", slice_key=None)[0].collections[0].get_facecolors()
    assert len(np.unique(colours, axis=0)) == min(count, 40)


def test_quantities_share_their_scale_over_slices(cells):
    axes = pl.tissue(cells, "depth")
    for panel, name in zip(axes, "ba", strict=True):
        depth = cells.obs["depth"].to_numpy()[rows_of(cells, name)]
        np.testing.assert_allclose(panel.collections[0].get_array(), depth)
    ends = np.percentile(cells.obs["depth"], [1, 99])
    for panel in axes:
        np.testing.assert_allclose(panel.collections[0].get_clim(), ends)


def test_genes_are_plotted_measured_and_predicted_with_their_correlation(cells):
    counts = cells.X.toarray()
    cells.layers["generated"] = 2.0 * log_normalized(csr_array(cells.X)).toarray() - 1
    cells.layers["generated"][:, 2] = np.nan
    axes = pl.genes(cells, ["g1", "g2"], slice_key=None)
    total = counts.sum(axis=1, keepdims=True)
    expected = np.log1p(counts / total * 1e4)
    np.testing.assert_allclose(axes[0, 0].collections[0].get_array(), expected[:, 1], rtol=1e-5)
    np.testing.assert_array_equal(
        axes[0, 1].collections[0].get_array(), cells.layers["generated"][:, 1]
    )
    assert axes[0, 1].get_title() == "g1, predicted, r 1.00"
    # Nothing was predicted for g2: grey cells, and no correlation.
    assert axes[1, 1].get_title() == "g2, predicted"
    assert np.ma.getmaskarray(axes[1, 1].collections[0].get_array()).all()


def test_values_that_are_no_counts_are_plotted_as_they_are(cells):
    cells.X = cells.X.toarray() / 3 - 0.1
    array = pl.genes(cells, "g0", slice_key=None)[0, 0].collections[0].get_array()
    np.testing.assert_allclose(array, cells.X[:, 0])


def test_the_std_is_plotted_against_the_error_of_each_cell(cells):
    cells.obsm["spatial_pred"][3] += 4.0
    (panel, errors), _ = pl.uncertainty(cells)
    std = np.linalg.norm(cells.obsm["spatial_std"], axis=1)[:25]
    np.testing.assert_allclose(panel.collections[0].get_array(), std)
    shown = points_of(panel)
    error = np.linalg.norm(shown - cells.obsm["spatial"][:25], axis=1)
    np.testing.assert_allclose(points_of(errors), np.column_stack([std, error]))
    assert np.argmax(error) == 3


def test_the_radius_says_which_share_lies_within_and_leaves_anchors_out(cells):
    cells.obsm["spatial_pred"] = cells.obsm["spatial"] + (1.0, 0.0)
    cells.obs["position_radius_90"] = np.where(np.arange(40) % 4 == 0, 0.5, 2.0)
    cells.obs[ANCHOR_KEY] = np.arange(40) % 4 == 1
    _, errors = pl.uncertainty(cells, slice_key=None)[0]
    # Of the thirty others ten have a radius that is too small.
    assert len(points_of(errors)) == 30
    assert errors.get_title() == "67% within the radius of 90%"


def test_errors_have_no_panel_where_all_true_positions_are_those_of_anchors(cells):
    cells.obs[ANCHOR_KEY] = np.arange(40) % 4 == 1
    cells.obsm["spatial"][~cells.obs[ANCHOR_KEY]] = np.nan
    assert pl.uncertainty(cells, slice_key=None).shape == (1, 1)
    cells.obsm["spatial"][0] = 50.0  # of slice b
    axes = pl.uncertainty(cells)
    assert axes.shape == (2, 2)
    assert len(points_of(axes[0, 1])) == 1
    assert not axes[1, 1].axison


def test_a_volume_has_every_cell_where_it_is(cells):
    cells.obsm["spatial3d"] = np.column_stack([cells.obsm["spatial"], np.arange(40.0)])
    axes = pl.volume(cells)
    np.testing.assert_array_equal(
        np.column_stack(axes.collections[0]._offsets3d), cells.obsm["spatial3d"]
    )


def test_positions_and_uncertainty_in_3d_are_aligned_in_space(cells):
    true = np.column_stack([cells.obsm["spatial"], np.random.default_rng(2).normal(size=40)])
    cells.obsm["spatial"] = true
    cells.obsm["spatial_pred"] = true[:, [2, 0, 1]] - 3
    cells.obsm["spatial_std"] = np.ones((40, 3))
    _, predicted = pl.positions(cells, slice_key=None)[0]
    np.testing.assert_allclose(np.column_stack(predicted.collections[0]._offsets3d), true)
    panel, errors = pl.uncertainty(cells, slice_key=None)[0]
    assert (panel.name, errors.name) == ("3d", "rectilinear")


def test_the_history_has_a_panel_for_each_loss_the_total_first():
    assert set(loss_curves.TITLES) == set(TERM_NAMES)
    names = ["val/position", "train/loss", "val/loss", "train/position", "train/grad_norm"]
    rows = [(step, 0, name, step + n) for step in (1, 2) for n, name in enumerate(names)]
    rows += [(step, 0, "train/balance", 0.0) for step in (1, 2)]  # no experts: nothing to see
    table = pd.DataFrame(rows, columns=["step", "epoch", "name", "value"])
    axes = pl.history(table)
    assert [panel.get_title() for panel in axes] == ["total loss", "predicted positions"]
    training, validation = axes[1].get_lines()
    assert list(training.get_ydata()) == [4, 5]
    assert list(validation.get_ydata()) == [1, 2]


def test_axes_of_the_caller_are_used(cells):
    _, mine = plt.subplots(2, 2)
    axes = pl.positions(cells, ax=mine)
    assert (axes == mine).all()
    assert pl.tissue(cells, slice_key=None, ax=mine[0, 0])[0] is mine[0, 0]


def test_nothing_is_written_into_the_anndata(cells):
    before = cells.copy()
    pl.positions(cells, "cell_type")
    pl.uncertainty(cells)
    pl.genes(cells, "g0")
    assert list(cells.uns) == list(before.uns)
    pd.testing.assert_frame_equal(cells.obs, before.obs)
    assert set(cells.obsm) == set(before.obsm)
