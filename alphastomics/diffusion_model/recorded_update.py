"""Updates of the weights as CUDA graphs: a batch enters, the weights move, a score leaves.

Random numbers, forward, backward, clipping, AdamW and average are some thousand small kernels;
their launches take the host several times as long as the GPU takes to run them. Each kind of batch
(padded or not) is recorded once, and replayed on the same memory from then on.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Int64
from torch import Tensor

from alphastomics.attn_model.model import Model
from alphastomics.config import Config
from alphastomics.diffusion_model.cuda_graph import RecordingError, recorded
from alphastomics.diffusion_model.ema import average_decay_on_device, update_average
from alphastomics.diffusion_model.randomness import StepRandomness
from alphastomics.diffusion_model.step import Scored
from alphastomics.utils.dataholder import DataHolder

logger = logging.getLogger(__name__)

# Kinds of batches that are worth a graph of their own, in training and validation.
MOST_GRAPHS = 12
Act = Callable[[DataHolder, Tensor], Scored]


class Gradients(NamedTuple):
    """Where a graph writes the gradients, clipped, and their norm before."""

    norm: Tensor
    by_weight: list[Tensor | None]


@runtime_checkable
class Trained(Protocol):
    """What is asked of the module that is trained."""

    config: Config
    model: Model
    average: Model
    updates: Tensor
    skipped_steps: Tensor
    gradient_norm: Tensor

    def randomness(self, batch: DataHolder, seeds: Int64[Tensor, " B"]) -> StepRandomness:
        """Draw the randomness of a batch from the seeds of its sets."""

    def score(self, batch: DataHolder, randomness: StepRandomness) -> Scored:
        """Noise a batch, denoise it, and compare."""


class RecordedUpdates:
    """Updates weights and average, and scores held-out cells, by a graph for each kind of batch.

    Parameters
    ----------
    module
        What is trained.
    optimizer
        Fused AdamW of the module's network.
    """

    def __init__(self, module: Trained, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer
        self.training = module.config.training
        self.device = module.updates.device
        self.rate = torch.zeros((), device=self.device)
        self.recordings: dict[Any, _Recording] = {}
        self.is_refused = False
        # Graphs run one after the other: what they need in between can share memory.
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def update(self, batch: DataHolder, seeds: Int64[Tensor, " B"]) -> Scored | None:
        """Update the weights with a batch; None where its kind cannot be recorded."""
        self.rate.fill_(self.optimizer.param_groups[0]["lr"])
        done = self._do(self.step, batch, seeds)
        if done is None:
            return None
        done.leave_gradients()
        return done.scored

    def score(self, batch: DataHolder, seeds: Int64[Tensor, " B"]) -> Scored | None:
        """Score a batch by the averaged weights; None where its kind cannot be recorded."""
        if self.module.average.position_head is not None and batch.expected is None:
            return None  # to find out makes the host wait
        done = self._do(self.held_out, batch, seeds)
        return None if done is None else done.scored

    def _do(self, act: Act, batch: DataHolder, seeds: Tensor) -> "_Recording | None":
        """Do something by its graph; None where there is none, and nothing was done."""
        smooths = self.module.model.smoothed_in is not None and batch.smoothed is None
        waits = smooths or batch.real_cells is None  # for the GPU
        if self.is_refused or waits:
            return None
        kind = (act.__name__, _kind(batch))
        if kind not in self.recordings:
            if len(self.recordings) == MOST_GRAPHS:
                return None
            self.recordings[kind] = _Recording(self, act, batch, seeds)
        recording = self.recordings[kind]
        try:
            recording(batch, seeds)
        except RecordingError as error:
            self.is_refused = True
            logger.warning(
                "updates cannot be recorded as CUDA graphs, and will be slower: %s", error
            )
            return None
        return recording

    def held_out(self, batch: DataHolder, seeds: Int64[Tensor, " B"]) -> Scored:
        """Score a batch, as it is recorded."""
        return self.module.score(batch, self.module.randomness(batch, seeds))

    def step(self, batch: DataHolder, seeds: Int64[Tensor, " B"]) -> Scored:
        """Update the weights with a batch, as it is recorded."""
        module = self.module
        parameters = list(module.model.parameters())
        self.optimizer.zero_grad(set_to_none=True)
        scored = module.score(batch, module.randomness(batch, seeds))
        # The caller's autocast is for the forward pass alone.
        with torch.autocast(self.device.type, enabled=False):
            scored.terms.total.backward()  # type: ignore[no-untyped-call]
            limit = self.training.gradient_clip_val or math.inf
            norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
            bad = (~torch.isfinite(norm)).to(torch.float32)
            # As a loss scaler does: the kernel that updates the weights reads this, and does not.
            self.optimizer.found_inf, self.optimizer.grad_scale = bad, None  # type: ignore[attr-defined]
            with self.rate_on_device():
                self.optimizer.step()
            module.skipped_steps += bad.to(torch.int64)
            if scored.prediction.aux.routing is not None:
                module.model.update_balance_bias(scored.prediction.aux.routing.counts)
            decay = average_decay_on_device(self.training.ema_decay, module.updates)
            update_average(module.average, module.model, decay)
            module.updates += 1
        module.gradient_norm = norm
        # A graph of autograd that outlives the step would tie the next one to its stream.
        return scored._replace(
            terms=_detached(scored.terms),
            prediction=_detached(scored.prediction),
            tasks=scored.tasks.detach(),
        )

    def release(self) -> None:
        """Give the memory of all graphs back, before the garbage collector would."""
        for recording in self.recordings.values():
            del recording.recorded  # which knows the recording
        self.recordings.clear()

    @contextmanager
    def rate_on_device(self) -> Iterator[None]:
        """Let the optimizer read its learning rate from the GPU; a checkpoint has the number."""
        group = self.optimizer.param_groups[0]
        kept = {key: group[key] for key in ("lr", "capturable")}
        recording = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        group.update(lr=self.rate, capturable=recording)
        try:
            yield
        finally:
            group.update(kept)


class _Recording:
    """The graph of one kind of batch, and the memory that it reads."""

    def __init__(
        self, updates: RecordedUpdates, act: Act, batch: DataHolder, seeds: Tensor
    ) -> None:
        # The host's knowledge of the cells is of one batch: a padded kind stays padded.
        self.batch = batch.mapped(torch.clone)
        self.seeds = seeds.clone()
        self.module, self.act = updates.module, act
        self.scored: Scored | None = None
        self.left: Gradients | None = None
        self.recorded = recorded(self.step, updates.device, updates.pool)

    def step(self) -> None:
        """Do it with what the memory holds."""
        self.scored = self.act(self.batch, self.seeds)
        weights = self.module.model.parameters()
        self.left = Gradients(self.module.gradient_norm, [weight.grad for weight in weights])

    def __call__(self, batch: DataHolder, seeds: Tensor) -> None:
        """Put a batch into the memory, and do it."""
        for name, value in _tensors(batch):
            getattr(self.batch, name).copy_(value)
        self.seeds.copy_(seeds)
        self.recorded()
        assert self.scored is not None
        batch = replace(batch, diffusion_time=self.scored.batch.diffusion_time)
        self.scored = self.scored._replace(batch=batch)

    def leave_gradients(self) -> None:
        """Leave the gradients of this graph with the weights, as an update without one does."""
        assert self.left is not None
        self.module.gradient_norm = self.left.norm
        if next(self.module.model.parameters()).grad is not self.left.by_weight[0]:
            weights = self.module.model.parameters()
            for weight, gradient in zip(weights, self.left.by_weight, strict=True):
                weight.grad = gradient


def _detached(value: Any) -> Any:
    """Cut tensors, in tuples within tuples, off from the graph of autograd."""
    if isinstance(value, Tensor):
        return value.detach()
    if not isinstance(value, tuple):
        return value
    parts = map(_detached, value)
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _tensors(batch: DataHolder) -> list[tuple[str, Tensor]]:
    """List the tensors of a batch by name."""
    named = [(field.name, getattr(batch, field.name)) for field in fields(batch)]
    return [(name, value) for name, value in named if isinstance(value, Tensor)]


def _kind(batch: DataHolder) -> tuple[Any, ...]:
    """Return what two batches have in common that one graph serves."""
    shapes = tuple((name, value.shape, value.dtype) for name, value in _tensors(batch))
    return shapes, batch.padding_mask is None
