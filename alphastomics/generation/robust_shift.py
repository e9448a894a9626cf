"""From a mean position to one region: a forest and the errors of its anchors enter, shifts leave.

A cell whose kind lies in several regions has its mean between them, where none may be. Anchors that
share leaves with a cell say how its position is distributed about the mean (quantile regression
forests, Meinshausen 2006); the M-estimator of that distribution, under the loss that the position
head is fitted with, lies in one of the regions.
"""

import numpy as np
from jaxtyping import Float, Float64, Int64
from scipy.sparse import csr_matrix
from sklearn.ensemble import ExtraTreesRegressor

from alphastomics.diffusion_model.position_fit import POWER, SOFT_SQUARE

# Anchors that share the most leaves with a cell, of which its distribution is made.
NEAREST = 200
ROUNDS = 15
BLOCK = 1024
SMALLEST = 1e-12


class RobustShift:
    """Moves means of positions to where cells lie more likely.

    Parameters
    ----------
    trees
        A forest that was fitted with bootstrap samples.
    features, errors
        What it was fitted to: features of anchors, and true minus mean position of each, where the
        mean is of fits without it.
    size
        Std of positions, over all axes.
    """

    def __init__(
        self,
        trees: ExtraTreesRegressor,
        features: Float[np.ndarray, "M F"],
        errors: Float64[np.ndarray, "M D"],
        size: float,
    ) -> None:
        self.trees, self.errors, self.size = trees, errors, max(size, SMALLEST)
        self.first = np.concatenate([[0], np.cumsum([tree.tree_.node_count for tree in trees])])
        self.anchors = self._memberships(trees.apply(features)).T.tocsr()

    def of_cells(self, features: Float[np.ndarray, "N F"]) -> Float64[np.ndarray, "N D"]:
        """Return the shift of each cell."""
        parts = [
            self._shifts(self._memberships(self.trees.apply(features[start : start + BLOCK])))
            for start in range(0, len(features), BLOCK)
        ]
        return np.concatenate(parts)

    def _memberships(self, leaves: Int64[np.ndarray, "N T"]) -> csr_matrix:
        """Return which leaves of all trees hold each cell."""
        starts = np.arange(0, leaves.size + 1, leaves.shape[1])
        columns = (leaves + self.first[:-1]).ravel()
        shape = len(leaves), int(self.first[-1])
        return csr_matrix((np.ones(leaves.size), columns, starts), shape=shape)

    def _shifts(self, memberships: csr_matrix) -> Float64[np.ndarray, "N D"]:
        """Minimise the loss by iteratively reweighted means."""
        shared = (memberships @ self.anchors).toarray()
        nearest = min(NEAREST, shared.shape[1])
        near = np.argpartition(-shared, nearest - 1, axis=1)[:, :nearest]
        weight = np.take_along_axis(shared, near, 1)
        error = self.errors[near]
        shift = np.zeros((len(weight), error.shape[-1]))
        for _ in range(ROUNDS):
            square = ((shift[:, None] - error) ** 2).sum(-1) / self.size**2
            each = weight * (square + SOFT_SQUARE) ** (POWER - 1)
            shift = np.einsum("nk,nkd->nd", each, error)
            shift /= np.maximum(each.sum(1), SMALLEST)[:, None]
        return shift


def robust_loss(error: Float64[np.ndarray, "N D"]) -> Float64[np.ndarray, " N"]:
    """(|error|^2 + c)^p, the position head's loss, of errors in units of the positions' std."""
    return ((error**2).sum(-1) + SOFT_SQUARE) ** POWER
