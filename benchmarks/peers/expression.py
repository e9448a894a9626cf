"""Expression at positions: hidden cells of a slice, and a section between two others.

    python -m benchmarks.peers.expression DATA --json rows.json [--methods NAME ...]

Every method is given training cells and positions, and returns standardised expression. gimVI,
Tangram and the like need a cell's other genes: at a bare position they predict nothing.
"""

import numpy as np
from sklearn.decomposition import PCA
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel

from alphastomics import AlphaSTomics
from alphastomics.evaluation.registry import expression_scores
from alphastomics.generation.baselines import SPATIAL_KNN, expression_baselines
from alphastomics.generation.estimators import mean_and_sample
from alphastomics.generation.training_cells import training_cells
from alphastomics.tasks import POS_TO_EXPR
from benchmarks.peers.processes import Method, Task, main
from benchmarks.peers.slices import Split, read_split

SETS = [
    "osmFISH, a fifth hidden",
    "BY3, a fifth hidden",
    "fly, a fifth hidden",
    "slab0 + slab1 -> slab2",
    "serial 0.04 + 0.14 -> 0.09",
]
SHOWN = ("pearson_gene_mean", "expression_mse")
GP_CELLS, GP_COMPONENTS, KERNEL_CELLS = 2000, 20, 500


def best_knn(split: Split, seed: int) -> np.ndarray:
    """Mean of the k nearest training cells, the best k of 5 to 100 by training cells."""
    predict = expression_baselines(split.cells, split.known, seed)[SPATIAL_KNN]
    result = np.empty_like(split.cells.expression)
    for number in range(len(split.cells.slice_names)):
        rows = split.cells.rows_of(number)
        result[rows] = predict(rows)
    return result


def gaussian_process(split: Split, seed: int) -> np.ndarray:
    """Gaussian process on 20 principal components, of at most 2,000 training cells.

    The kernel, an RBF or a Matern one of 1/2 or 3/2, is that of the largest marginal likelihood on
    500 of them: it is chosen on training data.
    """
    known, cells = split.known, split.cells
    assert known.position is not None
    assert cells.position is not None
    rows = np.random.default_rng(seed).permutation(len(known.slice_id))[:GP_CELLS]
    pca = PCA(min(GP_COMPONENTS, known.expression.shape[1]), random_state=seed)
    values = pca.fit_transform(known.expression)[rows]
    centre, scale = known.position.mean(0), known.position.std()
    at = (known.position[rows] - centre) / scale
    best: GaussianProcessRegressor | None = None
    for shape in (RBF(0.3), Matern(0.3, nu=0.5), Matern(0.3, nu=1.5)):
        kernel = ConstantKernel(1.0) * shape + WhiteKernel(1.0)
        model = GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed)
        model.fit(at[:KERNEL_CELLS], values[:KERNEL_CELLS])
        if (
            best is None
            or model.log_marginal_likelihood_value_ > best.log_marginal_likelihood_value_
        ):
            best = model
    assert best is not None
    final = GaussianProcessRegressor(best.kernel_, optimizer=None, normalize_y=True)
    found = final.fit(at, values).predict((cells.position - centre) / scale)
    return pca.inverse_transform(found).astype(np.float32)


def ours(split: Split, seed: int) -> np.ndarray:
    """AlphaSTomics with nothing set, its training included."""
    model = AlphaSTomics(split.train, seed=seed, **split.settings).train()
    trained = model._trained()
    known = training_cells(trained.module, trained.genes)
    settings = model.config.sampling
    mode = POS_TO_EXPR.name
    return mean_and_sample(
        trained.module, split.cells, mode, settings, seed, known
    ).estimate.expression


def score(split: Split, values: np.ndarray, _seed: int) -> dict[str, dict[str, float]]:
    """Score every test slice."""
    cells, scores = split.cells, {}
    assert cells.position is not None
    for number, name in enumerate(cells.slice_names):
        rows = cells.rows_of(number)
        found = expression_scores(
            values[rows].astype(np.float32),
            cells.expression[rows],
            cells.measured[number],
            cells.position[rows, : cells.dims],
        )
        scores[name] = {key: found[key] for key in SHOWN}
    return scores


METHODS = {
    "spatial k-NN, best k": Method(best_knn),
    "Gaussian process": Method(gaussian_process),
    "AlphaSTomics": Method(ours),
}
TASK = Task("expression", METHODS, SETS, read_split, score, SHOWN)

if __name__ == "__main__":
    main(TASK, __doc__)
