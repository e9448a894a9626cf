"""What the network accepts: tensors enter, an `InputError` leaves when one does not fit.

Every check reads shapes, dtypes and devices only, never values, so that it costs no wait for a GPU
and leaves no trace in a compiled graph.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from alphastomics.config import ModelConfig
from alphastomics.errors import InputError

DtypeKind = Literal["float", "bool"]


def require_tensor(
    name: str, value: Tensor, shape: Sequence[int | str], *, kind: DtypeKind, device: torch.device
) -> None:
    """Refuse a tensor of another rank, size, dtype or device than the network expects.

    Parameters
    ----------
    name
        What the caller calls the tensor.
    value
        The tensor that came.
    shape
        One entry an axis: a number is the size it must have, a letter stands for any size.
    kind
        Floating point numbers or booleans.
    device
        Where the tensor must lie.
    """
    if not isinstance(value, Tensor):
        raise InputError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    fits = value.ndim == len(shape) and all(
        isinstance(axis, str) or size == axis for size, axis in zip(value.shape, shape, strict=True)
    )
    if not fits:
        raise InputError(f"{name}: expected shape {_written(shape)}, got {_written(value.shape)}")
    right_kind = value.is_floating_point() if kind == "float" else value.dtype == torch.bool
    if not right_kind:
        expected = "a floating point dtype" if kind == "float" else "torch.bool"
        raise InputError(f"{name}: expected {expected}, got {value.dtype}")
    if value.device != device:
        raise InputError(
            f"{name}: expected on {device}, got on {value.device}; move the model and its inputs "
            "to one device"
        )


def require_cells(name: str, value: Tensor, width: int, weight: Tensor) -> None:
    """Refuse anything but (B, N, width) numbers, at least one cell, in the precision of `weight`.

    Under autocast the precision is torch's to choose, so that only the device is compared.
    """
    require_tensor(name, value, ("B", "N", width), kind="float", device=weight.device)
    if value.shape[0] == 0 or value.shape[1] == 0:
        raise InputError(
            f"{name}: expected at least one set of at least one cell, got shape "
            f"{_written(value.shape)}"
        )
    if value.dtype != weight.dtype and not torch.is_autocast_enabled(value.device.type):
        raise InputError(
            f"{name}: expected {weight.dtype} as the model's weights, got {value.dtype}; convert "
            "one of them, or run under torch.autocast"
        )


def require_node_mask(node_mask: Tensor | None, cells: Tensor) -> None:
    """Refuse a mask that does not say real or padding for each of the cells."""
    if node_mask is not None:
        shape = tuple(cells.shape[:2])
        require_tensor("node_mask", node_mask, shape, kind="bool", device=cells.device)


def require_setting(condition: bool, message: str) -> None:  # noqa: FBT001 - an assertion reads so
    """Refuse a setting of a constructor."""
    if not condition:
        raise InputError(message)


def require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a word that is not among the known ones."""
    require_setting(
        value in choices, f"{name}: expected one of {', '.join(choices)}; got {value!r}"
    )


def _written(shape: Sequence[int | str]) -> str:
    """Write a shape the way the documentation does: (B, N, 3)."""
    return "(" + ", ".join(str(size) for size in shape) + ("," if len(shape) == 1 else "") + ")"


def require_masks(
    expression: Tensor,
    gene_mask: Tensor | None,
    expression_hidden: Tensor | None,
    position_hidden: Tensor | None,
    *,
    like: Float[Tensor, " G"],
) -> None:
    """Refuse masks that do not fit the cells; `like` has the genes and the device."""
    num_genes = len(like)
    num_sets, num_cells = expression.shape[:2] if expression.ndim == 3 else ("B", "N")
    by_cell = gene_mask is not None and gene_mask.ndim == 3
    gene_shape = (num_sets, *([num_cells] if by_cell else []), num_genes)
    needed = {
        "gene_mask": (gene_mask, gene_shape),
        "expression_hidden": (expression_hidden, (num_sets, num_cells, num_genes)),
        "position_hidden": (position_hidden, (num_sets, num_cells, 3)),
    }
    for name, (mask, shape) in needed.items():
        if mask is not None:
            require_tensor(name, mask, shape, kind="bool", device=like.device)


def known_values(
    expression: Float[Tensor, "B N G"],
    gene_mask: Bool[Tensor, "B G"] | Bool[Tensor, "B N G"] | None,
    hidden: Bool[Tensor, "B N G"] | None,
) -> Float[Tensor, "B N G"]:
    """Put 0, the mean of a standardised gene, where a value is hidden or was not measured."""
    for unseen in (hidden, None if gene_mask is None else ~gene_mask):
        if unseen is not None:
            unseen = unseen if unseen.ndim == 3 else unseen[:, None]
            expression = expression.masked_fill(unseen, 0)
    return expression


def resized(size: ModelConfig, changes: Mapping[str, Any]) -> ModelConfig:
    """Return sizes with some values changed; a name that is none of theirs is refused."""
    if unknown := changes.keys() - ModelConfig.model_fields.keys():
        raise TypeError(f"Model: unexpected keyword argument(s) {', '.join(sorted(unknown))}")
    return size.model_copy(update=changes)
