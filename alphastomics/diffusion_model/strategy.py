"""The parallel strategy: settings and the machine enter, Lightning's strategy leaves."""

import importlib.util
import logging
import os
import signal
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    Strategy,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from alphastomics.attn_model.model import Model
from alphastomics.config import Config, DistributedConfig
from alphastomics.diffusion_model.deepspeed import ZeroStrategy
from alphastomics.errors import InputError

logger = logging.getLogger(__name__)

LIGHTNING_PRECISION = {"bf16": "bf16-mixed", "fp16": "16-mixed", "32": "32-true"}


class Devices(NamedTuple):
    """Kind and number of the devices of one machine."""

    accelerator: Literal["cpu", "gpu"]
    number: int


def choose_devices(settings: DistributedConfig) -> Devices:
    """Return what to run on: the CPU without a GPU; more GPUs than there are, are refused.

    Under a launcher such as torchrun on CPUs, each of its processes is a device.
    """
    present = torch.cuda.device_count()
    launched = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    asked = launched * (present > 0) if settings.devices == "auto" else settings.devices
    if asked == 0 or present == 0:
        devices = Devices("cpu", launched)
    elif asked > present:
        raise InputError(
            f"--gpus {asked} (distributed.devices): this machine has {present} GPU(s); "
            "ask for fewer, or 0 for the CPU"
        )
    else:
        devices = Devices("gpu", asked)
    check_launch(devices, settings.num_nodes)
    return devices


def say_without_gpu(settings: DistributedConfig) -> None:
    """Warn, once for a run, that the GPUs that were asked for are not there."""
    asked = settings.devices
    if asked not in ("auto", 0, 1) and torch.cuda.device_count() == 0:
        logger.warning("--gpus %d: this machine has no GPU: training on the CPU", asked)


def check_launch(devices: Devices, num_nodes: int) -> None:
    """Refuse a run that would wait for ranks that nobody has started, or leave some out."""
    ranks = devices.number * num_nodes
    launched = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS")
    if launched is None and num_nodes > 1:
        raise InputError(
            f"--num_nodes {num_nodes} (distributed.num_nodes): start the program on every machine "
            "with torchrun or srun: see docs/distributed.md"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ and launched != str(ranks):
        raise InputError(
            f"torchrun started {launched} processes, but --gpus and --num_nodes ask for "
            f"{devices.number} x {num_nodes}: make the two agree"
        )


def choose_precision(config: Config, devices: Devices) -> Any:
    """Return Lightning's name of a precision; auto is bf16 on a GPU and 32 on a CPU."""
    precision = config.training.precision
    if config.distributed.strategy == "deepspeed":
        return None  # the strategy brings its own
    if precision == "auto":
        precision = "bf16" if devices.accelerator == "gpu" else "32"
    if precision == "fp16" and devices.accelerator == "cpu":
        raise InputError(
            "training.precision (--fp16): half precision needs a GPU; use bf16 or 32 on a CPU"
        )
    return LIGHTNING_PRECISION[precision]


def choose_strategy(config: Config, devices: Devices) -> Strategy | str:
    """Return the strategy that the settings ask for."""
    settings = config.distributed
    ranks = devices.number * settings.num_nodes
    backend = "nccl" if devices.accelerator == "gpu" else "gloo"
    if settings.strategy == "fsdp":
        return ModelParallelStrategy(
            data_parallel_size=ranks,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=backend,
        )
    if settings.strategy == "deepspeed":
        return deepspeed_strategy(config, backend)
    if settings.strategy == "ddp" or ranks > 1:
        return DDPStrategy(process_group_backend=backend)
    return "auto"


def deepspeed_strategy(config: Config, backend: str) -> Strategy:
    """Return DeepSpeed's ZeRO, or say why it cannot run."""
    stage, training = config.distributed.deepspeed.stage, config.training
    reason = None
    if stage == 3:
        reason = "stage 3 would share out the averaged weights too; set deepspeed.stage: 2"
    elif training.precision not in ("auto", "32"):
        reason = f"would keep the averaged weights in {training.precision} too; use --precision 32"
    elif training.accumulate_grad_batches > 1:
        reason = "training.accumulate_grad_batches must be 1; use a larger batch"
    elif importlib.util.find_spec("deepspeed") is None:
        reason = "DeepSpeed is not installed; pip install 'alphastomics[deepspeed]'"
    if reason is not None:
        raise InputError(f"distributed.strategy deepspeed: {reason}, or use --strategy fsdp")
    return ZeroStrategy(stage, training.gradient_clip_val, backend)


def quiet_other_ranks(trainer: pl.Trainer) -> None:
    """Log on the first rank alone, and let the others end at once until training begins.

    It may be waiting for a rank that has refused, inside torch, where Python handles no signal; and
    it has written nothing that would need cleaning up.
    """
    if not trainer.is_global_zero:
        logging.getLogger("alphastomics").setLevel(logging.ERROR)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def shard_model(model: Model, mesh: DeviceMesh, *, reshard: bool) -> None:
    """Shard a network layer by layer (FSDP2), in place.

    Parameters
    ----------
    model
        The network.
    mesh
        The ranks that share it.
    reshard
        Give the gathered weights up after the forward pass: less memory, one more exchange.
    """
    for layer in model.trunk.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    # The count model is small, frozen, and called by itself: every rank keeps all of it.
    whole = set() if model.count_model is None else set(model.count_model.parameters())
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, ignored_params=whole)
