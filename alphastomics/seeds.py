"""The one place that seeds randomness: a seed enters, and every generator of the process is set.

Data commands draw from numpy generators that they make from the seed, and need no global state.
"""

import os
import random

import numpy as np


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seed python, numpy and torch, and name the seed for worker processes.

    Parameters
    ----------
    seed
        The run's `seed.global_seed`.
    deterministic
        Refuse kernels whose result changes from run to run.
    """
    import torch

    # Lightning's name: its worker_init_fn derives the seeds of loader processes from it.
    os.environ["PL_GLOBAL_SEED"] = str(seed)
    os.environ["PL_SEED_WORKERS"] = "1"
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - libraries that use numpy's global state are seeded too
    torch.manual_seed(seed)
    if deterministic:
        # cuBLAS reads this when its first handle is made; without it torch raises on a GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic


def seed_worker(worker: int, seed: int) -> None:
    """Seed a loader process: the worker's number makes its stream its own.

    Parameters
    ----------
    worker
        Number of the worker in its loader.
    seed
        The run's seed.
    """
    import torch

    state = np.random.SeedSequence(seed, spawn_key=(worker,)).generate_state(2)
    random.seed(int(state[0]))
    np.random.seed(int(state[0]))  # noqa: NPY002 - as above
    torch.manual_seed(int(state[1]))
