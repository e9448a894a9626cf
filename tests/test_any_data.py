"""Data of every shape train with nothing set, place cells, and say how good the model is."""

from typing import Any

import numpy as np
import pytest

from alphastomics import AlphaSTomics
from alphastomics.config import SimulationConfig
from alphastomics.simulate import simulate

SHAPES = {
    "50 cells": {"cells": 50, "slices": 1, "genes": 40},
    "500 cells": {"cells": 250, "slices": 2, "genes": 40},
    "one slice": {"cells": 1200, "slices": 1, "genes": 60},
    "200 slices of 50 cells": {"cells": 50, "slices": 200, "genes": 40},
    "3D": {"cells": 600, "slices": 3, "genes": 60, "dims": 3},
    "20,000 genes": {"cells": 300, "slices": 3, "genes": 20_000},
}


@pytest.mark.slow
@pytest.mark.usefixtures("whole_position_head")
@pytest.mark.parametrize("shape", SHAPES)
def test_data_of_any_shape_train_with_nothing_set(shape: str):
    settings = SimulationConfig(**SHAPES[shape])
    slices = list(simulate(settings, 3))
    model = AlphaSTomics(slices).train()
    record: dict[str, Any] = model._trained().record
    assert record["verdict"]["sentences"]
    query = simulate(settings, 4)
    placed = model.predict_positions(next(iter(query)))
    assert np.isfinite(placed).all()
    assert np.ptp(placed, axis=0)[:2].min() > 0
