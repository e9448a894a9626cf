"""From findings to the page's data: arrays enter, compact JSON-ready values leave; no network here.

Everything that is shown as a number is computed before numbers are packed, in full precision.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from scipy.stats import chi2

from alphastomics.errors import InputError
from alphastomics.evaluation.calibration import error_and_std
from alphastomics.evaluation.expression import gene_correlations
from alphastomics.evaluation.methods import MODEL, competes
from alphastomics.evaluation.neighbours import morans_i, spatial_neighbours
from alphastomics.evaluation.pairs import MORAN_NEIGHBOURS
from alphastomics.evaluation.registry import METRICS, metric_named
from alphastomics.evaluation.table import bar_end, best_method
from alphastomics.evaluation.verdict import verdicts
from alphastomics.generation.cells import InputCells
from alphastomics.report.curves import curve_data
from alphastomics.report.findings import (
    Findings,
    Inside,
    ObsColumn,
    Path,
    PredictedPositions,
    Scores,
)
from alphastomics.report.groups import Groups, error_by_group, groups_of
from alphastomics.report.packing import codes, numbers, packed, packed_positions, spanned
from alphastomics.tasks import TASKS

MOST_POINTS = 200_000
# Values of genes in the page, over true, predicted and new cells: keeps the file near 20 MB.
MOST_GENE_VALUES = 30_000_000
CALIBRATION_BINS, LEAST_IN_A_BIN = 10, 5
COVERAGE_LEVELS = np.linspace(0.05, 0.95, 19)
ENDS = (0.01, 0.99)
# The highest level of a gene says that its slice did not measure it.
LEVELS, UNMEASURED = 254, 255
RANKED_CELLS = 20_000


def shown_rows(cells: InputCells, limit: int, seed: int) -> Int64[np.ndarray, " M"]:
    """Choose the cells to show: all, or of each slice the same share, at random."""
    total = len(cells.names)
    if total <= limit:
        return np.arange(total)
    random = np.random.default_rng(seed)
    parts = []
    for number in range(len(cells.slice_names)):
        rows = cells.rows_of(number)
        count = max(1, len(rows) * limit // total)
        parts.append(random.choice(rows, count, replace=False))
    return np.sort(np.concatenate(parts)[:limit])


def moran_of(
    cells: InputCells, values: Float32[np.ndarray, "N G"], seed: int
) -> Float[np.ndarray, " G"]:
    """Moran's I of every gene, averaged over slices by their cells; NaN where no slice has one."""
    assert cells.position is not None
    random = np.random.default_rng(seed)
    total = np.zeros(values.shape[1])
    weight = np.zeros(values.shape[1])
    for number in range(len(cells.slice_names)):
        rows = random.permutation(cells.rows_of(number))[:RANKED_CELLS]
        if len(rows) <= MORAN_NEIGHBOURS:
            continue
        graph = spatial_neighbours(cells.position[rows, : cells.dims], k=MORAN_NEIGHBOURS)
        moran = morans_i(values[rows], graph).numpy()
        real = np.isfinite(moran) & cells.measured[number]
        total[real] += moran[real] * len(rows)
        weight[real] += len(rows)
    with np.errstate(invalid="ignore"):
        return total / weight


def require_genes(wanted: Sequence[str], genes: Sequence[str]) -> None:
    """Refuse genes that the model does not know."""
    for gene in wanted:
        if gene not in genes:
            raise InputError(
                f"--genes: {gene!r} is none of the checkpoint's {len(genes)} genes "
                f"(the first is {genes[0]!r})"
            )


def chosen_genes(
    genes: Sequence[str], moran: Float[np.ndarray, " G"], wanted: Sequence[str], capacity: int
) -> Int64[np.ndarray, " K"]:
    """Choose genes for the page: the wanted, then the most spatial, up to the page's capacity."""
    column_of = {gene: number for number, gene in enumerate(genes)}
    first = list(dict.fromkeys(column_of[gene] for gene in wanted))
    ranked = np.argsort(-np.nan_to_num(moran, nan=-np.inf), kind="stable")
    rest = [int(number) for number in ranked if int(number) not in set(first)]
    return np.array([*first, *rest][: max(capacity, len(first), 1)], dtype=np.int64)


def ends_of(values: Float[np.ndarray, " N"]) -> tuple[float, float]:
    """Return the 1st and 99th percentile: outliers must not take the colours from the rest."""
    low, high = (float(end) for end in np.quantile(values, ENDS)) if len(values) else (0.0, 1.0)
    return low, high if high > low else low + 1.0


def leveled(values: Float[np.ndarray, " N"], low: float, high: float) -> np.ndarray:
    """Round values to 8 bit levels between two ends."""
    return np.round(np.clip((values - low) / (high - low), 0, 1) * LEVELS).astype(np.uint8)


def gene_levels(
    true: Float32[np.ndarray, "N K"],
    others: dict[str, Float32[np.ndarray, "N K"]],
    measured: Bool[np.ndarray, "N K"],
    names: Sequence[str],
) -> list[dict[str, Any]]:
    """Pack genes as 8 bit levels; truth and predictions of a gene share their ends.

    So equal colours are equal values. The ends are the truth's.
    """
    levels = []
    for column, name in enumerate(names):
        real = measured[:, column]
        ends = ends_of(true[real, column])
        truth = np.where(real, leveled(true[:, column], *ends), UNMEASURED).astype(np.uint8)
        entry: dict[str, Any] = {"name": name, "low": ends[0], "high": ends[1]}
        entry["true"] = packed(truth)
        entry |= {part: packed(leveled(table[:, column], *ends)) for part, table in others.items()}
        levels.append(entry)
    return levels


def calibration_curve(
    error: Float[np.ndarray, " N"],
    std: Float[np.ndarray, " N"],
    dims: int,
    slice_id: Int64[np.ndarray, " N"] | None = None,
) -> dict[str, Any]:
    """Compare the std with the errors.

    Cells are binned by std: root mean square error against root mean square std. Coverage:
    if errors were Gaussian with that std, the same along every axis, |error|^2 D / std^2 would
    be chi-squared with D degrees of freedom, and the share of cells within its p-quantile p.
    `ratio` and `correlation` are those of `test`: of each slice, averaged by their cells.
    """
    slices = np.zeros(len(error), dtype=np.int64) if slice_id is None else slice_id
    bins = max(1, min(CALIBRATION_BINS, len(error) // LEAST_IN_A_BIN))
    parts = np.array_split(np.argsort(std, kind="stable"), bins)
    squared, variance = (np.square(part, dtype=np.float64) for part in (error, std / dims**0.5))
    radii = chi2.ppf(COVERAGE_LEVELS, dims)
    covered = [float(np.mean(squared <= radius * variance)) for radius in radii]
    by_slice = [error_and_std(error[slices == n], std[slices == n]) for n in np.unique(slices)]
    weight = np.unique(slices, return_counts=True)[1] / len(error)
    ratio, correlation = (float(np.dot(weight, part)) for part in zip(*by_slice, strict=True))
    varied = np.ptp(std) > 0 and np.ptp(error) > 0
    return {
        "std": [_rms(std[part]) for part in parts],
        "error": [_rms(error[part]) for part in parts],
        "level": COVERAGE_LEVELS.tolist(),
        "covered": covered,
        "ratio": ratio if np.isfinite(ratio) else None,
        "correlation": correlation if varied else None,
    }


def _rms(values: Float[np.ndarray, " N"]) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def gene_agreement(
    findings: Findings, predicted: Float32[np.ndarray, "N G"], true_moran: np.ndarray, seed: int
) -> dict[str, Any]:
    """Pearson r and Moran's I, true and predicted, of every gene."""
    cells = findings.cells
    same = (cells.measured == cells.measured[:1]).all()
    measured = torch.from_numpy(cells.measured[:1] if same else cells.measured[cells.slice_id])
    r = gene_correlations(
        torch.from_numpy(predicted), torch.from_numpy(cells.expression), measured
    ).numpy()
    predicted_moran = moran_of(cells, predicted, seed)
    return {
        "genes": list(findings.genes),
        "pearson": numbers(r),
        "moran_true": numbers(true_moran),
        "moran_predicted": numbers(predicted_moran),
    }


def path_data(path: Path, types: Int64[np.ndarray, " N"] | None) -> dict[str, Any]:
    """Pack the frames of the path, seen from above."""
    parts = {
        name: {axis: spanned(frames[..., index].ravel()) for index, axis in enumerate("xy")}
        for name, frames in (("noisy", path.noisy), ("clean", path.clean))
    }
    return {
        "cells": len(path.rows),
        "time": numbers(path.time),
        "types": None if types is None else codes(types[path.rows]),
        **parts,
    }


def inside_data(inside: Inside, cells: InputCells) -> dict[str, Any]:
    """Spell out what the layers do; attention as a map of the cells looked at, and as a curve."""
    assert cells.position is not None
    ordered = -np.sort(-inside.attention, axis=1)
    picks = np.unique(np.geomspace(1, ordered.shape[1], 200).astype(int)) - 1
    return {
        "cells": len(inside.rows),
        "slice": cells.slice_names[int(cells.slice_id[inside.rows[0]])],
        "time": numbers(inside.time),
        "expert_use": None
        if inside.expert_use is None
        else np.round(inside.expert_use, 4).tolist(),
        "gate": None if inside.gate is None else np.round(inside.gate, 5).tolist(),
        "position": packed_positions(cells.position[inside.rows]),
        "attention": [spanned(layer) for layer in inside.attention],
        "ranked": {"rank": (picks + 1).tolist(), "share": np.round(ordered[:, picks], 4).tolist()},
    }


def score_data(scores: Scores) -> list[dict[str, Any]]:
    """Lay the scores out as tables: by mode, methods in rows, metrics in columns."""
    tables = []
    for mode, methods in scores.items():
        if mode not in TASKS or not methods:
            continue
        present = {metric for values in methods.values() for metric in values}
        metrics = [metric for metric in METRICS if metric in present]
        metrics += sorted(present - set(METRICS))
        headlines = [metric for metric in TASKS[mode].metrics if metric in present]
        tables.append(
            {
                "mode": mode,
                "title": TASKS[mode].title,
                "methods": list(methods),
                "ours": MODEL,
                "headlines": headlines,
                "aside": [method for method in methods if not competes(method)],
                "metrics": [
                    {
                        "name": name,
                        "best": best_method(name, methods),
                        "full": bar_end(name, methods),
                        "label": metric_named(name).label,
                        "better": metric_named(name).better,
                        "meaning": metric_named(name).meaning,
                    }
                    for name in metrics
                ],
                "values": {
                    method: {name: numbers([value])[0] for name, value in values.items()}
                    for method, values in methods.items()
                },
            }
        )
    return tables


def column_data(column: ObsColumn, rows: Int64[np.ndarray, " M"]) -> dict[str, Any]:
    """Pack a column of `obs`: levels of numbers, or codes of names."""
    values = column.values[rows]
    if column.names is not None:
        return {"name": column.name, "names": column.names, "codes": codes(values.astype(np.int64))}
    real = np.isfinite(values)
    low, high = ends_of(values[real])
    level = np.where(real, leveled(np.where(real, values, low), low, high), UNMEASURED)
    return {"name": column.name, "low": low, "high": high, "levels": packed(level.astype(np.uint8))}


def predicted_position_data(
    predicted: PredictedPositions,
    rows: Int64[np.ndarray, " M"],
    cells: InputCells,
    groups: Groups | None,
) -> dict[str, Any]:
    """Pack the predicted positions, their errors and their std."""
    free = np.ones(len(predicted.error), dtype=bool) if predicted.free is None else predicted.free
    error, std = predicted.error[free], None if predicted.std is None else predicted.std[free]
    compared = None
    if std is not None:
        compared = calibration_curve(error, std, cells.dims, cells.slice_id[free])
    free_groups = None if groups is None else groups._replace(codes=groups.codes[free])
    anchors = None if predicted.free is None else codes((~free[rows]).astype(np.int64))
    return {
        "position": packed_positions(predicted.position[rows]),
        "error": spanned(predicted.error[rows]),
        "error_median": float(np.median(error)),
        "anchors": anchors,
        "assigned": predicted.assigned,
        "std": None if predicted.std is None else spanned(predicted.std[rows]),
        "calibration": compared,
        "radius": radius_data(predicted, rows),
        "by_group": error_by_group(free_groups, error, std),
    }


def radius_data(
    predicted: PredictedPositions, rows: Int64[np.ndarray, " M"]
) -> dict[str, Any] | None:
    """Pack calibrated radii, and what they promise beside what they hold; None without any."""
    radii = predicted.radii
    if radii is None or not np.isfinite(radii.radius).all():
        return None
    level, covered = zip(*predicted.coverage, strict=True)
    free = slice(None) if predicted.free is None else predicted.free
    radius = radii.radius[free]
    return {
        "map": spanned(radii.radius[rows]),
        "share": radii.level,
        "held": float(np.mean(predicted.error[free] <= radius)),
        "median": float(np.median(radius)),
        "by": radii.calibrated_by,
        "by_section": radii.by_section,
        "level": level,
        "covered": covered,
    }


def cell_data(
    findings: Findings, rows: Int64[np.ndarray, " M"], types: Groups | None
) -> dict[str, Any]:
    """Say what was looked at: the run, its cells, their slices and groups."""
    cells = findings.cells
    return {
        "title": findings.title,
        "verdict": [verdict.sentence for verdict in verdicts(findings.scores or {})],
        "facts": findings.facts,
        "missing": findings.missing,
        "generated": findings.is_generated,
        "dims": cells.dims,
        "cells": len(cells.names),
        "shown": len(rows),
        "names": [cells.names[row] for row in rows] if len(rows) <= 20_000 else None,
        "slices": cells.slice_names,
        "slice": codes(cells.slice_id[rows]),
        "types": None if types is None else types.names,
        "types_are": None if types is None else types.kind,
        "unit": findings.unit,
        "columns": [column_data(column, rows) for column in findings.columns],
        "type": None if types is None else codes(types.codes[rows]),
    }


def page_data(findings: Findings, seed: int, wanted: Sequence[str], limit: int) -> dict[str, Any]:
    """Make everything that the page needs, ready for JSON.

    Parameters
    ----------
    findings
        What was found.
    seed
        Of the choice of cells, when there are more than `limit`.
    wanted
        Genes that must be on the page.
    limit
        Cells to show at most.
    """
    cells = findings.cells
    assert cells.position is not None
    rows = shown_rows(cells, limit, seed)
    new, predicted = findings.new, findings.predicted
    others = {} if predicted is None else {"predicted": predicted}
    if new is not None:
        others["new"] = new.expression
    moran = moran_of(cells, cells.expression, seed)
    capacity = MOST_GENE_VALUES // (len(rows) * (1 + len(others)))
    picked = chosen_genes(findings.genes, moran, wanted, capacity)
    types = groups_of(cells, seed)
    of_type = None if types is None else types.codes
    return {
        **cell_data(findings, rows, types),
        "position": packed_positions(cells.position[rows]),
        "num_genes": len(findings.genes),
        "genes": gene_levels(
            cells.expression[np.ix_(rows, picked)],
            {name: table[np.ix_(rows, picked)] for name, table in others.items()},
            cells.measured[np.ix_(cells.slice_id[rows], picked)],
            [findings.genes[number] for number in picked],
        ),
        "predicted_position": findings.predicted_position
        and predicted_position_data(findings.predicted_position, rows, cells, types),
        "held": findings.held,
        "agreement": None
        if predicted is None
        else gene_agreement(findings, predicted, moran, seed),
        "new": new
        and {
            "position": packed_positions(new.position[rows]),
            "type": None if of_type is None else codes(of_type[new.nearest[rows]]),
        },
        "path": findings.path and path_data(findings.path, of_type),
        "inside": findings.inside and inside_data(findings.inside, cells),
        "scores": findings.scores and score_data(findings.scores),
        "curves": curve_data(findings.curves),
    }
