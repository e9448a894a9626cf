"""Findings without a network: a small tissue whose pictures have something to show."""

import numpy as np
import pyarrow as pa

from alphastomics.generation.cells import InputCells
from alphastomics.report.findings import (
    Curve,
    Findings,
    Inside,
    NewTissue,
    Path,
    PredictedPositions,
)

EVIL = "<script>alert(1)</script>"
GENES = [EVIL, "Gad1", "A&B", "</script><img src=x onerror=alert(2)>", "\u2028line", "{{plotly}}"]
TYPES = ["Neuron", EVIL, "Glia & co", "Vessel"]


def make_cells(
    cells: int = 120, slices: int = 2, dims: int = 2, *, types: bool = True, genes: int = 6
) -> InputCells:
    """Cells on a disc, or in a ball, whose genes and types follow their place."""
    random = np.random.default_rng(3)
    position = random.normal(size=(cells, 3)).astype(np.float32) * 100
    if dims == 2:
        position[:, 2] = 0
    waves = np.arange(1, genes + 1) / 80
    expression = np.sin(position[:, :1] * waves) + 0.2 * random.normal(size=(cells, genes))
    measured = np.ones((slices, genes), dtype=bool)
    measured[-1, 1] = slices == 1
    slice_id = np.sort(np.arange(cells) % slices).astype(np.int64)
    expression[~measured[slice_id]] = 0
    angle = np.arctan2(position[:, 1], position[:, 0])
    names = np.array(TYPES, dtype=object)
    return InputCells(
        expression=expression.astype(np.float32),
        measured=measured,
        position=position,
        dims=dims,
        slice_id=slice_id,
        slice_names=[f"<b>slice {number}</b>" for number in range(slices)],
        obs_name=pa.array([f"<i>{number}</i>" for number in range(cells)]),
        cell_type=names[((angle + np.pi) / np.pi * 2).astype(int) % 4] if types else None,
    )


def make_findings(cells: InputCells, genes: list[str] | None = None, **changes) -> Findings:
    """Everything that a page can show, of these cells."""
    random = np.random.default_rng(4)
    count, width = cells.expression.shape
    std = random.uniform(5, 20, count).astype(np.float32)
    shift = random.normal(size=(count, 3)).astype(np.float32) * std[:, None]
    shift[:, cells.dims :] = 0
    rows = cells.rows_of(0)
    frames = np.linspace(1, 0, 6, dtype=np.float32)[:, None, None]
    noise = random.normal(size=(len(rows), 3)).astype(np.float32) * 150
    known: dict = {
        "predicted_position": PredictedPositions(
            cells.position + shift, np.linalg.norm(shift, axis=1), std
        ),
        "predicted": cells.expression * np.float32(0.5),
        "new": NewTissue(cells.position[::-1].copy(), cells.expression, np.arange(count)[::-1]),
        "path": Path(
            rows,
            np.linspace(1, 1 / 6, 6),
            cells.position[rows] * (1 - frames) + noise * frames,
            cells.position[rows] * (1 - frames / 2),
        ),
        "inside": Inside(
            rows,
            np.array([0.1, 0.5, 0.9]),
            random.dirichlet(np.ones(4), (3, 2)),
            random.dirichlet(np.ones(25), (3, 2)),
            random.uniform(0.5, 2, (2, len(rows))).astype(np.float32),
        ),
        "scores": {
            "expr_to_pos": {
                "alphastomics": {"spearman_mean": 0.5, "procrustes": 0.4},
                "shuffled": {"spearman_mean": 0.0, "procrustes": 1.0},
                "class centroid oracle": {"spearman_mean": 0.9, "procrustes": 0.1},
            }
        },
        "curves": {
            f"{part}/{term}": Curve(np.arange(40.0), np.exp(-np.arange(40) / 9))
            for part in ("train", "val")
            for term in ("loss", "position")
        },
    }
    names = [*GENES, *(f"gene {number}" for number in range(width))][:width]
    known |= {"title": f"run {EVIL}", "facts": [("Data", EVIL)], **changes}
    return Findings(cells=cells, genes=genes or names, **known)
