"""The randomness of a step: a seed and the sets' keys enter; times, noise and masks leave.

Each set draws from a stream of its own, a pure function of (seed, what for, key of the set). So it
does not change with the other sets of the batch, the number of ranks, or a resumed run.
"""

import hashlib
import os
from typing import NamedTuple

import lightning.pytorch as pl
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from alphastomics.config import MaskingConfig, Mode
from alphastomics.diffusion_model.counter_noise import normal_numbers, uniform_numbers
from alphastomics.diffusion_model.masking import Hidden, draw_masks
from alphastomics.diffusion_model.noise import NoiseModel
from alphastomics.geometry import centered
from alphastomics.utils.dataholder import DataHolder

# Streams of numbers of a set's seed.
CHOICES, POSE, EXPRESSION_NOISE, POSITION_NOISE = range(4)


class Noise(NamedTuple):
    """Standard noise of expression (B, N, G), and of position (B, N, 3), centred; 0 in padding."""

    expression: Tensor
    position: Tensor


class StepRandomness(NamedTuple):
    """The random numbers of a batch.

    Times (B, 2), a rotation of each set (B, 3, 3) where sets are rotated at random, hidden entries,
    and the seeds (B) that noise follows from.
    """

    times: Tensor
    rotation: Tensor | None
    seeds: Tensor
    hidden: Hidden

    def noise(self, batch: DataHolder) -> Noise:
        """Return the noise of a batch."""
        num_cells, num_genes = batch.expression.shape[1:]
        mask, dtype = batch.node_mask, batch.expression.dtype
        expression = normal_numbers(self.seeds, EXPRESSION_NOISE, (num_cells, num_genes))
        position = normal_numbers(self.seeds, POSITION_NOISE, (num_cells, 3))
        return Noise(expression.to(dtype) * mask[..., None], centered(position.to(dtype), mask))


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


def seed_device(seed: int, device: torch.device) -> None:
    """Seed what dropout and routers draw from: the generators of the host and of one device.

    `torch.manual_seed` asks every kind of device there is, which takes longer than a step.
    """
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def stream_seed(*key: int | str) -> int:
    """Return a 63-bit seed that is a pure function of the key."""
    text = "/".join(str(part) for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def set_keys(batch: DataHolder) -> list[str]:
    """Name each set by the number of its first cell, which no other set of the epoch has.

    Cells without a number, as of bare tensors, leave the set's index in the batch.
    """
    first = batch.first_cells
    if first is None:
        first = tuple(batch.cell_id[:, 0].tolist())
    return [str(cell) if cell >= 0 else f"set {index}" for index, cell in enumerate(first)]


def rotation_of(
    quaternion: Float[Tensor, "B 4"], mirrored: Bool[Tensor, " B"]
) -> Float[Tensor, "B 3 3"]:
    """Return the rotation of each quaternion, mirrored or not.

    That of four normal numbers is uniform (Shoemake 1992); -1 times a rotation is a mirror image.
    """
    w, x, y, z = torch.nn.functional.normalize(quaternion, dim=1).unbind(1)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    rotation = torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)
    return torch.where(mirrored[:, None, None], -rotation, rotation)


def draw_for_sets(
    noise_model: NoiseModel,
    mode: Mode,
    masking: MaskingConfig,
    expression: Float[Tensor, "B N G"],
    step: int,
    seeds: list[int],
    *,
    rotates: bool = True,
    reflection: bool,
) -> StepRandomness:
    """Draw what a batch needs: each set from its own seed, and nothing waits for a GPU.

    The few numbers of a set that say what is done to it are drawn on the host; masks, and later
    noise, on the device of the batch.

    Parameters
    ----------
    noise_model, mode, masking
        What is noised and hidden, and how.
    expression
        The batch, for its shape and device.
    step
        Training steps done, for progressive masking.
    seeds
        Seed of each set.
    rotates, reflection
        Whether sets are rotated at random, and mirrored, too.
    """
    device, keys = expression.device, torch.tensor(seeds)
    numbers = uniform_numbers(keys, CHOICES, 6)
    times_on_host = noise_model.times_of(numbers[:, :4], mode)
    rotation = None
    if rotates:
        quaternion = normal_numbers(keys, POSE, (1, 4))[:, 0].double()
        mirrored = (numbers[:, 5] < 0.5) & reflection
        rotation = _moved(_rotations(quaternion, mirrored, times_on_host), device)
    times = _moved(times_on_host, device)
    masks: list[tuple[Tensor, Tensor] | None] = [None] * len(seeds)
    if masking.enable:
        for index in (numbers[:, 4] < masking.masking_probability).nonzero().flatten().tolist():
            generator = torch.Generator(device).manual_seed(seeds[index])
            masks[index] = draw_masks(masking, expression[index : index + 1], step, generator)
    hidden = _join_hidden(masks, expression, times)
    return StepRandomness(times, rotation, _moved(keys, device), hidden)


def _rotations(
    quaternion: Float[Tensor, "B 4"], mirrored: Bool[Tensor, " B"], times: Int[Tensor, "B 2"]
) -> Float[Tensor, "B 3 3"]:
    """Return the rotation of each set; positions that are given keep their frame.

    In an atlas it says where a cell is.
    """
    rotation = rotation_of(quaternion, mirrored)
    given = (times[:, 1] == 0)[:, None, None]
    return torch.where(given, torch.eye(3, dtype=rotation.dtype), rotation)


def _moved(value: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor of the host to a device, without waiting for it."""
    if device.type == "cuda":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


def _join_hidden(
    parts: list[tuple[Tensor, Tensor] | None],
    expression: Float[Tensor, "B N G"],
    times: Int[Tensor, "B 2"],
) -> Hidden:
    """Put the sets' masks together; nothing is hidden of what is given."""
    if all(part is None for part in parts):
        return Hidden(None, None)
    _, num_cells, num_genes = expression.shape

    def join(index: int, width: int) -> Tensor:
        empty = torch.zeros(1, num_cells, width, dtype=torch.bool, device=expression.device)
        joined = torch.cat([empty if part is None else part[index] for part in parts])
        return joined & (times[:, index, None, None] > 0)

    return Hidden(join(0, num_genes), join(1, 3))
