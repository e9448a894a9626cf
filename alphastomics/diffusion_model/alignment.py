"""Rigid alignment of two sets of cells: positions enter, the nearest rotation and shift leave.

Kabsch (1976), with the reflection of Umeyama (1991) allowed or not: the R that minimises
sum_i |R (p_i - mean p) - (q_i - mean q)|^2 over rotations, by the SVD of the 3 x 3 covariance.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from alphastomics.diffusion_model.noise import centered


def best_rotation(
    source: Float[Tensor, "B N 3"], target: Float[Tensor, "B N 3"], *, reflection: bool
) -> Float[Tensor, "B 3 3"]:
    """Rotation that brings centred `source` nearest to centred `target`: target ~ source @ R^T.

    Parameters
    ----------
    source, target
        Centred positions, with zeros for padding.
    reflection
        Allow mirror images.
    """
    # In float64: near-flat tissues have a singular value near 0, whose sign decides the rotation.
    covariance = target.double().mT @ source.double()
    u, _, vt = torch.linalg.svd(covariance)
    sign = torch.ones(covariance.shape[0], 3, dtype=torch.float64, device=covariance.device)
    if not reflection:
        sign[:, 2] = torch.where(torch.linalg.det(u @ vt) < 0, -1.0, 1.0)
    return (u * sign[:, None]) @ vt


@torch.no_grad()
def aligned(
    source: Float[Tensor, "B N 3"],
    target: Float[Tensor, "B N 3"],
    node_mask: Bool[Tensor, "B N"],
    *,
    reflection: bool,
) -> Float[Tensor, "B N 3"]:
    """Centre `source` and turn it onto centred `target`; padding becomes zero."""
    moved = centered(source, node_mask)
    rotation = best_rotation(moved, centered(target, node_mask), reflection=reflection)
    return (moved.double() @ rotation.mT).to(source.dtype)


def turned(
    source: Float[Tensor, "B N 3"],
    target: Float[Tensor, "B N 3"],
    node_mask: Bool[Tensor, "B N"],
    anchors: Bool[Tensor, "B N"],
    reflection: bool,  # noqa: FBT001 - one of the settings of the turn
) -> Float[Tensor, "B N 3"]:
    """Move `source` rigidly so that its anchors come nearest to the target's."""
    weight = anchors[..., None].double()
    count = weight.sum(1, keepdim=True).clamp(min=1)
    means = [(points.double() * weight).sum(1, keepdim=True) / count for points in (source, target)]
    moved = source.double() - means[0]
    rotation = best_rotation(
        moved * weight, (target.double() - means[1]) * weight, reflection=reflection
    )
    turned_source = moved @ rotation.mT + means[1]
    return (turned_source * node_mask[..., None]).to(source.dtype)
