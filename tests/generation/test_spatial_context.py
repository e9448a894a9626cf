"""Expression at a position from the cells around it: never worse than the best-k mean of them."""

import numpy as np
import pytest

from alphastomics.evaluation.baselines import spatial_knn_mean
from alphastomics.generation.cells import InputCells
from alphastomics.generation.spatial_context import (
    WEIGHT_STD,
    SpatialContext,
    stacking_weights,
)


def on_a_plane(cells: int, rng: np.random.Generator) -> np.ndarray:
    return np.pad(rng.random((cells, 2)), ((0, 0), (0, 1)))


def cells_of(position: np.ndarray, expression: np.ndarray, of_slice=None) -> InputCells:
    number = np.zeros(len(position), np.int64) if of_slice is None else of_slice
    slices = int(number.max()) + 1
    return InputCells(
        expression=expression.astype(np.float32),
        position=position,
        cell_type=None,
        slice_id=number,
        measured=np.ones((slices, expression.shape[1]), dtype=bool),
        dims=2,
        slice_names=[str(name) for name in range(slices)],
    )


def weights_naive(columns, target, counted, usual):
    """The same by loops: shared weights by least squares, then each gene about them."""
    number, genes = len(columns), target.shape[1]
    gram, moment = np.zeros((genes, number, number)), np.zeros((genes, number))
    for g in range(genes):
        rows = [n for n in range(len(target)) if counted[n, g]]
        for k in range(number):
            left = [columns[k][n, g] - usual[g] for n in rows]
            moment[g, k] = sum(a * target[n, g] for a, n in zip(left, rows, strict=True))
            for m in range(number):
                right = [columns[m][n, g] - usual[g] for n in rows]
                gram[g, k, m] = sum(a * b for a, b in zip(left, right, strict=True))
    whole = gram.sum(0)
    ridge = 1e-3 * np.trace(whole) / number + 1e-12
    shared = np.linalg.solve(whole + ridge * np.eye(number), moment.sum(0))
    weights = np.zeros((number, genes))
    for g in range(genes):
        rows = [n for n in range(len(target)) if counted[n, g]]
        errors = [
            target[n, g] - sum(shared[k] * (columns[k][n, g] - usual[g]) for k in range(number))
            for n in rows
        ]
        pull = sum(e**2 for e in errors) / max(len(rows), 1) / WEIGHT_STD**2 + 1e-12
        left = gram[g] + pull * np.eye(number)
        weights[:, g] = np.linalg.solve(left, moment[g] + pull * shared)
    return weights


def test_stacking_weights_equal_the_loops_also_with_unmeasured_genes():
    rng = np.random.default_rng(0)
    target = rng.normal(size=(12, 4))
    columns = [target + rng.normal(size=(12, 4)) for _ in range(3)]
    counted = rng.random((12, 4)) < 0.7
    counted[:, 3] = False
    usual = rng.normal(size=4)
    np.testing.assert_allclose(
        stacking_weights(columns, target, counted, usual),
        weights_naive(columns, target, counted, usual),
        rtol=1e-9,
        atol=1e-12,
    )


def test_a_column_that_is_the_truth_gets_all_the_weight():
    rng = np.random.default_rng(0)
    target = rng.normal(size=(400, 5))
    columns = [target, rng.normal(size=(400, 5))]
    weights = stacking_weights(columns, target, np.ones((400, 5), dtype=bool), np.zeros(5))
    np.testing.assert_allclose(weights, np.array([[1.0], [0.0]]) * np.ones((2, 5)), atol=0.01)


def test_a_known_cell_never_speaks_for_itself():
    rng = np.random.default_rng(0)
    position, expression = on_a_plane(60, rng), rng.normal(size=(60, 3)).astype(np.float32)
    context = SpatialContext(cells_of(position, expression), across_slices=False, seed=0, level=0.9)
    means = context._means(position, context.cells)
    changed = expression.copy()
    changed[7] += 1000
    after = context._means(position, cells_of(position, changed))
    for before, now, k in zip(means, after, context.scales, strict=True):
        np.testing.assert_array_equal(before[7], now[7])
        # The mean of the k nearest other cells, by sorting all distances.
        distance = np.linalg.norm(position - position[7], axis=1)
        nearest = np.argsort(distance)[1 : k + 1]
        np.testing.assert_allclose(before[7], expression[nearest].mean(0, dtype=np.float64))
        elsewhere = np.flatnonzero(np.abs(now - before).max(1) > 0)
        assert len(elsewhere) > 0


def test_across_slices_a_cell_is_predicted_without_its_whole_slice():
    rng = np.random.default_rng(0)
    position, expression = on_a_plane(90, rng), rng.normal(size=(90, 3)).astype(np.float32)
    of_slice = np.arange(90) % 3
    context = SpatialContext(
        cells_of(position, expression, of_slice), across_slices=True, seed=0, level=0.9
    )
    every = np.arange(90)
    left = context._left_out_means(every)
    for number in range(3):
        mine, others = of_slice == number, of_slice != number
        for mean, k in zip(left, context.scales, strict=True):
            result = spatial_knn_mean(
                position[mine], position[others], expression[others], np.ones((1, 3), bool), k=k
            )
            np.testing.assert_allclose(mean[mine], result.numpy(), atol=1e-12)


def smooth_field(position: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Twenty genes of hidden programs: ten vary over the tissue, ten from patch to patch."""
    parts = []
    for frequency in (5, 25):
        programs = np.stack(
            [np.sin(frequency * position[:, 0]), np.cos(frequency * position[:, 1])]
        )
        parts.append(programs.T @ rng.normal(size=(2, 10)))
    return np.hstack(parts)


@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_on_a_smooth_field_with_noise_it_beats_the_mean_of_the_best_k(noise):
    rng = np.random.default_rng(3)
    position, asked = on_a_plane(1200, rng), on_a_plane(500, rng)
    truth = smooth_field(np.vstack([position, asked]), rng)
    expression = truth + noise * rng.normal(size=truth.shape)
    known, target = expression[:1200].astype(np.float32), expression[1200:]
    context = SpatialContext(cells_of(position, known), across_slices=False, seed=0, level=0.9)
    means = [
        spatial_knn_mean(asked, position, known, np.ones((1, 20), bool), k=k).numpy()
        for k in (3, 5, 6, 10, 12, 20, 25, 50, 100, 200)
    ]
    result = context.predict(asked)
    error, best = (
        min(((values - truth[1200:]) ** 2).mean() for values in group)
        for group in ([result], means)
    )
    assert error < 0.75 * best
    r, best_r = (max(r_by_gene(values, target) for values in group) for group in ([result], means))
    assert r > best_r + 0.005
    # What it says it leaves of a gene is the error of new cells.
    left = np.sqrt(((result - target) ** 2).mean(0))
    np.testing.assert_allclose(context.std, left, rtol=0.15)


def r_by_gene(values: np.ndarray, target: np.ndarray) -> float:
    return float(
        np.mean([np.corrcoef(values[:, g], target[:, g])[0, 1] for g in range(target.shape[1])])
    )


def test_expression_that_does_not_depend_on_position_is_predicted_by_nearly_its_mean():
    rng = np.random.default_rng(0)
    position, expression = on_a_plane(600, rng), rng.normal(3, 1, (600, 4))
    context = SpatialContext(cells_of(position, expression), across_slices=False, seed=0, level=0.9)
    result = context.predict(on_a_plane(50, rng))
    # The mean of the six nearest alone would be off by 0.4.
    assert np.sqrt(((result - expression.mean(0)) ** 2).mean()) < 0.2


@pytest.mark.parametrize("number", [2, 3, 20, 50])
def test_few_known_cells_are_enough(number):
    rng = np.random.default_rng(0)
    position, expression = on_a_plane(number, rng), rng.normal(size=(number, 3))
    context = SpatialContext(cells_of(position, expression), across_slices=False, seed=0, level=0.9)
    assert np.isfinite(context.predict(on_a_plane(9, rng))).all()
