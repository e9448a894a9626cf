"""DeepSpeed's ZeRO 1 and 2: gradients and Adam's moments lie in parts on the ranks.

Lightning's strategy wants a GPU, casts the whole module and writes a folder of parts. Here it runs
on CPU ranks too, in float32, and its checkpoints are the same one file as everywhere: weights and
moments enter and leave whole.
"""

import argparse
from typing import Any

import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")


class PlainPrecision(DeepSpeedPrecision):
    """Leaves the number formats of module and batch as they are: positions keep their digits."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module."""
        return module

    def convert_input(self, data: Any) -> Any:
        """Return the batch."""
        return data


class ZeroStrategy(DeepSpeedStrategy):
    """ZeRO stage 1 or 2 through Lightning, on GPUs or CPU ranks.

    Parameters
    ----------
    stage
        1 shares out the moments, 2 the gradients too.
    clip
        Largest gradient norm; 0 is no limit. The engine holds the gradients, so it clips them.
    backend
        How ranks talk: nccl or gloo.
    """

    def __init__(self, stage: int, clip: float, backend: str) -> None:
        super().__init__(
            stage=stage,
            process_group_backend=backend,
            precision_plugin=PlainPrecision("32-true"),
            logging_batch_size_per_gpu=1,
        )
        assert isinstance(self.config, dict)
        self.config["gradient_clipping"] = clip

    def setup_environment(self) -> None:
        """Meet the other ranks, on whatever device."""
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """Meet the other ranks; CPU ranks have no device number to check."""
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None
    ) -> tuple[Any, Any]:
        """Hand the trained weights to the engine, which wants a device number even on a CPU."""
        import deepspeed

        engine, sharded, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=self.root_device.index or self.local_rank),
            config=self.config,
            model=model,
            model_parameters=[weight for weight in model.parameters() if weight.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, sharded

    def gradient_norm(self) -> Tensor:
        """Return the norm of the whole gradient, before clipping; infinite if it is not finite."""
        norm = self.optimizers[0].scaled_global_norm()  # type: ignore[attr-defined]
        # DeepSpeed says -1 for what is not finite.
        return norm if norm >= 0 else torch.full_like(norm, torch.inf)

    def trained(self) -> list[nn.Parameter]:
        """Return the weights in the order in which the optimizer got them."""
        assert self.lightning_module is not None
        return [weight for weight in self.lightning_module.parameters() if weight.requires_grad]

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Gather the moments: the state of a plain AdamW, the same on every rank."""
        from deepspeed.utils import safe_get_full_optimizer_state

        inner = optimizer.optimizer
        weights = self.trained()
        steps = [state["step"] for state in inner.state.values()]
        group = {key: value for key, value in inner.param_groups[0].items() if key != "params"}
        moments = {
            index: {key: safe_get_full_optimizer_state(weight, key) for key in MOMENTS}
            for index, weight in enumerate(weights if steps else [])
        }
        # A count of its own for each: a file keeps tensors shared, and all would count together.
        counted = {index: {"step": steps[0].clone(), **both} for index, both in moments.items()}
        return {
            "state": counted,
            "param_groups": [{**group, "params": list(range(len(weights)))}],
        }

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write one file, on the first rank."""
        DDPStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Read one file, on every rank."""
        return DDPStrategy.load_checkpoint(self, checkpoint_path, *args, **kwargs)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Say that the optimizer's state is in the file."""
        return True

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:  # noqa: FBT001, FBT002 - Lightning's signature
        """Load the weights, and this rank's part of their copy in the optimizer."""
        from deepspeed.utils import safe_set_full_fp32_param

        assert self.lightning_module is not None
        self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)
        for weight in self.trained():
            safe_set_full_fp32_param(weight, weight.detach())

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load this rank's part of the moments."""
        from deepspeed.utils import safe_set_full_optimizer_state

        (state,) = checkpoint["optimizer_states"]
        sharded: Any = self.optimizers[0]
        for flat in sharded.single_partition_of_fp32_groups:
            zeros = {key: torch.zeros_like(flat) for key in MOMENTS}
            sharded.optimizer.state[flat] = {"step": state["state"][0]["step"].clone(), **zeros}
        sharded._lazy_init_hp_params_optimizer_state()
        for index, weight in enumerate(self.trained()):
            for key in MOMENTS:
                value = state["state"][index][key].to(weight.device)
                safe_set_full_optimizer_state(weight, value, key)
        kept = {key: value for key, value in state["param_groups"][0].items() if key != "params"}
        sharded.optimizer.param_groups[0].update(kept)


def gradient_of(weight: nn.Parameter) -> Tensor | None:
    """Return the gradient of a weight; one that ZeRO has shared out is gathered."""
    if not hasattr(weight, "_hp_mapping"):
        return weight.grad
    from deepspeed.utils import safe_get_full_grad

    return safe_get_full_grad(weight)
