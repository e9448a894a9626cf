"""The whole at work: a processed folder enters, a trained model and sampled cells are checked.

Steps 5 and 6 of a demo: a short training with the program's own trainer, then diffusion sampling.
"""

import csv
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from alphastomics.config import Config, Mode
from alphastomics.diffusion_model.checkpoint import load_module
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.sample import DiffusionSampler
from alphastomics.diffusion_model.train import TrainRequest, train
from alphastomics.evaluation.baselines import shuffled
from alphastomics.evaluation.expression import gene_correlations
from alphastomics.evaluation.ranks import distance_spearman
from alphastomics.generation.cells import read_processed
from alphastomics.geometry import centered
from examples.showcase.checks import Check, above, below, within
from examples.showcase.parts import SINGLE, Stage

SPLIT = "test"
HEALTHY_GATE = (0.05, 0.95)  # closed, or filtering nothing: docs/monitoring.md
HEALTHY_ENTROPY = 0.5
SPREAD_RATIO = (1 / 3, 3.0)  # of generated to real tissue: a short training is no good one


class Tissue(NamedTuple):
    """A slice that training has not seen, as a batch of one set."""

    expression: Tensor
    position: Tensor
    mask: Tensor


def short_training(stage: Stage, folder: Path) -> tuple[list[Check], Path]:
    """Train from the beginning to the end; return the checks and the best checkpoint."""
    logging = stage.config.logging.model_copy(update={"save_dir": str(folder), "exp_name": "run"})
    config = stage.config.model_copy(update={"logging": logging})
    summary = train(config, TrainRequest(overwrite=True))
    values = logged(Path(summary["run"]) / "metrics.csv")
    first, last = values["val/loss"][0], values["val/loss"][-1]
    asked = config.training.max_epochs
    epochs = f"{summary['epochs']} epochs, {summary['steps']} steps"
    checks = [
        Check(f"{asked} epochs were trained", epochs, summary["epochs"] == asked),
        below("validation loss after the last epoch, first as the limit", last, first),
        *health(config, values),
    ]
    return checks, Path(summary["best_checkpoint"])


def logged(path: Path) -> dict[str, list[float]]:
    """Read what a run wrote down, by name, in order."""
    found: dict[str, list[float]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["name"], []).append(float(row["value"]))
    return found


def health(config: Config, values: dict[str, list[float]]) -> list[Check]:
    """Read the monitor: gates that filter, experts that share the work."""
    checks = []
    if "gate/activation_mean" in values:
        mean, std = (values[f"gate/activation_{name}"][-1] for name in ("mean", "std"))
        checks.append(within(f"opening of the gates (std {std:.2f})", mean, *HEALTHY_GATE))
    if config.layer.use_moe:
        entropy = values["moe/expert_entropy_normalized"][-1]
        checks.append(above("evenness of expert use, 1 at best", entropy, HEALTHY_ENTROPY))
    return checks


def sampling(stage: Stage, checkpoint: Path) -> list[Check]:
    """Generate positions, expression and both, for a slice that training has not seen."""
    module, genes = load_module(checkpoint)
    tissue = unseen_tissue(stage.processed, genes)
    predicted = drawn(module, tissue, "expr_to_pos")
    values = drawn(module, tissue, "pos_to_expr")
    # One call from pure noise is the mean of the posterior, the program's point estimate.
    estimate = drawn(module, tissue, "pos_to_expr", num_steps=1)
    both, again = (drawn(module, tissue, "joint") for _ in range(2))
    chance = torch.Generator().manual_seed(stage.config.seed.global_seed)
    by_chance = torch.as_tensor(shuffled(tissue.position[0], chance))
    ratio = float(both[1].std() / centered(tissue.position, tissue.mask).std())
    finite = all(bool(torch.isfinite(part).all()) for part in (*predicted, *values, *both))
    return [
        Check("all generated numbers are finite", str(finite).lower(), finite),
        kept("expr_to_pos returns the expression it was given", predicted[0], tissue.expression),
        above(
            "expr_to_pos: Spearman of distances, shuffled cells as the limit",
            order_of_distances(predicted[1][0], tissue),
            order_of_distances(by_chance, tissue),
        ),
        kept("pos_to_expr returns the positions it was given", values[1], tissue.position),
        below(
            "pos_to_expr: expression MSE of the estimate (mean Pearson r of genes "
            f"{correlation(estimate[0][0], tissue):.2g}), shuffled cells as the limit",
            squared_error(estimate[0][0], tissue),
            squared_error(torch.as_tensor(shuffled(tissue.expression[0], chance)), tissue),
        ),
        below("joint: new tissue is centred, error", off_centre(both[1], tissue), SINGLE),
        within("joint: extent of the new tissue over the real one's", ratio, *SPREAD_RATIO),
        kept("joint: the same seed gives the same cells", both[0], again[0]),
    ]


def unseen_tissue(processed: Path, genes: list[str]) -> Tissue:
    """Read the first slice of the test split."""
    cells = read_processed(processed, genes, SPLIT)
    rows = cells.rows_of(0)
    assert cells.position is not None
    expression = torch.from_numpy(cells.expression[rows])[None]
    position = torch.from_numpy(cells.position[rows])[None]
    return Tissue(expression, position, torch.ones(1, len(rows), dtype=torch.bool))


def drawn(
    module: AlphaSTomicsModule, tissue: Tissue, mode: Mode, num_steps: int | None = None
) -> tuple[Tensor, Tensor]:
    """Generate with the documented sampler, in as many steps as the settings say, or as given."""
    settings = module.config.sampling
    sampler = DiffusionSampler(
        module.average,
        module.noise_model,
        position_scale=float(module.position_scale),
        reflection=module.config.loss.reflection,
    )
    return sampler.sample(
        *tissue,
        mode=mode,
        num_steps=num_steps or settings.num_steps,
        sampler=settings.sampler,
        generator=torch.Generator().manual_seed(module.config.seed.global_seed),
    )


def kept(claim: str, one: Tensor, other: Tensor) -> Check:
    """Claim that two tensors are equal to the bit."""
    differing = int((one != other).sum())
    return Check(claim, f"{differing} entries differ", differing == 0)


def order_of_distances(position: Tensor, tissue: Tissue) -> float:
    """Return the mean Spearman correlation of each cell's distances to all others."""
    return float(distance_spearman(position, tissue.position[0]).mean())


def correlation(expression: Tensor, tissue: Tissue) -> float:
    """Return the mean Pearson correlation of genes, of those that have one."""
    measured = torch.ones(1, expression.shape[1], dtype=torch.bool)
    return float(gene_correlations(expression, tissue.expression[0], measured).nanmean())


def squared_error(expression: Tensor, tissue: Tissue) -> float:
    """Return the mean squared error over cells and genes."""
    return float((expression - tissue.expression[0]).square().mean())


def off_centre(position: Tensor, tissue: Tissue) -> float:
    """Return how far positions are from being centred, in shares of the tissue's std."""
    return float((position - centered(position, tissue.mask)).abs().max() / tissue.position.std())
