"""Flags that a call does not use: what was given enters; words, or a refusal, leave."""

import logging
from collections.abc import Collection
from pathlib import Path

from alphastomics.config import Mode, PreprocessingConfig, SamplingConfig
from alphastomics.errors import InputError
from alphastomics.preprocessing.cell_source import SourceOptions
from alphastomics.preprocessing.formats.registry import (
    check_flags,
    converted_too,
    is_cell_folder,
)
from alphastomics.tasks import TASKS

logger = logging.getLogger(__name__)


def is_processed(source: Path) -> bool:
    """Tell a processed folder from cells: a file, a Zarr store, a folder of an instrument."""
    return source.is_dir() and not is_cell_folder(source)


def sample_notices(
    given: Collection[str],
    mode: Mode,
    settings: SamplingConfig,
    source: Path | None,
    *,
    has_counts: bool = False,
) -> list[str]:
    """Say which flags of `sample` do nothing in this call of a model, which may draw counts."""
    notices = []
    if not TASKS[mode].is_conditional:
        unused = [name for name in ("estimator", "num_samples") if name in given]
        notices += [f"--{name}: joint makes one sample, without a std: not used" for name in unused]
        unused = [f"--{name}" for name in ("num_steps", "sampler") if name in given and has_counts]
        if unused:
            notices.append(
                f"{', '.join(unused)}: new tissue of counts is sampled by a way of its own, cell "
                "beside cell (docs/model.md, New tissue): not used"
            )
    elif settings.estimator == "mean":
        unused = [f"--{name}" for name in ("num_steps", "sampler") if name in given]
        if unused:
            notices.append(
                f"{', '.join(unused)}: the estimate is one network call from each start; they "
                "count for the std alone. Add --estimator sample for a sample"
            )
    if "split" in given and (source is None or not is_processed(source)):
        notices.append("--split: counts with a processed folder: not used")
    return notices


def require_used_flags(
    given: Collection[str],
    options: PreprocessingConfig,
    source: Path | None,
    others: Collection[Path | None] = (),
) -> None:
    """Refuse --table and --pixel_size where no file of this call uses them; warn where some do.

    `others` are read beside the source: known cells. What is no file of cells has no use for flags.
    """
    asked = [name for name in ("table", "pixel_size") if name in given]
    if source is not None and not source.exists():
        return  # who reads it says so
    paths = [
        path
        for path in (source, *others)
        if path is not None
        and path.suffix not in (".pt", ".csv")
        and path.exists()
        and (options.format is not None or not is_processed(path))
    ]
    if asked and not paths:
        raise InputError(
            f"--{asked[0]}: counts with a file or folder of cells, such as --input_data; leave it "
            "out"
        )
    if asked:
        check_flags(paths, SourceOptions.of(options))
        words = converted_too(paths, SourceOptions.of(options))
        if words is not None:
            logger.warning("--pixel_size: %s: is that in pixels of this size?", words)


def score_notices(given: Collection[str], source: Path) -> list[str]:
    """Say which flags of `test` and `report` do nothing in this call."""
    if is_processed(source):
        words = "counts with --input_data; a processed folder has its own cell types: not used"
        return [f"--cell_type_key: {words}"] if "cell_type_key" in given else []
    return ["--split: counts with a processed folder: not used"] if "split" in given else []
