"""The randomness of a step: a seed and the sets' keys enter; times, noise and masks leave.

Each set draws from a stream of its own, a pure function of (seed, what for, key of the set). So it
does not change with the other sets of the batch, the number of ranks, or a resumed run.
"""

import hashlib
import os
from typing import NamedTuple

import lightning.pytorch as pl
import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from alphastomics.config import MaskingConfig, Mode
from alphastomics.diffusion_model.masking import Hidden, draw_hidden
from alphastomics.diffusion_model.noise import NoiseModel, centered_noise, draw_noise


class StepRandomness(NamedTuple):
    """The random numbers of a batch.

    Times (B, 2), a rotation of each set (B, 3, 3), noise of expression (B, N, G) and of position
    (B, N, 3), and hidden entries.
    """

    times: Tensor
    rotation: Tensor
    expression: Tensor
    position: Tensor
    hidden: Hidden


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seed python, numpy and torch, and name the seed for worker processes.

    Parameters
    ----------
    seed
        The run's `seed.global_seed`.
    deterministic
        Refuse kernels whose result changes from run to run.
    """
    pl.seed_everything(seed, workers=True, verbose=False)
    if deterministic:
        # cuBLAS reads this when its first handle is made; without it torch raises on a GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic


def stream_seed(*key: int | str) -> int:
    """Return a 63-bit seed that is a pure function of the key."""
    text = "/".join(str(part) for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def set_keys(cell_id: Int[Tensor, "B N"]) -> list[str]:
    """Name each set by the number of its first cell, which no other set of the epoch has.

    Cells without a number, as of bare tensors, leave the set's index in the batch.
    """
    first = cell_id[:, 0].tolist()
    return [str(cell) if cell >= 0 else f"set {index}" for index, cell in enumerate(first)]


def random_rotation(generator: Generator, *, reflection: bool) -> Float[Tensor, "3 3"]:
    """Draw a rotation of space, uniformly, and mirror it with probability 1/2 where allowed.

    The rotation of a random unit quaternion (Shoemake 1992); -1 times a rotation is a mirror image.
    """
    device = generator.device
    w, x, y, z = torch.nn.functional.normalize(
        torch.randn(4, generator=generator, device=device, dtype=torch.float64), dim=0
    )
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    rotation = torch.stack([torch.stack(row) for row in rows])
    mirrored = torch.rand((), generator=generator, device=device) < 0.5
    return torch.where(mirrored, -rotation, rotation) if reflection else rotation


def draw_for_sets(
    noise_model: NoiseModel,
    mode: Mode,
    masking: MaskingConfig,
    expression: Float[Tensor, "B N G"],
    node_mask: Tensor,
    step: int,
    seeds: list[int],
    *,
    reflection: bool,
) -> StepRandomness:
    """Draw what a batch needs, set by set.

    Parameters
    ----------
    noise_model, mode, masking
        What is noised and hidden, and how.
    expression, node_mask
        The batch, for its shapes and device.
    step
        Training steps done, for progressive masking.
    seeds
        Seed of each set.
    reflection
        Whether sets are mirrored, too.
    """
    device, dtype = expression.device, expression.dtype
    generator = torch.Generator(device)
    parts = []
    for index, seed in enumerate(seeds):
        generator.manual_seed(seed)
        cells, real = expression[index : index + 1], node_mask[index : index + 1]
        times = noise_model.draw_times(1, mode, generator, device)
        hidden = draw_hidden(masking, cells, times > 0, step, generator)
        noise = draw_noise(tuple(cells.shape), real, generator, dtype)
        shift = centered_noise((1, cells.shape[1], 3), real, generator, dtype)
        rotation = random_rotation(generator, reflection=reflection)[None].to(device)
        if int(times[0, 1]) == 0:
            # Positions that are given keep their frame: in an atlas it says where a cell is.
            rotation = torch.eye(3, dtype=rotation.dtype, device=device)[None]
        parts.append(StepRandomness(times, rotation, noise, shift, hidden))
    return StepRandomness(
        torch.cat([part.times for part in parts]),
        torch.cat([part.rotation for part in parts]),
        torch.cat([part.expression for part in parts]),
        torch.cat([part.position for part in parts]),
        _join_hidden([part.hidden for part in parts], expression),
    )


def _join_hidden(parts: list[Hidden], expression: Float[Tensor, "B N G"]) -> Hidden:
    """Put the sets' masks together; a set that hides nothing among others gets an empty mask."""
    if all(part.expression is None for part in parts):
        return Hidden(None, None)
    _, num_cells, num_genes = expression.shape

    def join(masks: list[Tensor | None], width: int) -> Tensor:
        empty = torch.zeros(1, num_cells, width, dtype=torch.bool, device=expression.device)
        return torch.cat([empty if mask is None else mask for mask in masks])

    return Hidden(
        join([part.expression for part in parts], num_genes),
        join([part.position for part in parts], 3),
    )
