"""Generating: a trained module and cells enter; places, expression, or both leave, with a spread.

Each slice is one set, or, if it is too large, several that share anchors. A draw goes down the
whole way from noise; the spread of several draws, turned onto one another, is the uncertainty of
each cell. The point estimate is what the network says of pure noise, in one call: the mean of the
posterior, here averaged over several starts.
`joint` has no posterior to average: it is one draw, without a spread.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from alphastomics.config import Mode, SamplingConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.sample import State
from alphastomics.errors import InputError
from alphastomics.generation.cells import InputCells
from alphastomics.generation.chunks import Seam
from alphastomics.generation.slices import (
    SliceSample,
    SliceSampler,
    chunks_of,
    radius_of_gyration,
    std_of_genes,
)
from alphastomics.generation.training_cells import ContextPrediction, predict_from_context
from alphastomics.geometry import moved_onto
from alphastomics.io.progress import Advance, track
from alphastomics.tasks import TASKS, tasks_of

logger = logging.getLogger(__name__)

# A section with some noise across it is still a section; the thinnest body is thicker.
PLANAR_SHARE = 0.1


@dataclass(frozen=True)
class Generated:
    """Generated cells and the spread of the draws, in the order of the input.

    `seams` are those of slices that were too large for one set.
    """

    expression: Float32[np.ndarray, "N G"]
    expression_std: Float32[np.ndarray, "N G"]
    position: Float[np.ndarray, "N 3"]
    position_std: Float[np.ndarray, "N 3"]
    seams: tuple[Seam, ...] = ()


def modes_of(module: AlphaSTomicsModule) -> tuple[Mode, ...]:
    """Return what a checkpoint can generate: a joint one everything, another its own mode."""
    return tuple(task.name for task in tasks_of(module.config.training.mode))


def require_mode(module: AlphaSTomicsModule, mode: Mode, cells: InputCells) -> None:
    """Refuse a mode that the checkpoint was not trained for, or that lacks its condition."""
    able = modes_of(module)
    if mode not in able:
        raise InputError(
            f"--sample_mode {mode}: the checkpoint was trained for {', '.join(able)} alone"
        )
    if not TASKS[mode].generates_position and cells.position is None:
        raise InputError(
            f"--sample_mode {mode}: the input has no coordinates; name them with the config's "
            "data.preprocessing.position_key"
        )


def generate(
    module: AlphaSTomicsModule,
    cells: InputCells,
    mode: Mode,
    settings: SamplingConfig,
    seed: int,
    known: InputCells | None = None,
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
    known
        Training cells: with `pos_to_expr`, the estimate at positions in their frame comes from
        those around.
    """
    require_mode(module, mode, cells)
    task = TASKS[mode]
    if not task.is_conditional:
        # Nothing is given: the mean of all tissues is no tissue, and no cell has a counterpart in
        # another draw that it could be compared with.
        settings = settings.model_copy(update={"estimator": "sample", "num_samples": 1})
    made = Arrays.for_cells(cells, mode)
    plans = [chunks_of(cells, number, settings, seed) for number in range(len(cells.slice_names))]
    calls = settings.num_steps + (settings.estimator == "mean")
    steps = calls * settings.num_samples * sum(plans)
    seams: list[Seam] = []
    with track(f"sample {mode}", steps, "network calls") as advance:
        for number, name in enumerate(cells.slice_names):
            one = SliceSampler(module, cells, number, mode, settings, seed)
            found, seam = generate_slice(one, settings, advance, flat=cells.dims == 2)
            made.put(cells.rows_of(number), found)
            if seam is not None:
                seams.append(seam._replace(slice_name=name))
    report_seams(seams, mode)
    result = made.generated_cells(tuple(seams))
    if task.reads_training_cells and settings.estimator == "mean":
        result = with_context(result, predict_from_context(module, cells, known, seed))
    return result


def with_context(made: "Generated", context: ContextPrediction) -> "Generated":
    """Put what the training cells around say in place of what the network says alone."""
    covered = context.covered[:, None]
    return replace(
        made,
        expression=np.where(covered, context.expression, made.expression),
        expression_std=np.where(covered, context.std, made.expression_std),
    )


@dataclass(frozen=True)
class Arrays:
    """Expression and position of all cells with their std; what is given is not copied.

    `generated` are the numbers of the parts that are filled slice by slice.
    """

    parts: list[np.ndarray]
    generated: tuple[int, ...]

    @classmethod
    def for_cells(cls, cells: InputCells, mode: Mode) -> "Arrays":
        """Allocate what a mode generates."""
        shape, place = cells.expression.shape, (len(cells.names), 3)
        parts: list[np.ndarray] = [cells.expression, nothing(shape), nothing(place), nothing(place)]
        if cells.position is not None:
            parts[2] = cells.position
        generated = tuple(2 * part + kind for part in TASKS[mode].generates for kind in (0, 1))
        for part in generated:
            parts[part] = np.zeros(shape if part < 2 else place, np.float32)
        return cls(parts, generated)

    def generated_cells(self, seams: tuple[Seam, ...] = ()) -> "Generated":
        """Give the parts their names."""
        expression, expression_std, position, position_std = self.parts
        return Generated(expression, expression_std, position, position_std, seams)

    def put(self, rows: np.ndarray, found: tuple[np.ndarray, ...]) -> None:
        """Fill in the cells of one slice."""
        for part in self.generated:
            self.parts[part][rows] = found[part]


def nothing(shape: tuple[int, ...]) -> Float32[np.ndarray, "N K"]:
    """Return zeros that take no memory: the std of what is given."""
    return np.broadcast_to(np.zeros((), np.float32), shape)


def report_seams(seams: list[Seam], mode: Mode) -> None:
    """Say how well the chunks of large slices fit."""
    for seam in seams:
        if not TASKS[mode].is_conditional:
            logger.info("%s: drawn in %d chunks around given anchors", seam.slice_name, seam.chunks)
            continue
        logger.info(
            "%s: drawn in %d chunks that share %d anchors; seam error %.4g (%.1f %% of the %s)",
            *(seam.slice_name, seam.chunks, seam.anchors, seam.rms, 100 * seam.relative),
            "spread of expression" if TASKS[mode].generates_expression else "tissue's radius",
        )


def as_tissue(
    cells: InputCells, made: Generated, *, flat: bool = False
) -> tuple[InputCells, Generated]:
    """Return cells that hold what was made of nothing.

    It is 2D where the model knows `flat` slices alone, or where every slice came out flat.
    """
    place = torch.from_numpy(made.position).double()
    rows = [torch.from_numpy(cells.rows_of(number)) for number in range(len(cells.slice_names))]
    flat = flat or all(is_planar(place[row]) for row in rows)
    if flat:
        place = place.clone()
        for row in rows:
            place[row] = (place[row] - place[row].mean(0)) @ plane_of(place[row])
        place[:, 2] = 0
        made = replace(made, position=place.float().numpy())
    dims = 2 if flat else 3
    return replace(cells, expression=made.expression, position=made.position, dims=dims), made


def is_planar(position: Float[Tensor, "N 3"]) -> bool:
    """Say whether cells lie in a plane: across it they spread FLAT_SHARE of what they do in it."""
    spread = torch.linalg.svdvals(position - position.mean(0))
    # Two cells lie on a line, and have two spreads.
    return len(position) < 3 or bool(spread[2] <= PLANAR_SHARE * spread[1])


def generate_slice(
    one: SliceSampler, settings: SamplingConfig, advance: Advance, *, flat: bool
) -> tuple[tuple[np.ndarray, ...], Seam | None]:
    """Draw one slice several times; return product and std of both modalities, and the seam."""
    draws = drawn(one, settings.num_steps, settings.num_samples, advance)
    if settings.estimator == "mean":
        product = averaged(one, drawn(one, 1, settings.num_samples, advance))
    else:
        first = next(draws)
        product, draws = averaged(one, iter([first])), chain([first], draws)
    spread = Deviation(one, product.mean)
    for draw in draws:
        spread.add(draw)
    return spread.result(flat=flat), seam_between(one, product)


def drawn(
    one: SliceSampler, num_steps: int, number: int, advance: Advance
) -> Iterator[SliceSample]:
    """Draw a slice several times, one in memory at a time."""
    return (one.draw(num_steps, draw, advance) for draw in range(number))


class AveragedSample(NamedTuple):
    """The mean of several products, the first of them, and the mean squares of their seams."""

    mean: State
    first: State
    seams: list[float]


def parts_of(one: SliceSampler) -> tuple[int, ...]:
    """Return the numbers of the modalities that are generated: 0 expression, 1 position."""
    return one.task.generates


class RunningMoments:
    """Mean and unbiased deviation of tensors that come one after the other (Welford 1962)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor = torch.zeros(())
        self.squares: Tensor = torch.zeros(())

    def add(self, value: Tensor) -> None:
        """Take in one more."""
        self.count += 1
        if self.count == 1:
            self.mean, self.squares = value.clone(), torch.zeros_like(value)
            return
        delta = value - self.mean
        self.mean += delta / self.count
        self.squares += delta * (value - self.mean)

    def deviation(self) -> Tensor:
        """Return the deviation; 0 of a single one."""
        return (self.squares / max(self.count - 1, 1)).sqrt()


def averaged(one: SliceSampler, products: Iterator[SliceSample]) -> AveragedSample:
    """Average products, positions turned onto the first before; what is given stays as it is."""
    moments = {part: RunningMoments() for part in parts_of(one)}
    first: State | None = None
    seams = []
    for product in products:
        first = product.cells if first is None else first
        seams += [] if product.seam is None else [product.seam]
        for part, found in moments.items():
            found.add(onto(product.cells[part], first[part], part, one.sampler.reflection))
    assert first is not None
    mean = State(*(moments[part].mean if part in moments else first[part] for part in (0, 1)))
    return AveragedSample(mean, first, seams)


class Deviation:
    """The std of draws in the frame of a product, gathered one draw at a time."""

    def __init__(self, one: SliceSampler, mean: State) -> None:
        self.one, self.mean = one, mean
        self.moments = {part: RunningMoments() for part in parts_of(one)}

    def add(self, draw: SliceSample) -> None:
        """Take in one more draw, turned onto the product."""
        for part, found in self.moments.items():
            reflection = self.one.sampler.reflection
            found.add(onto(draw.cells[part], self.mean[part], part, reflection))

    def result(self, *, flat: bool) -> tuple[np.ndarray, ...]:
        """Return product and std of expression, then of position."""
        found: list[Tensor] = []
        for part in (0, 1):
            mean = self.mean[part]
            given = torch.zeros(()).expand(mean.shape)
            std = self.moments[part].deviation() if part in self.moments else given
            if part == 1 and flat and part in self.moments:
                turn = plane_of(mean[0].double())
                mean = mean.double() @ turn
                # The std of each axis turns with the square of the rotation's entries.
                std = (std.double().square() @ turn.square()).sqrt()
            found += [mean, std]
        return tuple(part[0].float().cpu().numpy() for part in found)


def seam_between(one: SliceSampler, product: AveragedSample) -> Seam | None:
    """Return the seam of a slice that was drawn in chunks; NaN where its anchors were given."""
    if len(one.plan.parts) == 1:
        return None
    sizes = len(one.plan.parts), len(one.plan.anchors)
    if not product.seams:
        return Seam("", *sizes, math.nan, math.nan)
    rms = math.sqrt(sum(product.seams) / len(product.seams))
    if one.task.generates_position:
        size = radius_of_gyration(product.first.position)
    else:
        size = std_of_genes(product.first.expression, one.measured)
    return Seam("", *sizes, rms, rms / size if size else math.nan)


def onto(values: Tensor, target: Tensor, part: int, reflection: bool) -> Tensor:  # noqa: FBT001
    """Turn generated positions onto others; expression stays as it is."""
    if part == 0:
        return values.double()
    mask = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
    return moved_onto(values.double(), target.double(), mask, mask, reflection=reflection)


def plane_of(position: Float[Tensor, "N 3"]) -> Float[Tensor, "3 3"]:
    """Return the turn that lays a flat tissue into the xy plane, its longest axis along x."""
    centred = position - position.mean(0)
    _, axes = torch.linalg.eigh(centred.mT @ centred)
    return axes.flip(1)
