"""Both products of one run: the point estimate, a draw, and all that the draws say of each cell."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from alphastomics.config import Mode, SamplingConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.evaluation.calibration import Envelope
from alphastomics.generation.cells import InputCells
from alphastomics.generation.generate import (
    Arrays,
    Deviation,
    Generated,
    averaged,
    drawn,
    with_context,
)
from alphastomics.generation.slices import SliceSampler, chunks_of
from alphastomics.generation.training_cells import predict_from_context
from alphastomics.io.progress import track
from alphastomics.tasks import TASKS


@dataclass(frozen=True)
class MeanAndSample:
    """The point estimate and a draw, in the order of the input.

    `draws` are the places of all draws, each as it came; `envelope` bounds the draws of expression.
    """

    estimate: Generated
    sample: Generated
    draws: Float32[np.ndarray, "S N 3"]
    envelope: Envelope


def mean_and_sample(
    module: AlphaSTomicsModule,
    cells: InputCells,
    mode: Mode,
    settings: SamplingConfig,
    seed: int,
    known: InputCells | None = None,
) -> MeanAndSample:
    """Generate once for all slices, and keep both products: they are those of `generate`."""
    made = [Arrays.for_cells(cells, mode) for _ in range(2)]
    places = np.zeros((settings.num_samples, len(cells.names), 3), np.float32)
    makes_values = TASKS[mode].generates_expression
    low, high = (
        np.zeros_like(cells.expression) if makes_values else cells.expression for _ in range(2)
    )
    plans = [chunks_of(cells, number, settings, seed) for number in range(len(cells.slice_names))]
    steps = (settings.num_steps + 1) * settings.num_samples * sum(plans)
    with track(f"sample {mode}", steps, "network calls") as advance:
        for number in range(len(cells.slice_names)):
            one = SliceSampler(module, cells, number, mode, settings, seed)
            rows, flat = cells.rows_of(number), cells.dims == 2
            starts = averaged(one, drawn(one, 1, settings.num_samples, advance))
            spreads = [Deviation(one, starts.mean)]
            for draw, single in enumerate(
                drawn(one, settings.num_steps, settings.num_samples, advance)
            ):
                alone = Deviation(one, averaged(one, iter([single])).mean)
                alone.add(single)
                if not draw:
                    spreads.append(Deviation(one, alone.mean))
                for spread in spreads:
                    spread.add(single)
                places[draw, rows] = alone.result(flat=flat)[2]
                if makes_values:
                    values = single.cells.expression[0].numpy()
                    low[rows] = values if not draw else np.minimum(low[rows], values)
                    high[rows] = values if not draw else np.maximum(high[rows], values)
            for arrays, spread in zip(made, spreads, strict=True):
                arrays.put(rows, spread.result(flat=flat))
    estimate, sample = (arrays.generated_cells() for arrays in made)
    bounds = Envelope(low, high, estimate.expression_std, settings.num_samples)
    if TASKS[mode].reads_training_cells:
        estimate = with_context(estimate, predict_from_context(module, cells, known, seed))
    return MeanAndSample(estimate, sample, places, bounds)
