"""The comparison from the command line: settings and flags enter, tables and a page leave."""

import argparse
import datetime
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphastomics.cli.parse import OneLineParser, from_text
from alphastomics.config import Config
from alphastomics.config.file import LAYER_SECTION, document_fields, parse_document
from alphastomics.errors import InputError
from alphastomics.io.files import write_text
from benchmarks.ablation.configurations import BASELINE, SWITCHES, Configuration, chosen

if TYPE_CHECKING:
    from benchmarks.ablation.findings import Findings
    from benchmarks.ablation.runs import Budget, Run

logger = logging.getLogger(__name__)

SOURCE = "BASE_CONFIG"
SPLITS = ("test", "validation")
OUTPUT_DIR = Path("comparison")
SEEDS = (1, 2, 3)
TEST_CELLS = 4000


def compare_configs(document: Mapping[str, Any], argv: Sequence[str]) -> str:
    """Train every configuration with every seed, compare, and write what was found."""
    arguments = parser().parse_args(argv)
    merged = with_flags(document, arguments)
    config = parse_document(merged, SOURCE)
    check_budget(config)
    layer = merged.get(LAYER_SECTION, {})
    check_switches(layer)
    configurations = selected(arguments, layer)
    folder = arguments.output_dir
    folder.mkdir(parents=True, exist_ok=True)

    from benchmarks.ablation.findings import conclude
    from benchmarks.ablation.runs import Budget, run

    device = chosen_device(arguments.device)
    processed = arguments.data_dir or simulated(config, folder, overwrite=arguments.overwrite)
    budget = Budget(merged, processed, arguments.split, arguments.test_cells, device, folder)
    if arguments.overwrite:
        for one in configurations:
            for seed in arguments.seeds:
                budget.record(one, seed).unlink(missing_ok=True)
    check_runs(budget, configurations, arguments.seeds)
    # Seed by seed: whoever stops early has whole seeds to compare.
    runs = [run(budget, one, seed) for seed in arguments.seeds for one in configurations]
    return write(budget, config, runs, conclude(runs, arguments.reference))


def parser() -> argparse.ArgumentParser:
    """Return the flags; all settings are in the dict at the top of the script, or in --set."""
    found = OneLineParser(
        description="Compares configurations of the network on equal budgets, over several seeds.",
        allow_abbrev=False,
    )
    add = found.add_argument
    add("--data_dir", "--data-dir", type=Path, help="processed folder (default: simulated tissue)")
    add("--output_dir", "--output-dir", type=Path, default=OUTPUT_DIR, help="(default: comparison)")
    add("--seeds", type=int, nargs="+", default=list(SEEDS), help="(default: 1 2 3)")
    add("--epochs", type=int, help="epochs of every run (default: as in the script)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    add("--full", action="store_true", help="all gates, QK-norm, numbers and sizes of experts")
    add("--only", nargs="+", metavar="NAME", help="these configurations and the reference alone")
    add("--reference", default=BASELINE, help="what the others are compared with (Baseline)")
    add("--split", choices=SPLITS, default=SPLITS[0], help="cells that are scored (default: test)")
    add(
        "--test_cells", "--test-cells", type=int, default=TEST_CELLS,
        help="cells scored in each slice, at most (default: 4000)",
    )  # fmt: skip
    add(
        "--set", nargs="+", default=[], metavar="KEY=VALUE",
        help="settings by their path in config.yaml, as in model.d_model=128",
    )  # fmt: skip
    add("--overwrite", action="store_true", help="replace what is in the output folder")
    return found


def with_flags(document: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Overlay the script's settings with the flags."""
    if len(set(arguments.seeds)) < len(arguments.seeds):
        raise InputError(f"--seeds: {arguments.seeds} names a seed twice")
    if arguments.test_cells < 1:
        raise InputError(f"--test_cells: expected at least 1, got {arguments.test_cells}")
    # Through JSON: a copy in depth of plain values, so that the script's dict stays as it is.
    merged: dict[str, Any] = json.loads(json.dumps(document))
    settings = dict(split_setting(text) for text in arguments.set)
    if arguments.epochs is not None:
        settings["training.max_epochs"] = arguments.epochs
    for path, value in settings.items():
        *sections, name = path.split(".")
        node = merged
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return merged


def split_setting(text: str) -> tuple[str, Any]:
    """Read KEY=VALUE; the value as the type of its setting."""
    path, equals, value = text.partition("=")
    fields = document_fields()
    if not equals or path not in fields:
        raise InputError(f"--set {text}: expected KEY=VALUE, as in training.batch_size=1024")
    if path.rpartition(".")[2] in SWITCHES:
        raise InputError(f"--set {text}: the configurations decide that; use --only")
    return path, from_text(value, fields[path])


def check_budget(config: Config) -> None:
    """Refuse settings with which the budgets would not be equal, or not all figures be found."""
    if config.training.early_stopping:
        raise InputError(
            f"{SOURCE}: training.early_stopping: must be false, so that all runs are equally long"
        )
    if config.training.mode != "joint":
        raise InputError(f"{SOURCE}: training.mode: must be joint: both errors are compared")


def check_switches(layer: Mapping[str, Any]) -> None:
    """Refuse what every configuration sets for itself: it would be ignored."""
    for key in SWITCHES:
        if key in layer:
            raise InputError(
                f"{SOURCE}: {LAYER_SECTION}.{key}: the configurations decide that; remove it, and "
                "choose among them with --only"
            )


def check_runs(
    budget: "Budget", configurations: Sequence[Configuration], seeds: Sequence[int]
) -> None:
    """Refuse data, a configuration or a seed that cannot be used, before the first run."""
    from alphastomics.diffusion_model.train import check_data
    from alphastomics.preprocessing.folder import DataFolder
    from benchmarks.ablation.scoring import held_out

    metadata = DataFolder(budget.processed).metadata()
    held_out(budget.processed, metadata.genes, budget.split, budget.test_cells)
    for configuration in configurations:
        for seed in seeds:
            check_data(budget.settings(configuration, seed), metadata)


def selected(arguments: argparse.Namespace, layer: Mapping[str, Any]) -> list[Configuration]:
    """Return the configurations that were asked for, the reference among them."""
    full = arguments.full or arguments.only is not None
    known = {one.name: one for one in chosen(full=full, layer=layer)}
    wanted = [one.name for one in chosen(full=arguments.full, layer=layer)]
    if arguments.only is not None:
        wanted = [arguments.reference, *(n for n in arguments.only if n != arguments.reference)]
    elif arguments.reference not in wanted:
        wanted = [arguments.reference, *wanted]
    for name in wanted:
        if name not in known:
            raise InputError(f"no configuration {name!r}; known: {'; '.join(known)}")
    return [known[name] for name in wanted]


def chosen_device(asked: str) -> str:
    """Return cpu or cuda."""
    import torch

    if asked == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: this machine has no usable GPU; use --device cpu")
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


def simulated(config: Config, folder: Path, *, overwrite: bool) -> Path:
    """Make the synthetic tissue, once for all runs."""
    from examples.synthetic import synthetic_folder

    return synthetic_folder(config, folder / "tissue", overwrite=overwrite)


def heading_of(budget: "Budget", config: Config, findings: "Findings") -> list[str]:
    """Say what was run, on what."""
    from alphastomics import __version__
    from alphastomics.diffusion_model.run_folder import environment
    from alphastomics.preprocessing.folder import DataFolder

    machine = environment()
    metadata = DataFolder(budget.processed).metadata()
    cells = ", ".join(f"{split.cells:,} {name}" for name, split in metadata.splits.items())
    training, model = config.training, config.model
    gpu = machine["gpus"][0] if budget.device == "cuda" else "CPU"
    return [
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, alphastomics {__version__}, "
        f"Python {machine['python']}, torch {machine['torch']}, {gpu}",
        f"data: {budget.processed.name}, {cells} cells, {metadata.num_genes} genes; scored on "
        f"split {budget.split}, at most {budget.test_cells:,} cells of a slice",
        f"each run: {training.max_epochs} epochs of {training.batch_size} cells a step, "
        f"learning rate {training.learning_rate:g}, width {model.d_model}, {model.n_layers} layers",
        f"seeds {', '.join(map(str, findings.seeds))}; reference: {findings.reference}",
    ]


def write(budget: "Budget", config: Config, runs: "list[Run]", findings: "Findings") -> str:
    """Write table, CSV, JSON and page; return the table for the terminal."""
    from benchmarks.ablation.page import render
    from benchmarks.ablation.tables import curves_csv, differences_csv, markdown, runs_csv

    heading = heading_of(budget, config, findings)
    report = markdown(findings, heading)
    files = {
        "comparison.md": report,
        "comparison.html": render(findings, runs, heading),
        "comparison.json": json.dumps(plain(heading, runs, findings), indent=1) + "\n",
        "runs.csv": runs_csv(runs),
        "differences.csv": differences_csv(findings),
        "curves.csv": curves_csv(runs),
    }
    for name, content in files.items():
        write_text(budget.folder / name, content)
    listed = ", ".join(files)
    return f"{report}\nWritten to {budget.folder}: {listed}"


def plain(heading: list[str], runs: "list[Run]", findings: "Findings") -> dict[str, Any]:
    """Return everything as JSON has it: what is not known, or infinite, is null."""
    from benchmarks.ablation.findings import expectations, sentences

    def known(values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }

    header = ("configuration", "figure", "expected", "measured", "verdict")
    return {
        "about": heading,
        "reference": findings.reference,
        "seeds": findings.seeds,
        "runs": [
            {"configuration": run.configuration, "seed": run.seed, **known(run.figures)}
            for run in runs
        ],
        "summaries": {
            name: {key: known(value._asdict()) for key, value in found.items()}
            for name, found in findings.summaries.items()
        },
        "differences": [known(one._asdict()) for one in findings.differences],
        "in_words": sentences(findings),
        "once_expected": [dict(zip(header, row, strict=True)) for row in expectations(findings)],
    }
