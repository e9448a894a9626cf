"""The atlas frame: turned tissue comes back to where it was, by landmarks or by a reference."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from alphastomics.config import Config, SimulationConfig
from alphastomics.errors import InputError
from alphastomics.generation.cells import Blank, InputCells, blank_cells, read_query
from alphastomics.generation.frame import (
    Landmarks,
    Reference,
    into_frame,
    radius_of,
    read_landmarks,
)
from alphastomics.generation.generate import Generated
from alphastomics.simulate import write_tissue

RNG = np.random.default_rng(1)


def rotation_of(dims: int, *, mirrored: bool) -> np.ndarray:
    """Draw a rotation of the plane or of space, mirrored or not."""
    turn = np.eye(3)
    turn[:dims, :dims], _ = np.linalg.qr(RNG.normal(size=(dims, dims)))
    if (np.linalg.det(turn) < 0) != mirrored:
        turn[0] *= -1
    return turn


def body(dims: int, cells: int = 40) -> InputCells:
    """Cells with places in the frame."""
    position = RNG.normal(size=(cells, 3)) * [300.0, 200.0, 100.0] + [1000.0, 50.0, -20.0]
    position[:, dims:] = 0
    blank = blank_cells(Blank(cells), 4, dims=dims)
    return replace(blank, position=position.astype(np.float32))


def generated(cells: InputCells, position: np.ndarray) -> Generated:
    zeros = np.zeros_like(cells.expression)
    std = np.ones((len(position), 3), np.float32)
    return Generated(cells.expression, zeros, position.astype(np.float32), std)


def some_landmarks(cells: InputCells, rows: list[int], dims: int) -> Landmarks:
    position = {cells.names[row]: tuple(cells.position[row, :dims].tolist()) for row in rows}
    return Landmarks(Path("marks.csv"), position, dims)


OPTIONS = {"by_name": True, "scale": False, "reflection": True}


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("mirrored", [False, True])
def test_landmarks_bring_rotated_tissue_back(dims: int, mirrored: bool):
    cells = body(dims)
    rotated = generated(cells, (cells.position - 500) @ rotation_of(dims, mirrored=mirrored).T)
    if dims == 2:
        rotated.position[:, 2] = 0
    marks = some_landmarks(cells, [3, 8, 20, 31, 5], dims)
    filled, output, (framed,) = into_frame(cells, rotated, marks, **OPTIONS)
    assert filled.dims == dims
    np.testing.assert_allclose(output.position, cells.position, atol=1e-2)
    assert framed.rms < 1e-2
    assert (framed.known, framed.num_known) == ("landmarks", 5)
    again = framed.transform.apply(rotated.position.astype(np.float64))
    np.testing.assert_allclose(again, output.position, atol=1e-2)


def test_a_planar_slice_is_laid_into_a_frame_in_space():
    cells = body(2)
    there = cells.position @ rotation_of(3, mirrored=False).T + 7
    frame = replace(cells, position=there.astype(np.float32), dims=3)
    marks = some_landmarks(frame, [3, 8, 20], 3)
    filled, output, _ = into_frame(cells, generated(cells, cells.position), marks, **OPTIONS)
    assert filled.dims == 3
    np.testing.assert_allclose(output.position, frame.position, atol=1e-2)


def test_size_changes_only_where_it_may():
    cells = body(3)
    half = generated(cells, cells.position / 2)
    marks = some_landmarks(cells, list(range(10)), 3)
    _, rigid, (kept,) = into_frame(cells, half, marks, **OPTIONS)
    assert kept.transform.scale == 1
    assert radius_of(rigid.position) == pytest.approx(radius_of(cells.position) / 2, rel=1e-4)
    _, grown, (scaled,) = into_frame(cells, half, marks, **OPTIONS | {"scale": True})
    assert scaled.transform.scale == pytest.approx(2, rel=1e-4)
    np.testing.assert_allclose(grown.position, cells.position, atol=1e-2)
    np.testing.assert_allclose(grown.position_std, 2, rtol=1e-4)


def test_the_std_rotates_with_the_tissue():
    cells = body(2)
    quarter = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
    output = generated(cells, cells.position @ quarter.T)
    output.position_std[:] = [3.0, 1.0, 0.0]
    marks = some_landmarks(cells, [1, 2, 3, 4], 2)
    _, back, _ = into_frame(cells, output, marks, **OPTIONS)
    np.testing.assert_allclose(back.position_std, np.tile([1.0, 3.0, 0.0], (40, 1)), atol=1e-3)


def test_a_reference_with_cells_in_common_is_met_by_name():
    cells = body(2)
    shown = replace(
        cells, obs_name=pa.array([*cells.names[:10], *(f"other{n}" for n in range(30))])
    )
    output = generated(cells, cells.position @ rotation_of(2, mirrored=True).T)
    frame = Reference(Path("ref.h5ad"), shown)
    _, back, (framed,) = into_frame(cells, output, frame, **OPTIONS)
    assert (framed.known, framed.num_known) == ("cells in common", 10)
    np.testing.assert_allclose(back.position, cells.position, atol=1e-2)


def test_a_reference_of_other_cells_is_met_by_likeness(tmp_path: Path):
    write_tissue(SimulationConfig(cells=1200, slices=1, genes=60), 3, tmp_path, overwrite=False)
    plain = {"log_normalize": True, "scale": True}
    genes = [line.strip() for line in gene_names(tmp_path / "slice_0.h5ad")]
    whole = read_query(tmp_path / "slice_0.h5ad", genes, plain, Config())
    query, shown = part_of(whole, slice(0, None, 2), "a"), part_of(whole, slice(1, None, 2), "b")
    rotated = generated(query, query.position @ rotation_of(2, mirrored=True).T + [5e3, 0, 0])
    frame = Reference(Path("ref.h5ad"), shown)
    _, output, (framed,) = into_frame(query, rotated, frame, **OPTIONS)
    assert framed.known == "cells by expression kNN"
    off = np.sqrt(((output.position - query.position) ** 2).sum(1).mean())
    assert off < 0.1 * radius_of(query.position)
    small = replace(rotated, position=rotated.position / 3)
    _, grown, _ = into_frame(query, small, frame, **OPTIONS | {"scale": True})
    assert radius_of(grown.position) == pytest.approx(radius_of(shown.position), rel=0.05)


def gene_names(path: Path) -> list[str]:
    import anndata

    return list(anndata.read_h5ad(path).var_names)


def part_of(cells: InputCells, rows: slice, prefix: str) -> InputCells:
    names = pa.array([f"{prefix}{name}" for name in cells.names[rows]])
    return replace(cells.take(rows), obs_name=names, cell_type=None)


def test_positions_that_fix_no_frame_are_refused():
    cells = body(3)
    output = generated(cells, cells.position)
    with pytest.raises(InputError, match="3 known position"):
        into_frame(cells, output, some_landmarks(cells, [1, 2, 3], 3), **OPTIONS)
    flat = body(2)
    with pytest.raises(InputError, match="2 known position"):
        into_frame(flat, generated(flat, flat.position), some_landmarks(flat, [1, 2], 2), **OPTIONS)
    line = replace(flat, position=flat.position * np.float32([1, 0, 0]))
    marks = some_landmarks(line, [1, 2, 3, 4], 2)
    with pytest.raises(InputError, match="lie on one line"):
        into_frame(flat, generated(flat, flat.position), marks, **OPTIONS)
    plane = replace(cells, position=cells.position * np.float32([1, 1, 0]))
    marks = some_landmarks(plane, [1, 2, 3, 4, 5], 3)
    with pytest.raises(InputError, match="lie on one plane"):
        into_frame(cells, output, marks, **OPTIONS)
    with pytest.raises(InputError, match="has no z"):
        into_frame(cells, output, some_landmarks(cells, [1, 2, 3, 4], 2), **OPTIONS)
    collapsed = generated(cells, np.zeros_like(cells.position))
    with pytest.raises(InputError, match="generated at one position"):
        into_frame(cells, collapsed, some_landmarks(cells, [1, 2, 3, 4], 3), **OPTIONS)


def test_landmarks_that_name_no_cell_are_refused():
    cells = body(2)
    marks = Landmarks(Path("marks.csv"), {"cell_1": (0.0, 1.0), "nobody": (1.0, 2.0)}, 2)
    with pytest.raises(InputError, match=r"1 of 2 landmarks name no cell .*'nobody'"):
        into_frame(cells, generated(cells, cells.position), marks, **OPTIONS)


@pytest.mark.parametrize("header", ["", "cell,x,y\n"])
def test_a_csv_of_landmarks_is_read_with_or_without_header(tmp_path: Path, header: str):
    (tmp_path / "marks.csv").write_text(f'{header}"a, b",1,2\nc,3,-4.5\n\n')
    marks = read_landmarks(tmp_path / "marks.csv")
    assert marks.positions == {"a, b": (1.0, 2.0), "c": (3.0, -4.5)}
    assert marks.dims == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no landmarks"),
        ("cell,x,y\n", "no landmarks"),
        ("a,1,2\nb,1,x\n", "landmark 2"),
        ("a,1,2\nb,1,nan\n", "landmark 2"),
        ("a,1,2\nb,1,2,3\n", "landmark 2"),
        ("a,1\n", "landmark 1"),
        ("a,nan,3\nb,1,2\n", "landmark 1"),
        ("a,,3\nb,1,2\n", "landmark 1"),
        ("a,a,3\nb,1,2\n", "landmark 1"),
        ("a,3,a\nb,1,2\n", "landmark 1"),
        ("a,NA,N/A\nb,1,2\n", "landmark 1"),
        ("a,inf,-inf\nb,1,2\n", "landmark 1"),
        ("a,1,2\na,3,4\n", "twice"),
    ],
)
def test_a_csv_that_is_none_of_landmarks_or_lacks_a_number_is_refused(
    tmp_path: Path, content: str, words: str
):
    (tmp_path / "marks.csv").write_text(content)
    with pytest.raises(InputError, match=words):
        read_landmarks(tmp_path / "marks.csv")
