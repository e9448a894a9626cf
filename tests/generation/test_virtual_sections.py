"""Virtual sections: neighbouring sections enter; positions, counts and the posterior mean leave."""

from dataclasses import replace
from pathlib import Path

import anndata
import numpy as np
import pyarrow as pa
import pytest

from alphastomics import AlphaSTomics
from alphastomics.errors import InputError
from alphastomics.generation import virtual_sections
from alphastomics.generation.cells import InputCells
from alphastomics.generation.virtual_sections import (
    Neighbours,
    blank_sections,
    neighbours_of,
    positions_between,
    require_sections,
    section_positions,
)
from alphastomics.main import main
from tests.test_generated_counts import QUICK, two_programs


def measured(position: np.ndarray, *, dims: int = 2) -> InputCells:
    """Return cells of one gene in a common frame, a slice for each z."""
    z_values, slice_id = np.unique(position[:, 2], return_inverse=True)
    if dims == 3:
        z_values, slice_id = z_values[:1], np.zeros(len(position), dtype=np.int64)
    return InputCells(
        expression=np.zeros((len(position), 1), np.float32),
        position=position.astype(np.float64),
        cell_type=None,
        slice_id=slice_id.astype(np.int64),
        obs_name=pa.array([str(number) for number in range(len(position))]),
        measured=np.ones((len(z_values), 1), dtype=bool),
        dims=dims,
        slice_names=[f"z{number}" for number in range(len(z_values))],
        common_frame=True,
    )


def discs(sizes: list[int], radii: list[float], z_values: list[float]) -> np.ndarray:
    """Return one section of even density for each size, radius and z."""
    random = np.random.default_rng(0)
    parts = []
    for size, radius, z in zip(sizes, radii, z_values, strict=True):
        r, angle = radius * np.sqrt(random.random(size)), random.random(size) * 2 * np.pi
        parts.append(np.stack([r * np.cos(angle), r * np.sin(angle), np.full(size, z)], axis=1))
    return np.concatenate(parts)


def test_outline_and_number_of_cells_lie_between_those_of_the_neighbours():
    known = measured(discs([400, 1600], [10, 20], [0, 50]))
    for share, number, radius in ((0.0, 400, 10), (0.5, 1000, 15), (1.0, 1600, 20)):
        position = section_positions(known, 50 * share, None, seed=0)
        assert len(position) == number
        assert np.quantile(np.linalg.norm(position, axis=1), 0.98) == pytest.approx(radius, abs=0.7)
    assert len(section_positions(known, 25.0, 77, seed=0)) == 77


def test_cells_keep_their_positions_where_both_neighbours_are_the_same(monkeypatch):
    section = discs([300], [10], [0])[:, :2]
    monkeypatch.setattr(virtual_sections, "JITTER", 0.0)
    between = positions_between(Neighbours(section, section, 0.3), len(section), seed=0)
    by_row = (np.lexsort(part.T) for part in (between, section))
    first, second = (part[rows] for part, rows in zip((between, section), by_row, strict=True))
    np.testing.assert_allclose(first, second)


def test_a_shifted_section_moves_by_the_share_of_the_way(monkeypatch):
    section = discs([200], [10], [0])[:, :2]
    monkeypatch.setattr(virtual_sections, "JITTER", 0.0)
    shift = np.array([8.0, -4.0])
    between = positions_between(Neighbours(section, section + shift, 0.25), 200, seed=0)
    np.testing.assert_allclose(between.mean(0), section.mean(0) + shift / 4, atol=1e-9)


def test_neighbours_are_the_sections_just_below_and_above():
    known = measured(discs([30, 40, 50], [1, 1, 1], [0, 10, 30]))
    between = neighbours_of(known, 15.0)
    assert (len(between.below), len(between.above), between.share) == (40, 50, 0.25)
    at = neighbours_of(known, 10.0)
    assert (len(at.below), len(at.above), at.share) == (40, 40, 0)


def test_a_section_of_a_volume_is_between_the_layers_around_it():
    random = np.random.default_rng(0)
    volume = measured(random.random((8000, 3)) * [100, 100, 20], dims=3)
    between = neighbours_of(volume, 10.0)
    spacing, _ = virtual_sections.section_spacing(volume)
    assert len(between.below) == pytest.approx(8000 * spacing / 20, rel=0.15)
    assert between.share == pytest.approx(0.5, abs=0.1)
    cells = blank_sections(volume, [10.0], None, seed=0)
    assert cells.dims == 3
    assert (cells.position[:, 2] == 10).all()


def test_a_section_beside_the_measured_ones_is_said_and_one_further_off_refused(caplog):
    known = measured(discs([30, 40], [1, 1], [0, 10]))
    with caplog.at_level("WARNING"):
        assert neighbours_of(known, -10.0).share == 0
    assert "outside the measured range" in caplog.text
    for z in (-10.1, 21.0):
        with pytest.raises(InputError, match="outside the measured range, 0 to 10"):
            neighbours_of(known, z)


def test_a_model_without_a_frame_or_without_its_cells_is_refused():
    known = measured(discs([30, 40], [1, 1], [0, 10]))
    with pytest.raises(InputError, match="name the processed folder"):
        require_sections(None)
    with pytest.raises(InputError, match="knows no z"):
        require_sections(replace(known, common_frame=False))
    with pytest.raises(InputError, match="knows no z"):
        require_sections(measured(discs([30], [1], [0])))
    with pytest.raises(InputError, match="given twice"):
        blank_sections(known, [5.0, 5.0], None, seed=0)


def trained(*, dims: int) -> AlphaSTomics:
    """Train on two sections at z 0 and 10, whose genes say left from right."""
    sections = [two_programs(seed=seed, cells=cells) for seed, cells in ((0, 400), (1, 300))]
    for number, data in enumerate(sections):
        data.obs["slice_id"] = f"section_{number}"
        data.obs["cell_type"] = np.where(data.obsm["spatial"][:, 0] > 50, "right", "left")
        z = np.full((data.n_obs, dims - 2), 10.0 * number)
        data.obsm["spatial"] = np.hstack([data.obsm["spatial"], z])
    settings = {**QUICK, "data": {"preprocessing": {"cell_type_key": "cell_type"}}}
    return AlphaSTomics(sections, settings, seed=0, common_frame=True).train()


@pytest.fixture(scope="module")
def model() -> AlphaSTomics:
    return trained(dims=2)


def test_planar_sections_with_a_z_of_their_own_make_the_same_kind_of_section():
    data = trained(dims=3).virtual_section(5.0, seed=1)
    assert data.obsm["spatial"].shape == (350, 3)
    assert (data.obsm["spatial"][:, 2] == 5).all()
    assert "spatial3d" not in data.obsm
    left = data.obsm["spatial"][:, 0] < 50
    first = np.asarray(data[:, [f"g{number}" for number in range(8)]].X)
    assert first[left].mean() > 2 * first[~left].mean()


def test_a_virtual_section_has_counts_types_and_the_posterior_mean(model):
    data = model.virtual_section(5.0, seed=1)
    assert data.n_obs == 350
    assert set(data.obs["slice_id"]) == {"virtual_5"}
    np.testing.assert_array_equal(data.X, np.rint(data.X))
    np.testing.assert_array_equal(data.obs["total_counts"], data.X.sum(1))
    assert data.obsm["spatial"].shape == (350, 2)
    np.testing.assert_array_equal(data.obsm["spatial3d"][:, 2], 5)
    left = data.obsm["spatial"][:, 0] < 50
    genes = [f"g{number}" for number in range(8)]
    for values in (np.asarray(data[:, genes].X), data[:, genes].layers["generated"]):
        assert values[left].mean() > values[~left].mean()
    assert (data.obs["cell_type"][left] == "left").mean() > 0.8
    assert (data.layers["generated_std"] > 0).all()
    assert data.uns["alphastomics"]["mode"] == "virtual_section"
    again = model.virtual_section([5.0], seed=1)
    np.testing.assert_array_equal(again.X, data.X)
    np.testing.assert_array_equal(again.obsm["spatial"], data.obsm["spatial"])


def test_several_sections_are_slices_of_one_result(model):
    data = model.virtual_section([2, 8], 60)
    assert data.obs["slice_id"].value_counts().to_dict() == {"virtual_2": 60, "virtual_8": 60}
    assert set(data.obsm["spatial3d"][:, 2]) == {2, 8}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"z": 21}, "outside the measured range"),
        ({"z": "middle"}, "expected a number, or several, got 'middle'"),
        ({"z": []}, "expected a number"),
        ({"z": float("nan")}, "finite"),
        ({"z": 5, "n": 1}, "n: expected a whole number of at least 2"),
    ],
)
def test_what_cannot_be_made_is_one_line(model, given, words):
    with pytest.raises(InputError, match=words):
        model.virtual_section(**given)


def test_the_command_line_makes_the_same_sections(model, tmp_path: Path, capsys):
    checkpoint = next(Path(model._folder).rglob("last.ckpt"))
    target = tmp_path / "virtual.h5ad"
    words = ["sample", "--checkpoint", str(checkpoint), "--seed", "1", "--virtual_z", "5", "7"]
    assert main([*words, "--output", str(target)]) == 0
    written, same = anndata.read_h5ad(target), model.virtual_section([5, 7], seed=1)
    np.testing.assert_array_equal(written.X, same.X)
    np.testing.assert_array_equal(written.obsm["spatial3d"], same.obsm["spatial3d"])
    assert '"mode": "virtual_section"' in capsys.readouterr().out
    assert main([*words, "--reference", "a.h5ad"]) == 2
    assert "--reference: does nothing with --virtual_z" in capsys.readouterr().err
    assert main([*words, "--output", str(tmp_path / "a.pt")]) == 2
    assert main([*words[:-3], "--virtual_z", "high"]) == 2
    assert "--virtual_z: expected a number, got 'high'" in capsys.readouterr().err
