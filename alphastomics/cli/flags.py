"""Every command and flag of AlphaSTomics, as data.

Those of `train` are in `training_flags.py`, those of inputs in `input_flags.py`.
"""

from dataclasses import replace
from pathlib import Path
from typing import get_args

from alphastomics.cli.input_flags import (
    BY_CONTENT,
    INPUT_FORMAT,
    PREPROCESSING,
    SKIP_LOG_NORMALIZE,
    SLICE_INPUT,
    SPLIT,
    STD,
    TABLE_AND_PIXEL,
)
from alphastomics.cli.schema import (
    Command,
    Flag,
    count_flag,
    finite_number,
    mode_name,
    path_flag,
    settings,
    split_name,
    switch,
)
from alphastomics.cli.training_flags import BATCH_SIZE, CONFIG, DATA_DIR, SET, SETTINGS, TRAINING
from alphastomics.config import Mode

DEMO_DIR = "./demo"
DEFAULT_SPLIT = "test"

STEPS_HELP = (
    "Network calls of a sample (joint, --estimator sample, and the std); the estimate takes one."
)
AS_TRAINED = "as in training"
MODE_DEFAULT = "joint; expr_to_pos for cells without positions; the model's own if it has but one"
SOLVER_HELP = (
    "Solver of a sample (joint, --estimator sample, and the std); the estimate needs none."
)

VERBOSE = switch("verbose", "Log more, and show the traceback of an error.")
SEEDS = [
    Flag("seed", "seed.global_seed"),
    Flag("deterministic", "seed.deterministic", value=True),
]
OVERWRITE = switch("overwrite", "Replace what the output path already holds.")
CHECKPOINT = path_flag(
    "checkpoint", "Trained model: a checkpoint, a run's folder or an exported one.", required=True
)
SPLIT_NAME = Flag(
    "split",
    help="Cells of a processed folder to use: train, validation or test.",
    default=DEFAULT_SPLIT,
    kind=split_name,
    expected="train, validation or test",
    metavar="{train,validation,test}",
)
ANCHORS = Flag(
    "anchors",
    help="Cells whose position is known: a CSV of cell name, x, y[, z], a file of cells, a column "
    "of obs that marks them, or another section of the tissue (.h5ad).",
    default="none",
    metavar="FILE_OR_COLUMN",
    kind=str,
)

_COMMANDS = {
    "preprocess": Command(
        "Convert a folder of slices into Parquet shards: stage 1 and stage 2 in one go.",
        [
            *SLICE_INPUT,
            path_flag(
                "gene_list_file",
                "File with one gene a line.",
                default="the sorted union of all genes",
            ),
            *SPLIT,
            *STD,
            OVERWRITE,
            *SEEDS,
        ],
    ),
    "stage1": Command(
        "Normalise the slices of one data set and align them to a gene list.",
        [
            *SLICE_INPUT,
            path_flag("gene_list_file", "File with one gene a line.", required=True),
            *STD,
            OVERWRITE,
        ],
    ),
    "stage2": Command(
        "Merge the stage-1 output of several data sets, split it, and write Parquet shards.",
        [
            path_flag("input_dirs", "Folders that stage1 wrote.", required=True, many=True),
            path_flag("output_dir", "Folder to write.", required=True),
            *SETTINGS,
            *SPLIT,
            *STD,
            OVERWRITE,
            *SEEDS,
        ],
    ),
    "train": Command(
        "Train a model on a processed folder.",
        [
            *TRAINING,
            switch("profile", "Measure where a step's time goes: data, forward, backward, update."),
            OVERWRITE,
            *SEEDS,
        ],
    ),
    "test": Command(
        "Score a trained model on the test split.",
        [
            CHECKPOINT,
            *SETTINGS,
            DATA_DIR,
            Flag(
                "batch_size",
                "sampling.max_set_size",
                help="Cells in one network call at most; larger slices go in chunks.",
                default="65536; of a sample on a CPU 2048",
            ),
            path_flag(
                "input_data",
                "Cells to score on, instead of the processed folder: .h5ad or a vendor's folder.",
                default="--data_dir",
            ),
            *INPUT_FORMAT,
            SPLIT_NAME,
            Flag(
                "modes",
                help="Tasks to score.",
                default="all that the checkpoint was trained for",
                kind=mode_name,
                expected=" or ".join(get_args(Mode)),
                metavar="MODE",
                many=True,
            ),
            ANCHORS,
            Flag("num_steps", "sampling.num_steps", default=AS_TRAINED),
            Flag("estimator", "sampling.estimator"),
            *settings("sampling", "sampler", "num_samples"),
            *settings(PREPROCESSING, "cell_type_key"),
            path_flag("output", "JSON file for the scores.", default="beside the checkpoint"),
            switch("no_report", "Leave out the HTML report beside the JSON file."),
            OVERWRITE,
            *SEEDS,
            SKIP_LOG_NORMALIZE,
        ],
    ),
    "report": Command(
        "Write one HTML page about a run: tissues, scores, uncertainty, training, the network.",
        [
            Flag(
                "run",
                help="Folder of a run, made by train.",
                kind=Path,
                expected="a path",
                metavar="RUN",
                required=True,
                positional=True,
            ),
            SET,
            path_flag("checkpoint", "Checkpoint to report on.", default="the best of the run"),
            replace(DATA_DIR, default=AS_TRAINED),
            path_flag(
                "input_data",
                "Cells to report on, instead of the processed folder: .h5ad or a vendor's folder.",
                default="--data_dir",
            ),
            *INPUT_FORMAT,
            SPLIT_NAME,
            path_flag("scores", "JSON file that test wrote.", default="scored anew"),
            ANCHORS,
            Flag("estimator", "sampling.estimator", default=AS_TRAINED),
            Flag(
                "genes",
                help="Genes that must be among the page's colours.",
                default="the most spatial ones",
                kind=str,
                many=True,
                metavar="GENE",
            ),
            Flag("unit", help="Unit of the coordinates, for labels.", default="µm", kind=str),
            Flag("num_steps", "sampling.num_steps", default=AS_TRAINED),
            Flag("sampler", "sampling.sampler", default=AS_TRAINED),
            Flag("num_samples", "sampling.num_samples", default=AS_TRAINED),
            Flag("cell_type_key", f"{PREPROCESSING}.cell_type_key", default=AS_TRAINED),
            path_flag("output", "HTML file to write.", default="report.html in the run's folder"),
            OVERWRITE,
            *SEEDS,
            SKIP_LOG_NORMALIZE,
        ],
    ),
    "sample": Command(
        "Generate positions, expression, or both, with a trained model.",
        [
            CHECKPOINT,
            path_flag(
                "input_data",
                "A file or folder of cells, a .pt file, or a processed folder.",
                default="required unless --num_cells is given",
                excludes="cells",
            ),
            *INPUT_FORMAT,
            count_flag(
                "num_cells",
                "How many cells to make: in joint mode without input, or with --virtual_z.",
                default="as many as the input, or the neighbouring sections, have",
                minimum=2,
                excludes="cells",
            ),
            Flag(
                "virtual_z",
                help="Make sections at these z, between or beside sections that share a frame.",
                default="none",
                kind=finite_number,
                expected="a number",
                metavar="Z",
                many=True,
            ),
            count_flag("num_slices", "With --num_cells: how many slices to make.", default="1"),
            *SETTINGS,
            Flag("sample_mode", "sampling.mode", default=MODE_DEFAULT),
            Flag("num_steps", "sampling.num_steps", help=STEPS_HELP, default=AS_TRAINED),
            Flag("sampler", "sampling.sampler", help=SOLVER_HELP),
            Flag("estimator", "sampling.estimator", second_names=("product",)),
            Flag("num_samples", "sampling.num_samples"),
            SPLIT_NAME,
            path_flag(
                "reference",
                "Slice in the atlas frame of the returned positions; for impute and label: cells.",
                default="centred positions",
                excludes="frame",
            ),
            path_flag(
                "landmarks",
                "CSV of cell name, x, y[, z]: known positions that fix the atlas frame.",
                default="centred positions",
                excludes="frame",
            ),
            replace(
                ANCHORS,
                default="rows of the input's coordinates that are not NaN",
                excludes="frame",
            ),
            switch("frame_scale", "Let the tissue grow or shrink as a whole onto the frame."),
            Flag(
                "genes",
                help="Genes to impute, with --sample_mode impute.",
                default="all that the model or the reference knows",
                kind=str,
                many=True,
                metavar="GENE",
            ),
            replace(DATA_DIR, help="Processed folder of the training.", default=AS_TRAINED),
            path_flag(
                "output",
                "File for the generated cells: .h5ad, .zarr (SpatialData) or .pt.",
                default="beside the input",
            ),
            OVERWRITE,
            *SEEDS,
            SKIP_LOG_NORMALIZE,
        ],
    ),
    "extract": Command(
        "Write an embedding per cell.",
        [
            CHECKPOINT,
            *SETTINGS,
            replace(DATA_DIR, excludes="data"),
            path_flag(
                "input_data",
                "Cells to embed, instead of the processed folder: .h5ad or a vendor's folder.",
                default="--data_dir",
                excludes="data",
            ),
            # --format is that of the output here.
            Flag(
                "input_format",
                f"{PREPROCESSING}.format",
                help="Format of --input_data.",
                default=BY_CONTENT,
            ),
            *TABLE_AND_PIXEL,
            Flag("output", "extract.output", metavar="PATH"),
            Flag("extract_mode", "extract.mode"),
            *settings("extract", "format", "max_samples"),
            replace(BATCH_SIZE, help="Cells in one network call.", default=AS_TRAINED),
            OVERWRITE,
            *SEEDS,
            SKIP_LOG_NORMALIZE,
        ],
    ),
    "upload": Command(
        "Upload a processed folder, or a trained model, to the Hugging Face Hub.",
        [
            path_flag(
                "data_dir",
                "Folder that preprocess wrote.",
                default="required unless --checkpoint is given",
                excludes="content",
            ),
            path_flag(
                "checkpoint",
                "Model to upload: a checkpoint, the folder of a run, or a model folder.",
                default="required unless --data_dir is given",
                excludes="content",
            ),
            Flag("repo_id", help="Name on the Hub, as owner/name.", kind=str, required=True),
            Flag(
                "license",
                help="Licence for the card, as the Hub spells it, such as mit or cc-by-4.0.",
                kind=str,
                default="what the card on the Hub says, if any",
            ),
            switch("private", "Make the repository private."),
            Flag("token", help="Access token.", kind=str, default="the usual Hub login"),
        ],
    ),
    "simulate": Command(
        "Write a synthetic tissue as h5ad slices.",
        [
            path_flag("output_dir", "Folder to write.", required=True),
            *SETTINGS,
            *settings("simulation", "cells", "slices", "genes", "dims"),
            Flag("common_frame", "simulation.common_frame", value=True),
            Flag("panel_share", "simulation.panel_share"),
            OVERWRITE,
            *SEEDS,
        ],
    ),
    "demo": Command(
        "Run the main job on a synthetic tissue, from slices to results.",
        [
            path_flag("output_dir", "Folder to write.", default=DEMO_DIR),
            *SEEDS,
        ],
    ),
    "info": Command(
        "Print what a network costs, in parameters and arithmetic: that of the settings, or with "
        "--data_dir the one that `train` would choose for these data.",
        [
            *SETTINGS,
            Flag("num_genes", "model.num_genes", help="Genes of the data.", default="none"),
            DATA_DIR,
        ],
    ),
    "config": Command(
        "Print every setting with its default and meaning, as a config.yaml to start from; with "
        "--data_dir, what `train` would choose for these data, and why.",
        [
            CONFIG,
            Flag("data_dir", "data.processed_data_dir", metavar="PATH", default="none"),
            Flag("gpus", "distributed.devices"),
        ],
    ),
}
# Every command can be asked for more words.
COMMANDS = {
    name: replace(command, flags=[*command.flags, VERBOSE]) for name, command in _COMMANDS.items()
}
