"""How far off predicted positions are: errors of left-out cells enter, calibrated radii leave.

Split conformal prediction with a scale for each cell (Lei et al. 2018, "Distribution-free
predictive inference for regression"): of cells like those that were left out, the share `level`
lies within scale times the quantile of their errors over scales, whatever the distribution.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

RADIUS_KEY = "position_radius_"
SECTION = "another section"
# Levels of a coverage curve.
CURVE_LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
ROUNDING = 1e-9  # 0.9 / (1 - 0.9) is a little more than 9


class Radii(NamedTuple):
    """Radii about predicted positions that hold the true ones of a share of the cells.

    NaN where nothing is known, 0 for anchors. `calibrated_by` says what they were found by.
    `curve` has radii of other levels, for a report. `lacking` says why cells have none.
    """

    radius: Float[np.ndarray, " N"]
    level: float
    calibrated_by: str
    anchored: Bool[np.ndarray, " N"] | None = None
    curve: Float[np.ndarray, "L N"] | None = None
    lacking: str = ""

    def changed(self, times: float | np.ndarray = 1.0, plus: float | np.ndarray = 0.0) -> "Radii":
        """Let radii grow or shrink with their cells' frame, or by how far cells were moved."""
        curve = None if self.curve is None else self.curve * times + plus
        return self._replace(radius=self.radius * times + plus, curve=curve)

    @property
    def is_calibrated(self) -> bool:
        """Whether some cell that is no anchor has a radius."""
        asked = slice(None) if self.anchored is None else ~self.anchored
        return bool(np.isfinite(self.radius[asked]).any())

    @property
    def by_section(self) -> bool:
        """Whether left-out cells of another section calibrate them."""
        return self.calibrated_by.startswith(SECTION)

    @property
    def key(self) -> str:
        """Name the column of obs that they stand in."""
        return f"{RADIUS_KEY}{100 * self.level:g}"


def conformal_factor(errors: Float[np.ndarray, " M"], level: float) -> float:
    """Return the scales that hold a share of further cells: NaN where the cells are too few.

    `errors` are those of left-out cells over their scales, sorted: the ceil((M + 1) level)-th.
    """
    rank = int(np.ceil((len(errors) + 1) * level - ROUNDING))
    return float(errors[rank - 1]) if 0 < rank <= len(errors) else float("nan")


def least_cells(level: float) -> int:
    """Return how many left-out cells a level needs."""
    return int(np.ceil(level / (1 - level) - ROUNDING))
