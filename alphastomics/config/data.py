"""Settings of the data path and of the synthetic tissue, with their defaults."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, model_validator

from alphastomics.config.section import (
    LARGEST_COUNT,
    RATIO_ROUNDING,
    Section,
    count,
    setting,
    share,
    text,
)

LARGEST_SPACING = 1e12  # the z of millions of slices, squared, is still a number
MOST_SLICES = 1_000_000  # of a synthetic tissue: each is a file
InputFormat = Literal[
    "h5ad", "stereoseq", "spatialdata", "xenium", "merscope", "cosmx", "visium_hd", "10x", "table"
]


def refuse_normalized_positions(value: object) -> object:
    """Say why the one documented value of `normalize_position` is false."""
    if value is True:
        raise ValueError(
            "data.preprocessing.normalize_position: coordinates keep their original values on "
            "disk and are brought to unit scale inside the model; set it to false"
        )
    return value


class PreprocessingConfig(Section):
    """From h5ad slices to Parquet shards."""

    normalize_position: Annotated[Literal[False], BeforeValidator(refuse_normalized_positions)] = (
        setting(False, "Always false: coordinates keep their original values on disk.")
    )
    scale: bool = setting(True, "Standardise each gene within its slice.")
    log_normalize: bool = setting(
        True, "Normalise each cell to a total of 1e4, then take log(1 + x)."
    )
    format: InputFormat | None = setting(
        None, "Format of the input; null recognises it by its content."
    )
    table: str | None = text(
        None, "Which table of an input: of a SpatialData store, or a Visium HD bin size."
    )
    pixel_size: float | None = setting(
        None,
        "Micrometres of a pixel: converts x and y, where they are in pixels.",
        gt=0,
        le=1e6,
    )
    position_key: str = text("spatial", "Key of obsm that holds the coordinates.")
    position_is_3d: bool = setting(
        False, "The coordinates have three columns, in one common frame."
    )
    common_frame: bool = setting(
        False,
        "2D slices lie in one frame (aligned sections, an atlas), so that their "
        "positions can be compared; 3D positions always do.",
    )
    z_spacing: float = setting(
        10.0, "For 2D slices: slice i gets z = i x z_spacing.", gt=0, le=LARGEST_SPACING
    )
    cell_type_key: str | None = text(None, "Column of obs that holds the cell types.")
    train_ratio: float = share(0.8, "Share of cells (or slices) for training.")
    val_ratio: float = share(0.1, "Share for validation; what is left over is for testing.")
    max_shard_size: int = count(100_000, "Cells in a Parquet shard at most.")
    max_cells_per_file: int = count(50_000, "Rows of a file held in memory at a time.")
    split_by: Literal["cell", "slice"] = setting(
        "cell", "Split single cells, or whole slices, into train/validation/test."
    )
    layout: Literal["shuffled", "slice"] = setting(
        "shuffled",
        "Mix the cells of all slices, or keep a slice's cells together so that "
        "sets can be streamed slice by slice.",
    )
    storage: Literal["dense", "sparse"] = setting(
        "dense", "Store a vector per cell, or lists of gene index and value."
    )
    workers: int = count(1, "Processes that work on slices side by side.")

    @model_validator(mode="after")
    def ratios_fit(self) -> "PreprocessingConfig":
        """Refuse a split that asks for more than there is."""
        if self.train_ratio + self.val_ratio > 1 + RATIO_ROUNDING:
            raise ValueError(
                f"data.preprocessing.train_ratio ({self.train_ratio}) and "
                f"data.preprocessing.val_ratio ({self.val_ratio}) must sum to at most 1"
            )
        return self


class LoadingConfig(Section):
    """From Parquet shards to batches."""

    num_workers: int = count(4, "Threads that read batches ahead; 0 for none.", minimum=0)
    streaming: bool = setting(False, "Read shards as they are needed, not all at first.", auto=True)
    buffer_size: int = count(50_000, "Cells in the shuffle buffer of a streaming loader.")
    set_size: int | None = count(
        None,
        "Cells that attend to one another; null makes the whole batch one set.",
        auto=True,
    )
    set_draw: Literal["auto", "random", "slice", "patch"] = setting(
        "auto",
        "Cells of a set: at random across slices of one frame, of one slice, or a "
        "contiguous patch of one; auto never mixes slices without a common frame.",
    )
    verify_checksums: bool = setting(True, "Compare each shard with its sha256.")


class DataConfig(Section):
    """Where the data is and how it is read."""

    processed_data_dir: str = text("./processed", "Folder that `preprocess` wrote.")
    preprocessing: PreprocessingConfig = PreprocessingConfig()
    loading: LoadingConfig = LoadingConfig()


class SimulationConfig(Section):
    """The synthetic tissue."""

    cells: int = count(2000, "Cells in each slice.")
    slices: int = setting(4, "Slices cut from the 3D volume.", ge=1, le=MOST_SLICES)
    genes: int = setting(200, "Genes of the whole panel; at least 20.", ge=20, le=LARGEST_COUNT)
    dims: Literal[2, 3] = setting(
        2, "Thin sections with in-plane coordinates, or slabs with 3D coordinates."
    )
    common_frame: bool = setting(
        False,
        "2D sections lie in the atlas frame; else each is rotated, mirrored and "
        "shifted at random, as on a slide, and has a sequencing depth of its own.",
    )
    panel_share: float = setting(
        1.0, "Share of the genes that each slice measures, drawn per slice.", gt=0, le=1
    )
