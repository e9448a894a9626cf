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
from alphastomics.diffusion_model.masking import Hidden, draw_masks, hides
from alphastomics.diffusion_model.noise import NoiseModel, TimeNumbers
from alphastomics.geometry import centered
from alphastomics.utils.dataholder import DataHolder


class StepRandomness(NamedTuple):
    """The random numbers of a batch.

    Times (B, 2), a rotation of each set (B, 3, 3) where sets are rotated at random, noise of
    expression (B, N, G) and of position (B, N, 3), and hidden entries.
    """

    times: Tensor
    rotation: Tensor | None
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


class SetNumbers(NamedTuple):
    """What is drawn for one set beside its noise: for its times, masks, and pose.

    A pose is a quaternion, and whether the set is mirrored.
    """

    times: TimeNumbers
    masks: tuple[Tensor, Tensor] | None
    pose: tuple[Tensor, Tensor] | None


def draw_for_sets(
    noise_model: NoiseModel,
    mode: Mode,
    masking: MaskingConfig,
    expression: Float[Tensor, "B N G"],
    node_mask: Tensor,
    step: int,
    seeds: list[int],
    *,
    rotates: bool = True,
    reflection: bool,
) -> StepRandomness:
    """Draw what a batch needs: each set from its own seed, and nothing waits for a GPU.

    The few numbers of a set that say what is done to it are drawn on the host; noise and masks on
    the device of the batch.

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
    rotates, reflection
        Whether sets are rotated at random, and mirrored, too.
    """
    device, host = expression.device, torch.device("cpu")
    on_device = torch.Generator(device)
    on_host = on_device if device == host else torch.Generator()
    noise, shift = torch.empty_like(expression), expression.new_empty(*node_mask.shape, 3)
    sets = []
    for index, seed in enumerate(seeds):
        for generator in {on_device, on_host}:
            generator.manual_seed(seed)
        numbers = noise_model.draw_time_numbers(1, mode, on_host, host)
        cells = expression[index : index + 1]
        is_masked = hides(masking, on_host)
        masks = draw_masks(masking, cells, step, on_device) if is_masked else None
        for drawn in (noise[index], shift[index]):
            torch.randn(drawn.shape, generator=on_device, out=drawn)
        pose = None
        if rotates:
            quaternion = torch.randn(4, generator=on_host, dtype=torch.float64)
            pose = quaternion, torch.rand((), generator=on_host) < 0.5
        sets.append(SetNumbers(numbers, masks, pose))
    joined = zip(*(each.times for each in sets), strict=True)
    times_on_host = noise_model.times_of(TimeNumbers(*map(torch.cat, joined)), mode)
    poses = [each.pose for each in sets if each.pose is not None]
    rotation = None
    if poses:
        rotation = _moved(_rotations(poses, times_on_host, reflection=reflection), device)
    times = _moved(times_on_host, device)
    hidden = _join_hidden([each.masks for each in sets], expression, times)
    return StepRandomness(
        times, rotation, noise.mul_(node_mask[..., None]), centered(shift, node_mask), hidden
    )


def _rotations(
    poses: list[tuple[Tensor, Tensor]], times: Int[Tensor, "B 2"], *, reflection: bool
) -> Float[Tensor, "B 3 3"]:
    """Return the rotation of each set; positions that are given keep their frame.

    In an atlas it says where a cell is.
    """
    quaternion, mirrored = (torch.stack(values) for values in zip(*poses, strict=True))
    rotation = rotation_of(quaternion, mirrored & reflection)
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
