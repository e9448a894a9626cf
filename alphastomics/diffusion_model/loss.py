"""The loss: predicted and true cells enter, named terms leave.

Expression: mean over real cells and measured genes of (x - x')^2. Position: mean over pairs of real
cells of the squared error of their distance, or, by setting, mean over real cells of the squared
distance to the truth after rigid alignment; both ignore rotation and translation. Masked
reconstruction: on hidden entries alone, against the clean values.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from alphastomics.config import Config, LossConfig, MaskingConfig
from alphastomics.diffusion_model.distance import distance_loss
from alphastomics.geometry import aligned_sets, centered


class LossTerms(NamedTuple):
    """The terms of the loss, unweighted, and their weighted sum `total`."""

    total: Tensor
    expression: Tensor
    position: Tensor
    masked: Tensor
    balance: Tensor


class Cells(NamedTuple):
    """Expression (B, N, G) and positions (B, N, 3), predicted or true."""

    expression: Tensor
    position: Tensor


class Entries(NamedTuple):
    """Which entries count: real cells (B, N), measured genes (B, N, G) and what was noised.

    `noised` (B, 2) says for each set whether its expression and its position were noised: a
    modality that is given needs no prediction. `hidden_*` are the entries of masked diffusion.
    `frame_known` (B): sets whose positions are compared in their own frame; True is all of them.
    """

    node_mask: Tensor
    gene_mask: Tensor | None = None
    noised: Tensor | None = None
    hidden_expression: Tensor | None = None
    hidden_position: Tensor | None = None
    frame_known: Tensor | Literal[True] | None = None


def squared_error(
    predicted: Float[Tensor, "*shape"], true: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """(x - x')^2, in the precision of the truth: a prediction in bf16 has too few digits."""
    return (predicted.to(true.dtype) - true).square()


def mean_over(error: Float[Tensor, "..."], counted: Bool[Tensor, "..."]) -> Float[Tensor, ""]:
    """Mean of the counted entries; 0 when there is none."""
    counted = counted.expand_as(error)
    # where, not a multiplication: a non-finite entry that does not count must not become NaN.
    total = torch.where(counted, error, torch.zeros_like(error)).sum()
    return total / counted.sum().clamp(min=1)


def aligned_loss(
    predicted: Float[Tensor, "B N 3"],
    true: Float[Tensor, "B N 3"],
    node_mask: Bool[Tensor, "B N"],
    *,
    reflection: bool,
    frame_known: Bool[Tensor, " B"] | Literal[True] | None = None,
) -> Float[Tensor, ""]:
    """Mean over real cells of the squared distance to the truth, rotated onto the prediction.

    The rotation is the best one, so that its own derivative adds nothing to the gradient. Sets with
    `frame_known` are not rotated: their noisy positions define the frame.
    """
    target = in_frame_of(predicted, true, node_mask, frame_known, reflection=reflection)
    error = (centered(predicted, node_mask) - target).square().sum(-1)
    return mean_over(error, node_mask)


def in_frame_of(
    predicted: Float[Tensor, "B N 3"],
    true: Float[Tensor, "B N 3"],
    node_mask: Bool[Tensor, "B N"],
    frame_known: Bool[Tensor, " B"] | Literal[True] | None,
    *,
    reflection: bool,
) -> Float[Tensor, "B N 3"]:
    """Centre the truth, and rotate it onto the prediction but for sets with `frame_known`."""
    if frame_known is True:
        return centered(true, node_mask)
    target = aligned_sets(true, predicted, node_mask, reflection=reflection)
    if frame_known is None:
        return target
    return torch.where(frame_known[:, None, None], centered(true, node_mask), target)


@torch.no_grad()
def errors_of_sets(predicted: Cells, true: Cells, entries: Entries) -> Float[Tensor, "B 2"]:
    """Mean squared error of expression and of position of each set: for people to watch."""
    mask, counted = entries.node_mask, _counted_genes(entries, true.expression)
    expression = squared_error(predicted.expression, true.expression) * counted
    position = (centered(predicted.position, mask) - centered(true.position, mask)).square()
    cells = mask.sum(1).clamp(min=1)
    return torch.stack(
        [
            expression.sum((1, 2)) / counted.sum((1, 2)).clamp(min=1),
            (position.sum(-1) * mask).sum(1) / cells,
        ],
        dim=1,
    )


class DualModalLoss(nn.Module):
    """Loss of expression and position together.

    Parameters
    ----------
    lambda_expression, lambda_position, lambda_masked_reconstruction
        Weights of the terms.
    position_loss
        `distance`: squared error of distances; `aligned`: squared error after rigid alignment;
        `both`: their sum.
    reflection
        Allow mirror images when aligning.
    """

    def __init__(
        self,
        lambda_expression: float = LossConfig().lambda_expression,
        lambda_position: float = LossConfig().lambda_position,
        lambda_masked_reconstruction: float = MaskingConfig().reconstruction_weight,
        position_loss: str = LossConfig().position,
        *,
        reflection: bool = LossConfig().reflection,
    ) -> None:
        super().__init__()
        self.lambda_expression = lambda_expression
        self.lambda_position = lambda_position
        self.lambda_masked_reconstruction = lambda_masked_reconstruction
        self.position_loss, self.reflection = position_loss, reflection

    @classmethod
    def from_config(cls, config: Config) -> "DualModalLoss":
        """Build the loss that a configuration describes."""
        return cls(
            config.loss.lambda_expression,
            config.loss.lambda_position,
            config.masking.reconstruction_weight,
            config.loss.position,
            reflection=config.loss.reflection,
        )

    @property
    def weights(self) -> dict[str, float]:
        """The weight of every term in the total."""
        return {
            "expression": self.lambda_expression,
            "position": self.lambda_position,
            "masked": self.lambda_masked_reconstruction,
            "balance": 1.0,  # the layers have weighted it
        }

    def forward(
        self, predicted: Cells, true: Cells, entries: Entries, penalty: Tensor | None = None
    ) -> LossTerms:
        """Score a prediction.

        Parameters
        ----------
        predicted, true
            The cells.
        entries
            Which entries count.
        penalty
            The routers' weighted balance loss, added to the total as it is.
        """
        none = true.expression.new_zeros(())
        terms = {
            "expression": self.expression_term(predicted, true, entries),
            "position": self.position_term(predicted, true, entries),
            "masked": self.masked_term(predicted, true, entries),
            "balance": none if penalty is None else penalty,
        }
        weighted = [weight * terms[name] for name, weight in self.weights.items()]
        return LossTerms(sum(weighted, start=none), **terms)

    def with_latents(
        self, terms: LossTerms, predicted: Tensor, true: Tensor, entries: Entries
    ) -> LossTerms:
        """Add the error of latents to that of expression: mean over real cells of noised sets."""
        counted = entries.node_mask[..., None]
        if entries.noised is not None:
            counted = counted & entries.noised[:, 0, None, None]
        error = mean_over(squared_error(predicted, true), counted)
        return terms._replace(
            total=terms.total + self.lambda_expression * error,
            expression=terms.expression + error,
        )

    def expression_term(self, predicted: Cells, true: Cells, entries: Entries) -> Tensor:
        """Mean over real cells, measured genes and noised sets of the squared error."""
        counted = _counted_genes(entries, true.expression)
        if entries.noised is not None:
            counted = counted & entries.noised[:, 0, None, None]
        return mean_over(squared_error(predicted.expression, true.expression), counted)

    def position_term(self, predicted: Cells, true: Cells, entries: Entries) -> Tensor:
        """Error of the positions of noised sets, whatever the frame."""
        real = entries.node_mask
        if entries.noised is not None:
            real = real & entries.noised[:, 1, None]
        term = true.position.new_zeros(())
        if self.position_loss in ("distance", "both"):
            term = term + distance_loss(predicted.position, true.position, real)
        if self.position_loss in ("aligned", "both"):
            term = term + aligned_loss(
                predicted.position,
                true.position,
                real,
                reflection=self.reflection,
                frame_known=entries.frame_known,
            )
        return term

    def masked_term(self, predicted: Cells, true: Cells, entries: Entries) -> Tensor:
        """Squared error of the hidden entries alone, against the clean values."""
        term = true.position.new_zeros(())
        if entries.hidden_expression is not None:
            hidden = entries.hidden_expression & _counted_genes(entries, true.expression)
            term = term + mean_over(squared_error(predicted.expression, true.expression), hidden)
        if entries.hidden_position is not None:
            # In the prediction's frame: the loss must not ask for a frame that noise has erased.
            real, known = entries.node_mask, entries.frame_known is True or None
            target = in_frame_of(
                predicted.position, true.position, real, known, reflection=self.reflection
            )
            error = squared_error(centered(predicted.position, real), target)
            term = term + mean_over(error, entries.hidden_position & real[..., None])
        return term


def _counted_genes(entries: Entries, like: Tensor) -> Tensor:
    """Entries of real cells and measured genes."""
    counted = entries.node_mask[..., None].expand_as(like)
    return counted if entries.gene_mask is None else counted & entries.gene_mask
