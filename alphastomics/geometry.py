"""Centring and rigid alignment of cells: positions enter, moved positions leave.

Kabsch (1976), with the reflection of Umeyama (1991) allowed or not: the R that minimises
sum_i |R (p_i - mean p) - (q_i - mean q)|^2 over rotations, by the SVD of the covariance.
"""

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor


def centered(
    position: Float[Tensor, "B N 3"], seen: Bool[Tensor, "B N"] | Bool[Tensor, "B N 3"]
) -> Float[Tensor, "B N 3"]:
    """Move the mean of the seen cells, or coordinates, of each set to 0; unseen ones become 0."""
    seen = seen[..., None] if seen.ndim == 2 else seen
    known = position.masked_fill(~seen, 0)
    mean = known.sum(1, keepdim=True) / seen.sum(1, keepdim=True).clamp(min=1)
    return (known - mean).masked_fill(~seen, 0)


def best_rotation(
    source: Float[Tensor, "*B N D"], target: Float[Tensor, "*B N D"], *, reflection: bool
) -> Float64[Tensor, "*B D D"]:
    """Rotation that brings centred `source` nearest to centred `target`: target ~ source @ R^T.

    Parameters
    ----------
    source, target
        Centred positions, with zeros for padding.
    reflection
        Allow mirror images.
    """
    # In float64: near-planar tissues have a singular value near 0, whose sign decides the rotation.
    # On the host: a GPU takes 9 ms for a few 3 x 3 matrices, and makes the host wait as well.
    covariance = target.double().mT @ source.double()
    u, _, vt = torch.linalg.svd(covariance.cpu())
    if not reflection:
        last = torch.where(torch.linalg.det(u @ vt) < 0, -1.0, 1.0)[..., None, None]
        u = torch.cat([u[..., :-1], u[..., -1:] * last], dim=-1)
    return (u @ vt).to(covariance.device)


@torch.no_grad()
def aligned_sets(
    source: Float[Tensor, "B N 3"],
    target: Float[Tensor, "B N 3"],
    node_mask: Bool[Tensor, "B N"],
    *,
    reflection: bool,
) -> Float[Tensor, "B N 3"]:
    """Centre `source` and rotate it onto centred `target`; padding becomes zero."""
    moved = centered(source, node_mask)
    rotation = best_rotation(moved, centered(target, node_mask), reflection=reflection)
    return (moved.double() @ rotation.mT).to(source.dtype)


def moved_onto(
    source: Float[Tensor, "B N 3"],
    target: Float[Tensor, "B N 3"],
    node_mask: Bool[Tensor, "B N"],
    anchors: Bool[Tensor, "B N"],
    *,
    reflection: bool,
) -> Float[Tensor, "B N 3"]:
    """Move `source` rigidly so that its anchors come nearest to the target's."""
    weight = anchors[..., None].double()
    count = weight.sum(1, keepdim=True).clamp(min=1)
    means = [(points.double() * weight).sum(1, keepdim=True) / count for points in (source, target)]
    moved = source.double() - means[0]
    rotation = best_rotation(
        moved * weight, (target.double() - means[1]) * weight, reflection=reflection
    )
    return ((moved @ rotation.mT + means[1]) * node_mask[..., None]).to(source.dtype)
