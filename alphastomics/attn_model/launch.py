"""Launches Triton's kernels: Triton looks at each argument each time, here once for calls alike.

A layer of few cells takes less time than that look, which costs as much again as the launch.
"""

from typing import Any

from torch import Tensor

# Kernels are compiled for addresses that are multiples of this, if they are.
ALIGNMENT = 16

Key = tuple[Any, ...]
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def key_of(tensors: tuple[Tensor | None, ...], *facts: Any) -> Key | None:
    """Return what decides how kernels are compiled for these tensors; None if one is not aligned.

    `facts` are the sizes that kernels are compiled for; those that they are not must be marked
    `do_not_specialize`.
    """
    address = 0
    for tensor in tensors:
        if tensor is not None:
            address |= tensor.data_ptr()
    if address % ALIGNMENT:
        return None
    return *facts, *(None if tensor is None else tensor.dtype for tensor in tensors)


def launch(
    key: Key | None,
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
) -> None:
    """Launch a kernel with its arguments in order, and its constants and options by name."""
    if key is None:
        kernel[grid](*arguments, **constants)
        return
    name = (key, kernel.__name__)
    known = _compiled.get(name)
    if known is None:
        compiled = kernel[grid](*arguments, **constants)
        if compiled is not None:  # Triton's interpreter compiles nothing.
            rest = tuple(constants[a] for a in kernel.arg_names[len(arguments) :])
            _compiled[name] = (compiled, rest)
        return
    compiled, rest = known
    compiled[grid](*arguments, *rest)
