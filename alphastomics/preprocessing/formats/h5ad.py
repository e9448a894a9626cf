"""AnnData, as .h5ad or .zarr: an open root group enters, its cells leave, by the usual keys.

Counts come from `layers["counts"]` where they are wanted and there, else from X. Stereo-seq files
without coordinates in obsm have them as columns x and y of obs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from alphastomics.errors import InputError
from alphastomics.preprocessing.anndata_file import (
    RESAVE,
    SUFFIXES,
    Frame,
    Positions,
    as_text,
    attribute,
    is_group,
    opened,
    read_whole,
    reading,
    require_finite,
)
from alphastomics.preprocessing.cell_source import (
    POSITION_KEY,
    USUAL_POSITION_KEYS,
    CellSource,
    Coordinates,
    Format,
    SourceOptions,
    may_be_positions,
)
from alphastomics.preprocessing.matrix import Expression

COUNTS_LAYER = "counts"
# What stereopy writes into uns of the files that it converts.
STEREOSEQ_MARKS = ("bin_type", "bin_size", "sn")
NANOBALL_UM = 0.5  # from one DNA nanoball of a Stereo-seq chip to the next


class AnnDataSource(CellSource):
    """The cells of an open AnnData file, or of a table in a SpatialData store."""

    def __init__(self, path: Path, root: Any, options: SourceOptions) -> None:
        self.path, self.root, self._options = path, root, options
        self.obs: Frame = Frame(path, root, "obs")
        var = Frame(path, root, "var")
        self.num_cells = len(self.obs)
        self.genes = tuple(var.names(0, len(var)).to_pylist())
        with reading(path, "uns"):
            has_uns = "uns" in root and is_group(root["uns"])
            self._uns = set(root["uns"]) if has_uns else set()
            self.has_log1p = "log1p" in self._uns and not self._takes_layer
            if "uns/alphastomics/mode" in root and not is_group(root["uns/alphastomics/mode"]):
                self.generated_mode = as_text([root["uns/alphastomics/mode"][()]])[0].as_py()
        if self._takes_layer:
            self.notes += (f"counts are taken from layers[{COUNTS_LAYER!r}]",)
        if self._columns_are_positions:
            self.notes += ("positions are taken from obs['x'] and obs['y']",)
        if may_be_positions(self.position_keys, POSITION_KEY):
            self._say_units()

    def _say_units(self) -> None:
        """Note that coordinates are converted, or warn where they look like pixels."""
        size = self._options.pixel_size
        if size is not None:
            self.notes += (
                f"x and y are converted from pixels of {size:.6g} µm; a z stays as it is",
            )
        elif stated := stated_pixel_sizes(self.path, self.root):
            sizes = ", ".join(f"{value:.6g}" for value in stated)
            self.warnings += (
                f"coordinates look like pixels (uns['spatial'] states microns_per_pixel {sizes}), "
                f"and are taken as stored: --pixel_size {stated[0]:.6g} converts them to µm",
            )
        elif self._is_stereoseq:
            self.warnings += (
                "coordinates look like those of Stereo-seq, which count DNA nanoballs of "
                f"{NANOBALL_UM} µm, and are taken as stored: --pixel_size {NANOBALL_UM} converts "
                "them to µm",
            )

    @cached_property
    def _takes_layer(self) -> bool:
        with reading(self.path, "layers"):
            there = "layers" in self.root and COUNTS_LAYER in self.root["layers"]
        return self._options.takes_counts and there

    @cached_property
    def expression(self) -> Expression:
        """Open the counts."""
        name = f"layers/{COUNTS_LAYER}" if self._takes_layer else "X"
        return Expression(self.path, self.root, self.num_cells, len(self.genes), name)

    @cached_property
    def _keys_of_obsm(self) -> list[str]:
        with reading(self.path, "obsm"):
            if "obsm" in self.root and not is_group(self.root["obsm"]):
                raise InputError(f"{self.path}: obsm is no group: {RESAVE}")
            return sorted(self.root["obsm"]) if "obsm" in self.root else []

    @cached_property
    def _columns_are_positions(self) -> bool:
        missing = not set(USUAL_POSITION_KEYS) & set(self._keys_of_obsm)
        return missing and self._is_stereoseq

    @cached_property
    def _is_stereoseq(self) -> bool:
        is_marked = bool(self._uns & set(STEREOSEQ_MARKS))
        asked = self._options.format == STEREOSEQ.name
        return {"x", "y"} <= set(self.obs.columns) and (asked or is_marked)

    @property
    def position_keys(self) -> list[str]:
        """List the keys of obsm, and that of columns of obs where these are the coordinates."""
        return [*self._keys_of_obsm, *([POSITION_KEY] if self._columns_are_positions else [])]

    def positions(self, key: str) -> Coordinates:
        """Open obsm[key], in micrometres where the size of a pixel is given."""
        stored: Coordinates
        if self._columns_are_positions and key == POSITION_KEY:
            stored = ObsCoordinates(self.obs)
        else:
            stored = Positions(self.path, self.root, key, self.num_cells)
        size = self._options.pixel_size
        return stored if size is None else PixelCoordinates(stored, size)

    def is_dissociated(self, key: str) -> bool:
        """Tell whether nothing in the file may be coordinates: no key of obsm, no columns."""
        has_columns = {"x", "y"} <= set(self.obs.columns)
        return not has_columns and not may_be_positions(self.position_keys, key)

    def to_anndata(self) -> Any:
        """Read the whole file as it is."""
        return read_whole(self.path)


def stated_pixel_sizes(path: Path, root: Any) -> list[float]:
    """Return what `uns["spatial"]` says a pixel measures, for each of its images, in µm."""
    with reading(path, "uns['spatial']"):
        images = element_at(root, "uns", "spatial")
        sizes = set()
        for name in images if is_group(images) else ():
            element = element_at(images[name], "scalefactors", "microns_per_pixel")
            if element is None or is_group(element):
                continue
            value = np.asarray(element[()])
            if value.size == 1 and value.dtype.kind in "iuf" and 0 < float(value) < np.inf:
                sizes.add(float(value))
    return sorted(sizes)


def element_at(root: Any, *names: str) -> Any:
    """Return what lies at the end of these names; None where one of them is missing."""
    for name in names:
        if not is_group(root) or name not in root:
            return None
        root = root[name]
    return root


class PixelCoordinates:
    """Coordinates in pixels, read in µm: x and y alone, since a pixel has no z."""

    def __init__(self, stored: Coordinates, pixel_size: float) -> None:
        self._stored, self._pixel_size = stored, pixel_size
        self.field, self.cells, self.columns = stored.field, stored.cells, stored.columns

    def rows(self, start: int, stop: int, *, partial: bool = False) -> Float64[np.ndarray, "N C"]:
        """Read the coordinates of some rows."""
        values = self._stored.rows(start, stop, partial=partial)
        return np.concatenate([values[:, :2] * self._pixel_size, values[:, 2:]], axis=1)


class ObsCoordinates:
    """Coordinates that are columns x and y of obs."""

    field = "obs[['x', 'y']]"
    columns = 2

    def __init__(self, obs: Frame) -> None:
        self.obs, self.cells = obs, len(obs)

    def rows(self, start: int, stop: int, *, partial: bool = False) -> Float64[np.ndarray, "N 2"]:
        """Read the coordinates of some rows."""
        with reading(self.obs.path, self.field):
            elements = [self.obs.group[name] for name in ("x", "y")]
            if any(is_group(part) or attribute(part, "categories") for part in elements):
                raise InputError(f"{self.obs.path}: {self.field} are no plain columns of numbers")
            values = np.stack([part[start:stop] for part in elements], axis=1).astype(np.float64)
        return require_finite(self.obs.path, self.field, values, start, partial=partial)


@contextmanager
def opened_h5ad(path: Path, options: SourceOptions) -> Iterator[CellSource]:
    """Open an AnnData file or store."""
    with opened(path) as root:
        yield AnnDataSource(path, root, options)


def _is_anndata(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


FORMAT = Format(
    name="h5ad",
    content="AnnData in an .h5ad file or a .zarr store",
    recognises=_is_anndata,
    files=lambda path, _: [path],
    opened=opened_h5ad,
    uses=lambda *_: ("pixel_size",),
)
# The content shows it, too, once the file is open: FORMAT is asked first.
STEREOSEQ = replace(FORMAT, name="stereoseq", content="an .h5ad file with columns x and y in obs")
