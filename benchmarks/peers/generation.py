"""New tissue: as many cells as were hidden, made from the others, and compared with them.

    python -m benchmarks.peers.generation DATA --json rows.json [--methods NAME ...]

A fifth of each training slice is hidden, as by `benchmarks.defaults --hidden`. Beside each method
stand other real cells of the slice, and those with their positions shuffled.
"""

import numpy as np
from scipy.spatial import cKDTree

from alphastomics import AlphaSTomics
from alphastomics.evaluation.methods import MODEL
from alphastomics.generation.cells import rows_of_scaling
from alphastomics.generation.evaluate_joint import joint_scores
from alphastomics.generation.generate import Generated, generate
from alphastomics.generation.training_cells import training_cells
from alphastomics.tasks import JOINT
from benchmarks.peers.processes import Method, Task, main
from benchmarks.peers.slices import Split, read_split

SETS = [
    "osmFISH, a fifth hidden",
    "Moffitt -0.09 -> -0.29",
    "BY3, a fifth hidden",
    "embryos, a fifth hidden",
]
SHOWN = (
    "auc_cells",
    "auc_niches",
    "moran_correlation",
    "type_neighbour_distance",
    "outline_overlap",
)
NEIGHBOURS = 10


def resampled(split: Split, seed: int) -> Generated:
    """Copy the counts of random training cells, each to the position of a neighbour of its own.

    The neighbour is one of the ten nearest, and its position is moved at random by about the
    distance between cells. No cell is copied twice, which a classifier would notice. Such tissue
    looks real, and knows nothing that is not in the training cells.
    """
    random = np.random.default_rng(seed)
    known, cells = split.known, split.cells
    assert known.position is not None
    expression, position = np.empty_like(cells.expression), np.zeros((len(cells.slice_id), 3))
    sources = np.array([known.slice_names.index(name) for name in cells.slice_names])
    for number, known_number in enumerate(sources.tolist()):
        rows, source = cells.rows_of(number), known.rows_of(known_number)
        at = known.position[source]
        distance, near = cKDTree(at).query(at, k=NEIGHBOURS + 1)
        copied = random.permutation(len(source))[: len(rows)]
        column = random.integers(1, NEIGHBOURS + 1, len(rows))
        expression[rows] = known.expression[source[copied]]
        noise = random.normal(0, np.median(distance[:, 1]), (len(rows), 3))
        noise[:, cells.dims :] = 0
        position[rows] = at[near[copied, column]] + noise
    nothing = np.zeros_like(position)
    return Generated(
        expression=expression,
        expression_std=np.zeros_like(expression),
        position=position,
        position_std=nothing,
        scaling=rows_of_scaling(known.scaling, sources),
    )


def ours(split: Split, seed: int) -> Generated:
    """AlphaSTomics with nothing set, its training included."""
    model = AlphaSTomics(split.train, seed=seed, **split.settings).train()
    settings = model.config.sampling
    module = model._trained().module
    assert training_cells(module, model.genes) is not None
    return generate(module, split.cells, JOINT.name, settings, seed, purpose="score")


def score(split: Split, new: Generated, seed: int) -> dict[str, dict[str, float]]:
    """Score new tissue, and real tissue beside it."""
    scores = joint_scores(new, split.cells, split.known, seed)
    scores["new"] = scores.pop(MODEL)
    return {
        name: {key: values[key] for key in SHOWN if key in values}
        for name, values in scores.items()
    }


METHODS = {"k-NN resampler": Method(resampled), "AlphaSTomics": Method(ours)}
TASK = Task(
    "generation",
    METHODS,
    SETS,
    lambda folder, name, seed: read_split(folder, name, seed, hidden=True),
    score,
    SHOWN,
)

if __name__ == "__main__":
    main(TASK, __doc__)
