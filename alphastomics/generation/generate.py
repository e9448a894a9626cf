"""Generating: a trained module and cells enter; places, expression, or both leave, with a spread.

Each slice is one set, or, if it is too large, several that share anchors. A draw goes down the
whole way from noise; the spread of several draws, turned onto one another, is the uncertainty of
each cell. The point estimate is what the network says of pure noise, in one call: the mean of the
posterior, here averaged over several starts.
`joint` has no posterior to average: it is one draw, without a spread.
"""

import logging
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from alphastomics.config import Mode, SamplingConfig
from alphastomics.diffusion_model.alignment import turned
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.sample import State
from alphastomics.errors import InputError
from alphastomics.generation.cells import InputCells
from alphastomics.generation.chunks import Seam
from alphastomics.generation.slices import (
    Drawn,
    SliceSampler,
    radius_of_gyration,
    spread_of_genes,
)
from alphastomics.progress import Advance, track

logger = logging.getLogger(__name__)

# A section with some noise across it is still a section; the thinnest body is thicker.
FLAT_SHARE = 0.1


@dataclass(frozen=True)
class Generated:
    """Generated cells and the spread of the draws, in the order of the input.

    `seams` are those of slices that were too large for one set.
    """

    expression: Float32[np.ndarray, "N G"]
    expression_std: Float32[np.ndarray, "N G"]
    position: Float32[np.ndarray, "N 3"]
    position_std: Float32[np.ndarray, "N 3"]
    seams: tuple[Seam, ...] = ()


def modes_of(module: AlphaSTomicsModule) -> tuple[Mode, ...]:
    """Return what a checkpoint can generate: a joint one everything, another its own mode."""
    trained = module.config.training.mode
    return ("joint", "expr_to_pos", "pos_to_expr") if trained == "joint" else (trained,)


def require_mode(module: AlphaSTomicsModule, mode: Mode, cells: InputCells) -> None:
    """Refuse a mode that the checkpoint was not trained for, or that lacks its condition."""
    able = modes_of(module)
    if mode not in able:
        raise InputError(
            f"--sample_mode {mode}: the checkpoint was trained for {', '.join(able)} alone"
        )
    if mode == "pos_to_expr" and cells.position is None:
        raise InputError(
            "--sample_mode pos_to_expr: the input has no coordinates; name them with the config's "
            "data.preprocessing.position_key"
        )


def generate(
    module: AlphaSTomicsModule, cells: InputCells, mode: Mode, settings: SamplingConfig, seed: int
) -> Generated:
    """Generate for all slices of the input.

    Parameters
    ----------
    module
        The trained model, on the device to use.
    cells
        What is given.
    mode
        What is generated.
    settings
        Steps, solver, draws and product.
    seed
        Seed of the draws: the same one gives the same cells.
    """
    require_mode(module, mode, cells)
    if mode == "joint":
        # Nothing is given: the mean of all tissues is no tissue, and no cell has a counterpart in
        # another draw that it could be compared with.
        settings = settings.model_copy(update={"product": "sample", "num_samples": 1})
    shape = cells.expression.shape
    parts = [np.zeros((shape[0], width), np.float32) for width in (shape[1], shape[1], 3, 3)]
    slices = [
        SliceSampler(module, cells, number, mode, settings, seed)
        for number in range(len(cells.slice_names))
    ]
    calls = settings.num_steps + (settings.product == "estimate")
    steps = calls * settings.num_samples * sum(len(one.plan.parts) for one in slices)
    seams: list[Seam] = []
    with track(f"sample {mode}", steps, "network calls") as advance:
        for number, one in enumerate(slices):
            rows = cells.rows_of(number)
            made, seam = generate_slice(one, settings, advance, flat=cells.dims == 2)
            for part, values in zip(parts, made, strict=True):
                part[rows] = values
            if seam is not None:
                seams.append(seam._replace(slice_name=cells.slice_names[number]))
    report_seams(seams, mode)
    return Generated(parts[0], parts[1], parts[2], parts[3], tuple(seams))


def report_seams(seams: list[Seam], mode: Mode) -> None:
    """Say how well the chunks of large slices fit."""
    for seam in seams:
        if mode == "joint":
            logger.info("%s: drawn in %d chunks around given anchors", seam.slice_name, seam.chunks)
            continue
        logger.info(
            "%s: drawn in %d chunks that share %d anchors; seam error %.4g (%.1f %% of the %s)",
            *(seam.slice_name, seam.chunks, seam.anchors, seam.rms, 100 * seam.relative),
            "spread of expression" if mode == "pos_to_expr" else "tissue's radius",
        )


def as_tissue(
    cells: InputCells, made: Generated, *, flat: bool = False
) -> tuple[InputCells, Generated]:
    """Return cells that hold what was made of nothing.

    It is 2D where the model knows `flat` slices alone, or where every slice came out flat.
    """
    place = torch.from_numpy(made.position).double()
    rows = [torch.from_numpy(cells.rows_of(number)) for number in range(len(cells.slice_names))]
    flat = flat or all(is_flat(place[row]) for row in rows)
    if flat:
        place = place.clone()
        for row in rows:
            place[row] = (place[row] - place[row].mean(0)) @ plane_of(place[row])
        place[:, 2] = 0
        made = replace(made, position=place.float().numpy())
    dims = 2 if flat else 3
    return replace(cells, expression=made.expression, position=made.position, dims=dims), made


def is_flat(position: Float[Tensor, "N 3"]) -> bool:
    """Say whether cells lie in a plane: across it they spread FLAT_SHARE of what they do in it."""
    spread = torch.linalg.svdvals(position - position.mean(0))
    # Two cells lie on a line, and have two spreads.
    return len(position) < 3 or bool(spread[2] <= FLAT_SHARE * spread[1])


def generate_slice(
    one: SliceSampler, settings: SamplingConfig, advance: Advance, *, flat: bool
) -> tuple[tuple[np.ndarray, ...], Seam | None]:
    """Draw one slice several times; return product and spread of both modalities, and the seam."""
    draws = drawn(one, settings.num_steps, settings.num_samples, advance)
    products = draws[:1]
    if settings.product == "estimate":
        products = drawn(one, 1, settings.num_samples, advance)
    return one_product(one, products, draws, flat=flat), seam_between(one, products)


def drawn(one: SliceSampler, num_steps: int, number: int, advance: Advance) -> list[Drawn]:
    """Draw a slice several times."""
    return [one.draw(num_steps, draw, advance) for draw in range(number)]


def one_product(
    one: SliceSampler, products: list[Drawn], draws: list[Drawn], *, flat: bool
) -> tuple[np.ndarray, ...]:
    """Return a product and the spread of the draws."""
    turn = None if one.mode == "pos_to_expr" else one.sampler.reflection
    cells = [[made.cells for made in several] for several in (products, draws)]
    return summed_up(*cells, reflection=turn, flat=flat)


def seam_between(one: SliceSampler, products: list[Drawn]) -> Seam | None:
    """Return the seam of a slice that was drawn in chunks; NaN where its anchors were given."""
    if len(one.plan.parts) == 1:
        return None
    sizes = len(one.plan.parts), len(one.plan.anchors)
    squares = [drawn.seam for drawn in products if drawn.seam is not None]
    if not squares:
        return Seam("", *sizes, math.nan, math.nan)
    rms, first = math.sqrt(sum(squares) / len(squares)), products[0].cells
    if one.mode == "expr_to_pos":
        size = radius_of_gyration(first.position)
    else:
        size = spread_of_genes(first.expression, one.measured)
    return Seam("", *sizes, rms, rms / size if size else math.nan)


def summed_up(
    products: list[State], draws: list[State], *, reflection: bool | None, flat: bool
) -> tuple[np.ndarray, ...]:
    """Return the mean of the products and the spread of the draws: of expression, then of position.

    Positions are turned onto the first product before they are averaged, and onto their mean before
    they are compared; `reflection` None leaves them where they are, as given ones must be.
    """
    mean = State(
        *(
            average([product[part] for product in products], part, reflection=reflection)
            for part in (0, 1)
        )
    )
    spread = State(
        *(
            deviation([draw[part] for draw in draws], mean[part], part, reflection=reflection)
            for part in (0, 1)
        )
    )
    place, place_spread = mean.position, spread.position
    if flat and reflection is not None:
        turn = plane_of(place[0].double())
        place = place.double() @ turn
        # The spread of each axis turns with the square of the rotation's entries.
        place_spread = (place_spread.double().square() @ turn.square()).sqrt()
    parts = (mean.expression, spread.expression, place, place_spread)
    return tuple(part[0].float().cpu().numpy() for part in parts)


def onto(values: Tensor, target: Tensor, part: int, *, reflection: bool | None) -> Tensor:
    """Turn generated positions onto others; expression, and what was given, stays as it is."""
    if part == 0 or reflection is None:
        return values.double()
    mask = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
    return turned(values.double(), target.double(), mask, mask, reflection)


def average(values: list[Tensor], part: int, *, reflection: bool | None) -> Tensor:
    """Mean of several products, turned onto the first."""
    return torch.stack(
        [onto(value, values[0], part, reflection=reflection) for value in values]
    ).mean(0)


def deviation(values: list[Tensor], mean: Tensor, part: int, *, reflection: bool | None) -> Tensor:
    """Compute the unbiased deviation of draws, in the frame of the product; 0 of a single one."""
    moved = torch.stack([onto(value, mean, part, reflection=reflection) for value in values])
    return moved.std(0, correction=min(len(values) - 1, 1))


def plane_of(position: Float[Tensor, "N 3"]) -> Float[Tensor, "3 3"]:
    """Return the turn that lays a flat tissue into the xy plane, its longest axis along x."""
    centred = position - position.mean(0)
    _, axes = torch.linalg.eigh(centred.mT @ centred)
    return axes.flip(1)
