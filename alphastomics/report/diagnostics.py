"""A look inside for the report: a module and a slice enter; experts, gates and attention leave."""

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from alphastomics.attn_model.inspection import LayerRecord, record
from alphastomics.config import Mode
from alphastomics.diffusion_model.masking import Hidden
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.randomness import stream_seed
from alphastomics.generation.cells import InputCells
from alphastomics.report.findings import Inside
from alphastomics.tasks import TASKS
from alphastomics.utils.dataholder import DataHolder

TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)
GATE_BINS = 25
# Attention received takes N^2 time; this many cells show its shape.
MOST_CELLS = 4096


@torch.no_grad()
def look_inside(
    module: AlphaSTomicsModule,
    cells: InputCells,
    rows: Int64[np.ndarray, " N"],
    mode: Mode,
    seed: int,
) -> Inside:
    """Noise a slice to several times, as in training, and record what each layer does."""
    random = np.random.default_rng(stream_seed(seed, "report", "inside"))
    if len(rows) > MOST_CELLS:
        rows = np.sort(random.choice(rows, MOST_CELLS, replace=False))
    looks = [_look(module, cells, rows, mode, time, seed) for time in TIMES]
    return Inside(
        rows,
        np.array(TIMES),
        _stacked([[layer.expert_use for layer in look] for look in looks]),
        _stacked([[_gate_histogram(layer.gate) for layer in look] for look in looks]),
        np.mean([_attention(look) for look in looks], axis=0).astype(np.float32),
    )


def _look(
    module: AlphaSTomicsModule,
    cells: InputCells,
    rows: Int64[np.ndarray, " N"],
    mode: Mode,
    time: float,
    seed: int,
) -> list[LayerRecord]:
    """Record one forward pass; what the mode gives is at time 0."""
    assert cells.position is not None
    expression, position = (
        torch.from_numpy(part[rows])[None].to(module.position_scale.device)
        for part in (cells.expression, cells.position)
    )
    batch = DataHolder.of(expression, position, torch.ones_like(position[..., 0]).bool())
    step = round(time * module.noise_model.num_timesteps)
    times = torch.tensor([TASKS[mode].noised(step)], device=position.device)
    randomness = module.draw(batch, seed, "report")
    randomness = randomness._replace(times=times, hidden=Hidden(None, None))
    with record(module.average, attention="received") as seen:
        module.score(batch, randomness)
    return seen.layers


def _gate_histogram(gate: Tensor | None) -> Tensor | None:
    """Count how far gates are open, as shares of all."""
    if gate is None:
        return None
    counts = torch.histc(gate.float().cpu(), bins=GATE_BINS, min=0, max=1)
    return counts / counts.sum().clamp(min=1)


def _attention(look: list[LayerRecord]) -> Float[np.ndarray, "L M"]:
    """Return what each cell receives, in even shares."""
    received = [layer.attention_received for layer in look]
    return np.stack(
        [(share[0] * share.shape[1]).cpu().numpy() for share in received if share is not None]
    )


def _stacked(values: list[list[Tensor | None]]) -> Float[np.ndarray, "T L K"] | None:
    """Stack what every layer has; None when the network has no such part."""
    rows = [[value for value in row if value is not None] for row in values]
    if not rows[0]:
        return None
    return np.stack([torch.stack(row).double().cpu().numpy() for row in rows])
