"""Generating: a trained module and cells enter; places, expression, or both leave, with a spread.

Each slice is one set. Several draws are turned onto the first and averaged: their mean is the point
estimate, their standard deviation the uncertainty of each cell.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from alphastomics.config import Mode, SamplingConfig
from alphastomics.diffusion_model.draws import stream_seed
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.sample import DiffusionSampler, Known, turned
from alphastomics.errors import InputError
from alphastomics.generation.cells import InputCells
from alphastomics.progress import Advance, track


@dataclass(frozen=True)
class Generated:
    """Generated cells and the spread of the draws, in the order of the input."""

    expression: Float32[np.ndarray, "N G"]
    expression_std: Float32[np.ndarray, "N G"]
    position: Float32[np.ndarray, "N 3"]
    position_std: Float32[np.ndarray, "N 3"]


def modes_of(module: AlphaSTomicsModule) -> tuple[Mode, ...]:
    """Return what a checkpoint can generate: a joint one everything, another its own mode."""
    trained = module.config.training.mode
    return ("joint", "expr_to_pos", "pos_to_expr") if trained == "joint" else (trained,)


def require_mode(module: AlphaSTomicsModule, mode: Mode, cells: InputCells) -> None:
    """Refuse a mode that the checkpoint was not trained for, or that lacks its condition."""
    able = modes_of(module)
    if mode not in able:
        raise InputError(
            f"--sample_mode {mode}: the checkpoint was trained for {', '.join(able)} alone"
        )
    if mode == "pos_to_expr" and cells.position is None:
        raise InputError(
            "--sample_mode pos_to_expr: the input has no coordinates; name them with the config's "
            "data.preprocessing.position_key"
        )


def generate(
    module: AlphaSTomicsModule, cells: InputCells, mode: Mode, settings: SamplingConfig, seed: int
) -> Generated:
    """Generate for all slices of the input.

    Parameters
    ----------
    module
        The trained model, on the device to use.
    cells
        What is given.
    mode
        What is generated.
    settings
        Steps, solver, draws and product.
    seed
        Seed of the draws: the same one gives the same cells.
    """
    require_mode(module, mode, cells)
    shape = cells.expression.shape
    parts = [np.zeros((shape[0], width), np.float32) for width in (shape[1], shape[1], 3, 3)]
    steps = settings.num_steps * settings.num_samples * len(cells.slice_names)
    with track(f"sample {mode}", steps, "network calls") as advance:
        for number, name in enumerate(cells.slice_names):
            rows = cells.rows_of(number)
            if len(rows) > settings.max_set_size:
                raise InputError(
                    f"slice {name}: {len(rows)} cells, more than sampling.max_set_size "
                    f"({settings.max_set_size}); raise it, or split the slice by obs['slice_id']"
                )
            made = generate_slice(module, cells, number, mode, settings, seed, advance)
            for part, values in zip(parts, made, strict=True):
                part[rows] = values
    return Generated(*parts)


def generate_slice(
    module: AlphaSTomicsModule,
    cells: InputCells,
    number: int,
    mode: Mode,
    settings: SamplingConfig,
    seed: int,
    advance: Advance,
) -> tuple[np.ndarray, ...]:
    """Draw one slice several times; return mean (or first draw) and spread of both modalities."""
    device = module.position_scale.device
    rows = cells.rows_of(number)
    expression = torch.from_numpy(cells.expression[rows])[None].to(device)
    place = np.zeros((len(rows), 3), np.float32) if cells.position is None else cells.position[rows]
    position = torch.from_numpy(place)[None].to(device)
    mask = torch.ones(1, len(rows), dtype=torch.bool, device=device)
    genes = torch.from_numpy(cells.measured[number]).to(device).expand(1, len(rows), -1)
    sampler = DiffusionSampler(
        module.average,
        module.noise_model,
        position_scale=float(module.position_scale),
        reflection=module.config.loss.reflection,
    )
    draws: list[tuple[Tensor, Tensor]] = []
    for draw in range(settings.num_samples):
        generator = torch.Generator().manual_seed(stream_seed(seed, "sample", number, draw))
        made = sampler.sample(
            expression,
            position,
            mask,
            mode,
            num_steps=settings.num_steps,
            sampler=settings.sampler,
            known=Known(genes=genes) if mode == "expr_to_pos" else Known(),
            generator=generator,
            watch=lambda _step, _state: advance(1),
        )
        if draws and mode != "pos_to_expr":
            made = (made[0], turned(made[1], draws[0][1], mask, mask, sampler.reflection))
        draws.append(made)
    flat = cells.dims == 2 and mode != "pos_to_expr"
    return summed_up(draws, first=settings.product == "sample", flat=flat)


def summed_up(
    draws: list[tuple[Tensor, Tensor]], *, first: bool, flat: bool
) -> tuple[np.ndarray, ...]:
    """Return mean (or the first draw) and standard deviation of expression, then of position."""
    expressions, positions = (torch.cat([draw[part] for draw in draws]).double() for part in (0, 1))
    if flat:
        positions = positions @ plane_of(positions.mean(0))
    parts = []
    for values in (expressions, positions):
        parts += [values[0] if first else values.mean(0), values.std(0, correction=0)]
    return tuple(part.float().cpu().numpy() for part in parts)


def plane_of(position: Float[Tensor, "N 3"]) -> Float[Tensor, "3 3"]:
    """Return the turn that lays a flat tissue into the xy plane, its longest axis along x."""
    centred = position - position.mean(0)
    _, axes = torch.linalg.eigh(centred.mT @ centred)
    return axes.flip(1)
