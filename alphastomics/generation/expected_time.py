"""How long a test will take: a model, cells and tasks enter; seconds of each part leave.

The network is timed on one small set. The rest is arithmetic whose rates were measured on CPU cores
of 2026; they say minutes from hours, not seconds.
"""

import logging
import time
from typing import NamedTuple

import numpy as np
import torch

from alphastomics.config import SamplingConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.sample import DiffusionSampler
from alphastomics.evaluation.pairs import MOST_PAIRED_CELLS
from alphastomics.generation.baselines import TREE_CELLS
from alphastomics.generation.cells import InputCells
from alphastomics.generation.chunks import largest_set
from alphastomics.generation.slices import network_calls
from alphastomics.tasks import EXPR_TO_POS, JOINT, Task

logger = logging.getLogger(__name__)

# Cells of the set that the network is timed on.
TIMED_CELLS = 2048
# Of one core: a pair of cells in all scores of positions, a cell and gene in the trees, in the
# scores of expression, and in the page.
PAIR_SECONDS, TREE_SECONDS, VALUE_SECONDS, PAGE_SECONDS = 7.0e-8, 6.0e-5, 2.0e-5, 1.0e-5
POSITION_METHODS = 9


class ExpectedTime(NamedTuple):
    """Seconds of the network, of the baselines, and of scores and page."""

    network: float
    baselines: float
    scores: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def say_expected_time(
    module: AlphaSTomicsModule,
    cells: InputCells,
    known: InputCells | None,
    settings: SamplingConfig,
    tasks: tuple[Task, ...],
) -> None:
    """Log what will be done, and about how long it takes on this device."""
    device = module.position_scale.device
    parts = expected_time(module, cells, known, settings, tasks)
    where = "a GPU" if device.type == "cuda" else f"{torch.get_num_threads()} CPU cores"
    logger.info(
        "test: %s of %s cells in %d slice(s) takes about %s on %s: sampling %s, baselines %s, "
        "scores and page %s",
        ", ".join(task.name for task in tasks),
        f"{len(cells.names):,}",
        len(cells.slice_names),
        spelled(parts.total),
        where,
        *(spelled(seconds) for seconds in parts),
    )


def spelled(seconds: float) -> str:
    """Say a duration in the unit that suits it, rounded as an estimate is."""
    if seconds < 90:
        return f"{max(round(seconds / 5) * 5, 1)} s"
    return f"{round(seconds / 60)} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def expected_time(
    module: AlphaSTomicsModule,
    cells: InputCells,
    known: InputCells | None,
    settings: SamplingConfig,
    tasks: tuple[Task, ...],
) -> ExpectedTime:
    """Estimate each part; slices are scored by themselves, so that pairs are those within them."""
    cores = torch.get_num_threads()
    sizes = np.bincount(cells.slice_id, minlength=len(cells.slice_names)).astype(float)
    num_genes = cells.expression.shape[1]
    trained = 0 if known is None else min(len(known.names), TREE_CELLS)
    scores_positions = EXPR_TO_POS in tasks
    methods = POSITION_METHODS if trained else 3
    pairs = float((np.minimum(sizes, MOST_PAIRED_CELLS) ** 2).sum()) * methods * scores_positions
    values = len(cells.names) * num_genes * len([task for task in tasks if task is not EXPR_TO_POS])
    return ExpectedTime(
        sum(network_seconds(module, cells, settings, task) for task in tasks),
        trained * num_genes * TREE_SECONDS / cores if scores_positions else 0.0,
        (pairs * PAIR_SECONDS + values * VALUE_SECONDS) / cores
        + len(cells.names) * num_genes * PAGE_SECONDS,
    )


def network_seconds(
    module: AlphaSTomicsModule, cells: InputCells, settings: SamplingConfig, task: Task
) -> float:
    """Estimate the network calls of a task from a timed one, of exact attention in large sets."""
    device = module.position_scale.device
    largest_slice = int(np.bincount(cells.slice_id).max())
    timed = min(largest_slice, TIMED_CELLS)
    call_seconds = timed_call(module, cells, task, timed)
    ways = [(settings.num_steps, settings.num_samples)]
    ways = [(settings.num_steps, 1)] if task is JOINT else [*ways, (1, settings.num_samples)]
    total = 0.0
    for num_steps, number in ways:
        in_a_set = min(largest_slice, largest_set(settings, device, num_steps))
        calls = number * network_calls(cells, settings, device, num_steps)
        total += calls * call_seconds * (in_a_set / timed) ** 2
    return total


def timed_call(module: AlphaSTomicsModule, cells: InputCells, task: Task, num_cells: int) -> float:
    """Return the seconds of one network call on some cells, after one that warms up."""
    device = module.position_scale.device
    expression = torch.from_numpy(cells.expression[:num_cells])[None].to(device)
    position = torch.zeros(1, num_cells, 3, device=device)
    mask = torch.ones(1, num_cells, dtype=torch.bool, device=device)
    sampler = DiffusionSampler(module, module.noise_model)
    cache: dict[str, torch.Tensor] = {}
    spent = 0.0
    for _ in range(2):
        begun = time.perf_counter()
        arguments = (expression, position, mask, task.name)
        stream = torch.Generator().manual_seed(0)
        state = sampler.sample(*arguments, num_steps=1, generator=stream, cache=cache)
        state[1].cpu()  # waits for the device, too
        spent = time.perf_counter() - begun
    return spent
