"""The command `report`: a run's folder, or a checkpoint, and cells enter; one HTML file leaves."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from alphastomics.config import Config, Mode
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.run_folder import (
    RunFolder,
    best_checkpoint,
    checkpoint_of,
    read_record,
)
from alphastomics.errors import InputError
from alphastomics.generation.cells import InputCells, require_all_positions
from alphastomics.generation.commands import load_for_use, scored_cells, with_trained_sampling
from alphastomics.generation.evaluate import evaluate
from alphastomics.generation.evaluate_anchored import known_by_anchors
from alphastomics.generation.frame import Reference
from alphastomics.generation.generate import Generated
from alphastomics.generation.left_out import read_errors
from alphastomics.generation.notices import is_processed
from alphastomics.generation.sources import Surroundings, given_positions, read_cells
from alphastomics.generation.training_cells import cells_for_baselines, training_cells
from alphastomics.io.files import require_file, require_output, write_text
from alphastomics.io.vitessce import view_path
from alphastomics.preprocessing.cell_source import SourceOptions
from alphastomics.report.collect import collect_findings, generate_for_page
from alphastomics.report.curves import read_curves
from alphastomics.report.findings import Scores
from alphastomics.report.generated import read_virtual, virtual_findings
from alphastomics.report.groups import obs_columns
from alphastomics.report.page import render
from alphastomics.report.prepare import MOST_POINTS, page_data, require_genes
from alphastomics.report.view import is_store, write_view_beside
from alphastomics.tasks import TASKS

logger = logging.getLogger(__name__)

REPORT_FILE = "report.html"
DEFAULT_UNIT = "µm"
ESTIMATES = {
    "mean": "posterior means",
    "sample": "one sample",
    "assigned": "assigned: one position of the tissue for each cell",
}
NO_COLUMNS = (
    "report: a processed folder keeps the cell types alone; to colour cells by other columns of "
    "obs, give a slice as --input_data SLICE.h5ad"
)


@dataclass(frozen=True)
class ReportRequest:
    """What to report on.

    Attributes
    ----------
    input_data, split
        Cells whose positions are known: a processed folder and its split, or a file.
    genes
        Genes that must be among the colours.
    scores
        What `test` found; None scores anew.
    unit
        Unit of the coordinates.
    modes
        Tasks to report on; None: all that the checkpoint can.
    generated
        What `test` has generated for these cells; what is not there is generated.
    anchors
        Cells that are given, or another section: a file, or a column of obs.
    """

    input_data: Path
    split: str
    genes: Sequence[str] = ()
    scores: Scores | None = None
    unit: str = DEFAULT_UNIT
    modes: Collection[Mode] | None = None
    generated: Mapping[Mode, Generated] = field(default_factory=dict)
    anchors: str | None = None


def report(
    config: Config,
    *,
    run: Path,
    checkpoint: Path | None,
    request: ReportRequest,
    output: Path | None,
    overwrite: bool,
) -> Path:
    """Write the report of a run's best checkpoint; return where it is."""
    target = run / REPORT_FILE if output is None else output
    require_html(target)
    require_output(target, overwrite=overwrite)
    if is_store(request.input_data):
        require_output(view_path(target), overwrite=overwrite)
    chosen = best_checkpoint(RunFolder(run)) if checkpoint is None else checkpoint_of(checkpoint)
    return write_report(config, checkpoint=chosen, request=request, target=target)


def write_report(config: Config, *, checkpoint: Path, request: ReportRequest, target: Path) -> Path:
    """Write the page, and a view beside it where the cells lie in a store."""
    write_page(config, checkpoint=checkpoint, request=request, target=target)
    if is_store(request.input_data):
        write_view_beside(target, request.input_data, config.data.preprocessing)
    return target


def write_page(config: Config, *, checkpoint: Path, request: ReportRequest, target: Path) -> None:
    """Generate, score where nobody has, and write the page; virtual sections are shown alone."""
    virtual = read_virtual(request.input_data, SourceOptions.of(config.data.preprocessing))
    if virtual is not None:
        require_genes(request.genes, list(virtual.var_names))
        findings = virtual_findings(request.input_data, virtual, request.unit)
        seed = config.seed.global_seed
        write_text(target, render(page_data(findings, seed, request.genes, MOST_POINTS)))
        return
    module, genes = load_for_use(checkpoint)
    require_genes(request.genes, genes)
    config = with_trained_sampling(config, module)
    cells = read_cells(request.input_data, module, genes, config, request.split)
    require_all_positions(cells, request.input_data)
    around = Surroundings(request.input_data, module, genes, config)
    cells, section = given_positions(cells, request.anchors, around)
    settings, seed = config.sampling, config.seed.global_seed
    near = (Path(config.data.processed_data_dir), checkpoint)
    scores, generated = request.scores, dict(request.generated)
    if scores is None:
        known = cells_for_baselines(module, genes, request.input_data, near)
        what = scored_cells(request.input_data, request.split)
        scores = evaluate(
            module, cells, known, settings, seed, what=what, kept=generated, section=section
        )
    training = training_cells(module, genes, near)
    if cells.anchors is not None:
        training = known_by_anchors(cells, None)
    generated = generate_for_page(
        *(module, cells, settings, seed, training),
        modes=request.modes,
        generated=generated,
        section=section,
    )
    folder = run_of(checkpoint)
    findings = collect_findings(
        module,
        genes,
        cells,
        settings,
        seed,
        title=checkpoint.stem if folder is None else folder.path.name,
        facts=facts_of(module, genes, cells, config, checkpoint, request, section),
        scores=scores,
        curves={} if folder is None else read_curves(folder.metrics),
        generated=generated,
        errors=read_errors(checkpoint),
    )
    if is_processed(request.input_data):
        logger.info("%s", NO_COLUMNS)
    options = SourceOptions.of(config.data.preprocessing)
    columns = obs_columns(request.input_data, len(cells.names), options)
    findings = replace(findings, unit=request.unit, columns=columns)
    write_text(target, render(page_data(findings, seed, request.genes, MOST_POINTS)))
    logger.info("report: %s", target)


def run_of(checkpoint: Path) -> RunFolder | None:
    """Find the run that a checkpoint, or a folder of weights, lies in; None when it was moved."""
    resolved = checkpoint.resolve()
    folders = (RunFolder(folder) for folder in (resolved.parent, resolved.parent.parent))
    return next((folder for folder in folders if folder.metrics.is_file()), None)


def require_html(path: Path) -> None:
    """Refuse a name that no browser would open as a page."""
    if path.suffix not in (".html", ".htm"):
        raise InputError(f"{path}: expected an --output that ends in .html")


def report_of_test(
    config: Config,
    *,
    checkpoint: Path,
    input_data: Path,
    split: str,
    scored: dict[str, Any],
    modes: Collection[Mode] | None = None,
    generated: Mapping[Mode, Generated] = MappingProxyType({}),
    anchors: str | None = None,
) -> Path:
    """Write the report beside the scores that `test` has just written, of the cells it made."""
    target = page_beside(Path(scored["output"]))
    request = ReportRequest(
        *(input_data, split),
        scores=only_scores(scored),
        modes=modes,
        generated=generated,
        anchors=anchors,
    )
    return write_report(config, checkpoint=checkpoint, request=request, target=target)


def page_beside(scores: Path) -> Path:
    """Name the page after the file of the scores, which it must not replace."""
    page = scores.with_suffix(".html")
    return scores.with_name(f"{scores.stem}.report.html") if page == scores else page


def pages_beside(scores: Path, input_data: Path | None) -> list[Path]:
    """Name what a report of a test writes: the page, and the view of a store."""
    page = page_beside(scores)
    return [page, view_path(page)] if input_data is not None and is_store(input_data) else [page]


def read_scores(path: Path) -> Scores:
    """Read the scores that `test` wrote."""
    require_file(path)
    right = "give the file that `test` wrote"
    scores = only_scores(read_record(path, right))
    if not scores:
        raise InputError(f"{path}: holds no scores; {right}")
    return scores


def only_scores(content: dict[str, Any]) -> Scores:
    """Keep {mode: {method: {metric: number}}} of what `test` returns or writes."""
    scores: Scores = {}
    for mode, methods in content.items():
        if mode not in TASKS or not isinstance(methods, dict):
            continue
        for method, values in methods.items():
            if isinstance(values, dict):
                kept = {k: float(v) for k, v in values.items() if isinstance(v, int | float)}
                scores.setdefault(mode, {})[method] = kept
    return scores


def known_facts(cells: InputCells, section: Reference | None) -> list[tuple[str, str]]:
    """Say which positions were given, for the head of the page."""
    if section is not None:
        return [("Reference section", f"{section.source.name}, {len(section.cells.names):,} cells")]
    if cells.anchors is None:
        return []
    number = int(np.isfinite(cells.anchors).all(1).sum())
    return [("Anchors", f"{number:,} of {len(cells.names):,} cells: not scored")]


def facts_of(
    module: AlphaSTomicsModule,
    genes: list[str],
    cells: InputCells,
    config: Config,
    checkpoint: Path,
    request: ReportRequest,
    section: Reference | None,
) -> list[tuple[str, str]]:
    """Say what was looked at, for the head of the page."""
    layer, size, sampling = module.config.layer, module.config.model, config.sampling
    attention = f"{layer.attention} attention" if layer.gate == "none" else f"{layer.gate} gate"
    experts = f", {layer.num_experts} experts" if layer.use_moe else ""
    source = request.input_data.name
    number = len(cells.slice_names)
    slices = "one slice" if number == 1 else f"{number} slices"
    split = f", {request.split} split" if request.input_data.is_dir() else ""
    return [
        ("Cells", f"{len(cells.names):,} in {slices}"),
        ("Genes", f"{len(genes):,}"),
        ("Data", f"{source}{split}"),
        ("Trained for", module.config.training.mode),
        ("Network", f"{size.n_layers} layers of {size.d_model}, {attention}{experts}"),
        (
            "Sampling",
            f"{sampling.num_steps} steps {sampling.sampler}, {sampling.num_samples} samples",
        ),
        ("Predicted positions are", ESTIMATES[sampling.estimator]),
        *known_facts(cells, section),
        ("Checkpoint", checkpoint.name),
        ("Seed", str(config.seed.global_seed)),
        ("Made", date.today().isoformat()),
    ]
