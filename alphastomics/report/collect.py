"""Findings of a checkpoint: a module and cells with known positions enter, `Findings` leave."""

from collections.abc import Collection, Mapping

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn

from alphastomics.config import Mode, SamplingConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.noise import step_times
from alphastomics.diffusion_model.randomness import stream_seed
from alphastomics.diffusion_model.sample import DiffusionSampler, Known
from alphastomics.evaluation.position import aligned
from alphastomics.generation.cells import InputCells
from alphastomics.generation.chunks import largest_set
from alphastomics.generation.evaluate_anchored import anchored_positions
from alphastomics.generation.frame import Reference
from alphastomics.generation.generate import Generated, generate, modes_of
from alphastomics.generation.left_out import LeftOutErrors, scales_of, with_radii
from alphastomics.generation.radii import CURVE_LEVELS
from alphastomics.geometry import best_rotation
from alphastomics.report.diagnostics import look_inside
from alphastomics.report.findings import (
    Curve,
    Findings,
    NewTissue,
    Path,
    PredictedPositions,
    Scores,
)
from alphastomics.tasks import EXPR_TO_POS, JOINT, POS_TO_EXPR

PATH_CELLS, PATH_STEPS = 3000, 30
# True cells that new ones are compared with: enough for every kind of cell.
COMPARED_CELLS = 4000
COMPONENTS = 30


def collect_findings(
    module: AlphaSTomicsModule,
    genes: list[str],
    cells: InputCells,
    settings: SamplingConfig,
    seed: int,
    *,
    title: str,
    facts: list[tuple[str, str]],
    scores: Scores | None,
    curves: dict[str, Curve],
    generated: Mapping[Mode, Generated],
    errors: LeftOutErrors | None = None,
) -> Findings:
    """Put together what was generated, and look inside the network.

    Parameters
    ----------
    module, genes
        The trained model and its genes.
    cells, settings, seed
        Cells whose positions are known, and how to sample.
    title, facts, scores, curves
        What was found before.
    generated
        Cells of the modes to show, as `generate_for_page` returns them.
    errors
        What training found on held-out slices, which radii are calibrated by.
    """
    able, missing = modes_of(module), {}
    positions = predicted = new = path = held = None
    largest = max(range(len(cells.slice_names)), key=lambda number: len(cells.rows_of(number)))
    if EXPR_TO_POS.name in generated:
        positions = predicted_positions(generated[EXPR_TO_POS.name], cells, settings, errors)
        path = denoising_path(module, cells, largest, settings, seed)
        if positions.std is None:
            missing["std"] = "one sample only (sampling.num_samples): there is no std"
    if POS_TO_EXPR.name in generated:
        predicted = generated[POS_TO_EXPR.name].expression
        held = held_values(generated[POS_TO_EXPR.name], cells)
    if JOINT.name in generated:
        new = new_tissue(generated[JOINT.name], cells, seed)
    absent = {"predicted_position": positions, "predicted": predicted, "new": new, "path": path}
    all_shown = all(mode in generated for mode in able)
    why = (
        f"the checkpoint was trained for {', '.join(able)} alone"
        if all_shown
        else f"{', '.join(generated)} was asked for alone (--modes)"
    )
    missing |= {name: why for name, result in absent.items() if result is None}
    if not curves:
        missing["curves"] = "there is no metrics.csv of a run beside the checkpoint"
    if scores is None:
        missing["scores"] = "nothing was scored"
    inside = look_inside(module, cells, cells.rows_of(largest), able[0], seed)
    shown = positions, predicted, new, path, inside
    return Findings(title, facts, cells, genes, *shown, scores, curves, missing, held=held)


def generate_for_page(
    module: AlphaSTomicsModule,
    cells: InputCells,
    settings: SamplingConfig,
    seed: int,
    known: InputCells | None,
    *,
    modes: Collection[Mode] | None,
    generated: Mapping[Mode, Generated],
    section: Reference | None = None,
) -> dict[Mode, Generated]:
    """Generate in the modes to show, or all that the checkpoint has, what is not there yet."""
    shown = [mode for mode in modes_of(module) if modes is None or mode in modes]
    results = {
        mode: generated[mode]
        if mode in generated
        else generate(module, cells, mode, settings, seed, known, purpose="report")
        for mode in shown
    }
    mode = EXPR_TO_POS.name
    if mode in shown and mode not in generated and (section or cells.anchors is not None):
        estimate = results[mode]
        by = anchored_positions(module, cells, section, estimate, settings, seed)
        results[mode] = by.shown
    return results


def predicted_positions(
    generated: Generated,
    cells: InputCells,
    settings: SamplingConfig,
    errors: LeftOutErrors | None = None,
) -> PredictedPositions:
    """Rotate each slice of predicted positions onto its truth."""
    assert cells.position is not None
    dims = cells.dims
    position = cells.position.copy()
    for number in range(len(cells.slice_names)):
        rows = cells.rows_of(number)
        position[rows, :dims] = aligned(
            generated.position[rows, :dims],
            cells.position[rows, :dims],
            scale=False,
            reflection=True,
        ).numpy()
    error = np.linalg.norm(position - cells.position, axis=1)
    std = np.linalg.norm(generated.position_std[:, :dims], axis=1)
    radii = generated.radii
    if radii is not None and not radii.is_calibrated:
        radii = None
    curve = None if radii is None else radii.curve
    if generated.radii is None and errors is not None and settings.estimator != "sample":
        radii = with_radii(cells, generated, errors, settings.radius_level).radii
        scale = scales_of(cells, generated, errors)
        curve = np.stack([errors.factor(level) * scale for level in CURVE_LEVELS])
    free = np.ones(len(error), dtype=bool)
    if cells.anchors is not None:
        free = np.isnan(cells.anchors).any(1)
    coverage: list[tuple[float, float]] = []
    if curve is not None:
        held = (error[free] <= curve[:, free]).mean(1)
        coverage = list(zip(CURVE_LEVELS, held.tolist(), strict=True))
    has_std = settings.num_samples > 1 or generated.radii is not None
    has_std = has_std and bool(np.isfinite(std).any())
    return PredictedPositions(
        *(position, error, std if has_std else None, radii, tuple(coverage)),
        free=free if cells.anchors is not None else None,
        assigned=settings.estimator == "assigned" and generated.radii is not None,
    )


def held_values(generated: Generated, cells: InputCells) -> tuple[float, float, str] | None:
    """Return the share of true values that intervals promise to hold, and do; None without any."""
    if generated.intervals is None:
        return None
    low, high = generated.intervals[:2]
    counted = np.isfinite(low) & cells.measured[cells.slice_id]
    if cells.anchors is not None:
        counted &= np.isnan(cells.anchors).any(1)[:, None]
    held = ((low <= cells.expression) & (cells.expression <= high))[counted].mean()
    return generated.intervals.level, float(held), generated.intervals.calibrated_by


def new_tissue(generated: Generated, cells: InputCells, seed: int) -> NewTissue:
    """Bring new cells, as many as each slice has, to the most similar cells."""
    assert cells.position is not None
    position, dims = cells.position.copy(), cells.dims
    nearest = np.zeros(len(position), dtype=np.int64)
    for number in range(len(cells.slice_names)):
        rows = cells.rows_of(number)
        random = np.random.default_rng(stream_seed(seed, "report", "match", number))
        compared = random.permutation(rows)[:COMPARED_CELLS]
        nearest[rows] = compared[
            nearest_rows(generated.expression[rows], cells.expression[compared])
        ]
        position[rows, :dims] = brought_onto(
            generated.position[rows, :dims],
            cells.position[nearest[rows], :dims],
            cells.position[rows, :dims],
        )
    return NewTissue(position, generated.expression, nearest)


def nearest_rows(
    values: Float32[np.ndarray, "N G"], known: Float32[np.ndarray, "M G"]
) -> Int64[np.ndarray, " N"]:
    """Find for each row of `values` the most similar known one, in the known's main components."""
    query, kept = torch.from_numpy(values).double(), torch.from_numpy(known).double()
    mean = kept.mean(0)
    axes = torch.linalg.svd(kept - mean, full_matrices=False)[2][:COMPONENTS].T
    target = (kept - mean) @ axes
    parts = [
        torch.cdist((part - mean) @ axes, target).argmin(1) for part in torch.split(query, 4096)
    ]
    return torch.cat(parts).numpy()


def brought_onto(
    points: Float[np.ndarray, "N D"],
    likes: Float[np.ndarray, "N D"],
    true: Float[np.ndarray, "N D"],
) -> Float[np.ndarray, "N D"]:
    """Rotate points towards the most similar cells, centred on the slice."""
    moved = aligned(points, likes, scale=False, reflection=True).float().numpy()
    return moved - likes.mean(0) + true.mean(0)


def denoising_path(
    module: AlphaSTomicsModule,
    cells: InputCells,
    number: int,
    settings: SamplingConfig,
    seed: int,
) -> Path:
    """Follow one sample of a slice from noise to tissue; of a large slice, of some cells."""
    assert cells.position is not None
    device, rows = module.position_scale.device, cells.rows_of(number)
    random = np.random.default_rng(stream_seed(seed, "report", "path"))
    most = max(largest_set(settings, device, settings.num_steps), PATH_CELLS)
    if len(rows) > most:
        rows = np.sort(random.permutation(rows)[:most])
    noisy: list[Tensor] = []
    clean: list[Tensor] = []

    def keep_noisy(_network: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        noisy.append(arguments[1][0].cpu())

    hook = module.average.register_forward_pre_hook(keep_noisy)
    sampler = DiffusionSampler(module, module.noise_model)
    true = torch.from_numpy(cells.position[rows])
    steps = min(settings.num_steps, PATH_STEPS)
    measured = torch.from_numpy(cells.measured[number]).to(device).expand(1, len(rows), -1)
    sampler.sample(
        torch.from_numpy(cells.expression[rows])[None].to(device),
        true[None].to(device),
        torch.ones(1, len(rows), dtype=torch.bool, device=device),
        EXPR_TO_POS.name,
        num_steps=steps,
        sampler=settings.sampler,
        known=Known(genes=measured),
        generator=torch.Generator().manual_seed(stream_seed(seed, "sample", number, 0)),
        watch=lambda _step, state: clean.append(state.position[0].cpu()),
    )
    hook.remove()
    centre = true.double().mean(0)
    rotation = best_rotation(clean[-1].double(), true.double() - centre, reflection=True)
    shown = np.sort(random.permutation(len(rows))[:PATH_CELLS])
    frames = [
        ((torch.stack(part).double() * sampler.position_scale) @ rotation.T + centre)[:, shown]
        .float()
        .numpy()
        for part in (noisy, clean)
    ]
    time = np.array(step_times(module.noise_model.num_timesteps, steps)[:-1])
    return Path(rows[shown], time / module.noise_model.num_timesteps, *frames)
