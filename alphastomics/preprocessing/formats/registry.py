"""Every input format: a path enters; its format, its files or its open cells leave.

To add a format, write a module with a `FORMAT` and name it in `_FORMATS`; its name stands in
`InputFormat` in config/data.py.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, overload

from alphastomics.config.data import InputFormat
from alphastomics.errors import InputError
from alphastomics.preprocessing.anndata_file import SUFFIXES
from alphastomics.preprocessing.cell_source import CellSource, Format, SourceOptions
from alphastomics.preprocessing.formats import (
    cosmx,
    h5ad,
    merscope,
    spatialdata,
    table,
    tenx,
    visium_hd,
    xenium,
)

logger = logging.getLogger(__name__)

# In the order in which they are asked: the more telling content first.
_FORMATS = (
    spatialdata.FORMAT,
    h5ad.FORMAT,
    h5ad.STEREOSEQ,
    xenium.FORMAT,
    merscope.FORMAT,
    cosmx.FORMAT,
    visium_hd.FORMAT,
    tenx.FORMAT,
    table.FORMAT,
)
FORMATS: dict[InputFormat, Format] = {form.name: form for form in _FORMATS}
# Units: positions are in pixels, or in whatever unit they were stored.
PIXELS: tuple[InputFormat, ...] = ("cosmx", "visium_hd")
AS_STORED: tuple[InputFormat, ...] = ("h5ad", "stereoseq", "spatialdata")
# Why a flag may not count.
UNUSED = {
    "table": "has no tables to choose from",
    "pixel_size": "has no positions in pixels",
}


@overload
def format_of(path: Path, options: SourceOptions) -> InputFormat: ...
@overload
def format_of(
    path: Path, options: SourceOptions, *, missing_ok: Literal[True]
) -> InputFormat | None: ...
def format_of(
    path: Path, options: SourceOptions, *, missing_ok: bool = False
) -> InputFormat | None:
    """Return the format that was asked for, or the one that the content shows.

    What is of none is refused, or None with `missing_ok`.
    """
    if options.format is not None and not missing_ok:
        return options.format
    for name, form in FORMATS.items():
        if form.recognises(path):
            return name
    if missing_ok:
        return None
    kind = "folder" if path.is_dir() else "file"
    known = "; ".join(f"{form.name}: {form.content}" for form in FORMATS.values())
    raise InputError(f"{path}: is a {kind} of no known format: check the path (known: {known})")


def is_input(path: Path, options: SourceOptions) -> bool:
    """Tell whether a search of --input_dir takes a path as an input, of the format asked for."""
    if options.format is not None:
        return FORMATS[options.format].recognises(path)
    name = format_of(path, options, missing_ok=True)
    if name is None or not FORMATS[name].is_searched:
        return False
    if path.suffix.lower() in SUFFIXES:
        return True
    # Files of AnnData come first: what an instrument wrote may lie beside them.
    names = (entry.name for entry in path.iterdir() if entry.suffix.lower() in SUFFIXES)
    beside = sorted(name for name in names if not name.startswith("."))
    if beside:
        logger.warning(
            "%s: %s in it is read, and not the %s output beside it: give --format %s to read that",
            *(path, beside[0], name, name),
        )
    return not beside


def is_unsearched(path: Path, options: SourceOptions) -> bool:
    """Tell counts of dissociated cells that a search of --input_dir does not take."""
    if options.format is not None:
        return False
    name = format_of(path, options, missing_ok=True)
    return name is not None and not FORMATS[name].is_searched


def is_cell_folder(path: Path) -> bool:
    """Tell a folder or store of cells, in any format, from a processed folder."""
    return path.is_dir() and format_of(path, SourceOptions(), missing_ok=True) is not None


def files_of(path: Path, options: SourceOptions) -> list[Path]:
    """List the files that are read of an input; a missing one is refused."""
    return FORMATS[format_of(path, options)].files(path, options)


def check_flags(paths: Sequence[Path], options: SourceOptions) -> None:
    """Refuse --table or --pixel_size where it counts for no input; warn where for some alone."""
    for flag, why in UNUSED.items():
        if getattr(options, flag) is None:
            continue
        names = {path: format_of(path, options) for path in paths}
        unused = [
            path for path, name in names.items() if flag not in FORMATS[name].uses(path, options)
        ]
        if unused and len(unused) == len(paths):
            name = names[unused[0]]
            raise InputError(f"--{flag}: {unused[0]} ({name}) {why}: leave it out")
        if unused:
            logger.warning(
                "--%s: not used for %d of %d inputs (first %s, %s), which %s",
                *(flag, len(unused), len(paths), unused[0], names[unused[0]], why),
            )


def converted_too(paths: Sequence[Path], options: SourceOptions) -> str | None:
    """Say that --pixel_size converts AnnData beside folders whose positions are always in pixels.

    None where all inputs are of one kind.
    """
    if options.pixel_size is None:
        return None
    names = {format_of(path, options): path for path in paths}
    pixels, stored = ([name for name in kinds if name in names] for kinds in (PIXELS, AS_STORED))
    if not pixels or not stored:
        return None
    return f"converts {names[stored[0]]}, too, beside {names[pixels[0]]} ({pixels[0]})"


def require_one_unit(paths: Sequence[Path], options: SourceOptions) -> None:
    """Refuse --pixel_size for AnnData beside folders whose positions are always in pixels."""
    words = converted_too(paths, options)
    if words is not None:
        raise InputError(
            f"--pixel_size: {words}: prepare them apart with `stage1`, each with a --pixel_size of "
            "its own or without, and merge them with `stage2`"
        )


@contextmanager
def opened_source(path: Path, options: SourceOptions) -> Iterator[CellSource]:
    """Open an input of any format."""
    with FORMATS[format_of(path, options)].opened(path, options) as source:
        yield source
