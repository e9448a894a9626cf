"""Both products of one run: the point estimate, a draw, and all that the draws say of each cell."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from alphastomics.config import Mode, SamplingConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.evaluation.calibration import Envelope
from alphastomics.generation.cells import InputCells
from alphastomics.generation.generate import Generated, drawn, one_product, with_context
from alphastomics.generation.slices import SliceSampler
from alphastomics.generation.training_cells import predict_from_context
from alphastomics.progress import track


@dataclass(frozen=True)
class Products:
    """The point estimate and a draw, in the order of the input.

    `draws` are the places of all draws, each as it came; `envelope` bounds the draws of expression.
    """

    estimate: Generated
    sample: Generated
    draws: Float32[np.ndarray, "S N 3"]
    envelope: Envelope


def both_products(
    module: AlphaSTomicsModule,
    cells: InputCells,
    mode: Mode,
    settings: SamplingConfig,
    seed: int,
    known: InputCells | None = None,
) -> Products:
    """Generate once for all slices, and keep both products: they are those of `generate`."""
    num_cells, num_genes = cells.expression.shape
    widths = (num_genes, num_genes, 3, 3)
    made = [[np.zeros((num_cells, width), np.float32) for width in widths] for _ in range(2)]
    places = np.zeros((settings.num_samples, num_cells, 3), np.float32)
    low, high = (np.zeros((num_cells, num_genes), np.float32) for _ in range(2))
    slices = [
        SliceSampler(module, cells, number, mode, settings, seed)
        for number in range(len(cells.slice_names))
    ]
    steps = (settings.num_steps + 1) * settings.num_samples
    steps *= sum(len(one.plan.parts) for one in slices)
    with track(f"sample {mode}", steps, "network calls") as advance:
        for number, one in enumerate(slices):
            rows, flat = cells.rows_of(number), cells.dims == 2
            draws = drawn(one, settings.num_steps, settings.num_samples, advance)
            starts = drawn(one, 1, settings.num_samples, advance)
            for parts, products in zip(made, (starts, draws[:1]), strict=True):
                for part, values in zip(
                    parts, one_product(one, products, draws, flat=flat), strict=True
                ):
                    part[rows] = values
            for draw, single in enumerate(draws):
                places[draw, rows] = one_product(one, [single], [single], flat=flat)[2]
            values = np.stack([single.cells.expression[0].numpy() for single in draws])
            low[rows], high[rows] = values.min(0), values.max(0)
    spread = Envelope(low, high, made[0][1], settings.num_samples)
    estimate, sample = (Generated(one, two, three, four) for one, two, three, four in made)
    if mode == "pos_to_expr":
        estimate = with_context(estimate, predict_from_context(module, cells, known, seed))
    return Products(estimate, sample, places, spread)
