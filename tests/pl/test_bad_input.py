"""A picture of what is not there is refused in one line that says what there is."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from alphastomics import pl
from alphastomics.errors import InputError

pytestmark = pytest.mark.filterwarnings("default:::matplotlib", "default:::pyparsing")


@pytest.mark.parametrize(
    ("plot", "said"),
    [
        (lambda a: pl.positions(a, "type"), "neither a column of obs nor a gene"),
        (lambda a: pl.positions(a, pred_key="x"), r"obsm\['x'\] is missing \(there: spatial, "),
        (lambda a: pl.positions(a, true_key="x"), r"true_key=…"),
        (lambda a: pl.positions(a, slice_key="x"), r"slice_key=…"),
        (lambda a: pl.positions(a, pred_key="X_pca"), r"shape \(40, 5\)"),
        (lambda a: pl.positions(a, true_key="deep"), "same number of dimensions"),
        (lambda a: pl.genes(a, ["g0", "Sox2"]), r"'Sox2' is not in adata.var_names \(3 genes"),
        (lambda a: pl.genes(a, []), "list is empty"),
        (lambda a: pl.genes(a, "g0", pred_layer="x"), r"layers\['x'\] is missing"),
        (lambda a: pl.genes(a, "g0", true_layer="x"), r"layers\['x'\] is missing"),
        (lambda a: pl.tissue(a, position_key="x"), r"position_key=…"),
        (lambda a: pl.volume(a), "pl.tissue plots planar slices"),
        (lambda a: pl.volume(a, position_key="deep", ax=plt.figure().gca()), 'projection="3d"'),
        (lambda a: pl.tissue(a, ax=plt.figure().gca()), "2 panels are plotted, got 1 axes"),
        (lambda a: pl.history(a), "expected a trained model"),
        (lambda _: pl.history(pd.DataFrame(columns=["step", "name", "value"])), "no losses"),
    ],
)
def test_a_mistake_is_one_line(cells, plot, said):
    cells.obsm["X_pca"] = np.zeros((40, 5))
    cells.obsm["deep"] = np.zeros((40, 3))
    with pytest.raises(InputError, match=said) as refused:
        plot(cells)
    assert "\n" not in str(refused.value)


def test_predictions_that_are_missing_name_the_verb(cells):
    del cells.obsm["spatial_pred"]
    with pytest.raises(InputError, match=r"model\.predict_positions\(adata\) writes"):
        pl.positions(cells)
    del cells.obsm["spatial_std"]
    cells.obsm["spatial_pred"] = cells.obsm["spatial"]
    with pytest.raises(InputError, match=r"obsm\['spatial_std'\] is missing"):
        pl.uncertainty(cells)
