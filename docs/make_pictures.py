"""Run every block of the tutorial in an empty folder, and draw its pictures into docs/pictures.

python docs/make_pictures.py
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from page_blocks import run_blocks

DOCS = Path(__file__).parent
COLOURS = 128  # of a picture: a quarter of the bytes, for steps in the colour bar


def rotated_onto(source: Any, target: Any) -> Any:
    """Rotate positions onto others, mirrored if that fits better: Kabsch (1976)."""
    import numpy as np

    moved, aim = source - source.mean(0), target - target.mean(0)
    left, _, right = np.linalg.svd(moved.T @ aim)
    return moved @ left @ right + target.mean(0)


def draw(folder: Path, target: Path) -> list[Path]:
    """Draw what a run of the tutorial left."""
    import anndata
    import matplotlib
    import pandas as pd

    matplotlib.use("agg")
    target.mkdir(exist_ok=True)
    predicted = anndata.read_h5ad(folder / "predicted.h5ad")
    new = anndata.read_h5ad(folder / "new.h5ad")
    # The training that judged the model; the second one has nothing left to validate with.
    history = pd.read_csv(folder / "outputs" / "tutorial" / "holdout" / "metrics.csv")
    return [
        draw_loss(history, target / "loss.png"),
        draw_predicted(predicted, target / "predicted.png"),
        draw_new(new, target / "new.png"),
    ]


def draw_loss(history: Any, path: Path) -> Path:
    """Draw the losses of training and validation over the steps."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 2.6))
    # One step's loss depends on the times it drew: dots for steps, a line for whole validations.
    steps, whole = (history[history["name"] == name] for name in ("train/loss", "val/loss"))
    axes.plot(steps["step"], steps["value"], ".", color="silver", label="training, single steps")
    axes.plot(whole["step"], whole["value"], color="tab:blue", label="held-out slice")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend(frameon=False)
    return saved(figure, path)


def draw_predicted(predicted: Any, path: Path) -> Path:
    """Draw true positions, predicted positions, and their std."""
    import matplotlib.pyplot as plt
    import numpy as np

    true = np.asarray(predicted.obsm["spatial"])
    aligned = rotated_onto(predicted.obsm["spatial_pred"], true)
    types = predicted.obs["cell_type"].cat.codes
    std = np.linalg.norm(predicted.obsm["spatial_std"], axis=1)
    figure, panels = plt.subplots(
        1, 3, figsize=(11, 3), sharex=True, sharey=True, layout="constrained"
    )
    for axes, position, title in zip(panels, (true, aligned, aligned), TITLES, strict=True):
        last = title == TITLES[-1]
        shown = axes.scatter(
            *position.T, c=std if last else types, cmap="viridis" if last else "tab20", s=5
        )
        axes.set(title=title, aspect="equal", xticks=[], yticks=[])
    figure.colorbar(shown, ax=panels[-1], shrink=0.8)
    return saved(figure, path)


TITLES = ("true, by cell type", "predicted, by cell type", "predicted, by std")


def draw_new(new: Any, path: Path) -> Path:
    """Draw new tissue, coloured by the first principal component of its expression."""
    import matplotlib.pyplot as plt
    import numpy as np

    values = np.asarray(new.X, dtype=float)
    left, size, _ = np.linalg.svd(values - values.mean(0), full_matrices=False)
    figure, axes = plt.subplots(figsize=(4, 3.4))
    axes.scatter(*new.obsm["spatial_pred"][:, :2].T, c=left[:, 0] * size[0], cmap="coolwarm", s=4)
    axes.set(title="new tissue, by first component", aspect="equal", xticks=[], yticks=[])
    return saved(figure, path)


def saved(figure: Any, path: Path) -> Path:
    """Write a figure small enough for a page, and close it."""
    import matplotlib.pyplot as plt
    from PIL import Image

    figure.savefig(path, dpi=90, bbox_inches="tight")
    plt.close(figure)
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(COLOURS)
    few.save(path, optimize=True)
    return path


def main() -> None:
    """Run the tutorial and draw."""
    page = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="alphastomics-tutorial-") as scratch:
        run_blocks(page, Path(scratch), {})
        for path in draw(Path(scratch), DOCS / "pictures"):
            sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
