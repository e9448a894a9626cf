"""What any Lightning Trainer may ask of the module, and what the module learns from its data.

The packages `lightning` and `pytorch_lightning` hold the same code twice, and a Trainer of one
refuses a module of the other: this base class belongs to both.
"""

import logging
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytorch_lightning
import torch
from torch import Tensor

from alphastomics.attn_model.model import Model
from alphastomics.config import Config
from alphastomics.diffusion_model.strategy import shard_model
from alphastomics.errors import InputError
from alphastomics.geometry import centered
from alphastomics.preprocessing.batch_loader import BatchLoader
from alphastomics.utils.dataholder import DataHolder

logger = logging.getLogger(__name__)


def is_distributed() -> bool:
    """Say whether this is one of several processes that train together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def scale_of_loader(loader: BatchLoader) -> float | None:
    """Return the root mean square coordinate of the cells of a set, from the training split.

    A set drawn across slices extends as far as the whole dataset, one of a slice as far as slices.
    """
    statistics = loader.metadata.position_statistics
    if statistics is None:
        return None
    return statistics.scale if loader.draw.kind == "random" else statistics.within_slice_scale


def scale_of_batch(batch: DataHolder) -> float | None:
    """Return the same of one batch, over all ranks; None where no two cells differ."""
    moved = centered(batch.positions.double(), batch.node_mask)
    squares = (moved * batch.node_mask[..., None]).square().sum((0, 1))
    sums = torch.cat([squares, batch.node_mask.sum().double()[None]])
    if is_distributed():
        torch.distributed.all_reduce(sums)
    varying = int((sums[:3] > 0).sum())
    return math.sqrt(float(sums[:3].sum()) / (float(sums[3]) * varying)) if varying else None


class TrainerModule(pl.LightningModule, pytorch_lightning.LightningModule):  # type: ignore[misc]
    """A LightningModule of both packages that knows the data it is trained on."""

    position_scale: Tensor
    updates: Tensor
    config: Config
    model: Model
    average: Model
    # Both packages look for these, and take the other package's own for a user's.
    configure_sharded_model = val_dataloader = None  # type: ignore[assignment]
    # Batches of an epoch, where they are known before Lightning asks its loader.
    num_batches: int | None = None
    has_begun = is_sharded = False

    def __init__(self, position_scale: float | None) -> None:
        super().__init__()
        known = position_scale is not None
        scale = math.nan if position_scale is None else position_scale
        if known and not (math.isfinite(scale) and scale > 0):
            raise InputError(f"position_scale: expected a number above 0, got {position_scale}")
        # float64, so that a scale survives the way through a checkpoint to the last digit.
        self.register_buffer("position_scale", torch.tensor(scale, dtype=torch.float64))
        # What the host knows of the buffers: to ask them would make it wait for a GPU.
        self.knows_scale, self.updates_done = known, 0
        self.scale_is_provisional = False
        self.genes: list[str] = []
        self.slice_names: list[str] = []
        # Slices whose style the count model knows, in its order.
        self.style_names: list[str] = []
        # Cell types that it knows, in its order.
        self.type_names: list[str] = []
        # What was done to the expression that the module is trained on; None where nobody said.
        self.normalization: dict[str, Any] | None = None
        # Whether every set that it is trained on lies in a plane: so does new tissue.
        self.planar = False
        # Whether its positions have three measured coordinates: so do those that it predicts.
        self.is_volume = False
        # By what it knows its training cells again; None where nobody said.
        self.training_digest: str | None = None

    def learn_scale(self, scale: float | None) -> None:
        """Keep the scale of positions; 1 where all cells lie in one point."""
        self.position_scale.fill_(1.0 if scale is None else scale)
        self.share_scale()

    def require_scale(self, batch: DataHolder) -> None:
        """Learn the scale of positions from the first batch, unless it is known."""
        if not self.knows_scale:
            self.learn_scale(scale_of_batch(batch))
            logger.info("position scale learned from a batch: %.6g", float(self.position_scale))
            # Lightning shows a few validation batches before training: they only stand in.
            attached = self._trainer is not None
            self.scale_is_provisional = attached and self.trainer.sanity_checking

    def share_scale(self) -> None:
        """Tell the networks, so that a sampler of one of them returns the user's units."""
        self.knows_scale = bool(torch.isfinite(self.position_scale))
        for network in (self.model, self.average):
            network.position_scale = float(self.position_scale) if self.knows_scale else None
            network.reflection = self.config.loss.reflection

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights and scale."""
        result = super().load_state_dict(*args, **kwargs)
        self.share_scale()
        self.updates_done = int(self.updates)
        return result

    def planned_steps(self) -> int:
        """Return how many updates the run will make.

        Asking Lightning sets its loader up before a checkpoint's state can reach it, and a resumed
        epoch would begin anew: a run of ours counts them from the length of the loader.
        """
        if self.num_batches is None:
            return int(self.trainer.estimated_stepping_batches)
        training = self.config.training
        return training.max_epochs * -(-self.num_batches // training.accumulate_grad_batches)

    def configure_model(self) -> None:
        """Shard the network and its average when the strategy has a mesh of devices."""
        mesh = getattr(self, "device_mesh", None)
        if mesh is not None and not self.is_sharded:
            full = self.config.distributed.fsdp.sharding_strategy == "FULL_SHARD"
            shard_model(self.model, mesh["data_parallel"], reshard=full)
            # No backward pass would shard the average again after a validation.
            shard_model(self.average, mesh["data_parallel"], reshard=True)
            self.is_sharded = True

    def on_fit_start(self) -> None:
        """Compile the network that is trained, where asked for; its weights stay where they are."""
        if self.config.training.compile:
            self.model.compile()

    def on_train_start(self) -> None:
        """Learn from the loader's metadata; what fails from here on is not a checkpoint's fault."""
        if self.scale_is_provisional:
            self.position_scale.fill_(math.nan)
            self.knows_scale = self.scale_is_provisional = False
        self.updates_done = int(self.updates)
        self.learn_from(self.trainer.train_dataloader)
        self.has_begun = True

    def learn_from(self, loader: Any) -> None:
        """Take genes, normalisation and scale from a loader of ours; nothing from any other."""
        if not isinstance(loader, BatchLoader):
            return
        if not self.knows_scale:
            self.learn_scale(scale_of_loader(loader))
        if not self.genes:
            metadata, mixed = loader.metadata, loader.draw.kind == "random"
            z_values = {record.z for record in metadata.slices}
            self.genes = metadata.genes
            self.normalization = metadata.normalization.model_dump()
            self.slice_names = [record.name for record in metadata.slices]
            self.training_digest = metadata.training_digest
            self.is_volume = None in z_values
            self.planar = not self.is_volume and (len(z_values) == 1 or not mixed)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write down format, config, genes and scale, and the checksum of it all."""
        from alphastomics.diffusion_model.checkpoint import add_model_metadata

        add_model_metadata(checkpoint, self)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take from a checkpoint what is no weight, and was learned before the first step."""
        from alphastomics.diffusion_model.checkpoint import OWN_KEY

        self.style_names = list(checkpoint.get(OWN_KEY, {}).get("styles", []))
        self.type_names = list(checkpoint.get(OWN_KEY, {}).get("types", []))

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path, map_location: Any = None, **_options: Any
    ) -> "TrainerModule":
        """Build the module of a checkpoint, ready for use; nothing in the file is ever run.

        Parameters
        ----------
        checkpoint_path
            A checkpoint, an exported folder, or the folder of a run.
        map_location
            Device to use; the CPU without one.
        """
        from alphastomics.diffusion_model.checkpoint import load_module

        module, _ = load_module(Path(checkpoint_path), kind=cls)
        return module if map_location is None else module.to(map_location)
