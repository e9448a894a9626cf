"""The flags of slices that are read and preprocessed, which several commands share."""

from alphastomics.cli.schema import Flag, path_flag, settings
from alphastomics.cli.training_flags import SETTINGS

PREPROCESSING = "data.preprocessing"
SKIP_LOG_NORMALIZE = Flag(
    "skip_log_normalize",
    f"{PREPROCESSING}.log_normalize",
    value=False,
    help="Leave out normalisation to 1e4 and log1p: it was done before.",
    hyphenated=True,
)
STD = [
    Flag("workers", f"{PREPROCESSING}.workers"),
    Flag(
        "scheduler",
        help="Address of a Dask scheduler to run on, instead of local processes.",
        default="none",
        metavar="ADDRESS",
        kind=str,
    ),
]
BY_CONTENT = "recognised by its content"
TABLE_AND_PIXEL = settings(PREPROCESSING, "table", "pixel_size")
INPUT_FORMAT = [
    Flag(
        "format",
        f"{PREPROCESSING}.format",
        help="Format of the input.",
        default=BY_CONTENT,
        second_names=("input_format",),
    ),
    *TABLE_AND_PIXEL,
]
SLICE_INPUT = [
    path_flag(
        "input_dir",
        "Folder of slices (.h5ad, .zarr, folders of instruments), searched in sorted order; or one "
        "such folder.",
        required=True,
    ),
    path_flag("output_dir", "Folder to write.", required=True),
    *SETTINGS,
    *INPUT_FORMAT,
    Flag("position_key", f"{PREPROCESSING}.position_key"),
    Flag("position_is_3d", f"{PREPROCESSING}.position_is_3d", value=True),
    Flag("common_frame", f"{PREPROCESSING}.common_frame", value=True),
    *settings(PREPROCESSING, "z_spacing", "cell_type_key"),
    SKIP_LOG_NORMALIZE,
    Flag(
        "skip_scale",
        f"{PREPROCESSING}.scale",
        value=False,
        help="Leave out the standardisation of each gene within its slice.",
        hyphenated=True,
    ),
    Flag("max_cells_per_file", f"{PREPROCESSING}.max_cells_per_file"),
]
SPLIT = settings(
    PREPROCESSING, "train_ratio", "val_ratio", "max_shard_size", "split_by", "layout", "storage"
)
