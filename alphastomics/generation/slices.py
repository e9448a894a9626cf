"""Sampling one slice: a trained module and a slice's cells enter, generated cells leave.

A slice that fits is one set. A larger one is sampled in chunks that share anchors, and that start
from the noise of the same whole slice. Given one modality, each chunk stands for itself and is then
rotated onto the anchors of the first; in `joint` mode nothing holds two chunks together, so that
later chunks are sampled around the anchors of the first, which are then given.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from torch import Generator, Tensor

from alphastomics.attn_model.niche_model import STEPS, NicheModel
from alphastomics.config import Mode, SamplingConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.randomness import stream_seed
from alphastomics.diffusion_model.sample import DiffusionSampler, Known, State
from alphastomics.diffusion_model.solvers import require_way
from alphastomics.errors import InputError
from alphastomics.generation.cells import InputCells
from alphastomics.generation.chunks import (
    ChunkPlan,
    disagreement,
    joined_chunks,
    largest_set,
    onto_anchors,
    plan_chunks,
)
from alphastomics.generation.niches import TissueFrame, frame_of_slice, style_of
from alphastomics.io.progress import Advance
from alphastomics.tasks import TASKS

# Cells of several sets that share a network call on a GPU.
CELLS_AT_ONCE = 65_536


class SliceSample(NamedTuple):
    """Cells of a slice, and the mean square error of its seams where it has any."""

    cells: State
    seam: float | None


def network_calls(
    cells: InputCells, settings: SamplingConfig, device: torch.device, num_steps: int
) -> int:
    """Count the network calls of one sample of every slice: steps of each of its chunks."""
    largest = largest_set(settings, device, num_steps)
    sizes = np.bincount(cells.slice_id, minlength=len(cells.slice_names))
    return num_steps * sum(len(plan_chunks(int(size), largest, 0).parts) for size in sizes)


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
        self.task, self.settings, self.key = TASKS[mode], settings, (seed, "sample", number)
        self.device = module.position_scale.device
        position = cells.position
        known = np.zeros((len(rows), 3)) if position is None else position[rows]
        self.whole = State(
            *(torch.from_numpy(values)[None] for values in (cells.expression[rows], known))
        )
        self.measured = torch.from_numpy(cells.measured[number])
        self.anchor_seed = stream_seed(seed, "anchors", number)
        # Sets in one network call: a GPU waits for Python more than it computes; a CPU does not.
        self.sets_at_once = (
            1 if self.device.type == "cpu" else max(CELLS_AT_ONCE // max(len(rows), 1), 1)
        )
        self.cache: dict[str, Tensor] = {}
        self.sampler = DiffusionSampler(
            module.average,
            module.noise_model,
            position_scale=float(module.position_scale),
            reflection=module.config.loss.reflection,
        )
        # Whether the mean is asked for, not a sample; counts of the first sample.
        self.is_mean = False
        self.counts: np.ndarray | None = None
        self.types: np.ndarray | None = None
        self.sampler.style = style_of(module, self.name, stream_seed(seed, "style", number))
        self.frame = self.known_frame(module, cells, number)

    def known_frame(
        self, module: AlphaSTomicsModule, cells: InputCells, number: int
    ) -> TissueFrame | None:
        """Return the tissue that cells are sampled in, neighbour by neighbour; None: the network's.

        New tissue is like one that the model knows; given positions may lie in such a one.
        """
        counts = self.sampler.counts
        if counts is None or not self.task.generates_expression or not bool(counts.is_fitted):
            return None
        if self.task.generates_position:
            return TissueFrame(self.sampler.style, None)
        frame = frame_of_slice(module, counts.niches, cells, number)
        if frame is not None:
            self.sampler.style = frame.tissue
        return frame

    @property
    def niches(self) -> NicheModel:
        """Return what makes cells that fit their neighbours."""
        assert self.sampler.counts is not None
        return self.sampler.counts.niches

    def scaling(self) -> list[tuple[Float64[np.ndarray, " G"], Float64[np.ndarray, " G"]]]:
        """Return the mean and std of genes that sampled expression was standardised by, if any."""
        model = self.sampler.counts
        if model is None or not self.task.generates_expression:
            return []
        mean, std = (part[self.sampler.style] for part in (model.mean, model.std))
        return [(mean.double().cpu().numpy(), std.double().cpu().numpy())]

    def without_cells(self) -> "SliceSampler":
        """Let go of what was given: what was drawn is still asked for."""
        self.whole, self.cache, self.frame = State(torch.empty(0), torch.empty(0)), {}, None
        return self

    def plan(self, num_steps: int) -> ChunkPlan:
        """Say in which chunks a sample of so many steps is made."""
        largest = largest_set(self.settings, self.device, num_steps)
        return plan_chunks(self.whole.expression.shape[1], largest, self.anchor_seed)

    def samples(
        self, num_steps: int, number: int, advance: Advance, *, is_mean: bool = False
    ) -> Iterator[SliceSample]:
        """Sample the slice several times, or its mean; few are in memory at a time."""
        if self.frame is not None and not is_mean:
            for index in range(number):
                yield self.sample_in_niches(self.frame, num_steps, index, advance)
            return
        together = self.sets_at_once
        # The noise that `ddpm` adds on its way is drawn for one set.
        random = self.settings.sampler == "ddpm" and num_steps > 1
        if together == 1 or random or len(self.plan(num_steps).parts) > 1:
            for index in range(number):
                self.is_mean = is_mean
                yield self.sample(num_steps, index, advance)
            return
        for first in range(0, number, together):
            indices = range(first, min(first + together, number))
            self.is_mean = is_mean
            yield from self.several(num_steps, indices, advance)

    def several(
        self, num_steps: int, indices: Sequence[int], advance: Advance
    ) -> list[SliceSample]:
        """Sample a slice that is one set several times, in the same network calls."""
        streams = [Generator().manual_seed(stream_seed(*self.key, index)) for index in indices]
        starts = [self.whole_noise(stream) for stream in streams]
        noise = State(*(torch.cat(parts) for parts in zip(*starts, strict=True)))
        given = State(*(part.expand(len(indices), -1, -1) for part in self.whole))
        cache = {name: part.expand(len(indices), -1, -1) for name, part in self.prepared().items()}
        state = self.sample_set(given, num_steps, streams[0], noise, 0, advance, cache)
        self.keep_counts(indices[0], [self.sampler.drawn], None)
        parts = zip(*(torch.split(part, 1) for part in state), strict=True)
        return [SliceSample(State(*part), None) for part in parts]

    def sample(self, num_steps: int, number: int, advance: Advance) -> SliceSample:
        """Sample the slice once; `number` is the sample's index and decides its noise."""
        generator = Generator().manual_seed(stream_seed(*self.key, number))
        plan = self.plan(num_steps)
        if len(plan.parts) == 1:
            state = self.sample_set(self.whole, num_steps, generator, None, 0, advance, self.cache)
            self.keep_counts(number, [self.sampler.drawn], None)
            return SliceSample(state, None)
        noise = self.whole_noise(generator)
        chunks: list[State] = []
        counts: list[Tensor | None] = []
        for chunk in range(len(plan.parts)):
            rows = plan.rows(chunk)
            given = State(*(part[:, rows] for part in self.whole))
            num_known = 0
            if chunk and not self.task.is_conditional:
                num_known = len(plan.anchors)
                for part, first in zip(given, chunks[0], strict=True):
                    part[:, :num_known] = first[:, :num_known]
            stream = Generator().manual_seed(stream_seed(*self.key, number, chunk))
            start = State(*(part[:, rows] for part in noise))
            cache = self.prepared_part(rows)
            state = self.sample_set(given, num_steps, stream, start, num_known, advance, cache)
            chunks.append(self.fitted(state, chunks, len(plan.anchors)))
            counts.append(self.sampler.drawn)
        self.keep_counts(number, counts, plan)
        return SliceSample(self.joined(plan, chunks), self.seam_of(plan, chunks))

    def sample_in_niches(
        self, frame: TissueFrame, num_steps: int, number: int, advance: Advance
    ) -> SliceSample:
        """Sample the slice once: positions, if they are not given, then expression at them."""
        require_way(self.sampler.noise_model, num_steps, self.settings.sampler)
        steps = num_steps * len(self.plan(num_steps).parts)  # as they are counted
        watch = lambda done: advance(steps * (done + 1) // STEPS - steps * done // STEPS)  # noqa: E731
        generator = Generator().manual_seed(stream_seed(*self.key, number))
        model, inner = self.sampler.counts, frame.position
        assert model is not None
        position = self.whole.position
        if inner is None:
            num_cells = self.whole.expression.shape[1]
            inner = self.niches.sample_positions(num_cells, frame.tissue, generator)
            middle = inner.double().mean(0)
            position = (inner.double() - middle)[None].cpu() * self.sampler.position_scale
        latents = self.niches.sample_latents(inner, frame.tissue, generator, watch)
        if not bool(torch.isfinite(latents).all()):
            raise InputError(f"slice {self.name}: {NOT_FINITE}")
        seed = int(torch.randint(2**62, (), generator=generator))
        values, counts = model.draw(latents, self.sampler.style, seed)
        if number == 0:
            self.counts = counts
            self.types = model.sample_types(latents, seed + 1)
        return SliceSample(State(torch.from_numpy(values)[None], position), None)

    def keep_counts(self, number: int, chunks: list[Tensor | None], plan: ChunkPlan | None) -> None:
        """Keep the counts that the first sample consists of, chunk by chunk."""
        counts = [part for part in chunks if part is not None]
        if number or self.is_mean or len(counts) != len(chunks):
            return
        first = [part[:1].float() for part in counts]
        whole = first[0][0] if plan is None else joined_chunks(plan, first)[0]
        self.counts = whole.numpy().astype(np.int64)

    def prepared(self) -> dict[str, Tensor]:
        """Return what follows from the given expression of the whole slice, computed once."""
        if not self.cache and not self.task.generates_expression:
            expression = self.whole.expression.to(self.device)
            mask = torch.ones(expression.shape[:2], dtype=torch.bool, device=self.device)
            genes = self.known(expression.shape, 0).genes
            self.cache |= self.sampler.prepare(expression, mask, genes)
        return self.cache

    def prepared_part(self, rows: np.ndarray) -> dict[str, Tensor] | None:
        """Return it for a chunk: neighbours of the whole slice say more than those of the chunk.

        Of a slice that is too large for one set each chunk prepares its own.
        """
        part_of = getattr(self.sampler.model, "part_of", None)
        fits = self.whole.expression.shape[1] <= largest_set(self.settings, self.device, 1)
        if part_of is None or not fits or self.task.generates_expression:
            return None
        prepared = self.prepared()
        return part_of(prepared, torch.from_numpy(rows).to(self.device)) if prepared else None

    def whole_noise(self, generator: Generator) -> State:
        """Draw the noise of all cells: that which the slice would start from as one set."""
        *sizes, num_genes = self.whole.expression.shape
        widths = self.sampler.width_of(self.task, num_genes), 3
        return State(*(torch.randn(*sizes, width, generator=generator) for width in widths))

    def sample_set(
        self,
        given: State,
        num_steps: int,
        generator: Generator,
        noise: State | None,
        num_known: int,
        advance: Advance,
        cache: dict[str, Tensor] | None,
    ) -> State:
        """Draw sets on the device, and bring them back; the first `num_known` cells are given."""
        shape = given.expression.shape
        number = shape[0]
        try:
            state = self.sampler.sample(
                given.expression.to(self.device),
                given.position.to(self.device),
                torch.ones(shape[:2], dtype=torch.bool, device=self.device),
                self.task.name,
                num_steps=num_steps,
                sampler=self.settings.sampler,
                known=self.known(shape, num_known),
                generator=generator,
                noise=None if noise is None else State(*(part.to(self.device) for part in noise)),
                watch=lambda _step, _state: advance(number),
                cache=cache,
                is_mean=self.is_mean,
            )
            # What was given is here already; each transfer waits for the device.
            parts = enumerate(zip(state, given, strict=True))
            moved = State(
                *(new.cpu() if part in self.task.generates else old for part, (new, old) in parts)
            )
            finite = all(bool(torch.isfinite(moved[part]).all()) for part in self.task.generates)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            finite = False  # what linear algebra says of values that are not finite
        if not finite:
            raise InputError(f"slice {self.name}: {NOT_FINITE}")
        return moved

    def known(self, shape: tuple[int, ...], num_known: int) -> Known:
        """Say what is known: the genes that were measured, or whole cells of an earlier chunk."""
        if not self.task.generates_expression:
            return Known(genes=self.measured.to(self.device).expand(shape))
        if not num_known:
            return Known()
        is_known = (torch.arange(shape[1], device=self.device) < num_known).expand(shape[:2])
        return Known(genes=is_known[..., None].expand(shape), positions=is_known)

    def fitted(self, state: State, earlier: list[State], num_anchors: int) -> State:
        """Rotate the positions of a later chunk onto the anchors of the first."""
        if not earlier or self.task.generates_expression:
            return state
        anchors = earlier[0].position[:, :num_anchors]
        aligned = onto_anchors(state.position, anchors, reflection=self.sampler.reflection)
        return State(state.expression, aligned)

    def joined(self, plan: ChunkPlan, chunks: list[State]) -> State:
        """Join what was generated, positions centred on the whole slice; what was given stays."""
        expression, position = self.whole
        if self.task.generates_expression:
            expression = joined_chunks(plan, [chunk.expression for chunk in chunks])
        if self.task.generates_position:
            position = joined_chunks(plan, [chunk.position for chunk in chunks])
            position = position - position.mean(1, keepdim=True)
        return State(expression, position)

    def seam_of(self, plan: ChunkPlan, chunks: list[State]) -> float | None:
        """Return the mean square disagreement about the anchors; none where they were given."""
        if not self.task.is_conditional:
            return None
        count = len(plan.anchors)
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
