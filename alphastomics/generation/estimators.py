"""Both estimators of one run: the posterior mean, a sample, and the envelope of all samples."""

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
    with_context,
)
from alphastomics.generation.slices import SliceSampler, network_calls
from alphastomics.generation.training_cells import predict_from_context
from alphastomics.io.progress import track
from alphastomics.tasks import TASKS


@dataclass(frozen=True)
class MeanAndSample:
    """The posterior mean and a sample, in the order of the input.

    `samples` are the positions of all samples, each in its own frame; `envelope` bounds the
    samples of expression.
    """

    estimate: Generated
    sample: Generated
    samples: Float32[np.ndarray, "S N 3"]
    envelope: Envelope

    def by(self, estimator: str) -> Generated:
        """Return what `generate` gives with this estimator."""
        return self.sample if estimator == "sample" else self.estimate


def mean_and_sample(
    module: AlphaSTomicsModule,
    cells: InputCells,
    mode: Mode,
    settings: SamplingConfig,
    seed: int,
    known: InputCells | None = None,
) -> MeanAndSample:
    """Generate once for all slices, and keep both estimators: they are those of `generate`."""
    results = [Arrays.for_cells(cells, mode) for _ in range(2)]
    positions = np.zeros((settings.num_samples, len(cells.names), 3), np.float32)
    makes_values = TASKS[mode].generates_expression
    low, high = (
        np.zeros_like(cells.expression) if makes_values else cells.expression for _ in range(2)
    )
    device, num_samples = module.position_scale.device, settings.num_samples
    calls = sum(network_calls(cells, settings, device, n) for n in (1, settings.num_steps))
    with track(f"score {mode}", num_samples * calls, "network calls") as advance:
        for number in range(len(cells.slice_names)):
            sampler = SliceSampler(module, cells, number, mode, settings, seed)
            rows, planar = cells.rows_of(number), cells.dims == 2
            starts = averaged(sampler, sampler.samples(1, num_samples, advance, is_mean=True))
            deviations = [Deviation(sampler, starts.mean)]
            for index, single in enumerate(
                sampler.samples(settings.num_steps, num_samples, advance)
            ):
                alone = Deviation(sampler, averaged(sampler, iter([single])).mean)
                alone.add(single)
                if not index:
                    deviations.append(Deviation(sampler, alone.mean))
                for deviation in deviations:
                    deviation.add(single)
                positions[index, rows] = alone.result(planar=planar)[2]
                if makes_values:
                    values = single.cells.expression[0].numpy()
                    low[rows] = values if not index else np.minimum(low[rows], values)
                    high[rows] = values if not index else np.maximum(high[rows], values)
            for arrays, deviation in zip(results, deviations, strict=True):
                arrays.put(rows, deviation.result(planar=planar))
    estimate, sample = (arrays.generated_cells() for arrays in results)
    bounds = Envelope(low, high, estimate.expression_std, settings.num_samples)
    if TASKS[mode].reads_training_cells:
        context = predict_from_context(module, cells, known, seed, settings.radius_level)
        estimate = with_context(estimate, context)
    return MeanAndSample(estimate, sample, positions, bounds)
