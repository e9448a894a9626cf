"""Checkpoints: tensors and plain data enter, one checksummed file leaves, and back.

A checkpoint is what `torch.save` writes, read with `weights_only=True` alone, so that no code of a
file ever runs. It carries its format, config, genes and scale under the key `alphastomics`, and the
sha256 of all its content under `sha256`: torch itself does not notice a flipped bit.
"""

import hashlib
import io
import json
import logging
import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor

from alphastomics import __version__
from alphastomics.attn_model.gene_curve import GeneCurve
from alphastomics.config.file import parse_document, to_document
from alphastomics.diffusion_model.bounds import (
    MOST_PICKLED,
    READ_ERRORS,
    Shapes,
    require_bounded_archive,
    require_bounded_content,
    require_fitting,
    unfit,
)
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.run_folder import checkpoint_of, read_record
from alphastomics.diffusion_model.trainer_module import TrainerModule
from alphastomics.errors import InputError
from alphastomics.io.files import write_bytes, write_text

logger = logging.getLogger(__name__)

FORMAT = 1
OWN_KEY, CHECKSUM_KEY = "alphastomics", "sha256"
MODEL_PREFIX = "model."
WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"


def plain(value: Any, where: str = "checkpoint") -> Any:
    """Return a value as tensors and plain data; what is neither is our own mistake."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(items)]
    raise TypeError(f"{where}: {type(value).__name__} is no plain data")


def digest(value: Any) -> str:
    """Return the sha256 of plain data, whatever the order in which a file stores it."""
    hasher = hashlib.sha256()
    _feed(hasher, value)
    return hasher.hexdigest()


def _feed(hasher: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        numbers = value.detach().cpu().contiguous().flatten()
        hasher.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        hasher.update(numbers.view(torch.uint8).numpy().tobytes() if numbers.numel() else b"")
    elif isinstance(value, Mapping):
        hasher.update(f"mapping {len(value)}".encode())
        for key, item in value.items():
            hasher.update(repr(key).encode())
            _feed(hasher, item)
    elif isinstance(value, list | tuple):
        hasher.update(f"list {len(value)}".encode())
        for item in value:
            _feed(hasher, item)
    else:
        hasher.update(f"{type(value).__name__} {value!r}".encode())


class ChecksummedCheckpointIO(TorchCheckpointIO):
    """Lightning's reading and writing of checkpoints, whole and with a checksum."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint, complete or not at all."""
        content = plain({key: value for key, value in checkpoint.items() if key != CHECKSUM_KEY})
        content[CHECKSUM_KEY] = digest(content)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        # In memory first: on a full disk torch's own writer fails without saying why.
        buffer = io.BytesIO()
        torch.save(content, buffer)
        write_bytes(target, buffer.getbuffer())

    def load_checkpoint(self, path: Any, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint, refusing what was altered; never as code, whatever is asked for."""
        return read_checkpoint(Path(path))


def load_plain(path: Path, kind: str, most_pickled: int) -> Any:
    """Read what `torch.save` wrote, if it is tensors and plain data; nothing in it is ever run."""
    pickle_bytes = require_bounded_archive(path, kind, most_pickled)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path}: not {kind}, or damaged: it holds something other than tensors and plain "
            "data, and was not run"
        ) from error
    except READ_ERRORS as error:
        raise InputError(f"{path}: cannot be read as {kind}: truncated or damaged") from error
    require_bounded_content(content, pickle_bytes, path)
    return content


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU and check its checksum, or say what is wrong with it."""
    if path.is_dir():
        inside = [path / "checkpoints/last.ckpt", path / "last.ckpt"]
        here = next((name for name in inside if name.is_file()), "a checkpoint file like last.ckpt")
        raise InputError(f"{path}: is a folder, and of no model; give {here}")
    if not path.is_file():
        raise InputError(f"{path}: no such checkpoint")
    content = load_plain(path, "a checkpoint of AlphaSTomics", MOST_PICKLED)
    if not isinstance(content, dict) or OWN_KEY not in content or CHECKSUM_KEY not in content:
        raise InputError(f"{path}: not a checkpoint of AlphaSTomics")
    version = content[OWN_KEY].get("format") if isinstance(content[OWN_KEY], dict) else None
    if version != FORMAT:
        raise InputError(
            f"{path}: checkpoint format {version!r}; this version ({__version__}) reads format "
            f"{FORMAT}: use the version of AlphaSTomics that wrote it"
        )
    checksum = content.pop(CHECKSUM_KEY)
    if digest(content) != checksum:
        raise InputError(
            f"{path}: altered since it was written: its content differs from its checksum"
        )
    # Checkpoints of version 0.1.0 lack what came later.
    is_first = not {"flat", "training_digest"} & content[OWN_KEY].keys()
    if is_first:
        content[OWN_KEY]["flat"] = False
    require_metadata(content[OWN_KEY], path)
    weights = content.get("state_dict")
    if not isinstance(weights, dict) or not all(map(is_weight, weights.items())):
        raise InputError(f"{path}: holds no weights: it is damaged")
    if is_first:
        add_curves(weights, content[OWN_KEY], path)
    return content


def add_curves(weights: dict[str, Tensor], metadata: dict[str, Any], path: Path) -> None:
    """Give a network of version 0.1.0 the curves of genes that it lacks: all of them zero."""
    config = parse_document(metadata["config"], str(path))
    with torch.device("meta"):
        curve = GeneCurve(len(metadata["genes"]), config.model.d_model)
    for network in ("model", "average"):
        for name, value in curve.state_dict().items():
            key = f"{network}.trunk.gene_curve.{name}"
            weights.setdefault(key, torch.zeros(value.shape))


def is_weight(item: tuple[Any, Any]) -> bool:
    """Tell a named tensor of numbers from anything else."""
    name, value = item
    return isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided


def require_metadata(metadata: dict[str, Any], path: Path) -> None:
    """Refuse a model that does not say what it is in a way that makes sense."""
    genes, scale, done = (metadata.get(key) for key in ("genes", "position_scale", "normalization"))
    sound = {
        "config": isinstance(metadata.get("config"), dict),
        "genes": isinstance(genes, list)
        and all(isinstance(gene, str) for gene in genes)
        and 0 < len(genes) == len(set(genes)),
        "position_scale": isinstance(scale, float) and 0 < scale < math.inf,
        "normalization": done is None
        or (isinstance(done, dict) and {"log_normalize", "scale"} <= done.keys()),
        "flat": isinstance(metadata.get("flat"), bool),
        "training_digest": isinstance(metadata.get("training_digest"), str | None),
        "slices": is_list_of_names(metadata.get("slices", [])),
        "styles": is_list_of_names(metadata.get("styles", [])),
        "types": is_list_of_names(metadata.get("types", [])),
    }
    for key, holds in sound.items():
        if not holds:
            raise InputError(f"{path}: its {key} is missing or makes no sense: it is damaged")


def is_list_of_names(value: Any) -> bool:
    """Tell names from anything else."""
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def model_metadata(module: AlphaSTomicsModule, genes: Sequence[str]) -> dict[str, Any]:
    """Return what a checkpoint says of itself."""
    return {
        "format": FORMAT,
        "version": __version__,
        "config": to_document(module.config),
        "genes": list(genes),
        "position_scale": float(module.position_scale),
        "normalization": module.normalization,
        "flat": module.planar,
        "volume": module.is_volume,
        "training_digest": module.training_digest,
        "slices": module.slice_names,
        "styles": module.style_names,
        "types": module.type_names,
    }


def add_model_metadata(checkpoint: dict[str, Any], module: TrainerModule) -> None:
    """Add what a checkpoint says of itself and its checksum: any Trainer's can then be read."""
    assert isinstance(module, AlphaSTomicsModule)
    genes = module.genes or [f"gene_{number}" for number in range(module.model.num_genes)]
    checkpoint[OWN_KEY] = model_metadata(module, genes)
    if isinstance(module.trainer.strategy.checkpoint_io, ChecksummedCheckpointIO):
        return  # it adds the checksum when it writes
    try:
        content = plain(checkpoint)
    except TypeError as error:
        logger.warning("%s: the commands will refuse this checkpoint; a Trainer reads it", error)
        return
    checkpoint.update(content)
    checkpoint[CHECKSUM_KEY] = digest(content)


def require_same_genes(known: Sequence[str], genes: Sequence[str], path: Path, data: str) -> None:
    """Refuse data whose genes are not the checkpoint's, in order; show the first difference."""
    if list(known) == list(genes):
        return
    pairs = zip([*known, None], [*genes, None], strict=False)
    index, (trained, given) = next(
        (index, pair) for index, pair in enumerate(pairs) if pair[0] != pair[1]
    )
    raise InputError(
        f"{path}: trained on {len(known)} genes, {data} has {len(genes)}; first difference at gene "
        f"{index + 1}: {trained!r} in the checkpoint, {given!r} in the data. Preprocess the data "
        "with the checkpoint's gene list"
    )


def load_module(
    path: Path, kind: type[AlphaSTomicsModule] = AlphaSTomicsModule
) -> tuple[AlphaSTomicsModule, list[str]]:
    """Build the module of a checkpoint, and return it with its genes.

    The folder of a run stands for its best checkpoint; an exported folder will do, too.
    """
    if (path / WEIGHTS_FILE).is_file():
        return import_weights(path, kind)
    path = checkpoint_of(path)
    content = read_checkpoint(path)
    weights = content["state_dict"]
    shapes = {
        name.removeprefix(MODEL_PREFIX): tuple(value.shape)
        for name, value in weights.items()
        if name.startswith(MODEL_PREFIX)
    }
    module = module_of(content[OWN_KEY], shapes, path, kind)
    try:
        module.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        raise unfit(path) from error
    return module, content[OWN_KEY]["genes"]


def module_of(
    metadata: dict[str, Any],
    shapes: Shapes,
    path: Path,
    kind: type[AlphaSTomicsModule] = AlphaSTomicsModule,
) -> AlphaSTomicsModule:
    """Build the module that a checkpoint says it is, if its weights are those of one."""
    config = parse_document(metadata["config"], str(path))
    require_fitting(config, len(metadata["genes"]), shapes, path)
    module = kind(config, len(metadata["genes"]), position_scale=metadata["position_scale"])
    module.genes = list(metadata["genes"])
    module.normalization = metadata.get("normalization")
    module.planar = metadata["flat"]
    # Earlier versions say it in the settings, where the user did.
    module.is_volume = bool(metadata.get("volume", config.data.preprocessing.position_is_3d))
    module.training_digest = metadata.get("training_digest")
    module.slice_names = list(metadata.get("slices", []))
    module.style_names = list(metadata.get("styles", []))
    module.type_names = list(metadata.get("types", []))
    return module.eval()


def export_weights(module: AlphaSTomicsModule, genes: Sequence[str], folder: Path) -> Path:
    """Write the averaged weights as safetensors, with a JSON of config, genes and scale."""
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.contiguous() for name, value in module.average.state_dict().items()}
    write_bytes(folder / WEIGHTS_FILE, save(weights, metadata={CHECKSUM_KEY: digest(weights)}))
    metadata = json.loads(json.dumps(model_metadata(module, genes)))
    metadata[CHECKSUM_KEY] = digest(metadata)
    write_text(folder / CONFIG_FILE, json.dumps(metadata, indent=2) + "\n")
    return folder / WEIGHTS_FILE


def import_weights(
    folder: Path, kind: type[AlphaSTomicsModule] = AlphaSTomicsModule
) -> tuple[AlphaSTomicsModule, list[str]]:
    """Build the module of a folder that `export_weights` wrote: both networks are the average."""
    from safetensors import SafetensorError, safe_open

    metadata = read_model_metadata(folder / CONFIG_FILE)
    path = folder / WEIGHTS_FILE
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            module = module_of(metadata, shapes, folder / CONFIG_FILE, kind)
            tensors = {name: file.get_tensor(name) for name in names}
            checksum = (file.metadata() or {}).get(CHECKSUM_KEY)
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path}: cannot be read as safetensors: it is truncated or damaged"
        ) from error
    # The checksum was made in the network's own order, which the file does not keep.
    weights = {name: tensors[name] for name in module.average.state_dict()}
    if digest(weights) != checksum:
        raise InputError(
            f"{path}: altered since it was written: its content differs from its checksum"
        )
    for network in (module.average, module.model):
        network.load_state_dict(weights)
    return module, metadata["genes"]


def read_model_metadata(path: Path) -> dict[str, Any]:
    """Read what exported weights say of themselves, or say what is wrong with it."""
    if not path.is_file():
        raise InputError(f"{path}: is missing beside {WEIGHTS_FILE}: copy the whole folder")
    again = "copy it again, or export it again"
    metadata = read_record(path, again)
    if metadata.get("format") != FORMAT:
        raise InputError(
            f"{path}: not the metadata of a model that this version ({__version__}) reads"
        )
    if metadata.pop(CHECKSUM_KEY, None) != digest(metadata):
        raise InputError(
            f"{path}: altered, or exported by version 0.1.0, which wrote no checksum: its content "
            f"differs from its checksum; {again}"
        )
    require_metadata(metadata, path)
    return metadata
