"""Sampling one slice: a trained module and a slice's cells enter, generated cells leave.

A slice that fits is one set. A larger one is sampled in chunks that share anchors, and that start
from the noise of the same whole slice. Given one modality, each chunk stands for itself and is then
rotated onto the anchors of the first; in `joint` mode nothing holds two chunks together, so that
later chunks are sampled around the anchors of the first, which are then given.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from alphastomics.config import Mode, SamplingConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.randomness import stream_seed
from alphastomics.diffusion_model.sample import DiffusionSampler, Known, State
from alphastomics.errors import InputError
from alphastomics.generation.cells import InputCells
from alphastomics.generation.chunks import disagreement, joined_chunks, onto_anchors, plan_chunks
from alphastomics.io.progress import Advance
from alphastomics.tasks import TASKS


class SliceSample(NamedTuple):
    """Cells of a slice, and the mean square error of its seams where it has any."""

    cells: State
    seam: float | None


def chunks_of(cells: InputCells, number: int, settings: SamplingConfig, seed: int) -> int:
    """Count the chunks that a slice is sampled in."""
    size = int((cells.slice_id == number).sum())
    return len(plan_chunks(size, settings.max_set_size, stream_seed(seed, "anchors", number)).parts)


class SliceSampler:
    """Samples one slice, again and again.

    Parameters
    ----------
    module
        The trained model, on the device to use.
    cells, number
        What is given, and which of its slices is sampled.
    mode
        What is generated.
    settings
        Solver and largest set.
    seed
        Seed of all samples.
    """

    def __init__(
        self,
        module: AlphaSTomicsModule,
        cells: InputCells,
        number: int,
        mode: Mode,
        settings: SamplingConfig,
        seed: int,
    ) -> None:
        rows = cells.rows_of(number)
        self.name = cells.slice_names[number]
        self.task, self.solver, self.key = TASKS[mode], settings.sampler, (seed, "sample", number)
        self.device = module.position_scale.device
        position = cells.position
        known = np.zeros((len(rows), 3)) if position is None else position[rows]
        self.whole = State(
            *(torch.from_numpy(values)[None] for values in (cells.expression[rows], known))
        )
        self.measured = torch.from_numpy(cells.measured[number])
        self.plan = plan_chunks(
            len(rows), settings.max_set_size, stream_seed(seed, "anchors", number)
        )
        self.cache: dict[str, Tensor] = {}
        self.sampler = DiffusionSampler(
            module.average,
            module.noise_model,
            position_scale=float(module.position_scale),
            reflection=module.config.loss.reflection,
        )

    def sample(self, num_steps: int, number: int, advance: Advance) -> SliceSample:
        """Sample the slice once; `number` is the sample's index and decides its noise."""
        generator = Generator().manual_seed(stream_seed(*self.key, number))
        if len(self.plan.parts) == 1:
            return SliceSample(
                self.sample_set(self.whole, num_steps, generator, None, 0, advance), None
            )
        noise = self.whole_noise(generator)
        chunks: list[State] = []
        for chunk in range(len(self.plan.parts)):
            rows = self.plan.rows(chunk)
            given = State(*(part[:, rows] for part in self.whole))
            num_known = 0
            if chunk and not self.task.is_conditional:
                num_known = len(self.plan.anchors)
                for part, first in zip(given, chunks[0], strict=True):
                    part[:, :num_known] = first[:, :num_known]
            stream = Generator().manual_seed(stream_seed(*self.key, number, chunk))
            start = State(*(part[:, rows] for part in noise))
            state = self.sample_set(given, num_steps, stream, start, num_known, advance)
            chunks.append(self.fitted(state, chunks))
        return SliceSample(self.joined(chunks), self.seam_of(chunks))

    def whole_noise(self, generator: Generator) -> State:
        """Draw the noise of all cells: that which the slice would start from as one set."""
        return State(*(torch.randn(part.shape, generator=generator) for part in self.whole))

    def sample_set(
        self,
        given: State,
        num_steps: int,
        generator: Generator,
        noise: State | None,
        num_known: int,
        advance: Advance,
    ) -> State:
        """Draw one set on the device, and bring it back; the first `num_known` cells are given."""
        shape = given.expression.shape
        try:
            state = self.sampler.sample(
                given.expression.to(self.device),
                given.position.to(self.device),
                torch.ones(shape[:2], dtype=torch.bool, device=self.device),
                self.task.name,
                num_steps=num_steps,
                sampler=self.solver,
                known=self.known(shape, num_known),
                generator=generator,
                noise=None if noise is None else State(*(part.to(self.device) for part in noise)),
                watch=lambda _step, _state: advance(1),
                # Chunks would keep the smoothed expression of a whole large slice.
                cache=self.cache if len(self.plan.parts) == 1 else None,
            )
            finite = all(bool(torch.isfinite(part).all()) for part in state)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            finite = False  # what linear algebra says of values that are not finite
        if not finite:
            raise InputError(f"slice {self.name}: {NOT_FINITE}")
        return State(*(part.cpu() for part in state))

    def known(self, shape: tuple[int, ...], num_known: int) -> Known:
        """Say what is known: the genes that were measured, or whole cells of an earlier chunk."""
        if not self.task.generates_expression:
            return Known(genes=self.measured.to(self.device).expand(shape))
        if not num_known:
            return Known()
        is_known = (torch.arange(shape[1], device=self.device) < num_known).expand(shape[:2])
        return Known(genes=is_known[..., None].expand(shape), positions=is_known)

    def fitted(self, state: State, earlier: list[State]) -> State:
        """Rotate the positions of a later chunk onto the anchors of the first."""
        if not earlier or self.task.generates_expression:
            return state
        anchors = earlier[0].position[:, : len(self.plan.anchors)]
        aligned = onto_anchors(state.position, anchors, reflection=self.sampler.reflection)
        return State(state.expression, aligned)

    def joined(self, chunks: list[State]) -> State:
        """Join what was generated, positions centred on the whole slice; what was given stays."""
        expression, position = self.whole
        if self.task.generates_expression:
            expression = joined_chunks(self.plan, [chunk.expression for chunk in chunks])
        if self.task.generates_position:
            position = joined_chunks(self.plan, [chunk.position for chunk in chunks])
            position = position - position.mean(1, keepdim=True)
        return State(expression, position)

    def seam_of(self, chunks: list[State]) -> float | None:
        """Return the mean square disagreement about the anchors; none where they were given."""
        if not self.task.is_conditional:
            return None
        count = len(self.plan.anchors)
        if self.task.generates_position:
            return float(disagreement([chunk.position[:, :count] for chunk in chunks]).sum())
        values = [chunk.expression[:, :count, self.measured] for chunk in chunks]
        return float(disagreement(values).mean())


NOT_FINITE = (
    "the network made values that are not finite of it: its coordinates or expression are extreme "
    "(other units than in training?), or the training diverged"
)


def radius_of_gyration(position: Tensor) -> float:
    """Root mean square distance of cells from their centre: the size of a tissue."""
    centred = position.double() - position.double().mean(-2, keepdim=True)
    return float(centred.square().sum(-1).mean().sqrt())


def std_of_genes(expression: Tensor, measured: Tensor) -> float:
    """Root mean square deviation of the measured genes from their means."""
    values = expression[..., measured].double()
    return float((values - values.mean(-2, keepdim=True)).square().mean().sqrt())
