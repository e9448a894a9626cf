"""Going on with a run: a checkpoint's content enters, where the run was, or a refusal, leaves.

Everything that makes a resumed run another run than the one it goes on with is refused here,
before anything is written.
"""

from pathlib import Path
from typing import Any, NamedTuple

from alphastomics.config import Config
from alphastomics.config.file import parse_document
from alphastomics.diffusion_model.callbacks import LOGGED_KEY
from alphastomics.diffusion_model.checkpoint import OWN_KEY, read_checkpoint, require_same_genes
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.errors import InputError
from alphastomics.preprocessing.batch_loader import BatchLoader
from alphastomics.preprocessing.schema import Metadata

# Sections and keys that say what is learned, and how.
SAME_SECTIONS = ("model", "layer", "diffusion", "masking", "loss")
SAME_TRAINING = ("mode", "accumulate_grad_batches", "ema_decay")
# How the cells get into memory; between two epochs another number of processes may take over.
FREE_BETWEEN_EPOCHS = frozenset({"streaming", "buffer_size", "world_size"})
DAMAGED = "its record of where the run was makes no sense: it is damaged; resume from another one"


class Resumed(NamedTuple):
    """Where a run was: bytes of its log, epochs it had begun, and the state of its loader."""

    logged_bytes: int
    epochs: int
    loader: dict[str, Any]


def check_resume(path: Path, config: Config, metadata: Metadata) -> Resumed:
    """Refuse a checkpoint of another model or gene list; return where its run was."""
    content = read_checkpoint(path)
    data = config.data.processed_data_dir
    require_same_genes(content[OWN_KEY]["genes"], metadata.genes, path, data)
    module = AlphaSTomicsModule(config, metadata.num_genes)
    stored = {name: tuple(value.shape) for name, value in content["state_dict"].items()}
    described = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    if stored != described:
        names = sorted(set(stored.items()) ^ set(described.items()))
        raise InputError(
            f"{path}: its network is not the one that the settings describe (first difference: "
            f"{names[0][0]}); use the config.yaml of its run folder"
        )
    shapes = dict(enumerate(tuple(value.shape) for value in module.model.parameters()))
    return resumed_from(content, config, shapes, path)


def resumed_from(
    content: dict[str, Any], config: Config, shapes: dict[int, tuple[int, ...]], path: Path
) -> Resumed:
    """Read where a run was; refuse settings under which it would be another run."""
    try:
        loop = content["loops"]["fit_loop"]
        (loader,) = loop["state_dict"]["combined_loader"]
        states = content["callbacks"].values()
        logged = next((int(state[LOGGED_KEY]) for state in states if LOGGED_KEY in state), 0)
        begun = int(loop["epoch_progress"]["current"]["ready"])
        before = Resumed(logged, begun, {**loader, "loader": dict(loader["loader"])})
        int(loader["batch"]), int(loader["epoch"])
        require_plain_states(content, shapes)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: {DAMAGED}") from error
    if begun > config.training.max_epochs:
        raise InputError(
            f"training.max_epochs (--epochs): {config.training.max_epochs}, but {path} is of a run "
            f"that has begun epoch {begun}; give at least {begun}"
        )
    require_same_settings(parse_document(content[OWN_KEY]["config"], str(path)), config, path)
    return before


def require_plain_states(content: dict[str, Any], shapes: dict[int, tuple[int, ...]]) -> None:
    """Refuse states of optimizer, schedule and callbacks that are of another kind (TypeError)."""
    numbers = (int, float)
    for state in content["optimizer_states"]:
        for number, moments in state["state"].items():
            for value in moments.values():
                is_scalar = isinstance(value, numbers) or value.ndim == 0
                # A sharded run names its weights; then only the kind is known here.
                shape = shapes.get(number) if isinstance(number, int) else tuple(value.shape)
                if not is_scalar and tuple(value.shape) != shape:
                    raise TypeError("optimizer_states")
        if not all(isinstance(group, dict) for group in state["param_groups"]):
            raise TypeError("param_groups")
    for schedule in content["lr_schedulers"]:
        if not isinstance(schedule["last_epoch"], int):
            raise TypeError("lr_schedulers")
    keeper = content["callbacks"]["Keeper"]
    losses = [*keeper["best"].values(), keeper["lowest"], keeper["waited"]]
    if not all(isinstance(value, numbers) for value in losses):
        raise TypeError("callbacks")


def require_same_settings(known: Config, config: Config, path: Path) -> None:
    """Refuse to go on under other settings than those that the run began with."""
    keys: dict[str, tuple[str, ...]] = {"seed": ("global_seed",)}
    keys |= {name: tuple(type(getattr(config, name)).model_fields) for name in SAME_SECTIONS}
    keys |= {"training": SAME_TRAINING}
    for section, key in ((section, key) for section, names in keys.items() for key in names):
        before, now = (getattr(getattr(settings, section), key) for settings in (known, config))
        if before != now:
            raise InputError(
                f"{path}: its run has {section}.{key} {before!r}, but the settings say {now!r}: "
                "resume with the config.yaml of its run folder, or start a new run under another "
                "--exp_name"
            )


def require_same_order(training: BatchLoader, before: Resumed, path: Path) -> None:
    """Refuse other data, and settings under which an epoch's cells come in another order."""
    state = before.loader
    now, known = training.state_dict()["loader"], state["loader"]
    differing = {key for key in now if known.get(key) != now[key]}
    if state["batch"] == 0:
        differing -= FREE_BETWEEN_EPOCHS
        if known.get("world_size") != now["world_size"]:
            differing -= {"batch_size"}  # it counts the cells of one process
    if differing:
        key = min(differing)
        raise InputError(
            f"{path}: its run has {key} {known.get(key)!r}, but {key} is now {now[key]!r}: resume "
            "with the same data and settings, or start a new run under another --exp_name"
        )
