"""Writing what was generated: a copy of the input's AnnData, a store, or tensors; never half."""

import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int, Real
from scipy.sparse import csr_array

from alphastomics.config import Config, Mode
from alphastomics.generation.cells import InputCells
from alphastomics.generation.chunks import Seam
from alphastomics.generation.frame import FrameFit
from alphastomics.generation.generate import Generated
from alphastomics.generation.notices import is_processed
from alphastomics.generation.radii import RADIUS_KEY
from alphastomics.io.files import write_bytes
from alphastomics.io.h5ad import require_storable
from alphastomics.io.h5ad import write_anndata as write_file
from alphastomics.io.spatialdata import STORE_SUFFIX, write_spatialdata
from alphastomics.io.vitessce import write_view
from alphastomics.preprocessing.cell_source import SourceOptions
from alphastomics.preprocessing.formats.registry import opened_source
from alphastomics.preprocessing.normalize import log_normalized
from alphastomics.tasks import EXPR_TO_POS, TASKS

logger = logging.getLogger(__name__)

POSITION_KEY, STD_KEY, LAYER_KEY, LAYER_STD_KEY, COUNTS_KEY, RATE_KEY = (
    "spatial_pred",
    "spatial_std",
    "generated",
    "generated_std",
    "generated_counts",
    "generated_rate",
)
INTERVAL_KEYS = ("generated_low", "generated_high")
ANCHOR_KEY = "position_is_anchor"
# Columns of obs by which a view can colour cells.
VIEW_COLUMNS = ("cell_type_pred", "cell_type", "slice_id")


# Coverage of two embryos was 11 to 20 % where 60 % were expected: see docs/sampling.md.
UNCALIBRATED = (
    f"{STD_KEY} is not calibrated: it is far smaller than the true error, and no confidence "
    "interval; use it to rank cells at most. `alphastomics test` measures it (std_coverage, "
    "std_error_ratio)"
)
OF_A_SECTION = (
    f"{STD_KEY} is the error of cells of the reference section that were left out; it says nothing "
    "of what differs between both sections"
)


def write_generated_pt(
    path: Path, generated: Generated, cells: InputCells, frame_fits: Sequence[FrameFit]
) -> None:
    """Write tensors and plain data."""
    content: dict[str, Any] = {
        "expression": torch.tensor(generated.expression),
        "expression_std": torch.tensor(generated.expression_std),
        "positions": torch.tensor(generated.position[:, : cells.dims]),
        "positions_std": torch.tensor(generated.position_std[:, : cells.dims]),
        "slice_id": torch.from_numpy(cells.slice_id),
        "slice_names": cells.slice_names,
        "names": cells.names,
    }
    if generated.counts is not None:
        content["counts"] = torch.tensor(generated.counts)
    if generated.intervals is not None:
        low, high, level, by = generated.intervals
        content |= {"expression_low": torch.tensor(low), "expression_high": torch.tensor(high)}
        content |= {"interval_level": level, "interval_calibrated_by": by}
    radii = generated.radii
    if radii is not None and radii.is_calibrated:
        content[radii.key] = torch.tensor(radii.radius)
        content["radius_calibrated_by"] = radii.calibrated_by
    if radii is not None and radii.anchored is not None:
        content[ANCHOR_KEY] = torch.tensor(radii.anchored)
    if frame_fits:
        table = frame_table(frame_fits)["frame"]
        content["frame"] = {
            name: torch.from_numpy(column) if column.dtype != object else column.tolist()
            for name, column in table.items()
        }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_bytes(path, buffer.getbuffer())


def read_original(source: Path | None, config: Config) -> Any | None:
    """Read the cells that are to be copied, as AnnData; None where they are not in a file."""
    if source is None or source.suffix == ".pt" or is_processed(source):
        return None
    with opened_source(source, SourceOptions.of(config.data.preprocessing)) as cells:
        data = cells.to_anndata()
    require_storable(source, data, "remove it, or give an --output that ends in .pt")
    return data


def write_generated(
    path: Path,
    original: Any | None,
    generated: Generated,
    cells: InputCells,
    genes: Sequence[str],
    mode: Mode,
    frame_fits: Sequence[FrameFit],
) -> None:
    """Write the input's AnnData, or a new one, with what was generated."""
    data = new_anndata(cells, genes) if original is None else original
    if original is None and not TASKS[mode].is_conditional:
        put_counts(data, generated, cells)
    put_into(data, generated, cells, genes, mode, frame_fits)
    write_cells(path, data, generated.position, cells, is_predicted=TASKS[mode].generates_position)


def write_cells(
    path: Path,
    data: Any,
    position: Float[np.ndarray, "N 3"],
    cells: InputCells,
    *,
    is_predicted: bool,
) -> None:
    """Write an AnnData as .h5ad, or as a SpatialData store with a view beside it."""
    if path.suffix != STORE_SUFFIX:
        write_file(path, data, compression=None)
        return
    key = POSITION_KEY if is_predicted else "spatial"
    # The view finds positions where the shapes are, however the input calls its coordinates.
    data.obsm[key] = position[:, : cells.dims]
    write_spatialdata(path, data, data.obsm[key], cells.slice_id, cells.slice_names)
    write_view(path, key, [column for column in VIEW_COLUMNS if column in data.obs])


def put_into(
    data: Any,
    generated: Generated,
    cells: InputCells,
    genes: Sequence[str],
    mode: Mode,
    frame_fits: Sequence[FrameFit] = (),
) -> None:
    """Write what was generated, and a record of it, into an AnnData, under the documented keys.

    The record of another mode stays: it stands under that mode's name.
    """
    import pandas as pd

    task = TASKS[mode]
    record = {"dims": cells.dims, **seam_table(generated), **frame_table(frame_fits)}
    if task.generates_position:
        data.obsm[POSITION_KEY] = generated.position[:, : cells.dims]
        if task.is_conditional:
            data.obsm[STD_KEY] = generated.position_std[:, : cells.dims]
    if task.generates_expression:
        columns = pd.Index(genes).get_indexer(data.var_names)
        data.layers[LAYER_KEY] = widened(generated.expression, columns)
        if task.is_conditional:
            data.layers[LAYER_STD_KEY] = widened(generated.expression_std, columns)
        if task.is_conditional and (rate := rates(generated, cells)) is not None:
            data.layers[RATE_KEY] = widened(rate, columns)
        record |= put_intervals(data, generated, columns)
        if generated.counts is not None:
            data.layers[COUNTS_KEY] = widened(generated.counts, columns)
    if task is EXPR_TO_POS:
        record |= put_radii(data, generated)
    before = data.uns.get("alphastomics", {})
    kept: dict[str, Any] = {
        name: before[name] for name in TASKS if isinstance(before, Mapping) and name in before
    }
    names = np.array(list(genes), dtype=object)
    data.uns["alphastomics"] = {**kept, "mode": mode, "genes": names, **record, mode: record}


def put_radii(data: Any, generated: Generated) -> dict[str, Any]:
    """Write calibrated radii into obs; return what a record says of them, or that there are none.

    Those of an earlier prediction leave: nobody could tell them from these.
    """
    for column in [name for name in data.obs if is_radius_key(name)]:
        del data.obs[column]
    radii, note = generated.radii, std_note(generated)
    record: dict[str, Any] = {"spatial_std_calibrated": note is None}
    if note is not None:
        record["spatial_std_note"] = note
    if radii is not None and radii.anchored is not None:
        data.obs[ANCHOR_KEY] = radii.anchored
    if radii is None or not radii.is_calibrated:
        return record
    data.obs[radii.key] = radii.radius
    return record | {"radius_level": radii.level, "radius_calibrated_by": radii.calibrated_by}


def std_note(generated: Generated) -> str | None:
    """Say why the std of positions is not calibrated; None where it is."""
    radii = generated.radii
    if radii is not None and not radii.is_calibrated:
        unknown = np.isnan(generated.position_std[:, 0]).all()
        return f"{STD_KEY} is {'NaN' if unknown else 'not calibrated'}: {radii.lacking}"
    if radii is not None and radii.by_section:
        return OF_A_SECTION
    if radii is None or radii.anchored is None:
        return UNCALIBRATED
    if np.isnan(radii.radius).any():
        return f"in slices without a radius {UNCALIBRATED}"
    return None


def put_intervals(
    data: Any, generated: Generated, columns: Int[np.ndarray, " V"]
) -> dict[str, Any]:
    """Write calibrated intervals as layers; return what a record says of them, nothing without.

    Those of an earlier prediction leave.
    """
    for key in INTERVAL_KEYS:
        if key in data.layers:
            del data.layers[key]
    intervals = generated.intervals
    if intervals is None:
        return {}
    for key, values in zip(INTERVAL_KEYS, intervals[:2], strict=True):
        data.layers[key] = widened(values, columns)
    return {"interval_level": intervals.level, "interval_calibrated_by": intervals.calibrated_by}


def is_radius_key(name: object) -> bool:
    """Tell the columns of obs that anchors and radii stand in."""
    return name == ANCHOR_KEY or str(name).startswith(RADIUS_KEY)


def in_own_unit(generated: Generated, cells: InputCells) -> Float64[np.ndarray, "N G"] | None:
    """Undo the standardising of generated expression; None where nobody knows its unit."""
    if generated.scaling is None:
        return None
    mean, std = (part[cells.slice_id] for part in generated.scaling)
    return np.asarray(generated.expression * std + mean)


def rates(generated: Generated, cells: InputCells) -> Float32[np.ndarray, "N G"] | None:
    """Return generated expression as counts per 10,000, back from the logarithm."""
    logs = in_own_unit(generated, cells) if generated.is_logged else None
    return None if logs is None else np.expm1(np.maximum(logs, 0)).astype(np.float32)


def put_counts(data: Any, generated: Generated, cells: InputCells) -> None:
    """Make counts the values of new cells, with log-normalised ones beside them.

    Of a model without counts the values are those that it was trained on, before standardising.
    """
    if generated.counts is None:
        values = in_own_unit(generated, cells)
        if values is None:
            logger.warning(
                "X of the new cells is standardised expression: nobody knows its unit, since the "
                "model was trained with expression.space: genes"
            )
            return
        data.X = values.astype(np.float32)
        data.layers["normalized"] = data.X.copy()
        return
    counts = generated.counts.astype(np.float32)
    data.X = counts
    data.layers["normalized"] = log_normalized(csr_array(counts)).toarray()
    data.obs["total_counts"] = generated.counts.sum(1)


def seam_table(generated: Generated) -> dict[str, Any]:
    """Return the seams of slices that were drawn in chunks, a column each; nothing without any."""
    if not generated.seams:
        return {}
    columns = zip(*generated.seams, strict=True)
    names = np.array(next(columns), dtype=object)
    return {"seams": dict(zip(Seam._fields, [names, *map(np.array, columns)], strict=True))}


def frame_table(frame_fits: Sequence[FrameFit]) -> dict[str, Any]:
    """Return how each slice was brought into the frame, a column each; nothing without any."""
    if not frame_fits:
        return {}
    names, known = (np.array([fit[part] for fit in frame_fits], dtype=object) for part in (0, 1))
    return {
        "frame": {
            "slice_name": names,
            "known": known,
            "num_known": np.array([fit.num_known for fit in frame_fits]),
            "rms": np.array([fit.rms for fit in frame_fits]),
            "rotation": np.stack([fit.transform.rotation for fit in frame_fits]),
            "scale": np.array([fit.transform.scale for fit in frame_fits]),
            "shift": np.stack([fit.transform.shift for fit in frame_fits]),
        }
    }


def new_anndata(cells: InputCells, genes: Sequence[str]) -> Any:
    """Make an AnnData of cells that did not come from one."""
    import pandas as pd
    from anndata import AnnData

    obs = pd.DataFrame(
        {"slice_id": pd.Categorical(np.array(cells.slice_names, dtype=object)[cells.slice_id])},
        index=pd.Index(cells.names, dtype=object),
    )
    if cells.cell_type is not None:
        obs["cell_type"] = pd.Categorical(cells.cell_type)
    var = pd.DataFrame(index=pd.Index(list(genes), dtype=object))
    data = AnnData(cells.expression, obs=obs, var=var)
    if cells.position is not None:
        data.obsm["spatial"] = cells.position[:, : cells.dims]
    return data


def widened(
    values: Real[np.ndarray, "N G"], columns: Int[np.ndarray, " V"]
) -> Float32[np.ndarray, "N V"]:
    """Put the model's genes into a file's columns; genes that the model does not know are NaN.

    `columns` has the model's gene of each column of the file, -1 for none.
    """
    table = np.full((len(values), len(columns)), np.nan, dtype=np.float32)
    table[:, columns >= 0] = values[:, columns[columns >= 0]]
    return table
