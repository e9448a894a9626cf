"""Sizes that a file asks for, checked before memory is: a file enters, or a refusal leaves.

A few bytes can ask for gigabytes: compressed entries of a zip, tensors whose strides are 0, lists
that hold one another, a config of 400 layers. What is built is never larger than the file it is
built from.
"""

import struct
import zipfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alphastomics.attn_model.model import Model
from alphastomics.config import Config
from alphastomics.errors import InputError

# What torch and the zip reader raise on damaged files, beside the refusal to run anything.
READ_ERRORS = (
    zipfile.BadZipFile,
    RuntimeError,
    OSError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    MemoryError,
    OverflowError,
    struct.error,
)

MOST_EXPANDED = 1 << 30  # bytes of a tensor that shows fewer stored ones several times
# Bytes that are no tensors, of a model and of a file of cells with their names: every one of them
# can become an object of some 64 bytes.
MOST_PICKLED, MOST_PICKLED_CELLS = 8 << 20, 128 << 20

Shapes = Mapping[str, tuple[int, ...]]


def require_bounded_archive(path: Path, kind: str, most_pickled: int) -> int:
    """Refuse an archive that unpacks to more than its file; return the size of its pickle."""
    try:
        if not zipfile.is_zipfile(path):
            raise InputError(f"{path}: not {kind}, or cut short")
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except InputError:
        raise
    except READ_ERRORS as error:
        raise InputError(f"{path}: cannot be read as {kind}: truncated or damaged") from error
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not stored or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise InputError(
            f"{path}: not {kind}: it would unpack to more than its file holds, and was not opened"
        )
    pickled = sum(entry.file_size for entry in entries if entry.filename.endswith("data.pkl"))
    if pickled > most_pickled:
        raise InputError(
            f"{path}: not {kind}: {pickled:,} bytes of it are no tensors, and were not opened"
        )
    return pickled


def require_bounded_content(content: Any, num_bytes: int, path: Path) -> None:
    """Refuse content that is larger than what was read: every item took a byte of the pickle."""
    waiting, seen = [content], 0
    while waiting:
        value = waiting.pop()
        seen += 1
        if isinstance(value, Tensor):
            strided = value.layout == torch.strided and not value.is_meta
            most = max(value.untyped_storage().nbytes(), MOST_EXPANDED) if strided else 0
            bounded = not strided or value.nbytes <= most
        else:
            bounded = seen + len(waiting) <= num_bytes
            if isinstance(value, Mapping):
                waiting.extend(value.values())
            elif isinstance(value, list | tuple | set | frozenset):
                waiting.extend(value)
        if not bounded:
            raise InputError(f"{path}: asks for more memory than its file holds: it is damaged")


def require_fitting(config: Config, num_genes: int, shapes: Shapes, path: Path) -> None:
    """Refuse settings whose network is not the one that the weights are of, before it is built."""
    num_weights = sum(prod(shape) for shape in shapes.values())
    model, layer = config.model, config.layer
    widths = (model.d_model, model.d_ff or 1, model.n_heads, layer.num_experts, num_genes)
    if model.n_layers > len(shapes) or max(widths) > num_weights:
        raise unfit(path)
    with torch.device("meta"):
        network = Model.from_config(config, num_genes)
    described = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    if described != dict(shapes):
        raise unfit(path)


def unfit(path: Path) -> InputError:
    """Say that weights and settings of a model are not of one network."""
    return InputError(f"{path}: its weights do not fit its own config: it is damaged")
