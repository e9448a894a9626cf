"""The parts of a training step: what the network sees of a batch, and what came of it."""

from typing import NamedTuple

from jaxtyping import Bool
from torch import Tensor

from alphastomics.attn_model.model import Model, Prediction
from alphastomics.diffusion_model.loss import LossTerms
from alphastomics.diffusion_model.masking import Hidden
from alphastomics.utils.dataholder import DataHolder

# What the terms of the loss are called in the log, in the order of `LossTerms`.
TERM_NAMES = tuple("loss" if name == "total" else name for name in LossTerms._fields)


class Scored(NamedTuple):
    """What a step made: the loss, the prediction, and the batch with its diffusion time."""

    terms: LossTerms
    prediction: Prediction
    batch: DataHolder
    times: Tensor
    errors: Tensor
    """Mean squared error of expression and position of each set (B, 2)."""


class Seen(NamedTuple):
    """What the network sees of a batch, but for the noisy positions."""

    expression: Tensor
    node_mask: Tensor | None
    gene_mask: Tensor
    hidden: Hidden
    times: Tensor

    def rows(self, chosen: Bool[Tensor, " B"], *, time: float) -> "Seen":
        """Return some of the sets, with their positions at another time."""
        hidden = Hidden(*(None if mask is None else mask[chosen] for mask in self.hidden))
        times = self.times[chosen].clone()
        times[:, 1] = time
        node_mask = None if self.node_mask is None else self.node_mask[chosen]
        return Seen(self.expression[chosen], node_mask, self.gene_mask[chosen], hidden, times)

    def through(self, model: Model, position: Tensor, smoothed: Tensor | None) -> Prediction:
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
        )


def named_terms(stage: str, terms: LossTerms) -> dict[str, Tensor]:
    """Return the terms of a loss under the names they are logged by."""
    return {
        f"{stage}/{name}": value.detach() for name, value in zip(TERM_NAMES, terms, strict=True)
    }
