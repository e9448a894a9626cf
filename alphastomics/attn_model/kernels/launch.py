"""Launches Triton's kernels and lays out their memory at little cost to Python.

A layer of few cells takes a GPU less time than Python takes to launch it. So what a call needs is
one allocation, and Triton's look at each argument, which costs as much again as a launch, is spared
for calls that are compiled for the same.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Kernels are compiled for addresses that are multiples of this, if they are.
ALIGNMENT = 16
# Parts of an allocation begin at multiples of this.
PART = 512

Key = tuple[Any, ...]
Parts = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
# A kernel's runner for the last grid, the grid, and the compiled kernel.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[int, int, int], Any]] = {}


def key_of(tensors: Sequence[Tensor | None], *facts: Any) -> Key | None:
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
    return *facts, *[None if tensor is None else tensor.dtype for tensor in tensors]


def launch(
    key: Key | None, kernel: Any, grid: tuple[int, int, int], constants: Any, *arguments: Any
) -> None:
    """Launch a kernel with its arguments in order, the constants it is compiled for last."""
    name = (key, kernel.__name__)
    known = _compiled.get(name)
    if known is None:
        compiled = kernel[grid](
            *arguments, constants, num_warps=constants.warps, num_stages=constants.stages
        )
        # Triton's interpreter compiles nothing.
        if compiled is not None and key is not None:
            _compiled[name] = (compiled[grid], grid, compiled)
        return
    runner, last, compiled = known
    if grid != last:
        runner = compiled[grid]
        _compiled[name] = (runner, grid, compiled)
    runner(*arguments, constants)


def is_compiled(key: Key | None, kernel: Any) -> bool:
    """Tell whether a kernel has been launched with this key."""
    return (key, kernel.__name__) in _compiled


class Layout(NamedTuple):
    """Where the parts of an allocation begin, what they are, and how many bytes it has."""

    offsets: dict[str, int]
    parts: dict[str, tuple[tuple[int, ...], torch.dtype]]
    size: int


def lay_out(parts: Parts) -> Layout:
    """Lay parts, (name, shape, dtype) each, one behind the other."""
    offsets, end = {}, 0
    for name, shape, dtype in parts:
        offsets[name] = end
        end += -(-math.prod(shape) * dtype.itemsize // PART) * PART
    return Layout(offsets, {name: (shape, dtype) for name, shape, dtype in parts}, end)


class Space:
    """One allocation of many parts: each a tensor, or for kernels already compiled an address."""

    def __init__(self, layout: Layout, memory: Tensor, *, by_address: bool) -> None:
        self.layout, self.memory = layout, memory
        self.address = memory.data_ptr() if by_address else None

    def __getitem__(self, name: str) -> Any:
        """Return a part, to be handed to a kernel."""
        if self.address is None:
            return self.tensor(name)
        return self.address + self.layout.offsets[name]

    def tensor(self, name: str) -> Tensor:
        """Return a part as a tensor."""
        shape, dtype = self.layout.parts[name]
        start = self.layout.offsets[name]
        end = start + math.prod(shape) * dtype.itemsize
        return self.memory[start:end].view(dtype).view(shape)
