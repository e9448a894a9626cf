"""Train on some slices, predict the cells of another, and plot them for the README.

    python docs/make_readme_picture.py DATA

DATA is a folder with the seqFISH slices of benchmarks/defaults.py as h5ad files. The settings are
the defaults; --set gives others, such as --set seed=1. --model takes a saved model in place of a
training. Cells are predicted from expression alone, assigned to the positions of a training slice,
and assigned once more with known positions of some.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TRAIN, TEST = ("embryo2_z2", "embryo2_z5"), "embryo1_z2"
ANCHOR_SHARE = 0.05
# As many types as colours can separate; the others are plotted in grey.
SHOWN_TYPES = 10


def predicted_slice(arguments: argparse.Namespace) -> Any:
    """Train, and predict the held-out slice: by the mean, and assigned without and with anchors."""
    import anndata
    import numpy as np

    from alphastomics import AlphaSTomics

    def read(name: str) -> Any:
        return anndata.read_h5ad(next(arguments.data.rglob(f"{name}.h5ad")))

    if arguments.model:
        model = AlphaSTomics.load(arguments.model)
    else:
        model = AlphaSTomics([read(name) for name in TRAIN], **arguments.set).train()
        if arguments.save:
            model.save(arguments.save)
    cells = read(TEST)
    order = np.random.default_rng(0).permutation(cells.n_obs)
    cells.obs["known"] = np.isin(np.arange(cells.n_obs), order[: round(ANCHOR_SHARE * len(order))])
    one_call: dict[str, Any] = {"num_samples": 1, "num_steps": 1}  # the std is not drawn
    alone = model.predict_positions(cells, **one_call)
    one_call["estimator"] = "assigned"
    onto = model.predict_positions(cells, reference=read(TRAIN[0]), **one_call)
    model.predict_positions(cells, anchors="known", **one_call)
    cells.obsm["without_anchors"], cells.obsm["onto_another"] = alone, onto
    return cells


def draw(cells: Any, path: Path) -> None:
    """Draw true positions and the predictions, rotated onto them where they have no frame."""
    import matplotlib

    matplotlib.use("agg")
    import anndata
    import matplotlib.pyplot as plt
    import numpy as np
    import pandas as pd
    from make_pictures import rotated_onto, saved

    from alphastomics import pl
    from alphastomics.utils.metrics import position_scores

    true = np.asarray(cells.obsm["spatial"], np.float64)
    alone, onto = (
        rotated_onto(np.asarray(cells.obsm[key])[:, :2], true)
        for key in ("without_anchors", "onto_another")
    )
    assigned = np.asarray(cells.obsm["spatial_pred"], np.float64)[:, :2]
    rest = ~cells.obs["known"].to_numpy()
    scores = [
        position_scores(position[rest], true[rest], None)["spearman_median"]
        for position in (alone, onto, assigned)
    ]
    titles = (
        "true",
        f"by expression alone\nmedian Spearman {scores[0]:.2f}",
        f"assigned to positions of another embryo\nmedian Spearman {scores[1]:.2f}",
        f"assigned, {ANCHOR_SHARE:.0%} of the cells known\nmedian Spearman {scores[2]:.2f}",
    )
    types = cells.obs["cell_type"].astype(str)
    frequent = list(types.value_counts().index[:SHOWN_TYPES])
    shown = pd.Categorical(types, categories=frequent)
    # Rare types lie on top of frequent ones.
    order = np.argsort(shown.codes, kind="stable")
    # The same cells four times, as slices of one AnnData: one call plots them.
    whole = anndata.AnnData(obs=pd.DataFrame(index=np.arange(4 * len(order)).astype(str)))
    whole.obs["cell type"] = pd.Categorical(np.tile(types.to_numpy()[order], 4), frequent)
    whole.obs["method"] = np.repeat(titles, len(order))
    whole.obsm["spatial"] = np.concatenate([part[order] for part in (true, alone, onto, assigned)])
    figure, axes = plt.subplots(
        1, 4, figsize=(16, 4.5), sharex=True, sharey=True, layout="constrained"
    )
    for panel in pl.tissue(whole, "cell type", slice_key="method", ax=axes):
        panel.axis("off")
    saved(figure, path)


def main() -> None:
    """Read the command line, train, draw."""
    # As the command line does, before torch is imported: threads that wait must not spin.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--set", nargs="*", default=[], help="settings, as key=value")
    parser.add_argument("--model", type=Path, help="a saved model, in place of a training")
    parser.add_argument("--save", type=Path, help="save the trained model here")
    parser.add_argument("--keep", type=Path, help="keep the predicted slice as this h5ad")
    parser.add_argument("--predicted", type=Path, help="draw an h5ad that was kept")
    arguments = parser.parse_args()
    pairs = [pair.partition("=")[::2] for pair in arguments.set]
    arguments.set = {key: json.loads(value) for key, value in pairs}
    if arguments.predicted:
        import anndata

        cells = anndata.read_h5ad(arguments.predicted)
    else:
        cells = predicted_slice(arguments)
    if arguments.keep:
        cells.write_h5ad(arguments.keep)
    path = ROOT / "docs" / "pictures" / "reconstructed.png"
    draw(cells, path)
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
