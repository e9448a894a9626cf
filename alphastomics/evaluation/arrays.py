"""The edge of the metrics: arrays of a caller enter, checked float tensors and blocks leave.

A metric takes the cells of one slice as a torch tensor (on any device) or a numpy array, of any
floating type; inside, positions are float64, and expression becomes float64 block by block.
Squared distances come in blocks of rows, so that the N x N matrix is never held.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor

from alphastomics.errors import InputError

Array = Tensor | ndarray
T = TypeVar("T")

# Entries of a block. A megabyte of pairs stays in a core's cache; a GPU wants much work at once.
PAIRS_ON_CPU, ENTRIES_ON_CPU, ENTRIES_ON_GPU = 1 << 17, 1 << 20, 1 << 26


def as_tensor(values: Float[Array, "..."]) -> Float[Tensor, "..."]:
    """Wrap an array without copying it; no gradient is kept."""
    tensor = torch.as_tensor(values).detach()
    # Apple's GPUs know no float64.
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def checked(values: Float[Array, "N K"], what: str, *, least: int = 1) -> Float[Tensor, "N K"]:
    """Return values as a tensor, or refuse them: too few cells, or values that are no numbers.

    Parameters
    ----------
    values
        One row a cell.
    what
        Their name in the message, such as "predicted positions".
    least
        Cells without which the metric is undefined.
    """
    tensor = as_tensor(values)
    require_enough_cells(len(tensor), what, least=least)
    require_finite(torch.isfinite(tensor), what)
    return tensor


def position_pair(
    predicted: Float[Array, "N D"], true: Float[Array, "N D"], *, least: int
) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]:
    """Check predicted and true positions and bring both to the device of the truth."""
    require_same_shape(predicted, true, "positions")
    truth = checked(true, "true positions", least=least).double()
    return checked(predicted, "predicted positions", least=least).double().to(truth.device), truth


def require_same_shape(predicted: Array, true: Array, what: str) -> None:
    """Refuse arrays of different cells, genes or axes."""
    if predicted.shape != true.shape:
        raise InputError(
            f"predicted {what} have shape {tuple(predicted.shape)}, true {what} "
            f"{tuple(true.shape)}: give the same cells in the same order."
        )


def require_enough_cells(count: int, what: str, *, least: int) -> None:
    """Refuse a slice with fewer cells than a metric needs."""
    if count < least:
        raise InputError(
            f"{what}: {count} cells, but this metric needs at least {least}. "
            "Evaluate a larger slice, or leave this metric out."
        )


def require_finite(finite: Bool[Tensor, "N K"], what: str) -> None:
    """Refuse NaN and infinity, naming the first."""
    if not bool(finite.all()):
        wrong = (~finite).nonzero()
        raise InputError(
            f"{what}: {len(wrong)} values are NaN or infinite, the first in cell "
            f"{int(wrong[0, 0])}, column {int(wrong[0, 1])}. Drop those cells, or find out where "
            "the values were lost."
        )


def require_extent(true: Float[Tensor, "N D"]) -> None:
    """Refuse a truth whose cells all lie at one position: there is nothing to predict."""
    if bool((true == true[:1]).all()):
        raise InputError(
            f"true positions: all {len(true)} cells lie at one position, so that no prediction can "
            "be right or wrong. Check which key holds the coordinates."
        )


def spans(length: int, width: int, device: torch.device) -> list[slice]:
    """Cut `length` rows of `width` entries into blocks of bounded size."""
    return _cut(length, width, ENTRIES_ON_CPU if device.type == "cpu" else ENTRIES_ON_GPU)


def pair_spans(num_cells: int, device: torch.device) -> list[slice]:
    """Cut the rows of an N x N matrix into blocks of bounded size."""
    return _cut(num_cells, num_cells, PAIRS_ON_CPU if device.type == "cpu" else ENTRIES_ON_GPU)


def _cut(length: int, width: int, entries: int) -> list[slice]:
    step = max(1, entries // max(1, width))
    return [slice(start, min(length, start + step)) for start in range(0, length, step)]


def over_blocks(
    work: Callable[[list[slice]], T], blocks: list[slice], device: torch.device
) -> list[T]:
    """Give each thread its share of the blocks, and return what each made; a GPU takes them all.

    Meanwhile torch itself uses one thread for an operation: splitting up such small ones costs more
    than it saves, and on a busy machine a hundred times more.
    """
    if device.type != "cpu":
        return [work(blocks)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(lambda share: work(blocks[share::threads]), range(threads)))
    finally:
        torch.set_num_threads(threads)


def squared_distances(
    rows: Float[Tensor, "M D"], columns: Float[Tensor, "N D"]
) -> Float[Tensor, "M N"]:
    """Squared distance of every cell of `rows` to every cell of `columns`."""
    # Axis by axis: products of matrices lose the digits of near cells' distance.
    total = (rows[:, 0, None] - columns[:, 0]).square_()
    for axis in range(1, rows.shape[1]):
        difference = rows[:, axis, None] - columns[:, axis]
        total.addcmul_(difference, difference)
    return total
