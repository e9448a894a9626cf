"""Slices in random poses are rotated into one frame: the poses that made them are the truth."""

import numpy as np
import pytest

from alphastomics.config import SimulationConfig
from alphastomics.diffusion_model.registration import SliceCells, register_slices
from alphastomics.simulate import simulate


def log_normalized(adata) -> np.ndarray:
    counts = adata.X.toarray().astype(np.float64)
    values = np.log1p(counts / counts.sum(1, keepdims=True).clip(1) * 1e4)
    return ((values - values.mean(0)) / values.std(0).clip(1e-6)).astype(np.float32)


@pytest.fixture(scope="module")
def tissue() -> tuple[list[SliceCells], np.ndarray]:
    """Four slices as they lie on the slide, and what rotates each into the body, in the plane."""
    settings = SimulationConfig(cells=600, slices=4, genes=120)
    cells, truth = [], []
    for adata in simulate(settings, seed=1):
        position = np.hstack([adata.obsm["spatial"], np.zeros((adata.n_obs, 1))])
        cells.append(SliceCells(log_normalized(adata), position))
        truth.append(adata.uns["simulation"]["rotation"][:2, :2])
    return cells, np.array(truth)


def angle_between(one: np.ndarray, two: np.ndarray) -> float:
    """Degrees from one orthogonal matrix to another of the same handedness."""
    rotation = one @ two.T
    assert np.linalg.det(rotation) > 0, "one is the mirror image of the other"
    sine = rotation[1, 0] - rotation[0, 1]
    return float(np.degrees(np.abs(np.arctan2(sine, np.trace(rotation)))))


def nearest_rotation(matrix: np.ndarray) -> np.ndarray:
    u, _, vt = np.linalg.svd(matrix)
    return u @ vt


def test_the_poses_of_simulated_slices_are_found_mirror_images_included(tissue):
    cells, truth = tissue
    signs = {round(float(np.linalg.det(nearest_rotation(pose)))) for pose in truth}
    assert signs == {-1, 1}, "the seed must draw both hands"
    found = register_slices(cells, planar=True, seed=0)
    rotation = found.rotation[:, :2, :2]
    # The frame is that of the largest slice: poses are compared up to one rotation of all.
    whole = nearest_rotation(truth[0]) @ rotation[0].T
    for estimate, pose in zip(rotation, truth, strict=True):
        assert angle_between(whole @ estimate, nearest_rotation(pose)) < 15
    assert (found.agreement > 0.3).all()


def test_rotations_are_orthogonal_and_leave_z_alone(tissue):
    found = register_slices(tissue[0], planar=True, seed=0)
    for rotation in found.rotation:
        np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-9)
        np.testing.assert_array_equal(rotation[2], [0, 0, 1])
        np.testing.assert_array_equal(rotation[:, 2], [0, 0, 1])


def test_another_pose_of_a_slice_changes_its_rotation_by_that_pose_alone(tissue):
    cells, _ = tissue
    before = register_slices(cells, planar=True, seed=0).rotation
    angle = 2.0
    pose = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0]])
    pose = np.vstack([pose, [0, 0, 1]]) @ np.diag([-1, 1, 1])
    moved = [*cells]
    # Another scale and origin, too: neither changes how a slice is rotated.
    moved[2] = cells[2]._replace(position=7 * cells[2].position @ pose.T + [900, -50, 0])
    after = register_slices(moved, planar=True, seed=0).rotation
    np.testing.assert_allclose(after[2] @ pose, before[2], atol=1e-6)
    np.testing.assert_allclose(after[[0, 1, 3]], before[[0, 1, 3]], atol=1e-6)


def test_one_slice_keeps_its_frame_and_equal_slices_agree_fully(tissue):
    cells, _ = tissue
    alone = register_slices(cells[:1], planar=True, seed=0)
    np.testing.assert_array_equal(alone.rotation, np.eye(3)[None])
    assert alone.agreement.tolist() == [1.0]


def test_expression_that_says_nothing_of_position_has_no_agreement(tissue):
    cells, _ = tissue
    rng = np.random.default_rng(0)
    noise = [
        part._replace(expression=rng.normal(size=part.expression.shape).astype(np.float32))
        for part in cells
    ]
    assert register_slices(noise, planar=True, seed=0).agreement.max() < 0.2
