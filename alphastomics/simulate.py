"""A synthetic tissue whose truth is known: settings and a seed enter, h5ad slices leave.

The tissue is an ellipsoid, bent along its long axis, with an off-centre cavity. With u the position
of a cell in the straightened unit ball and r = |u| its distance from the core:

    type      k ~ softmax_k( b_k - (r - r_k)^2 / 2 w_r^2 - (u_x - x_k)^2 / 2 w_x^2 )
    field     f_g(u) = a_g * sqrt(2 / M) * sum_m cos(omega_gm . u + phi_gm)
    mean      log mu_ng = beta_g + marker_g[k_n] + f_g(u_n) + slice_sg + depth_n + depth_s
    count     x_ng ~ Poisson(Gamma(theta_g, mu_ng / theta_g)), that is NB with dispersion theta_g
    dropout   x_ng = 0 with probability d * exp(-mu_ng)

Layers (r_k) times regions (x_k) give the types; two more are everywhere. Markers tell the type,
fields tell the position within it. Slices are cut along z with a stated pose:
``body = rotation @ spatial + translation``. Without a common frame each is rotated, mirrored and
shifted at random, as real slices lie on a slide. docs/simulation.md says what each number is.
"""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from numpy.random import Generator, SeedSequence, default_rng

from alphastomics import __version__
from alphastomics.config import SimulationConfig
from alphastomics.errors import InputError, counted
from alphastomics.io.files import PARTIAL_SUFFIX, is_partial, output_folder, write_text
from alphastomics.io.h5ad import write_anndata
from alphastomics.io.progress import track

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData
    from scipy.sparse import csr_matrix

logger = logging.getLogger(__name__)

SEMI_AXES_UM = np.array([1500.0, 900.0, 700.0])
BEND_UM = 500.0
CAVITY_CENTRE = np.array([0.30, -0.10, 0.0])
CAVITY_RADII = np.array([0.30, 0.22, 0.40])
SECTION_THICKNESS_UM = 10.0
STACK_SHARE = 0.55  # sections lie within this share of the half-height, where they are large

LAYERS = {"Core": 0.45, "Inner": 0.65, "Outer": 0.82, "Skin": 0.96}
REGIONS = {"Anterior": -0.65, "Middle": 0.0, "Posterior": 0.65}
EVERYWHERE = ("Vascular", "Immune")
LAYER_WIDTH, REGION_WIDTH = 0.08, 0.30
EVERYWHERE_LOGIT = -2.8

MARKER_SHARE, FIELD_SHARE = 0.6, 0.25  # the rest is housekeeping
MARKER_LOG_FOLD = (2.2, 0.4)
FIELD_WAVES, FIELD_FREQUENCY, FIELD_LOG_STD = 4, 1.6, 0.9
DROPOUT, SLIDE_UM = 0.3, 5000.0
COMMON_DEPTH_STD, OWN_DEPTH_STD = 0.2, 0.5  # of the log depth of slices
ENTRIES_AT_A_TIME, RECORD_FILE = 4_000_000, "simulation.json"
VOLUME_KEY, POSE_KEY, COUNT_KEY, PANEL_KEY = 0, 1, 2, 3  # streams of the seed


@dataclass(frozen=True)
class GenePanel:
    """The genes: what each of them measures."""

    names: list[str]
    role: list[str]
    marker_of: list[str]
    base: Float[ndarray, " G"]
    fold: Float[ndarray, "K G"]
    dispersion: Float[ndarray, " G"]
    frequency: Float[ndarray, "G M 3"]
    phase: Float[ndarray, "G M"]
    amplitude: Float[ndarray, " G"]


@dataclass(frozen=True)
class Pose:
    """Where a slice lies in the tissue: body = rotation @ spatial + translation.

    `origin` is where its middle lies on the slide.
    """

    rotation: Float[ndarray, "3 3"]
    translation: Float[ndarray, " 3"]
    origin: Float[ndarray, " 3"]


def stream(seed: int, *key: int) -> Generator:
    """Return the random stream of a part: no part's numbers depend on another's."""
    return default_rng(SeedSequence(seed, spawn_key=key))


def type_names() -> list[str]:
    """Return the cell types: each layer in each region, and those that are everywhere."""
    return [f"{layer} {region}" for layer in LAYERS for region in REGIONS] + list(EVERYWHERE)


def straightened(volume_um: Float[ndarray, "N 3"]) -> Float[ndarray, "N 3"]:
    """Undo the bend and the axes' lengths: the tissue becomes the unit ball."""
    unit = volume_um / SEMI_AXES_UM
    unit[:, 1] -= BEND_UM * unit[:, 0] ** 2 / SEMI_AXES_UM[1]
    return unit


def is_tissue(volume_um: Float[ndarray, "N 3"]) -> Bool[ndarray, " N"]:
    """Say which positions lie in the tissue and outside its cavity."""
    unit = straightened(volume_um)
    in_cavity = (((unit - CAVITY_CENTRE) / CAVITY_RADII) ** 2).sum(1) < 1
    return ((unit**2).sum(1) <= 1) & ~in_cavity


def make_panel(num_genes: int, rng: Generator) -> GenePanel:
    """Draw the genes of the tissue."""
    types = type_names()
    num_markers = round(MARKER_SHARE * num_genes)
    num_fields = round(FIELD_SHARE * num_genes)
    role = ["marker"] * num_markers + ["field"] * num_fields
    role += ["housekeeping"] * (num_genes - len(role))
    fold = np.zeros((len(types), num_genes))
    markers = np.arange(num_markers)
    # Every type gets its share of the markers before any gets one more.
    owner = rng.permutation(num_markers) % len(types)
    fold[owner, markers] = rng.normal(*MARKER_LOG_FOLD, num_markers)
    is_field = np.array([word == "field" for word in role])
    is_housekeeping = np.array([word == "housekeeping" for word in role])
    width = len(str(num_genes))
    return GenePanel(
        names=[f"{word[:3].title()}{number + 1:0{width}d}" for number, word in enumerate(role)],
        role=role,
        marker_of=[types[k] for k in owner] + [""] * (num_genes - num_markers),
        base=rng.normal(np.where(is_housekeeping, 0.5, -0.8), 0.5),
        fold=fold,
        dispersion=rng.lognormal(np.log(4.0), 0.4, num_genes),
        frequency=rng.normal(0, FIELD_FREQUENCY, (num_genes, FIELD_WAVES, 3)),
        phase=rng.uniform(0, 2 * np.pi, (num_genes, FIELD_WAVES)),
        amplitude=np.where(is_field, FIELD_LOG_STD, 0.0),
    )


def slice_pose(settings: SimulationConfig, index: int, rng: Generator) -> Pose:
    """Draw where slice `index` is cut, evenly along z, and how it is oriented on the slide.

    3D slabs, and sections in a common frame, have the tissue's own frame, as in an atlas.
    """
    if settings.dims == 3:
        return Pose(np.eye(3), np.zeros(3), np.zeros(3))
    centre = np.array([0.0, 0.0, slab_bounds(settings, index).mean()])
    if settings.common_frame:
        return Pose(np.eye(3), centre, np.zeros(3))
    centre[:2] += rng.uniform(-40, 40, 2)
    tilt_x, tilt_y = np.deg2rad(rng.uniform(-4, 4, 2))
    in_plane = _rotation(2, rng.uniform(0, 2 * np.pi)) @ np.diag([rng.choice([-1.0, 1.0]), 1, 1])
    rotation = _rotation(0, tilt_x) @ _rotation(1, tilt_y) @ in_plane
    origin = np.array([*rng.uniform(-SLIDE_UM, SLIDE_UM, 2), 0.0])
    return Pose(rotation, centre - rotation @ origin, origin)


def _rotation(axis: int, angle: float) -> Float[ndarray, "3 3"]:
    """Rotation by `angle` about a coordinate axis."""
    rotation = np.eye(3)
    first, second = [other for other in range(3) if other != axis]
    rotation[first, first] = rotation[second, second] = np.cos(angle)
    rotation[first, second], rotation[second, first] = -np.sin(angle), np.sin(angle)
    return rotation


def slab_bounds(settings: SimulationConfig, index: int) -> Float[ndarray, " 2"]:
    """Return the lower and upper z of the slab that belongs to slice `index`."""
    edges = np.linspace(-1, 1, settings.slices + 1) * STACK_SHARE * SEMI_AXES_UM[2]
    return edges[index : index + 2]


def sample_positions(
    settings: SimulationConfig, index: int, pose: Pose, rng: Generator
) -> Float[ndarray, "N 3"]:
    """Draw the cells of a slice uniformly over the tissue in it, in the slice's own frame."""
    if settings.dims == 3:
        low, high = slab_bounds(settings, index)
    else:
        low, high = -SECTION_THICKNESS_UM / 2, SECTION_THICKNESS_UM / 2
    reach = np.array([*(SEMI_AXES_UM[:2] + BEND_UM + 100), 0.0])
    corner, size = pose.origin - reach + [0, 0, low], 2 * reach + [0, 0, high - low]
    kept: list[Float[ndarray, "n 3"]] = []
    missing = settings.cells
    while missing > 0:
        # About a quarter of the box is tissue.
        proposal = corner + size * rng.random((4 * missing + 64, 3))
        inside = proposal[is_tissue(proposal @ pose.rotation.T + pose.translation)]
        kept.append(inside[:missing])
        missing -= len(kept[-1])
    return np.concatenate(kept)


def sample_types(unit: Float[ndarray, "N 3"], rng: Generator) -> Int[ndarray, " N"]:
    """Draw each cell's type from the densities of the types at its position."""
    distance = np.sqrt((unit**2).sum(1))
    logits = [
        -((distance - r) ** 2) / (2 * LAYER_WIDTH**2)
        - (unit[:, 0] - x) ** 2 / (2 * REGION_WIDTH**2)
        for r in LAYERS.values()
        for x in REGIONS.values()
    ]
    logits += [np.full(len(unit), EVERYWHERE_LOGIT) for _ in EVERYWHERE]
    # Adding Gumbel noise and taking the largest samples the softmax.
    return np.argmax(np.stack(logits, 1) + rng.gumbel(size=(len(unit), len(logits))), axis=1)


def log_mean(
    panel: GenePanel, unit: Float[ndarray, "N 3"], cell_type: Int[ndarray, " N"]
) -> Float[ndarray, "N G"]:
    """Log of the expected counts, before the effects of slice and depth."""
    # One wave at a time keeps the memory at one N x G matrix.
    field = np.zeros((len(unit), len(panel.names)))
    for wave in range(FIELD_WAVES):
        field += np.cos(unit @ panel.frequency[:, wave].T + panel.phase[:, wave])
    field *= panel.amplitude * np.sqrt(2 / FIELD_WAVES)
    return panel.base + panel.fold[cell_type] + field


def sample_counts(
    panel: GenePanel, log_mu: Float[ndarray, "N G"], rng: Generator
) -> Float[ndarray, "N G"]:
    """Negative-binomial counts with dropout."""
    mu = np.exp(log_mu)
    rate = rng.gamma(panel.dispersion, 1.0, mu.shape) * (mu / panel.dispersion)
    counts = rng.poisson(rate).astype(np.float32)
    counts[rng.random(mu.shape) < DROPOUT * np.exp(-mu)] = 0
    return counts


def count_matrix(
    panel: GenePanel,
    unit: Float[ndarray, "N 3"],
    cell_type: Int[ndarray, " N"],
    depth_std: float,
    rng: Generator,
) -> "csr_matrix":
    """Draw the counts of a slice, sparse, a bounded number of entries at a time."""
    from scipy import sparse

    num_genes = len(panel.names)
    slice_effect = rng.normal(0, 0.1, num_genes) + rng.normal(0, depth_std)
    rows = max(1, ENTRIES_AT_A_TIME // num_genes)
    blocks = []
    for start in range(0, len(unit), rows):
        part = np.s_[start : start + rows]
        log_mu = log_mean(panel, unit[part], cell_type[part]) + slice_effect
        log_mu += rng.normal(0, 0.3, (len(log_mu), 1))
        blocks.append(sparse.csr_matrix(sample_counts(panel, log_mu, rng)))
    return sparse.vstack(blocks, format="csr")


def simulate_slice(settings: SimulationConfig, seed: int, index: int) -> "AnnData":
    """Make slice `index`: a pure function of the settings, the seed and the index."""
    import pandas as pd
    from anndata import AnnData

    panel = make_panel(settings.genes, stream(seed, VOLUME_KEY))
    rng = stream(seed, POSE_KEY, index)
    pose = slice_pose(settings, index, rng)
    spatial = sample_positions(settings, index, pose, rng)
    body = spatial @ pose.rotation.T + pose.translation
    unit = straightened(body)
    cell_type = sample_types(unit, rng)
    depth_std = COMMON_DEPTH_STD if settings.common_frame else OWN_DEPTH_STD
    counts = count_matrix(panel, unit, cell_type, depth_std, stream(seed, COUNT_KEY, index))
    measured = measured_genes(settings, stream(seed, PANEL_KEY, index))
    name = slice_name(settings, index)
    obs = pd.DataFrame(
        {
            "cell_type": pd.Categorical.from_codes(cell_type, type_names()),
            "slice_id": pd.Categorical([name] * len(spatial)),
        },
        index=_plain_text([f"{name}_{number}" for number in range(len(spatial))]),
    )
    var = pd.DataFrame(
        {"role": pd.Categorical(panel.role), "marker_of": pd.Categorical(panel.marker_of)},
        index=_plain_text(panel.names),
    )
    slice_data = AnnData(counts[:, measured].tocsr(), obs=obs, var=var.iloc[measured])
    slice_data.obsm["spatial"] = spatial[:, : settings.dims].astype(np.float32)
    slice_data.obsm["body"] = body.astype(np.float32)
    slice_data.uns["simulation"] = {
        **provenance(settings, seed),
        "rotation": pose.rotation,
        "translation": pose.translation,
    }
    return slice_data


def _plain_text(words: list[str]) -> "pd.Index":
    """Return words as an index of objects: h5ad readers of all ages know how to read that."""
    import pandas as pd

    return pd.Index(words, dtype=object)


def measured_genes(settings: SimulationConfig, rng: Generator) -> Int[ndarray, " P"]:
    """Draw which genes a slice measures."""
    number = max(1, round(settings.panel_share * settings.genes))
    return np.sort(rng.choice(settings.genes, number, replace=False))


def slice_name(settings: SimulationConfig, index: int) -> str:
    """Return a slice's name: numbers padded, so that sorted order is the order along z."""
    return f"slice_{index:0{len(str(settings.slices - 1))}d}"


def provenance(settings: SimulationConfig, seed: int) -> dict[str, Any]:
    """Return what made the tissue."""
    return {"alphastomics": __version__, "seed": seed, **settings.model_dump()}


def simulate(settings: SimulationConfig, seed: int) -> "Iterator[AnnData]":
    """Yield the slices of a tissue, one in memory at a time."""
    for index in range(settings.slices):
        yield simulate_slice(settings, seed, index)


def write_tissue(
    settings: SimulationConfig, seed: int, output_dir: Path, *, overwrite: bool
) -> list[Path]:
    """Write the slices of a tissue; slices that an interrupted run finished are kept."""
    paths = [output_dir / f"{slice_name(settings, i)}.h5ad" for i in range(settings.slices)]
    total = settings.slices * settings.cells
    with output_folder(output_dir), track("simulate", total, "cells") as advance:
        check_folder(settings, seed, output_dir, overwrite=overwrite)
        # Before anything is written: whether there is memory for a slice shows here.
        needed = overwrite or not paths[0].exists()
        first = simulate_slice(settings, seed, 0) if needed else None
        prepare_folder(settings, seed, output_dir, overwrite=overwrite)
        for index, path in enumerate(paths):
            if not path.exists():
                data = first if index == 0 else simulate_slice(settings, seed, index)
                write_anndata(path, data, compression="gzip")
            advance(settings.cells)
    return paths


def check_folder(
    settings: SimulationConfig, seed: int, output_dir: Path, *, overwrite: bool
) -> None:
    """Refuse a folder that holds another tissue, and to write over files that are not ours."""
    slices = sorted(output_dir.glob("*.h5ad"))
    if slices and not overwrite and not is_of(output_dir / RECORD_FILE, settings, seed):
        is_ours = {path.name for path in slices} <= own_slices(output_dir)
        raise InputError(
            f"{output_dir}: holds {counted(len(slices), '.h5ad file')} of "
            f"{'other settings' if is_ours else 'something else'} (first {slices[0].name}); choose "
            "an empty folder, or add --overwrite to replace what `simulate` wrote there"
        )
    names = {f"{slice_name(settings, index)}.h5ad" for index in range(settings.slices)}
    for path in slices:
        if overwrite and path.name in names - own_slices(output_dir):
            raise InputError(
                f"{path}: was not written by simulate, and is not replaced by --overwrite either: "
                "choose another --output_dir, or move it away"
            )


def own_slices(output_dir: Path) -> set[str]:
    """Name the slices that a folder's record lists: those this command wrote."""
    record = output_dir / RECORD_FILE
    try:
        known = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
        number = int(known.get("slices", 0)) if isinstance(known, dict) else 0
    except (ValueError, TypeError, RecursionError):
        return set()
    width = len(str(max(number - 1, 0)))
    names = (path.name for path in output_dir.glob("slice_*.h5ad"))
    digits = re.compile(rf"slice_(\d{{{width}}})\.h5ad", re.ASCII)
    matches = ((name, digits.fullmatch(name)) for name in names)
    return {name for name, match in matches if match and int(match[1]) < number}


def prepare_folder(
    settings: SimulationConfig, seed: int, output_dir: Path, *, overwrite: bool
) -> None:
    """Remove what is in the way, and write down what this tissue is."""
    for leftover in filter(is_partial, output_dir.glob(f".*{PARTIAL_SUFFIX}")):
        leftover.unlink()
    for name in own_slices(output_dir) if overwrite else ():
        (output_dir / name).unlink()
    write_text(output_dir / RECORD_FILE, record_of(settings, seed))


def is_of(record: Path, settings: SimulationConfig, seed: int) -> bool:
    """Tell whether a folder's record is that of this very tissue."""
    return record.is_file() and record.read_text(encoding="utf-8") == record_of(settings, seed)


def record_of(settings: SimulationConfig, seed: int) -> str:
    """Write down what makes a tissue."""
    return json.dumps(provenance(settings, seed), indent=2) + "\n"
