"""Settings of devices, logging and the extraction of embeddings."""

from typing import Annotated, Literal

from pydantic import Field

from alphastomics.config.section import Section, count, setting, text


class DeepSpeedConfig(Section):
    """Settings of `strategy: deepspeed`."""

    stage: Literal[1, 2, 3] = setting(2, "ZeRO stage.")


class FSDPConfig(Section):
    """Settings of `strategy: fsdp`."""

    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP"] = setting(
        "FULL_SHARD",
        "Shard weights, gradients and optimizer state, or keep weights gathered "
        "between forward and backward.",
    )


class DistributedConfig(Section):
    """Devices of a run, and how training is distributed over them."""

    strategy: Literal["auto", "ddp", "fsdp", "deepspeed"] = setting(
        "auto", "Parallel strategy; auto is ddp for several devices."
    )
    num_nodes: int = count(1, "Machines of the run.")
    devices: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = setting(
        "auto",
        "GPUs on each machine; 0 is the CPU; auto is one GPU, or the CPU without one.",
        json_schema_extra={"expected": "auto or a whole number of at least 0"},
    )
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    fsdp: FSDPConfig = FSDPConfig()


class ExtractConfig(Section):
    """How embeddings are extracted."""

    mode: Literal["auto", "latent", "niche", "encoder", "transformer", "all_layers"] = setting(
        "auto",
        "What becomes a cell's embedding: its latent, that and the latents around it, or hidden "
        "states; auto is niche, or encoder for a model without a count model.",
    )
    format: Literal["npz", "pt", "h5", "h5ad"] = setting("npz", "Format of the output file.")
    output: str = text("embeddings.npz", "Output file.")
    max_samples: int | None = count(None, "Cells to embed at most; null embeds all.")


class LoggingConfig(Section):
    """What a run writes down."""

    logger: Literal["csv", "tensorboard", "wandb"] = setting(
        "csv", "Logger beside the CSV file, which is always written."
    )
    wandb_project: str = text("alphastomics", "Project name for Weights & Biases.")
    log_every_n_steps: int = count(10, "Steps between two logged values.")
    save_top_k: int = count(3, "Best checkpoints to keep.", minimum=0)
    save_every_n_steps: int = count(500, "Steps between two writes of the last checkpoint.")
    save_dir: str = text("./outputs", "Folder under which each run has its own.")
    exp_name: str = text(
        "alphastomics",
        "Name of the run, and of its folder.",
        pattern=r"^[^/\\\x00-\x1f.][^/\\\x00-\x1f]*$",
        json_schema_extra={"expected": "a folder name without slashes or a leading dot"},
    )
