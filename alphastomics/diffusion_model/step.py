"""The parts of a training step: what the network sees of a batch, and what came of it."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from alphastomics.attn_model.model import Model
from alphastomics.attn_model.prediction import Prediction
from alphastomics.diffusion_model.loss import LossTerms
from alphastomics.diffusion_model.masking import Hidden
from alphastomics.utils.dataholder import DataHolder

# What the terms of the loss are called in the log, in the order of `LossTerms`.
TASK_NAMES = ("positions", "expression", "new tissue")
TERM_NAMES = tuple("loss" if name == "total" else name for name in LossTerms._fields)


class Scored(NamedTuple):
    """What a step made: the loss, the prediction, and the batch with its diffusion time."""

    terms: LossTerms
    prediction: Prediction
    batch: DataHolder
    times: Tensor
    tasks: Tensor
    """The sum of each task's errors over its sets, and how many these are (2, 3)."""


class Seen(NamedTuple):
    """What the network sees of a batch, but for the noisy positions."""

    expression: Tensor
    node_mask: Tensor | None
    gene_mask: Tensor
    hidden: Hidden
    times: Tensor
    latent: Tensor | None = None

    def rows(self, chosen: Bool[Tensor, " B"], *, time: float) -> "Seen":
        """Return some of the sets, with their positions at another time."""
        hidden = Hidden(*(None if mask is None else mask[chosen] for mask in self.hidden))
        times = self.times[chosen].clone()
        times[:, 1] = time
        node_mask = None if self.node_mask is None else self.node_mask[chosen]
        latent = None if self.latent is None else self.latent[chosen]
        genes = self.gene_mask[chosen]
        return Seen(self.expression[chosen], node_mask, genes, hidden, times, latent)

    def through(
        self,
        model: Model,
        position: Tensor,
        smoothed: Tensor | None,
        expected: Tensor | None = None,
    ) -> Prediction:
        """Call the network."""
        return model(
            self.expression,
            position,
            self.times,
            self.node_mask,
            gene_mask=self.gene_mask,
            expression_hidden=self.hidden.expression,
            position_hidden=self.hidden.position,
            smoothed=smoothed,
            expected=expected,
            latent=self.latent,
        )


def errors_of_tasks(
    times: Int[Tensor, "B 2"], errors: Float[Tensor, "B 2"]
) -> Float[Tensor, "2 3"]:
    """Add up the mean squared errors of expression and position by the task of each set.

    `positions` has expression given, `expression` has positions given, and new tissue has neither.
    """
    given = times == 0
    task = torch.stack([given[:, 0], given[:, 1], ~given.any(1)], dim=1).to(errors.dtype)
    error = torch.stack([errors[:, 1], errors[:, 0], errors.sum(1)], dim=1)
    return torch.stack([(task * error).sum(0), task.sum(0)])


def named_terms(stage: str, terms: LossTerms) -> dict[str, Tensor]:
    """Return the terms of a loss under the names they are logged by."""
    return {
        f"{stage}/{name}": value.detach() for name, value in zip(TERM_NAMES, terms, strict=True)
    }
