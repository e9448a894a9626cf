"""The module inside a run: a strategy shards it, and its checkpoints say what they are."""

from typing import Any

from alphastomics.diffusion_model.checkpoint import OWN_KEY, model_metadata
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.strategy import shard_model


class TrainedModule(AlphaSTomicsModule):
    """The module inside a run: it can be sharded, and its checkpoints say what they are."""

    genes: list[str]
    num_batches: int
    has_begun = False

    def planned_steps(self) -> int:
        """Count the updates from the length of the loader.

        Asking Lightning would set its loader up before a checkpoint's state can reach it, and a
        resumed epoch would begin anew.
        """
        training = self.config.training
        return training.max_epochs * -(-self.num_batches // training.accumulate_grad_batches)

    def configure_model(self) -> None:
        """Shard the network and its average when the strategy has a mesh of devices."""
        mesh = getattr(self, "device_mesh", None)
        if mesh is not None and not getattr(self, "is_sharded", False):
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
        """Note that everything was restored: what fails from here on is not the checkpoint's."""
        super().on_train_start()
        self.has_begun = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write down format, config, genes and scale."""
        checkpoint[OWN_KEY] = model_metadata(self, self.genes)
