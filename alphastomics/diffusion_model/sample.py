"""The reverse process: noise, what is known and a denoiser enter, generated cells leave.

A run predicts the clean cells again and again; `solvers.py` goes from one time to the next.
The loss of positions may ignore the frame. The network chooses one with its first prediction: cells
of known position are rotated into it, and everything is rotated back at the end. Later predictions
are rotated onto the last one and onto the noisy cells, these the more the less noise they hold.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from alphastomics.attn_model.count_model import CountModel
from alphastomics.attn_model.layers import without_dropout
from alphastomics.config import Mode, SamplingConfig, Solver
from alphastomics.diffusion_model.noise import (
    NoiseModel,
    centered_noise,
    draw_noise,
    step_times,
)
from alphastomics.diffusion_model.solvers import STEPS, Step, level, require_way
from alphastomics.errors import InputError
from alphastomics.geometry import best_rotation, centered, moved_onto
from alphastomics.tasks import EXPRESSION, POSITION, TASKS, Task

CELLS_THAT_FIX_A_FRAME = 3
_SAMPLING = SamplingConfig()


@runtime_checkable
class Denoiser(Protocol):
    """A network: noisy expression and positions, times (B, 2) and a mask; predicts both clean.

    It may have `prepare(expression, diffusion_time, node_mask, *, gene_mask, is_given)`, which
    computes once what follows from given expression, and returns it as further arguments; and
    `part_of(prepared, rows)`, which returns those of some of the cells. Such a network also takes
    `reads_expression`: whether its prediction of expression is used.
    """

    def __call__(
        self, expression: Tensor, position: Tensor, diffusion_time: Tensor, node_mask: Tensor,
        *, gene_mask: Tensor | None,
    ) -> Any:  # fmt: skip
        """Return something with `expression` and `position`."""
        ...


class Known(NamedTuple):
    """What is known beside the mode's condition.

    Attributes
    ----------
    genes
        Measured genes, (B, N, G): with `pos_to_expr` and `joint` their values are kept, the others
        generated (as latents: whatever is known of a part of the genes); with `expr_to_pos` the
        others are not seen. None: all, or none, are known.
    positions
        Cells (B, N) whose position is known and kept, when positions are generated.
    """

    genes: Tensor | None = None
    positions: Tensor | None = None


class State(NamedTuple):
    """Expression (B, N, G) and positions (B, N, 3): noisy on the way, clean at its end."""

    expression: Tensor
    position: Tensor


class DiffusionSampler:
    """Generates cells with a trained network.

    Parameters
    ----------
    model
        The network, or the module that it was trained in, whose averaged network is used.
    noise_model
        The schedule it was trained with.
    position_scale
        What one unit inside the model is in the user's units; None asks the trained network.
    reflection
        Whether mirror images counted as the same in training; None asks the trained network.
    """

    drawn: Tensor | None  # counts of the last sample

    def __init__(
        self,
        model: Denoiser,
        noise_model: NoiseModel,
        *,
        position_scale: float | None = None,
        reflection: bool | None = None,
    ) -> None:
        self.model: Denoiser = getattr(model, "average", model)
        self.noise_model = noise_model
        learned = getattr(self.model, "position_scale", None) or 1.0
        self.position_scale = learned if position_scale is None else position_scale
        # Where the network has one: expression is generated as latents, and drawn as counts.
        self.counts: CountModel | None = getattr(self.model, "count_model", None)
        self.style, self.drawn = 0, None
        mirrored = getattr(self.model, "reflection", True)
        self.reflection = mirrored if reflection is None else reflection

    @torch.no_grad()
    def sample(
        self,
        expr: Float[Tensor, "B N G"],
        pos: Float[Tensor, "B N 3"],
        mask: Bool[Tensor, "B N"],
        mode: Mode = _SAMPLING.task,
        *,
        num_steps: int = _SAMPLING.num_steps,
        sampler: Solver = _SAMPLING.sampler,
        known: Known = Known(),  # noqa: B008 - an empty tuple
        generator: Generator | None = None,
        noise: State | None = None,
        watch: Callable[[int, State], None] | None = None,
        cache: dict[str, Tensor] | None = None,
        is_mean: bool = False,
    ) -> tuple[Float[Tensor, "B N G"], Float[Tensor, "B N 3"]]:
        """Sample cells.

        Parameters
        ----------
        expr, pos
            What is given; a modality that is generated gives its shape alone, unless `known` says
            that parts of it are known.
        mask
            True for real cells.
        mode
            What is generated.
        num_steps
            Network calls, at most T.
        sampler
            Solver: ddim, ddpm or dpmpp.
        known
            Parts that are known beside the condition.
        generator
            Source of randomness; the global state is never touched when it is given.
        noise
            Standard normal noise to start from; drawn when it is not given.
        watch
            Called after each step with its number and the clean cells predicted there.
        cache
            Filled with what follows from given expression; later calls for these cells read it.
        is_mean
            Whether expression is to be the mean that the last step expects, not a sample.

        Returns
        -------
        tuple
            Expression, and positions in the user's units: centred on each set, or in the frame of
            the cells of known position where there are any. What was given comes back as it came.
        """
        run = _Run(self, expr, pos, mask, mode, known, generator, is_mean=is_mean)
        run.prepared = {} if cache is None else cache
        require_way(self.noise_model, num_steps, sampler)
        with without_dropout(self.model):
            clean = run.solve(num_steps, sampler, noise, watch)
            return run.outside(clean, is_mean=is_mean)

    def width_of(self, task: Task, num_genes: int) -> int:
        """Return the width of expression on its way down: of latents where these are generated."""
        counts = self.counts if task.generates_expression else None
        return num_genes if counts is None else counts.num_latents

    @torch.no_grad()
    def prepare(
        self,
        expr: Float[Tensor, "B N G"],
        mask: Bool[Tensor, "B N"],
        genes: Bool[Tensor, "B N G"] | None,
        *,
        is_given: bool = True,
    ) -> dict[str, Tensor]:
        """Compute what follows from given expression, if the network has a use for it."""
        prepare = getattr(self.model, "prepare", None)
        if prepare is None:
            return {}
        with without_dropout(self.model):
            time = expr.new_zeros(len(expr), 2)
            return dict(prepare(expr, time, mask, gene_mask=genes, is_given=is_given))


class _Run:
    """One call of `sample`: the condition, brought inside the model's units, and the way down."""

    def __init__(
        self,
        sampler: DiffusionSampler,
        expression: Tensor,
        position: Tensor,
        node_mask: Tensor,
        mode: Mode,
        known: Known,
        generator: Generator | None,
        *,
        is_mean: bool,
    ) -> None:
        if mode not in TASKS:
            raise InputError(f"mode: expected one of {', '.join(TASKS)}; got {mode!r}")
        self.sampler, self.noise_model, self.task = sampler, sampler.noise_model, TASKS[mode]
        self.mask, self.known, self.generator = node_mask, known, generator
        self.given = State(expression, position)
        seen = node_mask
        self.anchors: Tensor | None = None
        if self.task.generates_position and known.positions is not None:
            self.anchors = seen = node_mask & known.positions
        weight = seen[..., None].double()
        count = weight.sum(1, keepdim=True).clamp(min=1)
        self.center = (position.double() * weight).sum(1, keepdim=True) / count
        inner = (position.double() - self.center) / sampler.position_scale
        self.inner = State(expression, (inner * node_mask[..., None]).to(expression.dtype))
        self.prepared: dict[str, Tensor] = {}
        self.rotation: Tensor | None = None
        self.last: Tensor | None = None
        self.counts = sampler.counts if self.task.generates_expression else None
        self.expected = expression  # as the last step expects it, where latents are generated
        # Of latents the network's own prediction of values counts as their mean alone.
        self.reads_expression = self.task.generates_expression and (self.counts is None or is_mean)

    @property
    def generated(self) -> tuple[bool, bool]:
        """Say whether expression and positions are generated."""
        return self.task.generates_expression, self.task.generates_position

    def draw(self, modality: int) -> Float[Tensor, "B N F"]:
        """Draw noise of a modality's shape: that of positions is centred."""
        sizes, dtype = self.mask.shape, self.inner.expression.dtype
        if modality == POSITION:
            return centered_noise((*sizes, 3), self.mask, self.generator, dtype)
        width = self.sampler.width_of(self.task, self.inner.expression.shape[-1])
        return draw_noise((*sizes, width), self.mask, self.generator, dtype)

    def start(self, noise: State | None) -> State:
        """Begin with noise for what is generated; what is given stays as it is."""
        if noise is None:
            noise = State(self.draw(EXPRESSION), self.draw(POSITION))
        else:
            kept = noise.expression * self.mask[..., None], centered(noise.position, self.mask)
            noise = State(*(part.to(self.inner.expression.dtype) for part in kept))
        return State(
            *(fresh if make else kept
              for fresh, kept, make in zip(noise, self.inner, self.generated, strict=True))
        )  # fmt: skip

    def predict(self, noisy: State, time: int) -> State:
        """Call the network, bring its positions into the cells' frame, and put in the known."""
        times = torch.tensor([time if make else 0 for make in self.generated])
        times = times.expand(len(self.mask), 2).to(self.mask.device)
        network_time = self.noise_model.network_time(times, noisy.expression.dtype)
        genes = self.known.genes if not self.task.generates_expression else None
        model = self.sampler.model
        if not self.prepared:
            given = not self.task.generates_expression
            self.prepared |= self.sampler.prepare(
                self.inner.expression, self.mask, genes, is_given=given
            )
        seen, known = noisy.expression, dict[str, Any](self.prepared)
        if self.counts is not None:
            seen, known["latent"] = torch.zeros_like(self.inner.expression), seen
        if hasattr(model, "prepare"):
            known["reads_expression"] = self.reads_expression
        cells = seen, noisy.position, network_time, self.mask
        prediction = model(*cells, gene_mask=genes, **known)
        make_expression, make_position = self.generated
        expression = prediction.expression.to(noisy.expression.dtype)
        if not make_expression:
            expression = self.inner.expression
        elif self.counts is not None:
            self.expected, expression = expression, prediction.latent.to(expression.dtype)
            if self.known.genes is not None:  # what is known of a cell in part is put in at the end
                whole = self.known.genes.all(-1, keepdim=True)
                latents = self.counts.latents(self.inner.expression)
                expression = torch.where(whole, latents, expression)
        elif self.known.genes is not None:
            expression = torch.where(self.known.genes, self.inner.expression, expression)
        position = self.inner.position
        if make_position:
            position = self.in_frame(
                prediction.position.to(noisy.position.dtype), noisy.position, time
            )
        return State(expression * self.mask[..., None], position * self.mask[..., None])

    def in_frame(self, predicted: Tensor, noisy: Tensor, time: int) -> Float[Tensor, "B N 3"]:
        """Rotate predicted positions onto the known ones where they fix a frame, else as before.

        The rotation that fits both the noisy cells, of which alpha_t / sigma_t^2 is the weight in
        their likelihood, and the last prediction. Noise alone has no frame: the first prediction
        stays as it is.
        """
        if self.last is None and self.anchors is None:
            self.last = predicted
            return predicted
        alpha, sigma = level(self.noise_model, time, self.noise_model.settings.nu_position)
        weight = alpha / sigma**2
        target = predicted.double()
        if self.last is not None:
            target = (weight * noisy.double() + self.last.double()) / (weight + 1)
        mask, reflection = self.mask, self.sampler.reflection
        if self.anchors is None:
            self.last = moved_onto(predicted, target, mask, mask, reflection=reflection)
            return self.last
        enough = self.anchors.sum(1, keepdim=True) >= CELLS_THAT_FIX_A_FRAME
        if self.rotation is None:
            self.take_frame(predicted, enough)
        target = torch.where(self.anchors[..., None], self.inner.position.double(), target)
        fixed = torch.where(enough, self.anchors, mask)
        moved = moved_onto(predicted, target, mask, fixed, reflection=reflection)
        self.last = torch.where(self.anchors[..., None], self.inner.position, moved)
        return self.last

    def take_frame(self, predicted: Tensor, enough: Bool[Tensor, "B 1"]) -> None:
        """Rotate the cells of known position into the frame of the first prediction."""
        assert self.anchors is not None
        fixed = self.anchors & enough
        known = centered(self.inner.position.double(), fixed)
        target = centered(predicted.double(), fixed)
        # Without such cells both are zero, and the rotation is the identity.
        self.rotation = best_rotation(known, target, reflection=self.sampler.reflection)
        moved = (self.inner.position.double() @ self.rotation.mT).to(predicted.dtype)
        self.inner = self.inner._replace(position=moved)

    def solve(
        self, num_steps: int, solver: str, noise: State | None,
        watch: Callable[[int, State], None] | None,
    ) -> State:  # fmt: skip
        """Go from noise to clean cells."""
        noisy = self.start(noise)
        times = step_times(self.noise_model.num_timesteps, num_steps)
        clean, before = noisy, None
        for step, (t, s) in enumerate(pairwise(times)):
            clean = self.predict(noisy, t)
            if watch is not None:
                watch(step, clean)
            noisy = self.step(
                noisy, clean, before, (t, s), times[step - 1] if step else None, solver
            )
            before = clean
        return clean

    def step(
        self, noisy: State, clean: State, before: State | None, span: tuple[int, int],
        earlier: int | None, solver: str,
    ) -> State:  # fmt: skip
        """Go from time t to s < t, modality by modality."""
        settings = self.noise_model.settings
        parts = []
        for index, nu in enumerate((settings.nu_expression, settings.nu_position)):
            if not self.generated[index]:
                parts.append(noisy[index])
                continue
            last = None if before is None else before[index]
            step = Step(self.noise_model, nu, span, earlier, last, partial(self.draw, index))
            parts.append(STEPS[solver](noisy[index], clean[index], step))
        return State(*parts)

    def made_expression(self, clean: State, *, is_mean: bool) -> Float[Tensor, "B N G"]:
        """Return generated expression; of latents its mean, or what is drawn by them."""
        if self.counts is None:
            return clean.expression
        values = self.expected
        if not is_mean:
            where = getattr(self.generator, "device", None)
            seed = int(torch.randint(2**62, (), generator=self.generator, device=where))
            drawn, counts = self.counts.draw(clean.expression, self.sampler.style, seed)
            self.sampler.drawn = None if counts is None else torch.from_numpy(counts)
            values = torch.from_numpy(drawn).to(values)
        if self.known.genes is not None:
            values = torch.where(self.known.genes, self.given.expression, values)
        return values * self.mask[..., None]

    def outside(self, clean: State, *, is_mean: bool) -> tuple[Tensor, Tensor]:
        """Return to the user's units; what was given comes back as it came."""
        make_expression, make_position = self.generated
        expression = self.given.expression
        if make_expression:
            expression = self.made_expression(clean, is_mean=is_mean)
        if not make_position:
            return expression, self.given.position
        position = clean.position.double() * self.sampler.position_scale
        if self.rotation is not None:
            position = position @ self.rotation
        if self.anchors is None:
            return expression, centered(position, self.mask).to(self.given.position.dtype)
        position = (position + self.center) * self.mask[..., None]
        position = torch.where(self.anchors[..., None], self.given.position.double(), position)
        return expression, position.to(self.given.position.dtype)
