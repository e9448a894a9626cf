"""Data and steps from which nothing can be learned: the first batch enters, warnings leave."""

import logging
from typing import Any

import lightning.pytorch as pl
import torch

from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.utils.dataholder import DataHolder

logger = logging.getLogger(__name__)

MOST_SKIPPED = 0.1  # share of steps: half precision skips a few while it adapts


class SanityCheck(pl.Callback):
    """Warns of a first batch without variation, and of updates most of which are skipped."""

    def __init__(self) -> None:
        self.looked = False
        self.warned = False

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: DataHolder, *_args: Any
    ) -> None:
        """Look at the first batch."""
        if not self.looked and trainer.is_global_zero:
            for problem in without_variation(batch):
                logger.warning("%s", problem)
        self.looked = True

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at how many updates were skipped so far."""
        assert isinstance(pl_module, AlphaSTomicsModule)
        skipped, steps = int(pl_module.skipped_steps), max(trainer.global_step, 1)
        if not self.warned and skipped > MOST_SKIPPED * steps and trainer.is_global_zero:
            self.warned = True
            logger.warning(
                "%d of %d updates were skipped, since their gradients were not finite: the model "
                "hardly learns; lower --lr, or check the data",
                skipped,
                steps,
            )


def without_variation(batch: DataHolder) -> list[str]:
    """Say what is the same in all cells of a batch."""
    mask = batch.node_mask
    if int(mask.sum()) < 2:
        return []
    problems = []
    cells = batch.expression[mask]
    if bool((cells == cells[0]).all()):
        problems.append(
            "all genes are constant in the first batch: nothing can be learned from expression; "
            "check X and the normalisation"
        )
    same = torch.stack([(position[real] == position[real][:1]).all() for position, real in
                        zip(batch.positions, mask, strict=True) if real.any()])  # fmt: skip
    if bool(same.all()):
        problems.append(
            "all cells of the first batch lie at one position: nothing can be learned of where "
            "they are; check --position_key"
        )
    return problems
