"""Run every block of the tutorial in an empty folder, and draw its pictures into docs/pictures.

python docs/make_pictures.py
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from page_blocks import run_blocks

DOCS = Path(__file__).parent
DPI = 90
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

    from alphastomics import pl

    figure, axes = plt.subplots(figsize=(5, 2.6))
    pl.history(history[history["name"].isin(["train/loss", "val/loss"])], ax=axes)
    return saved(figure, path)


def draw_predicted(predicted: Any, path: Path) -> Path:
    """Draw true positions, predicted positions, their radius, and the errors."""
    import matplotlib.pyplot as plt

    from alphastomics import pl

    ratios = {"width_ratios": (3, 3, 4, 4)}
    figure, axes = plt.subplots(1, 4, figsize=(12, 3), layout="constrained", gridspec_kw=ratios)
    pl.positions(predicted, "cell_type", slice_key=None, ax=axes[:2])
    axes[1].get_legend().remove()
    pl.uncertainty(predicted, slice_key=None, ax=axes[2:])
    return saved(figure, path)


def draw_new(new: Any, path: Path) -> Path:
    """Draw new tissue, coloured by cell type."""
    import matplotlib.pyplot as plt

    from alphastomics import pl

    figure, axes = plt.subplots(figsize=(4, 3.4))
    pl.tissue(new, slice_key=None, ax=axes)
    axes.set_title("new tissue")
    return saved(figure, path)


def saved(figure: Any, path: Path, dpi: int = DPI) -> Path:
    """Write a figure small enough for a page, and close it."""
    import matplotlib.pyplot as plt
    from PIL import Image

    figure.savefig(path, dpi=dpi, bbox_inches="tight")
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
