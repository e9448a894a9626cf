"""The parts at work: a batch of cells enters each; what was checked, with its figure, leaves.

Steps 1 to 4 of a demo: the forward pass, the noise model, masked diffusion and a training step.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from alphastomics.attn_model.accounting import (
    active_parameters,
    feed_forward_share,
    total_parameters,
)
from alphastomics.attn_model.inspection import gate_moments
from alphastomics.attn_model.prediction import Prediction
from alphastomics.config import Config
from alphastomics.diffusion_model.loss import Cells, Entries
from alphastomics.diffusion_model.masking import draw_masks
from alphastomics.diffusion_model.module import AlphaSTomicsModule, MaskedDiffusionModule
from alphastomics.diffusion_model.noise import centered_noise
from alphastomics.preprocessing.batch_loader import BatchLoader
from alphastomics.utils.dataholder import DataHolder
from examples.showcase.checks import Check, above, below, within

EXACT = 1e-9  # of double precision, after some thousand additions
SINGLE = 1e-4  # of single precision, likewise
SHARE_STDS = 5  # a share of many entries lies within so many standard deviations of its mean
STEPS_ON_ONE_BATCH = 20
HIDDEN_VALUE = 1e3  # put where the network must not look


@dataclass(frozen=True)
class Stage:
    """What the steps share: settings, where the data lie, an untrained module and a batch."""

    config: Config
    processed: Path
    module: AlphaSTomicsModule
    batch: DataHolder

    @property
    def generator(self) -> torch.Generator:
        """Return a fresh source of randomness, the same in every step."""
        return torch.Generator().manual_seed(self.config.seed.global_seed)


@contextmanager
def seeded(config: Config) -> Iterator[None]:
    """Draw weights and dropout from the config's seed, and leave the global state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed.global_seed)
        yield


def untrained(config: Config, loader: BatchLoader) -> AlphaSTomicsModule:
    """Return the module that a run on a loader's cells begins with."""
    with seeded(config):
        module = AlphaSTomicsModule(config, loader.metadata.num_genes).eval()
    module.learn_from(loader)
    return module


def forward_pass(stage: Stage) -> list[Check]:
    """Predict clean cells; a set has no order, and padding has no say."""
    model = copy.deepcopy(stage.module.model).double().eval()
    expression = stage.batch.expression.double()
    position = stage.module.inner_positions(stage.batch, None).double()
    mask = stage.batch.node_mask
    time = torch.full((len(mask), 2), 0.5, dtype=torch.float64)

    def predict(cells: Tensor, position: Tensor, real: Tensor) -> Prediction:
        with torch.no_grad():
            result: Prediction = model(cells, position, time, real)
        return result

    found = predict(expression, position, mask)
    order = torch.randperm(mask.shape[1], generator=stage.generator)
    reordered = predict(expression[:, order], position[:, order], mask[:, order])
    fewer = mask.clone()
    fewer[:, -(mask.shape[1] // 4) :] = False
    hidden = ~fewer[..., None]
    plain = predict(expression * fewer[..., None], position * fewer[..., None], fewer)
    filled = predict(
        expression.masked_fill(hidden, HIDDEN_VALUE), position.masked_fill(hidden, -HIDDEN_VALUE),
        fewer,
    )  # fmt: skip
    shapes = tuple(found.expression.shape), tuple(found.position.shape)
    expected = tuple(expression.shape), tuple(position.shape)
    finite = all(bool(torch.isfinite(part).all()) for part in found[:2])
    return [
        Check("expression and positions come out as they went in", f"{shapes}", shapes == expected),
        Check("all numbers are finite", str(finite).lower(), finite),
        below("cells in another order, largest change", largest(reordered, found, order), EXACT),
        below("anything in padding, largest change", largest(filled, plain), EXACT),
        *layer_checks(stage, found),
    ]


def largest(one: Prediction, other: Prediction, order: Tensor | None = None) -> float:
    """Return the largest difference of two predictions, the second reordered."""
    parts = [other.expression, other.position]
    if order is not None:
        parts = [part[:, order] for part in parts]
    mine = (one.expression, one.position)
    return max(float((a - b).abs().max()) for a, b in zip(mine, parts, strict=True))


def layer_checks(stage: Stage, found: Prediction) -> list[Check]:
    """Look at the gates and the experts, where the configuration has them."""
    model, layer = stage.module.model, stage.config.layer
    total, active = total_parameters(model), active_parameters(model)
    sparse = layer.use_moe and layer.moe_top_k < layer.num_experts
    figure = f"{total:,} in all, {active:,} active: {feed_forward_share(model):.1%} of feed-forward"
    checks = [Check("parameters that a cell meets", figure, (active < total) == sparse)]
    if found.aux.gates:
        moments = [gate_moments(gate, stage.batch.node_mask) for gate in found.aux.gates]
        mean = sum(float(mean) for mean, _ in moments) / len(moments)
        checks.append(within(f"{layer.gate} gate, mean opening before training", mean, 0.2, 0.95))
    if layer.use_moe and found.aux.routing is not None:
        counts = found.aux.routing.counts
        per_layer = float(counts.sum(-1).max())
        asked = layer.moe_top_k * int(stage.batch.node_mask.sum())
        used = int((counts > 0).sum(-1).min())
        checks += [
            Check(
                f"each cell is assigned to {layer.moe_top_k} of {layer.num_experts} experts",
                f"{per_layer:,.0f} assignments a layer (expected {asked:,})",
                per_layer == asked,
            ),
            above("experts used in the least used layer", float(used), 1.0),
        ]
    return checks


def noise_model(stage: Stage) -> list[Check]:
    """Noise clean cells, and step back: the schedule keeps what it promises."""
    noise, settings = stage.module.noise_model, stage.config.diffusion
    last = settings.num_timesteps
    times = torch.arange(last + 1)
    alpha, sigma = noise.alpha_sigma(times, settings.nu_expression)
    mask = stage.batch.node_mask
    clean = stage.batch.expression.double()
    drawn = torch.randn(clean.shape, generator=stage.generator, dtype=clean.dtype)
    start, end = (
        noise.noised(clean, drawn, torch.full((len(mask),), t), settings.nu_expression)
        for t in (0, last)
    )
    shift = centered_noise((*mask.shape, 3), mask, stage.generator, torch.float64)
    t, s = torch.tensor([last * 3 // 4]), torch.tensor([last // 3])
    step = noise.posterior(t, s, settings.nu_expression)
    (alpha_t, sigma_t), (alpha_s, sigma_s) = (
        noise.alpha_sigma(time, settings.nu_expression) for time in (t, s)
    )
    signal = step.on_noisy * alpha_t + step.on_clean - alpha_s
    power = step.on_noisy**2 * sigma_t**2 + step.std**2 - sigma_s**2
    return [
        below("alpha² + sigma² = 1, error", float((alpha**2 + sigma**2 - 1).abs().max()), EXACT),
        below("at time 0 nothing is changed, error", float((start - clean).abs().max()), EXACT),
        below("at time T nothing is left, error", float((end - drawn).abs().max()), EXACT),
        below("position noise has no mean, error", float(shift.mean(1).abs().max()), EXACT),
        below(
            f"a step from t = {int(t)} to s = {int(s)} ends on the schedule, error",
            max(float(signal.abs().max()), float(power.abs().max())),
            EXACT,
        ),
    ]


def masked_diffusion(stage: Stage) -> list[Check]:
    """Hide features: as many as asked for, out of the network's sight, and scored by themselves."""
    with seeded(stage.config):
        module = MaskedDiffusionModule(stage.config, stage.batch.expression.shape[-1]).eval()
    settings, batch = module.config.masking, stage.batch
    num_sets, num_cells, num_genes = batch.expression.shape
    noised = torch.ones(num_sets, 2, dtype=torch.bool)
    late, seeds = torch.tensor(settings.progressive_steps), torch.arange(num_sets)
    hidden = draw_masks(settings, seeds, noised, (num_cells, num_genes), late)
    assert hidden.expression is not None
    assert hidden.position is not None
    model = copy.deepcopy(module.model).double()
    expression = batch.expression.double()
    position = stage.module.inner_positions(batch, None).double()
    time = torch.full((len(batch.node_mask), 2), 0.5, dtype=torch.float64)
    with torch.no_grad():
        plain, filled = (
            model(
                values, position, time, batch.node_mask, gene_mask=batch.gene_mask,
                expression_hidden=hidden.expression, position_hidden=hidden.position,
            )
            for values in (expression, expression.masked_fill(hidden.expression, HIDDEN_VALUE))
        )  # fmt: skip
    entries = Entries(batch.node_mask, batch.gene_mask, hidden_expression=hidden.expression)
    predicted = Cells(plain.expression, plain.position)
    term = float(module.loss.masked_term(predicted, Cells(expression, position), entries))
    chosen = hidden.expression & batch.gene_mask
    by_hand = float((plain.expression - expression)[chosen].square().mean())
    return [
        share_check("genes", hidden.expression, settings.expression_mask_ratio),
        share_check("coordinates", hidden.position, settings.position_mask_ratio),
        below("anything in hidden entries, largest change", largest(filled, plain), EXACT),
        below(
            f"its loss ({term:.3f}) is the mean over hidden entries, error",
            abs(term - by_hand),
            EXACT,
        ),
    ]


def share_check(what: str, hidden: Tensor, ratio: float) -> Check:
    """Compare the share of hidden entries with what was asked for."""
    share = float(hidden.float().mean())
    std = math.sqrt(ratio * (1 - ratio) / hidden.numel())
    tolerance = SHARE_STDS * std
    return within(f"share of hidden {what}", share, ratio - tolerance, ratio + tolerance)


def training_step(stage: Stage) -> list[Check]:
    """Take a step, and some more on the same batch: gradients reach the network, the loss falls."""
    with seeded(stage.config):
        return steps_on_one_batch(stage)


def steps_on_one_batch(stage: Stage) -> list[Check]:
    """Train on one batch with one sample of noise."""
    module = copy.deepcopy(stage.module).train()
    randomness = module.draw(stage.batch, "demo")
    optimizer = torch.optim.AdamW(module.model.parameters(), stage.config.training.learning_rate)
    losses, norm, reached = [], 0.0, 0.0
    for step in range(STEPS_ON_ONE_BATCH):
        terms = module.score(stage.batch, randomness).terms
        losses.append(float(terms.total.detach()))
        optimizer.zero_grad()
        torch.autograd.backward([terms.total])
        if step == 1:  # at the first, parts that start at no effect hide what is behind them
            norm, reached = gradient_reach(module)
        optimizer.step()
    weighted = (weight * getattr(terms, name) for name, weight in module.loss.weights.items())
    total = torch.stack([term.detach() for term in weighted]).sum()
    fell = 1 - losses[-1] / losses[0]
    return [
        below(
            "the total is the weighted sum, error",
            abs(float((total - terms.total).detach())),
            SINGLE,
        ),
        within("norm of the gradient", norm, 1e-6, 1e6),
        above("share of the parameter tensors that a gradient reaches", reached, 0.9),
        above(f"{STEPS_ON_ONE_BATCH} steps on one batch, share the loss falls by", fell, 0.05),
    ]


def gradient_reach(module: AlphaSTomicsModule) -> tuple[float, float]:
    """Return the norm of the gradient, and the share of the tensors that have one."""
    gradients = [parameter.grad for parameter in module.model.parameters()]
    norms = [0.0 if part is None else float(torch.linalg.vector_norm(part)) for part in gradients]
    return math.hypot(*norms), sum(norm > 0 for norm in norms) / len(norms)
