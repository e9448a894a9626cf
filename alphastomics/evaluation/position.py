"""Position after alignment: predicted and true positions enter, errors leave.

The prediction is brought onto the truth by the shift and rotation Q (and scale c, where allowed)
that minimise sum_i |c Q (p_i - mean p) - (t_i - mean t)|^2: Kabsch (1976), Umeyama (1991). Axes are
never stretched one by one: the aspect ratio is a part of what is predicted.

A tissue that is planar in 3D can be flipped by a rotation, so that its mirror image aligns with or
without `reflection`; give its two in-plane coordinates where handedness matters.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from alphastomics.evaluation.arrays import Array, position_pair, require_extent
from alphastomics.geometry import best_rotation


def aligned(
    predicted: Float[Array, "N D"], true: Float[Array, "N D"], *, scale: bool, reflection: bool
) -> Float[Tensor, "N D"]:
    """Move the prediction onto the truth: it leaves in the truth's frame and units.

    Parameters
    ----------
    predicted, true
        The same cells in the same order.
    scale
        Let the prediction grow or shrink as a whole.
    reflection
        Allow its mirror image.
    """
    p, t = position_pair(predicted, true, least=1)
    centre = t.mean(0)
    p, t = p - p.mean(0), t - centre
    moved = p @ best_rotation(p, t, reflection=reflection).T
    if scale:
        moved = moved * ((moved * t).sum() / moved.square().sum().clamp(min=1e-300))
    return moved + centre


def procrustes(
    predicted: Float[Array, "N D"], true: Float[Array, "N D"], *, scale: bool, reflection: bool
) -> float:
    """Squared error left after alignment: sum |aligned - t|^2 / sum |t - mean t|^2.

    With scale and reflection this is scipy's `procrustes` disparity, in [0, 1]; 1 is what a
    prediction of one single position gets. Without scale it has no upper bound.
    """
    p, t = position_pair(predicted, true, least=2)
    require_extent(t)
    error = aligned(p, t, scale=scale, reflection=reflection) - t
    return float(error.square().sum() / (t - t.mean(0)).square().sum())


def rmsd(predicted: Float[Array, "N D"], true: Float[Array, "N D"], *, reflection: bool) -> float:
    """Root mean square distance sqrt(mean_i |aligned_i - t_i|^2), rigidly, in the user's units."""
    p, t = position_pair(predicted, true, least=1)
    error = aligned(p, t, scale=False, reflection=reflection) - t
    return float(error.square().sum(1).mean().sqrt())


def axis_rmse(
    predicted: Float[Array, "N D"], true: Float[Array, "N D"], *, reflection: bool
) -> Float[Tensor, " D"]:
    """Root mean square error of each axis after rigid alignment; their squares add to rmsd^2."""
    p, t = position_pair(predicted, true, least=1)
    error = aligned(p, t, scale=False, reflection=reflection) - t
    return error.square().mean(0).sqrt()


def rssd(predicted: Float[Array, "N D"], true: Float[Array, "N D"]) -> float:
    """Root of the summed squared distances, as LUNA reports it: min_Q sqrt(sum_i |Q p_i - t_i|^2).

    Both sets are centred; Q is a rotation in space (`scipy...Rotation.align_vectors`), which lets
    a planar tissue be flipped. It grows with the number of cells: rssd = rmsd sqrt(N). Smaller
    is better; LUNA's values are for coordinates scaled to [-0.5, 0.5] on each axis.
    """
    p, t = position_pair(predicted, true, least=1)
    return _rssd_about_origin(p - p.mean(0), t - t.mean(0))


def class_rssd(
    predicted: Float[Array, "N D"], true: Float[Array, "N D"], labels: Sequence[object] | ndarray
) -> float:
    """Mean over cell classes of the RSSD of a class's own cells, each class rotated by itself."""
    p, t = position_pair(predicted, true, least=1)
    p, t = p - p.mean(0), t - t.mean(0)
    _, number = np.unique(np.asarray(labels), return_inverse=True)
    of_class = torch.from_numpy(number).to(p.device)
    parts = [
        _rssd_about_origin(p[of_class == index], t[of_class == index])
        for index in range(int(number.max()) + 1)
    ]
    return sum(parts) / len(parts)


def _rssd_about_origin(p: Float[Tensor, "N D"], t: Float[Tensor, "N D"]) -> float:
    rotation = best_rotation(p, t, reflection=p.shape[1] == 2)
    return float((p @ rotation.T - t).square().sum().sqrt())
