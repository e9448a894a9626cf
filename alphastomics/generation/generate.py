"""Generating: a trained module and cells enter; places, expression, or both leave, with a spread.

Each slice is one set. A draw goes down the whole way from noise; the spread of several draws,
turned onto one another, is the uncertainty of each cell. The point estimate is what the network
says of pure noise, in one call: the mean of the posterior, here averaged over several starts.
`joint` has no posterior to average: it is one draw, without a spread.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from alphastomics.config import Mode, SamplingConfig
from alphastomics.diffusion_model.draws import stream_seed
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.sample import DiffusionSampler, Known, State, turned
from alphastomics.errors import InputError
from alphastomics.generation.cells import InputCells
from alphastomics.progress import Advance, track

# A section with some noise across it is still a section; the thinnest body is thicker.
FLAT_SHARE = 0.1


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
    if mode == "joint":
        # Nothing is given: the mean of all tissues is no tissue, and no cell has a counterpart in
        # another draw that it could be compared with.
        settings = settings.model_copy(update={"product": "sample", "num_samples": 1})
    shape = cells.expression.shape
    parts = [np.zeros((shape[0], width), np.float32) for width in (shape[1], shape[1], 3, 3)]
    calls = settings.num_steps + (settings.product == "estimate")
    steps = calls * settings.num_samples * len(cells.slice_names)
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


def as_tissue(cells: InputCells, made: Generated) -> tuple[InputCells, Generated]:
    """Return cells that hold what was made of nothing; slices that all came out flat become 2D."""
    place = torch.from_numpy(made.position).double()
    rows = [torch.from_numpy(cells.rows_of(number)) for number in range(len(cells.slice_names))]
    flat = all(is_flat(place[row]) for row in rows)
    if flat:
        place = place.clone()
        for row in rows:
            place[row] = (place[row] - place[row].mean(0)) @ plane_of(place[row])
        place[:, 2] = 0
        made = replace(made, position=place.float().numpy())
    dims = 2 if flat else 3
    return replace(cells, expression=made.expression, position=made.position, dims=dims), made


def is_flat(position: Float[Tensor, "N 3"]) -> bool:
    """Say whether cells lie in a plane: across it they spread FLAT_SHARE of what they do in it."""
    spread = torch.linalg.svdvals(position - position.mean(0))
    return bool(spread[2] <= FLAT_SHARE * spread[1])


def generate_slice(
    module: AlphaSTomicsModule,
    cells: InputCells,
    number: int,
    mode: Mode,
    settings: SamplingConfig,
    seed: int,
    advance: Advance,
) -> tuple[np.ndarray, ...]:
    """Draw one slice several times; return product and spread of both modalities."""
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

    def drawn(num_steps: int) -> list[State]:
        made: list[State] = []
        for draw in range(settings.num_samples):
            generator = torch.Generator().manual_seed(stream_seed(seed, "sample", number, draw))
            one = sampler.sample(
                expression,
                position,
                mask,
                mode,
                num_steps=num_steps,
                sampler=settings.sampler,
                known=Known(genes=genes) if mode == "expr_to_pos" else Known(),
                generator=generator,
                watch=lambda _step, _state: advance(1),
            )
            made.append(State(*one))
        return made

    draws = drawn(settings.num_steps)
    products = drawn(1) if settings.product == "estimate" else draws[:1]
    turn = None if mode == "pos_to_expr" else sampler.reflection
    return summed_up(products, draws, reflection=turn, flat=cells.dims == 2)


def summed_up(
    products: list[State], draws: list[State], *, reflection: bool | None, flat: bool
) -> tuple[np.ndarray, ...]:
    """Return the mean of the products and the spread of the draws: of expression, then of position.

    Positions are turned onto the first product before they are averaged, and onto their mean before
    they are compared; `reflection` None leaves them where they are, as given ones must be.
    """
    mean = State(
        *(
            average([product[part] for product in products], part, reflection=reflection)
            for part in (0, 1)
        )
    )
    spread = State(
        *(
            deviation([draw[part] for draw in draws], mean[part], part, reflection=reflection)
            for part in (0, 1)
        )
    )
    place, place_spread = mean.position, spread.position
    if flat and reflection is not None:
        turn = plane_of(place[0].double())
        place = place.double() @ turn
        # The spread of each axis turns with the square of the rotation's entries.
        place_spread = (place_spread.double().square() @ turn.square()).sqrt()
    parts = (mean.expression, spread.expression, place, place_spread)
    return tuple(part[0].float().cpu().numpy() for part in parts)


def onto(values: Tensor, target: Tensor, part: int, *, reflection: bool | None) -> Tensor:
    """Turn generated positions onto others; expression, and what was given, stays as it is."""
    if part == 0 or reflection is None:
        return values.double()
    mask = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
    return turned(values.double(), target.double(), mask, mask, reflection)


def average(values: list[Tensor], part: int, *, reflection: bool | None) -> Tensor:
    """Mean of several products, turned onto the first."""
    return torch.stack(
        [onto(value, values[0], part, reflection=reflection) for value in values]
    ).mean(0)


def deviation(values: list[Tensor], mean: Tensor, part: int, *, reflection: bool | None) -> Tensor:
    """Compute the deviation of draws about their own mean, in the frame of the product."""
    moved = torch.stack([onto(value, mean, part, reflection=reflection) for value in values])
    return moved.std(0, correction=0)


def plane_of(position: Float[Tensor, "N 3"]) -> Float[Tensor, "3 3"]:
    """Return the turn that lays a flat tissue into the xy plane, its longest axis along x."""
    centred = position - position.mean(0)
    _, axes = torch.linalg.eigh(centred.mT @ centred)
    return axes.flip(1)
