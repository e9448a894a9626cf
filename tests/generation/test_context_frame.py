"""Expression at positions from the training cells around: heights of slices, moved origins."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.generation.cells import InputCells, some_cells
from alphastomics.generation.training_cells import predict_from_context


def small_module() -> AlphaSTomicsModule:
    """Return a module under which contexts are remembered."""
    return AlphaSTomicsModule({"model": {"d_model": 8, "n_heads": 1, "n_layers": 1}}, 2)


def slices_with_gradients(z_spacing: float) -> InputCells:
    """Return two slices of width 1 whose gene grows along x, and along y in the second."""
    random = np.random.default_rng(0)
    position = np.concatenate([random.random((400, 3)), random.random((400, 3))])
    slice_id = np.repeat([0, 1], 400)
    position[:, 2] = slice_id * z_spacing
    gene = np.where(slice_id == 0, position[:, 0], position[:, 1])
    return InputCells(
        expression=np.stack([gene, -gene], axis=1).astype(np.float32),
        position=position,
        cell_type=None,
        slice_id=slice_id,
        obs_name=pa.array([str(number) for number in range(800)]),
        measured=np.ones((2, 2), dtype=bool),
        dims=2,
        slice_names=["first", "second"],
    )


def query_of(known: InputCells, number: int) -> InputCells:
    """Return every fourth cell of a slice as a user gives it: without a height."""
    cells = some_cells(known, known.rows_of(number)[::4])
    position = np.array(cells.position)
    position[:, 2] = 0
    return replace(cells, position=position)


@pytest.mark.parametrize("z_spacing", [0.0, 10.0])
@pytest.mark.parametrize("number", [0, 1])
def test_a_planar_query_lies_at_the_height_of_its_slice(number, z_spacing):
    known = slices_with_gradients(z_spacing)
    query = query_of(known, number)
    found = predict_from_context(small_module(), query, known, seed=0, level=0.9)
    assert found.covered.all()
    assert np.corrcoef(found.expression[:, 0], query.expression[:, 0])[0, 1] > 0.95


def test_a_context_is_not_remembered_for_cells_that_were_moved():
    known, module = slices_with_gradients(0.0), small_module()
    expected = None
    for shift in (0.0, 100.0):
        cells = [
            replace(part, position=part.position + shift) for part in (known, query_of(known, 0))
        ]
        found = predict_from_context(module, cells[1], cells[0], seed=0, level=0.9)
        expected = found.expression if expected is None else expected
        np.testing.assert_allclose(found.expression, expected, atol=1e-4)
