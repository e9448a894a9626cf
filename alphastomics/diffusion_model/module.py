"""A training step: a batch enters, a loss leaves: noise, mask, model, loss, log.

Here alone the noise, the network and the losses meet. Positions are in the user's units
outside; inside, each set is centred and divided by one number per data set.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from alphastomics.attn_model.model import Model
from alphastomics.attn_model.prediction import Prediction
from alphastomics.config import Config
from alphastomics.config.file import as_config
from alphastomics.diffusion_model.loss import (
    Cells,
    DualModalLoss,
    Entries,
    LossTerms,
    errors_of_sets,
)
from alphastomics.diffusion_model.noise import NoiseModel
from alphastomics.diffusion_model.randomness import (
    Noise,
    StepRandomness,
    draw_for_sets,
    seed_device,
    seeds_on,
    set_keys,
    stream_seed,
)
from alphastomics.diffusion_model.step import Scored, Seen, errors_of_tasks, named_terms
from alphastomics.diffusion_model.trainer_module import is_distributed
from alphastomics.diffusion_model.updating_module import UpdatingModule
from alphastomics.geometry import best_rotation, centered
from alphastomics.utils.dataholder import DataHolder

# Samples of time and noise for each validation batch: of few sets, one is a poor estimate.
VALIDATION_SAMPLES = 4


class AlphaSTomicsModule(UpdatingModule):
    """The diffusion model of expression and position.

    Parameters
    ----------
    cfg
        The typed config, or a dict spelled like config.yaml.
    num_genes
        Genes of the data.
    position_scale
        What one unit inside the model is in the user's units; None learns it from the data.
    """

    slice_rotation: Tensor

    def __init__(
        self,
        cfg: Config | Mapping[str, Any],
        num_genes: int,
        *,
        position_scale: float | None = None,
    ) -> None:
        super().__init__(position_scale)
        self.config = as_config(cfg)
        self.model = Model.from_config(self.config, num_genes)
        self.average = copy.deepcopy(self.model).requires_grad_(requires_grad=False)
        self.noise_model = NoiseModel(self.config.diffusion)
        self.loss = DualModalLoss.from_config(self.config)
        # Rotation of each slice into the frame that the slices share; none is known by itself.
        self.register_buffer(
            "slice_rotation", torch.eye(3, dtype=torch.float64)[None], persistent=False
        )
        self.last: Scored | None = None
        self.share_scale()

    @property
    def denoiser(self) -> Model:
        """Return the network to use: the averaged one, unless it is being trained."""
        return self.model if self.training else self.average

    def forward(
        self,
        expression: Float[Tensor, "B N G"],
        positions: Float[Tensor, "B N 3"],
        diffusion_time: Float[Tensor, "B T"],
        node_mask: Bool[Tensor, "B N"] | None = None,
        **masks: Tensor,
    ) -> Prediction:
        """Predict clean cells, positions in the user's units and centred; `masks` as in `Model`."""
        mask = torch.ones_like(positions[..., 0]).bool() if node_mask is None else node_mask
        self.require_scale(DataHolder.of(expression, positions, mask))
        inner = (centered(positions.double(), mask) / self.position_scale).to(expression.dtype)
        prediction = self.denoiser(expression, inner, diffusion_time, mask, **masks)
        position = (prediction.position * self.position_scale).to(positions.dtype)
        return prediction._replace(position=position)

    def inner_positions(
        self, batch: DataHolder, rotation: Float[Tensor, "B 3 3"] | None
    ) -> Float[Tensor, "B N 3"]:
        """Centre each set, bring it to unit scale, and rotate it.

        The losses ignore the frame, so that nothing fixes the frame of a prediction; the network
        must serve all of them, since a sampler continues in the frame of its first prediction.
        """
        self.require_scale(batch)
        moved = centered(batch.positions.double(), batch.node_mask) / self.position_scale
        if rotation is not None:
            moved = moved @ rotation.mT
        return moved.to(batch.expression.dtype)

    def score(self, batch: DataHolder, randomness: StepRandomness) -> Scored:
        """Noise a batch, denoise it, and compare: steps 4 to 7 of the data flow."""
        settings, times = self.config.diffusion, randomness.times
        noise = randomness.noise(batch, self.config.num_latents)
        latent = self.latents_of(batch, noise, randomness.hidden.expression)
        noised = self.noise_model.noised(
            batch.expression if latent is None else latent,
            noise.expression,
            times[:, 0],
            settings.nu_expression,
        )
        expression = noised
        if latent is not None:
            # Given expression is that of genes, noised that of latents alone.
            expression = batch.expression.masked_fill(times[:, :1, None] > 0, 0)
        seen = Seen(
            expression,
            batch.padding_mask,
            batch.gene_mask,
            randomness.hidden,
            self.noise_model.network_time(times, batch.expression.dtype),
            None if latent is None else noised,
        )
        smoothed = self.smoothed(batch, seen)
        rotation = self.rotation_of(batch, randomness, noise.position, seen, smoothed)
        true = Cells(batch.expression, self.inner_positions(batch, rotation))
        noised_position = self.noise_model.noised(
            true.position, noise.position, times[:, 1], settings.nu_position
        )
        prediction = seen.through(self.denoiser, noised_position, smoothed, batch.expected)
        entries = Entries(
            batch.node_mask,
            batch.gene_mask,
            times > 0,
            randomness.hidden.expression,
            randomness.hidden.position,
            self.knows_frame(times),
        )
        predicted = Cells(prediction.expression, prediction.position)
        terms = self.loss(predicted, true, entries, prediction.aux.penalty)
        if latent is not None:
            assert prediction.latent is not None
            terms = self.loss.with_latents(terms, prediction.latent, latent, entries)
        tasks = errors_of_tasks(times, errors_of_sets(predicted, true, entries))
        batch = replace(batch, diffusion_time=seen.times)
        return Scored(terms, prediction, batch, times, tasks)

    def latents_of(
        self, batch: DataHolder, noise: Noise, hidden: Tensor | None
    ) -> Float[Tensor, "B N L"] | None:
        """Return latents of what is seen of a batch's expression, where these are diffused."""
        counts = self.denoiser.count_model
        if counts is None:
            return None
        seen = batch.gene_mask if hidden is None else batch.gene_mask & ~hidden
        return counts.latents(batch.expression, seen, noise.latent)

    def smoothed(self, batch: DataHolder, seen: Seen) -> Tensor | None:
        """Smooth given expression once for all calls of a step, where the network reads it."""
        if self.denoiser.smoothed_in is None:
            return None
        if batch.smoothed is not None:
            return batch.smoothed
        return self.denoiser.smooth(
            seen.expression,
            seen.times,
            seen.node_mask,
            gene_mask=seen.gene_mask,
            expression_hidden=seen.hidden.expression,
        )

    def knows_frame(self, times: Int[Tensor, "B 2"]) -> Bool[Tensor, " B"] | Literal[True] | None:
        """Say which sets know their frame: all but pure noise beside given expression."""
        frame = self.config.diffusion.position_frame
        if frame == "random":
            return None
        if frame == "registered":
            return True
        return (times[:, 0] > 0) | (times[:, 1] < self.noise_model.num_timesteps)

    @torch.no_grad()
    def rotation_of(
        self,
        batch: DataHolder,
        randomness: StepRandomness,
        noise: Float[Tensor, "B N 3"],
        seen: Seen,
        smoothed: Tensor | None,
    ) -> Float[Tensor, "B 3 3"]:
        """Rotate sets whose expression is given into the frame that the network would choose.

        A sampler's first prediction sets the frame of all that follow. In any other frame noisy
        positions would help only a network that finds the rotation between what they say and
        what expression says; a small one goes by one of the two, and loses the other on its way.
        Other sets keep their own frame: one thing less to find for new tissue.
        """
        frame = self.config.diffusion.position_frame
        if frame == "random":
            assert randomness.rotation is not None
            return randomness.rotation
        if frame == "registered":
            # A set of several slices is of slices in one frame, which have no rotation.
            number = batch.slice_id[:, 0].clamp(0, len(self.slice_rotation) - 1)
            return self.slice_rotation[number]
        rotation = torch.eye(3, dtype=torch.float64, device=batch.expression.device)
        rotation = rotation.repeat(len(batch.expression), 1, 1)
        times = randomness.times
        given = (times[:, 0] == 0) & (times[:, 1] < self.noise_model.num_timesteps)
        called = given.clone()
        # Ranks that share the weights among them must call the network equally often.
        called[0] |= is_distributed()
        if bool(called.any()):
            # From pure noise, where a sampler begins.
            start = seen.rows(called, time=1.0)
            smoothed = None if smoothed is None else smoothed[called]
            chosen = start.through(self.denoiser, noise[called], smoothed).position
            best = best_rotation(
                centered(batch.positions[called].double(), batch.node_mask[called]),
                chosen.double(),
                reflection=self.config.loss.reflection,
            )
            rotation[given] = best[given[called]]
        return rotation

    def draw(self, batch: DataHolder, *purpose: int | str) -> StepRandomness:
        """Draw the randomness of a batch: a pure function of seed, purpose and sets."""
        return self.randomness(batch, self.seeds(batch, *purpose))

    def seeds(self, batch: DataHolder, *purpose: int | str) -> Int64[Tensor, " B"]:
        """Return the seed of each set: all that the host works out for its randomness."""
        seed = self.config.seed.global_seed
        seeds = [stream_seed(seed, *purpose, key) for key in set_keys(batch)]
        return seeds_on(batch.expression.device, seeds)

    def randomness(self, batch: DataHolder, seeds: Int64[Tensor, " B"]) -> StepRandomness:
        """Draw the randomness of a batch from the seeds of its sets, without waiting for a GPU."""
        num_cells, num_genes = batch.expression.shape[1:]
        return draw_for_sets(
            self.noise_model,
            self.config.training.mode,
            self.config.masking,
            (num_cells, num_genes),
            self.updates,
            seeds,
            rotates=self.config.diffusion.position_frame == "random",
            reflection=self.config.loss.reflection,
        )

    def transfer_batch_to_device(
        self, batch: DataHolder, device: torch.device, dataloader_idx: int
    ) -> DataHolder:
        """Copy a batch without waiting for it; page-locked memory makes that possible."""
        same = batch.expression.device == device
        return batch if same else batch.to(device, non_blocking=True)

    def training_step(self, batch: DataHolder, batch_idx: int) -> Tensor:
        """Noise, mask, model, loss, log."""
        # Dropout and the routers' noise draw from the global state: a pure function of the step.
        step = (self.current_epoch, batch_idx, self.global_rank)
        seed = stream_seed(self.config.seed.global_seed, "step", *step)
        seed_device(seed, batch.expression.device)
        self.seen_slices.append(batch.slice_id)
        seeds = self.seeds(batch, "train", self.current_epoch)
        updates = self.recorded_updates
        scored = None if updates is None else updates.update(batch, seeds)
        self.is_updated = scored is not None
        if scored is None:
            scored = self.score(batch, self.randomness(batch, seeds))
            self.count_experts(scored.prediction)
        self.last = scored
        return scored.terms.total

    def validation_step(self, batch: DataHolder, batch_idx: int) -> None:
        """Score the averaged network; times and noise are the same in every epoch."""
        self.log_held_out(batch, "val", "validation")

    def test_step(self, batch: DataHolder, batch_idx: int) -> None:
        """Score the averaged network on test cells, as in validation."""
        self.log_held_out(batch, "test", "test")

    def log_held_out(self, batch: DataHolder, stage: str, purpose: str) -> None:
        """Log the loss of held-out cells, averaged over several samples of time and noise."""
        batch = self.with_expected(batch)
        seeds = (self.seeds(batch, purpose, number) for number in range(VALIDATION_SAMPLES))
        samples = [torch.stack(self.held_out_score(batch, each).terms) for each in seeds]
        terms = LossTerms(*torch.stack(samples).mean(0))
        self.log_dict(named_terms(stage, terms), batch_size=batch.count_cells(), sync_dist=True)

    def held_out_score(self, batch: DataHolder, seeds: Int64[Tensor, " B"]) -> Scored:
        """Score a held-out batch, as a CUDA graph where that is possible."""
        scored = None
        if self.recorded_updates is not None:
            scored = self.recorded_updates.score(batch, seeds)
        return self.score(batch, self.randomness(batch, seeds)) if scored is None else scored

    def with_expected(self, batch: DataHolder) -> DataHolder:
        """Add where cells are expected by their expression: held-out cells and the head stay."""
        head, first = self.average.position_head, batch.first_cells
        if self.recorded_updates is None or head is None or batch.smoothed is None or first is None:
            return batch
        if first not in self.expected_positions:
            self.expected_positions[first] = self.average.expect(
                batch.expression, batch.smoothed, batch.padding_mask, gene_mask=batch.gene_mask
            )
        return replace(batch, expected=self.expected_positions[first])


class MaskedDiffusionModule(AlphaSTomicsModule):
    """The same model with masked diffusion switched on, whatever the config says."""

    def __init__(self, cfg: Config | Mapping[str, Any], num_genes: int, **options: Any) -> None:
        config = as_config(cfg)
        masking = config.masking.model_copy(update={"enable": True})
        super().__init__(config.model_copy(update={"masking": masking}), num_genes, **options)
