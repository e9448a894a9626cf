"""Generating: a trained module and cells enter; positions, expression, or both leave, with a std.

Each slice is one set, or, if it is too large, several that share some cells. A sample goes down the
whole way from noise; the std of several samples, rotated onto one another, is the uncertainty of
each cell. The point estimate is what the network says of pure noise, in one call: the mean of the
posterior, here averaged over several starts.
`joint` has no posterior to average: it is one sample, without a std.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from alphastomics.config import Mode, SamplingConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.sample import State
from alphastomics.errors import InputError
from alphastomics.generation.cells import InputCells, joined_slices, labels_of
from alphastomics.generation.chunks import ChunkPlan, Seam, report_seams
from alphastomics.generation.intervals import ExpressionIntervals
from alphastomics.generation.radii import Radii
from alphastomics.generation.slices import (
    SliceSample,
    SliceSampler,
    network_calls,
    radius_of_gyration,
    std_of_genes,
)
from alphastomics.generation.training_cells import ContextPrediction, predict_from_context
from alphastomics.generation.units import in_given_unit, scaling_of_generated
from alphastomics.geometry import moved_onto
from alphastomics.io.progress import Advance, track
from alphastomics.preprocessing.query_fit import DEFAULT_NORMALIZATION
from alphastomics.preprocessing.shard_reader import Scaling
from alphastomics.tasks import TASKS, tasks_of

# A section with some noise across it is still a section; the thinnest volume is thicker.
PLANAR_SHARE = 0.1


@dataclass(frozen=True)
class Generated:
    """Generated cells and the std of the samples, in the order of the input.

    `seams` are those of slices that were too large for one set. `counts` are those that sampled
    expression stands for, where the model was trained on counts; `scaling` is what it is
    standardised by in each slice, and `is_logged` says that it is log(1 + counts per 10,000) before
    that. `cell_type` names that of new cells, where types are known. `radii` are how far off
    positions are, and `intervals` expression, where that is calibrated.
    """

    expression: Float32[np.ndarray, "N G"]
    expression_std: Float32[np.ndarray, "N G"]
    position: Float[np.ndarray, "N 3"]
    position_std: Float[np.ndarray, "N 3"]
    seams: tuple[Seam, ...] = ()
    counts: Int64[np.ndarray, "N G"] | None = None
    scaling: Scaling | None = None
    is_logged: bool = False
    cell_type: np.ndarray | None = None
    radii: Radii | None = None
    intervals: ExpressionIntervals | None = None


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
            f"--sample_mode {mode}: the input has no coordinates; name them with --set "
            "data.preprocessing.position_key=KEY"
        )


def generate(
    module: AlphaSTomicsModule,
    cells: InputCells,
    mode: Mode,
    settings: SamplingConfig,
    seed: int,
    known: InputCells | None = None,
    purpose: str = "sample",
) -> Generated:
    """Generate for all slices of the input.

    Parameters
    ----------
    module
        The trained model, on the device to use.
    cells, mode
        What is given, and what is generated.
    settings, seed
        Steps, solver, samples and estimator; the same seed gives the same cells.
    known
        Training cells: with `pos_to_expr`, the estimate at positions in their frame comes from
        those around.
    purpose
        What the progress is called: `test` and `report` generate too.
    """
    require_mode(module, mode, cells)
    task = TASKS[mode]
    if settings.estimator == "assigned":  # by what comes after
        settings = settings.model_copy(update={"estimator": "mean"})
    if not task.is_conditional:
        # The mean of all tissues is no tissue, and no cell has a counterpart in another sample.
        settings = settings.model_copy(update={"estimator": "sample", "num_samples": 1})
    arrays = Arrays.for_cells(cells, mode)
    ways = (1, settings.num_steps) if settings.estimator == "mean" else (settings.num_steps,)
    device = module.position_scale.device
    calls = sum(network_calls(cells, settings, device, num_steps) for num_steps in ways)
    seams: list[Seam] = []
    samplers: list[SliceSampler] = []
    with track(f"{purpose} {mode}", calls * settings.num_samples, "steps") as advance:
        for number, name in enumerate(cells.slice_names):
            sampler = SliceSampler(module, cells, number, mode, settings, seed)
            results, seam = generate_slice(sampler, settings, advance, planar=cells.dims == 2)
            arrays.put(cells.rows_of(number), results)
            samplers.append(sampler.without_cells())
            if seam is not None:
                seams.append(seam._replace(slice_name=name))
    report_seams(seams, mode)
    result = arrays.generated_cells(tuple(seams))
    if task.generates_expression:
        normalization = module.normalization or DEFAULT_NORMALIZATION
        scaling = scaling_of_generated(samplers, cells, is_scaled=normalization["scale"])
        result = replace(result, scaling=scaling, is_logged=normalization["log_normalize"])
    if settings.estimator == "sample":
        result = with_drawn(result, samplers, cells, module.type_names)
    if task.reads_training_cells and settings.estimator == "mean":
        context = predict_from_context(module, cells, known, seed, settings.radius_level)
        result = with_context(result, context)
    return result


def with_drawn(
    generated: "Generated", samplers: list[SliceSampler], cells: InputCells, types: list[str]
) -> "Generated":
    """Add counts and cell types that a sample stands for; given cells keep their own unit."""
    expression = in_given_unit(generated.expression, generated.scaling, samplers, cells)
    if expression is None:
        return generated
    counts = joined_slices([sampler.counts for sampler in samplers], cells)
    numbers = joined_slices([sampler.types for sampler in samplers], cells)
    named = labels_of(numbers, types) if types and numbers is not None else None
    return replace(generated, expression=expression, counts=counts, cell_type=named)


def with_context(generated: "Generated", context: ContextPrediction) -> "Generated":
    """Put what the training cells around say instead of what the network says alone."""
    return replace(
        generated,
        expression=np.where(context.covered, context.expression, generated.expression),
        expression_std=np.where(context.covered, context.std, generated.expression_std),
        intervals=context.intervals,
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
        shape, coordinates = cells.expression.shape, (len(cells.names), 3)
        parts: list[np.ndarray] = [
            cells.expression,
            nothing(shape),
            nothing(coordinates),
            nothing(coordinates),
        ]
        if cells.position is not None:
            parts[2] = cells.position
        generated = tuple(2 * part + kind for part in TASKS[mode].generates for kind in (0, 1))
        for part in generated:
            parts[part] = np.zeros(shape if part < 2 else coordinates, np.float32)
        return cls(parts, generated)

    def generated_cells(self, seams: tuple[Seam, ...] = ()) -> "Generated":
        """Give the parts their names."""
        expression, expression_std, position, position_std = self.parts
        return Generated(expression, expression_std, position, position_std, seams)

    def put(self, rows: np.ndarray, values: tuple[np.ndarray, ...]) -> None:
        """Fill in the cells of one slice."""
        for part in self.generated:
            self.parts[part][rows] = values[part]


def nothing(shape: tuple[int, ...]) -> Float32[np.ndarray, "N K"]:
    """Return zeros that take no memory: the std of what is given."""
    return np.broadcast_to(np.zeros((), np.float32), shape)


def as_tissue(
    cells: InputCells, generated: Generated, *, planar: bool = False
) -> tuple[InputCells, Generated]:
    """Return cells that hold what was generated: 2D where all slices are, or came out, planar."""
    position = torch.from_numpy(generated.position).double().clone()
    rows = [torch.from_numpy(cells.rows_of(number)) for number in range(len(cells.slice_names))]
    planar = planar or all(is_planar(position[row]) for row in rows)
    for row in rows if planar else ():
        position[row] -= position[row].mean(0)
        position[row] = position[row] @ plane_of(position[row])
    if planar:
        position[:, 2] = 0
        generated = replace(generated, position=position.float().numpy())
    return replace(
        cells,
        expression=generated.expression,
        position=generated.position,
        cell_type=generated.cell_type,
        dims=2 if planar else 3,
    ), generated


def is_planar(position: Float[Tensor, "N 3"]) -> bool:
    """Say whether cells lie in a plane: their extent across it is within PLANAR_SHARE."""
    extent = torch.linalg.svdvals(position - position.mean(0))
    # Two cells lie on a line, and have two singular values.
    return len(position) < 3 or bool(extent[2] <= PLANAR_SHARE * extent[1])


def generate_slice(
    slice_sampler: SliceSampler, settings: SamplingConfig, advance: Advance, *, planar: bool
) -> tuple[tuple[np.ndarray, ...], Seam | None]:
    """Sample one slice several times; return estimate and std of both modalities, and the seam."""
    num_samples, num_steps = settings.num_samples, settings.num_steps
    samples = slice_sampler.samples(num_steps, num_samples, advance)
    if settings.estimator == "mean":
        num_steps = 1
        average = averaged(
            slice_sampler, slice_sampler.samples(1, num_samples, advance, is_mean=True)
        )
    else:
        first = next(samples)
        average, samples = averaged(slice_sampler, iter([first])), chain([first], samples)
    deviation = Deviation(slice_sampler, average.mean)
    for sample in samples:
        deviation.add(sample)
    plan = slice_sampler.plan(num_steps)
    return deviation.result(planar=planar), seam_between(slice_sampler, plan, average)


class AveragedSample(NamedTuple):
    """The mean of several samples, the first of them, and the mean squares of their seams."""

    mean: State
    first: State
    seams: list[float]


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


def averaged(sampler: SliceSampler, samples: Iterator[SliceSample]) -> AveragedSample:
    """Average samples, positions rotated onto the first before; what is given stays as it is."""
    moments = {part: RunningMoments() for part in sampler.task.generates}
    first: State | None = None
    seams = []
    for sample in samples:
        first = sample.cells if first is None else first
        seams += [] if sample.seam is None else [sample.seam]
        for part, moment in moments.items():
            moment.add(onto(sample.cells[part], first[part], part, sampler.sampler.reflection))
    assert first is not None
    mean = State(*(moments[part].mean if part in moments else first[part] for part in (0, 1)))
    return AveragedSample(mean, first, seams)


class Deviation:
    """The std of samples in the frame of their average, gathered one sample at a time."""

    def __init__(self, sampler: SliceSampler, mean: State) -> None:
        self.sampler, self.mean = sampler, mean
        self.moments = {part: RunningMoments() for part in sampler.task.generates}

    def add(self, sample: SliceSample) -> None:
        """Take in one more sample, rotated onto the average."""
        for part, moment in self.moments.items():
            reflection = self.sampler.sampler.reflection
            moment.add(onto(sample.cells[part], self.mean[part], part, reflection))

    def result(self, *, planar: bool) -> tuple[np.ndarray, ...]:
        """Return estimate and std of expression, then of position."""
        values: list[Tensor] = []
        for part in (0, 1):
            mean = self.mean[part]
            given = torch.zeros(()).expand(mean.shape)
            std = self.moments[part].deviation() if part in self.moments else given
            if part == 1 and planar and part in self.moments:
                rotation = plane_of(mean[0].double())
                mean = mean.double() @ rotation
                # The std of each axis rotates with the square of the rotation's entries.
                std = (std.double().square() @ rotation.square()).sqrt()
            values += [mean, std]
        return tuple(part[0].float().cpu().numpy() for part in values)


def seam_between(sampler: SliceSampler, plan: ChunkPlan, average: AveragedSample) -> Seam | None:
    """Return the seam of a slice that was sampled in chunks; NaN where its anchors were given."""
    if len(plan.parts) == 1 or (sampler.task.is_conditional and not average.seams):  # no chunks
        return None
    sizes = len(plan.parts), len(plan.anchors)
    if not average.seams:
        return Seam("", *sizes, math.nan, math.nan)
    rms = math.sqrt(sum(average.seams) / len(average.seams))
    if sampler.task.generates_position:
        size = radius_of_gyration(average.first.position)
    else:
        size = std_of_genes(average.first.expression, sampler.measured)
    return Seam("", *sizes, rms, rms / size if size else math.nan)


def onto(values: Tensor, target: Tensor, part: int, reflection: bool) -> Tensor:  # noqa: FBT001
    """Rotate generated positions onto others; expression stays as it is."""
    if part == 0:
        return values.double()
    mask = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
    return moved_onto(values.double(), target.double(), mask, mask, reflection=reflection)


def plane_of(position: Float[Tensor, "N 3"]) -> Float[Tensor, "3 3"]:
    """Return the rotation into the xy plane, longest axis along x: none for what lies in it."""
    centred = position - position.mean(0)
    extent = centred.square().mean(0).sqrt()
    if extent[2] <= PLANAR_SHARE * extent[:2].min():
        return torch.eye(3, dtype=position.dtype, device=position.device)
    _, axes = torch.linalg.eigh(centred.mT @ centred)
    return axes.flip(1)
