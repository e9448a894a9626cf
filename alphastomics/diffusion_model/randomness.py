"""The randomness of a step: a seed and the sets' keys enter; times, noise and masks leave.

Each set has a seed of its own, a pure function of (seed, what for, key of the set), and its numbers
are hashes of that seed (`counter_noise.py`). So they do not change with the other sets of the
batch, the number of ranks, or a resumed run. The host works out the seeds; all else is drawn for
all sets at once, on the device of the batch.
"""

import hashlib
import os
from typing import NamedTuple

import lightning.pytorch as pl
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from alphastomics.config import MaskingConfig, Mode
from alphastomics.diffusion_model.counter_noise import Stream, normal_numbers, uniform_numbers
from alphastomics.diffusion_model.masking import Hidden, draw_masks
from alphastomics.diffusion_model.noise import NoiseModel
from alphastomics.geometry import centered
from alphastomics.utils.dataholder import DataHolder


class Noise(NamedTuple):
    """Standard noise of expression (B, N, G), and of position (B, N, 3), centred; 0 in padding.

    Where expression is diffused as latents, noise of those (B, N, L), and what they are drawn by.
    """

    expression: Tensor
    position: Tensor
    latent: Tensor | None = None


class StepRandomness(NamedTuple):
    """The random numbers of a batch.

    Times (B, 2), a rotation of each set (B, 3, 3) where sets are rotated at random, hidden entries,
    and the seeds (B) that noise follows from.
    """

    times: Tensor
    rotation: Tensor | None
    seeds: Tensor
    hidden: Hidden

    def noise(self, batch: DataHolder, num_latents: int = 0) -> Noise:
        """Return the noise of a batch, of its latents if they have a width."""
        num_cells, num_genes = batch.expression.shape[1:]
        mask, dtype = batch.node_mask, batch.expression.dtype
        width = num_latents or num_genes
        expression = normal_numbers(self.seeds, Stream.EXPRESSION_NOISE, (num_cells, width))
        position = normal_numbers(self.seeds, Stream.POSITION_NOISE, (num_cells, 3))
        latent = None
        if num_latents:
            latent = normal_numbers(self.seeds, Stream.LATENT, (num_cells, num_latents)).to(dtype)
        return Noise(
            expression.to(dtype) * mask[..., None], centered(position.to(dtype), mask), latent
        )


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


def seeds_on(device: torch.device, seeds: list[int]) -> Int64[Tensor, " B"]:
    """Copy seeds to a device, without waiting for it."""
    values = torch.tensor(seeds)
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


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
    shape: tuple[int, int],
    step: Int[Tensor, ""],
    seeds: Int64[Tensor, " B"],
    *,
    rotates: bool = True,
    reflection: bool,
) -> StepRandomness:
    """Draw what a batch needs, each set from its own seed, on the device of the seeds.

    The host reads nothing, so that a CUDA graph can hold all of it.

    Parameters
    ----------
    noise_model, mode, masking
        What is noised and hidden, and how.
    shape
        Cells of a set, and genes.
    step
        Training steps done, for progressive masking.
    seeds
        Seed of each set.
    rotates, reflection
        Whether sets are rotated at random, and mirrored, too.
    """
    numbers = uniform_numbers(seeds, Stream.CHOICES, (1, 6))[:, 0]
    times = noise_model.times_of(numbers[:, :4], mode)
    rotation, hidden = None, Hidden(None, None)
    if rotates:
        quaternion = normal_numbers(seeds, Stream.POSE, (1, 4))[:, 0].double()
        rotation = _rotations(quaternion, (numbers[:, 5] < 0.5) & reflection, times)
    if masking.enable:
        is_masked = numbers[:, 4, None] < masking.masking_probability
        # Nothing is hidden of what is given.
        hidden = draw_masks(masking, seeds, is_masked & (times > 0), shape, step)
    return StepRandomness(times, rotation, seeds, hidden)


def _rotations(
    quaternion: Float[Tensor, "B 4"], mirrored: Bool[Tensor, " B"], times: Int[Tensor, "B 2"]
) -> Float[Tensor, "B 3 3"]:
    """Return the rotation of each set; positions that are given keep their frame.

    In an atlas it says where a cell is.
    """
    rotation = rotation_of(quaternion, mirrored)
    given = (times[:, 1] == 0)[:, None, None]
    unrotated = torch.eye(3, dtype=rotation.dtype, device=rotation.device)
    return torch.where(given, unrotated, rotation)
