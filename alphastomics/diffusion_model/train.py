"""A training run: a config and a processed folder enter, a run folder with checkpoints leaves."""

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.loggers.logger import Logger

from alphastomics.config import Config
from alphastomics.diffusion_model.advice import describe
from alphastomics.diffusion_model.background_save import BackgroundCheckpointIO, files_of
from alphastomics.diffusion_model.callbacks import (
    Keeper,
    Progress,
    StopOnRequest,
    TimeSplit,
    save_last,
)
from alphastomics.diffusion_model.checkpoint import (
    export_weights,
    load_module,
)
from alphastomics.diffusion_model.count_fit import fit_count_model
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.monitor import Monitor
from alphastomics.diffusion_model.position_fit import fit_position_head
from alphastomics.diffusion_model.randomness import seed_everything
from alphastomics.diffusion_model.resume import check_resume, require_same_order
from alphastomics.diffusion_model.run_folder import CsvLog, RunFolder
from alphastomics.diffusion_model.sanity import SanityCheck
from alphastomics.diffusion_model.slice_preparation import rotate_slices, slice_smoother
from alphastomics.diffusion_model.strategy import (
    choose_devices,
    choose_precision,
    choose_strategy,
    quiet_other_ranks,
)
from alphastomics.diffusion_model.tracking import wandb_logger
from alphastomics.errors import InputError
from alphastomics.preprocessing.batch_loader import BatchLoader, create_dataloaders
from alphastomics.preprocessing.folder import DataFolder
from alphastomics.preprocessing.holdout import Holdout
from alphastomics.preprocessing.resume import write_marker
from alphastomics.preprocessing.schema import Metadata

logger = logging.getLogger(__name__)
# What a checkpoint's state of the wrong kind makes of Lightning's restoring.
RESTORE_ERRORS = (LookupError, TypeError, AttributeError, ValueError, RuntimeError)


class TrainRequest(NamedTuple):
    """What a caller asks for beside the settings."""

    resume: str | None = None
    overwrite: bool = False
    profile: bool = False


def check_data(config: Config, metadata: Metadata) -> None:
    """Refuse data that cannot be trained on with these settings."""
    where = config.data.processed_data_dir
    cells = metadata.splits["train"].cells
    if cells == 0:
        raise InputError(f"{where}: the training split is empty; raise --train_ratio")
    if config.model.num_genes not in (None, metadata.num_genes):
        raise InputError(
            f"model.num_genes (--num_genes): {config.model.num_genes}, but {where} has "
            f"{metadata.num_genes} genes; leave it out, or preprocess with the right gene list"
        )
    set_size = config.data.loading.set_size
    sizes = [record.cells_per_split["train"] for record in metadata.slices]
    # Sets of a slice are padded to one size.
    fitting = cells if set_size is None else sum(-(-size // set_size) for size in sizes) * set_size
    if config.training.batch_size > max(fitting, cells):
        raise InputError(
            f"training.batch_size (--batch_size): {config.training.batch_size}, but the training "
            f"split of {where} has {cells} cells; use at most that many"
        )


def resume_path(request: TrainRequest, folder: RunFolder) -> Path | None:
    """Return the checkpoint to go on from; `last` in a folder without one starts anew."""
    if request.resume is None:
        return None
    if request.resume != "last":
        named = Path(request.resume)
        return RunFolder(named).last if RunFolder(named).exists() else named
    if not folder.last.is_file():
        logger.info("%s: no checkpoint yet; starting anew", folder.path)
        return None
    return folder.last


def make_loggers(config: Config, folder: RunFolder, csv_log: CsvLog) -> list[Logger]:
    """Return the CSV file, which is always written, and what else was asked for."""
    kind = config.logging.logger
    if kind == "csv":
        return [csv_log]
    try:
        if kind == "tensorboard":
            from lightning.pytorch.loggers import TensorBoardLogger

            return [csv_log, TensorBoardLogger(folder.path, name="tensorboard", version="")]
        return [csv_log, wandb_logger(config.logging, folder.path)]
    except ModuleNotFoundError as error:
        raise InputError(
            f"logging.logger {kind}: not installed; pip install 'alphastomics[track]'"
        ) from error


def quiet_lightning() -> None:
    """Leave it to us to speak: tips and notes on hardware are not the user's concern."""
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)


def make_trainer(
    config: Config, folder: RunFolder, watching: Sequence[pl.Callback], csv_log: CsvLog
) -> pl.Trainer:
    """Set Lightning up for a run on this machine."""
    quiet_lightning()
    devices = choose_devices(config.distributed)
    try:
        return pl.Trainer(
            accelerator=devices.accelerator,
            devices=devices.number,
            num_nodes=config.distributed.num_nodes,
            strategy=choose_strategy(config, devices),
            precision=choose_precision(config, devices),
            max_epochs=config.training.max_epochs,
            check_val_every_n_epoch=config.training.validate_every_n_epochs,
            accumulate_grad_batches=config.training.accumulate_grad_batches,
            logger=make_loggers(config, folder, csv_log),
            log_every_n_steps=config.logging.log_every_n_steps,
            callbacks=[
                Monitor(config.logging.log_every_n_steps),
                *watching,
                StopOnRequest(folder),
                SanityCheck(),
            ],
            plugins=[BackgroundCheckpointIO()],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
        )
    except RuntimeError as error:
        if "SLURM" not in str(error):
            raise
        raise InputError(f"train: this SLURM job is not set up for it: {error}") from error


def make_loaders(
    config: Config, metadata: Metadata, trainer: pl.Trainer, holdout: Holdout | None
) -> tuple[BatchLoader, BatchLoader]:
    """Return the loaders of training and validation for this rank."""
    loading, device = config.data.loading, trainer.strategy.root_device
    training, validation, _ = create_dataloaders(
        config.data.processed_data_dir,
        batch_size=config.training.batch_size,
        streaming=loading.streaming,
        buffer_size=loading.buffer_size,
        num_workers=loading.num_workers,
        set_size=loading.set_size,
        set_draw=loading.set_draw,
        seed=config.seed.global_seed,
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        verify_checksums=loading.verify_checksums,
        device=device if device.type == "cuda" else None,
        holdout=holdout,
        smooth=slice_smoother(config, metadata, device),
    )
    return training, validation


def train(
    config: Config,
    request: TrainRequest,
    *,
    holdout: Holdout | None = None,
    has_validation: bool = True,
    plan: Sequence[str] = (),
) -> dict[str, Any]:
    """Train a model; return a summary of the run, which is empty on all ranks but the first.

    Parameters
    ----------
    config
        All settings.
    request
        What is asked for beside them.
    holdout
        Training cells to hold out: they take the validation cells' part.
    has_validation
        Whether validation cells are looked at, where there are any.
    plan
        Lines to log before the cells are read.
    """
    metadata = DataFolder(config.data.processed_data_dir).metadata()
    check_data(config, metadata)
    folder = RunFolder(Path(config.logging.save_dir) / config.logging.exp_name)
    held_out = holdout is not None or metadata.splits["validation"].cells > 0
    keeper, progress, csv_log = Keeper(folder, config), Progress(), CsvLog(folder.metrics)
    split = TimeSplit() if request.profile else None
    watching = [progress, *([] if split is None else [split]), keeper]
    folder.recover_if_free()
    checkpoint = resume_path(request, folder)
    options = {"resume": request.resume is not None, "overwrite": request.overwrite}
    before = None if checkpoint is None else check_resume(checkpoint, config, metadata)
    trainer = make_trainer(config, folder, watching, csv_log)
    quiet_other_ranks(trainer)
    first = trainer.is_global_zero
    with folder.claimed(first=first):
        if first:  # all that can be refused is, before anything is written
            folder.require_free(checkpoint, **options)
            for line in plan:
                logger.info("%s", line)
        seed_everything(config.seed.global_seed, deterministic=config.seed.deterministic)
        training, validation = make_loaders(config, metadata, trainer, holdout)
        module = make_module(config, training)
        module.may_record = not request.profile  # which times the parts of an update
        if config.diffusion.position_frame == "registered":
            rotate_slices(module, training.reader, holdout, config.seed.global_seed)
        progress.total = training.num_cells * config.training.max_epochs
        if before is not None and checkpoint is not None:
            require_same_order(training, before, checkpoint)
        if first:
            folder.prepare(config, checkpoint, **options)
            csv_log.start(0 if before is None else before.logged_bytes)
        with folder.running(first=first):
            if checkpoint is None:  # which else has it
                fit_parts(module, training, config, trainer.strategy.root_device)
            seen = validation if has_validation and held_out else None
            run_fit(trainer, module, training, seen, checkpoint)
            return conclude(trainer, folder, keeper, split)


def fit_parts(
    module: AlphaSTomicsModule, training: BatchLoader, config: Config, device: torch.device
) -> None:
    """Fit what looks at single cells, before the network is trained."""
    fit_position_head(module, training, config, device)
    fit_count_model(module, training, config, device)


def make_module(config: Config, training: BatchLoader) -> AlphaSTomicsModule:
    """Build the network, tell it what its data are, and describe both in the log."""
    module = AlphaSTomicsModule(config, training.metadata.num_genes)
    module.learn_from(training)
    module.num_batches = len(training)
    set_size = config.data.loading.set_size or config.training.batch_size
    describe(module, training.metadata, set_size)
    return module


def run_fit(
    trainer: pl.Trainer,
    module: AlphaSTomicsModule,
    training: Any,
    validation: Any | None,
    checkpoint: Path | None,
) -> None:
    """Train, and say what was wrong with the data or the checkpoint where that fails."""
    try:
        with warnings.catch_warnings():
            # That there are no validation cells was seen, and is in the report.
            warnings.simplefilter("ignore", PossibleUserWarning)
            trainer.fit(
                module,
                training,
                validation,
                ckpt_path=None if checkpoint is None else str(checkpoint),
                weights_only=True,
            )
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        slices = module.describe_slices(module.seen_slices)
        raise InputError(
            f"values inside the network are not finite at step {module.global_step}, epoch "
            f"{module.current_epoch}, in a batch of {slices}; lower --lr, or check these slices"
        ) from error
    except RESTORE_ERRORS as error:
        if checkpoint is None or module.has_begun or isinstance(error, InputError):
            raise
        raise InputError(
            f"{checkpoint}: cannot be resumed from ({type(error).__name__}: {error}): its state of "
            "optimizer or loops is damaged; resume from another checkpoint"
        ) from error
    finally:
        # Lightning does this last, and not at all where the GPU has failed.
        files_of(trainer).wait()


def conclude(
    trainer: pl.Trainer, folder: RunFolder, keeper: Keeper, split: TimeSplit | None
) -> dict[str, Any]:
    """Save the end of a run, export the best weights, and write its report."""
    save_last(trainer, folder)
    files_of(trainer).wait()
    if not trainer.is_global_zero:
        return {}
    best = keeper.best_path() or folder.last
    summary: dict[str, Any] = {
        "run": str(folder.path),
        "best_checkpoint": str(best),
        "last_checkpoint": str(folder.last),
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "best_val_loss": min(keeper.best.values(), default=None),
        "best_step": keeper.best_step(),
    }
    if split is not None:
        summary["milliseconds_per_step"] = split.table()
    module, genes = load_module(best)
    summary["weights"] = str(export_weights(module, genes, folder.path / "export"))
    write_marker(folder.summary, summary)
    folder.mark("finished", step=trainer.global_step)
    return summary
