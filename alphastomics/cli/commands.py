"""What each command does: a `Call` enters, the text for stdout leaves.

Every import of a package stands inside the command that needs it, so that `--help` is instant.
"""

import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from alphastomics.cli.flags import DEFAULT_SPLIT, DEMO_DIR
from alphastomics.cli.parse import Call
from alphastomics.errors import InputError
from alphastomics.tasks import IMPUTE, LABEL, TASKS

logger = logging.getLogger(__name__)


def prepare(call: Call) -> str:
    """Run `preprocess` or one of its halves; print a summary.

    The keywords of these three functions are the flags that are no settings.
    """
    from alphastomics.preprocessing import commands

    options = call.config.data.preprocessing
    if call.command == "stage1":
        summary = commands.stage1(options, **vars(call.arguments))
    else:
        run = commands.stage2 if call.command == "stage2" else commands.preprocess
        summary = run(options, **vars(call.arguments), seed=call.config.seed.global_seed)
    return json.dumps(summary, indent=2)


def train(call: Call) -> str | None:
    """Train a model; print a summary of the run, on the first rank."""
    from alphastomics.diffusion_model.train import TrainRequest
    from alphastomics.fit import PLAN_FILE, fit

    arguments = call.arguments
    if arguments.test_after_train:
        from alphastomics.generation.evaluate import require_testable
        from alphastomics.generation.sources import require_assignable

        require_testable(call.config.data.processed_data_dir)
        require_assignable(call.config.sampling)
    for words in unused_by_train(call):
        logger.warning("%s", words)
    request = TrainRequest(arguments.resume, arguments.overwrite, arguments.profile)
    summary = fit(call.config, request)
    if not summary:
        return None
    if arguments.test_after_train:
        from alphastomics.generation.commands import test as run_test
        from alphastomics.report.commands import report_of_test

        tested: dict[str, Any] = {
            "checkpoint": Path(summary["best_checkpoint"]),
            "input_data": Path(call.config.data.processed_data_dir),
            "split": DEFAULT_SPLIT,
        }
        kept: dict[Any, Any] = {}
        summary["test"] = run_test(call.config, **tested, output=None, kept=kept)
        shown = report_of_test(call.config, **tested, scored=summary["test"], generated=kept)
        summary["report"] = str(shown)
    # The run keeps both in full.
    summary["plan"] = str(Path(summary["run"]) / PLAN_FILE)
    if "verdict" in summary:
        summary["verdict"] = summary["verdict"]["sentences"]
    return json.dumps(summary, indent=2)


def seed(call: Call) -> None:
    """Seed the process, and refuse kernels that are not deterministic where that is asked for."""
    from alphastomics.diffusion_model.randomness import seed_everything

    settings = call.config.seed
    seed_everything(settings.global_seed, deterministic=settings.deterministic)


def unused_by_train(call: Call) -> list[str]:
    """Say which flags of `train` do nothing with these settings."""
    config = call.config
    off = {
        "--use_moe": (config.layer.use_moe, ("num_experts", "moe_top_k")),
        "--enable_masking": (
            config.masking.enable,
            ("expression_mask_ratio", "position_mask_ratio"),
        ),
        "--streaming": (config.data.loading.streaming, ("buffer_size",)),
    }
    # Streaming that was not asked for is chosen by itself for very many cells.
    unless = {"--streaming": ", unless the cells are too many for memory"}
    return [
        f"--{name}: counts with {switch}, which is off{unless.get(switch, '')}: not used"
        for switch, (on, names) in off.items()
        for name in names
        if on is False and name in call.given
    ]


def require_processed(folder: Path) -> None:
    """Refuse a folder of training cells that is none: it would not be used."""
    from alphastomics.generation.notices import is_processed

    if not is_processed(folder):
        raise InputError(f"--data_dir {folder}: is no processed folder; name that of the training")


def require_used(call: Call, source: Path | None, known: Collection[Path | None] = ()) -> None:
    """Refuse flags of an input that no file of the call uses."""
    from alphastomics.generation.notices import require_used_flags

    require_used_flags(call.given, call.config.data.preprocessing, source, known)


def sample(call: Call) -> str:
    """Generate cells; print where they are."""
    from alphastomics.generation.commands import blank_of, frame_of
    from alphastomics.generation.commands import sample as run_sample

    arguments = call.arguments
    if "data_dir" in call.given:
        require_processed(Path(call.config.data.processed_data_dir))
    known = (arguments.reference, arguments.anchors and Path(arguments.anchors))
    require_used(call, arguments.input_data, known)
    seed(call)
    if call.config.sampling.mode in (IMPUTE, LABEL):
        return json.dumps(annotated(call), indent=2)
    if arguments.genes:
        raise InputError("--genes: counts with --sample_mode impute; leave it out")
    if arguments.virtual_z is not None:
        return virtual_sections(call)
    summary = run_sample(
        call.config,
        given=call.given,
        checkpoint=arguments.checkpoint,
        input_data=arguments.input_data,
        output=arguments.output,
        split=arguments.split or DEFAULT_SPLIT,
        overwrite=arguments.overwrite,
        blank=blank_of(arguments.num_cells, arguments.num_slices),
        frame=frame_of(arguments.reference, arguments.landmarks, scale=arguments.frame_scale),
        anchors=arguments.anchors,
    )
    return json.dumps(summary, indent=2)


def virtual_sections(call: Call) -> str:
    """Make sections where none was measured; print where they are."""
    from alphastomics.generation.virtual_sections import sample_virtual

    arguments = call.arguments
    summary = sample_virtual(
        call.config,
        checkpoint=arguments.checkpoint,
        z_values=arguments.virtual_z,
        number=arguments.num_cells,
        output=arguments.output,
        overwrite=arguments.overwrite,
        given=call.given,
    )
    return json.dumps(summary, indent=2)


def annotated(call: Call) -> dict[str, Any]:
    """Impute genes, or label cells; say what was done."""
    from alphastomics.generation.annotation import annotate

    arguments, mode = call.arguments, call.config.sampling.mode
    unused = ("num_cells", "num_slices", "virtual_z", "landmarks", "anchors", "frame_scale")
    for name in unused:
        if getattr(arguments, name):
            raise InputError(f"--{name}: does not count with --sample_mode {mode}; leave it out")
    return annotate(
        call.config,
        checkpoint=arguments.checkpoint,
        input_data=arguments.input_data,
        output=arguments.output,
        split=arguments.split or DEFAULT_SPLIT,
        overwrite=arguments.overwrite,
        reference=arguments.reference,
        genes=arguments.genes,
    )


def test(call: Call) -> str:
    """Score a checkpoint; print the scores as a table."""
    from alphastomics.diffusion_model.run_folder import checkpoint_of
    from alphastomics.evaluation.table import score_table
    from alphastomics.evaluation.verdict import verdicts
    from alphastomics.generation.commands import test as run_test
    from alphastomics.generation.notices import is_processed, score_notices

    arguments = call.arguments
    require_free_outputs(arguments)
    tested: dict[str, Any] = {
        "checkpoint": checkpoint_of(arguments.checkpoint),
        "input_data": arguments.input_data or Path(call.config.data.processed_data_dir),
        "split": arguments.split or DEFAULT_SPLIT,
        "modes": arguments.modes,
        "anchors": arguments.anchors,
    }
    require_used(call, tested["input_data"], [arguments.anchors and Path(arguments.anchors)])
    for words in score_notices(call.given, tested["input_data"]):
        logger.warning("%s", words)
    seed(call)
    kept: dict[Any, Any] = {}
    scores = run_test(call.config, **tested, output=arguments.output, kept=kept)
    scores_by_task: dict[str, Any] = {mode: scores[mode] for mode in TASKS if mode in scores}
    lines = [verdict.sentence for verdict in verdicts(scores_by_task)]
    if tested["split"] == "train" and is_processed(tested["input_data"]):
        lines = ["no verdict: the model was trained on these cells"]
    lines += ["", score_table(scores_by_task), f"\nscores: {scores['output']}"]
    if not arguments.no_report:
        from alphastomics.report.commands import report_of_test

        page = report_of_test(call.config, **tested, scored=scores, generated=kept)
        lines.append(f"report: {page}")
    return "\n".join(lines)


def require_free_outputs(arguments: Any) -> None:
    """Refuse to replace the file that was named, or a page beside it, without --overwrite."""
    from alphastomics.report.commands import pages_beside

    if arguments.output is None or arguments.overwrite:
        return
    pages = [] if arguments.no_report else pages_beside(arguments.output, arguments.input_data)
    for path in (arguments.output, *pages):
        if path.exists():
            raise InputError(f"{path}: exists; add --overwrite, or name another --output")


def report(call: Call) -> str:
    """Write the report of a run; print where it is."""
    from alphastomics.generation.notices import score_notices
    from alphastomics.report.commands import DEFAULT_UNIT, ReportRequest, read_scores
    from alphastomics.report.commands import report as run_report

    arguments = call.arguments
    request = ReportRequest(
        arguments.input_data or Path(call.config.data.processed_data_dir),
        arguments.split or DEFAULT_SPLIT,
        arguments.genes or (),
        None if arguments.scores is None else read_scores(arguments.scores),
        arguments.unit or DEFAULT_UNIT,
        anchors=arguments.anchors,
    )
    require_used(call, request.input_data, [arguments.anchors and Path(arguments.anchors)])
    for words in score_notices(call.given, request.input_data):
        logger.warning("%s", words)
    seed(call)
    target = run_report(
        call.config,
        run=arguments.run,
        checkpoint=arguments.checkpoint,
        request=request,
        output=arguments.output,
        overwrite=arguments.overwrite,
    )
    return str(target)


def upload(call: Call) -> str:
    """Send a processed folder or a model to the Hub; print its address there."""
    arguments = call.arguments
    options = {
        "private": arguments.private,
        "token": arguments.token,
        "licence": arguments.license,
    }
    if arguments.checkpoint is not None:
        from alphastomics.diffusion_model.hub_model import upload_model

        return upload_model(arguments.checkpoint, arguments.repo_id, **options)
    if arguments.data_dir is None:
        raise InputError("upload: give --data_dir (a processed folder) or --checkpoint (a model)")
    from alphastomics.preprocessing.upload import upload as run_upload

    return run_upload(arguments.data_dir, arguments.repo_id, **options)


def extract(call: Call) -> str:
    """Write an embedding per cell; print a summary."""
    from alphastomics.extract.folder import ExtractRequest
    from alphastomics.extract.folder import extract as run_extract
    from alphastomics.extract.h5ad import extract_h5ad

    arguments = call.arguments
    require_used(call, arguments.input_data)
    request = ExtractRequest(
        arguments.checkpoint, call.given, arguments.overwrite, arguments.input_data
    )
    run = run_extract if request.input_data is None else extract_h5ad
    return json.dumps(run(call.config, request), indent=2)


def simulate(call: Call) -> str:
    """Write a synthetic tissue; print its files."""
    from alphastomics.simulate import write_tissue

    paths = write_tissue(
        call.config.simulation,
        call.config.seed.global_seed,
        call.arguments.output_dir,
        overwrite=call.arguments.overwrite,
    )
    return "\n".join(str(path) for path in paths)


def demo(call: Call) -> str:
    """Do the main job on a synthetic tissue; print where the results are."""
    from alphastomics.cli.demo import run_demo

    folder = call.arguments.output_dir or Path(DEMO_DIR)
    return run_demo(folder, call.config.seed.global_seed)


def info(call: Call) -> str:
    """Print parameters and arithmetic of a network, without building its weights.

    That of the data folder is the one which `train` would choose; without data, by `--num_genes`,
    it is that of the settings, where `auto` has its default.
    """
    import torch

    from alphastomics.attn_model.accounting import account
    from alphastomics.attn_model.model import Model
    from alphastomics.fit import plan_for
    from alphastomics.preprocessing.folder import DataFolder

    config, num_genes = call.config, call.config.model.num_genes
    network = "of the settings; what is auto has its default"
    if "data_dir" in call.given or num_genes is None:
        data = config.data.processed_data_dir
        plan, num_genes = plan_for(config), DataFolder(data).metadata().num_genes
        config, network = plan.config, f"that train would choose for {data} on {plan.device.name}"
    with torch.device("meta"):
        model = Model.from_config(config, num_genes)
    set_size = config.data.loading.set_size or config.training.batch_size
    size = config.model
    return json.dumps(
        {
            "network": f"{size.n_layers} layers of {size.d_model}, {network}",
            "num_genes": num_genes,
            "set_size": set_size,
            **account(model, set_size),
        },
        indent=2,
    )


def config(call: Call) -> str:
    """Print the commented default settings, or the plan for a processed folder."""
    from alphastomics.config.file import commented_yaml

    if "data_dir" not in call.given:
        return commented_yaml()
    from alphastomics.fit import plan_for

    return "\n".join(plan_for(call.config).lines())


RUNNERS: dict[str, Callable[[Call], str | None]] = {
    "preprocess": prepare,
    "stage1": prepare,
    "stage2": prepare,
    "train": train,
    "test": test,
    "report": report,
    "sample": sample,
    "extract": extract,
    "upload": upload,
    "simulate": simulate,
    "demo": demo,
    "info": info,
    "config": config,
}
