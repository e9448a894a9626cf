"""Where in an AnnData the cells are: choices enter, checked; files that the commands read leave.

The commands read files. So that the notebook's results are theirs, an AnnData takes the same way:
what is needed of it is written to a temporary file, under the names that preprocessing expects.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from anndata import AnnData, ImplicitModificationWarning
from scipy.sparse import issparse

from alphastomics.config import Config, PreprocessingConfig
from alphastomics.errors import InputError
from alphastomics.io.h5ad import write_anndata
from alphastomics.preprocessing.cell_source import (
    USUAL_POSITION_KEYS,
    SourceOptions,
    may_be_positions,
    usual_position_key,
)
from alphastomics.preprocessing.formats.h5ad import COUNTS_LAYER
from alphastomics.preprocessing.formats.registry import (
    AS_STORED,
    check_flags,
    format_of,
    require_one_unit,
)
from alphastomics.preprocessing.genes import require_unique
from alphastomics.preprocessing.inspection import SAMPLE_KEYS
from alphastomics.preprocessing.query_fit import say_notes
from alphastomics.preprocessing.reader import SLICE_KEY, USUAL_SLICE_KEYS
from alphastomics.preprocessing.subprocess_reader import in_subprocess

logger = logging.getLogger(__name__)

SETUP_KEY = "alphastomics_setup"
POSITION, CELL_TYPE = "spatial", "cell_type"  # names in the temporary files


@dataclass(frozen=True)
class Setup:
    """Where in an AnnData the cells are.

    Parameters
    ----------
    position_key
        Key of obsm with the coordinates; None for cells without any.
    cell_type_key
        Column of obs with the cell types; None for none.
    slice_key
        Column of obs that names each cell's slice; None makes all cells one slice.
    layer
        Layer with the counts; None is X.
    """

    position_key: str | None
    cell_type_key: str | None
    slice_key: str | None
    layer: str | None


def with_files_read(parts: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Read what is named by a path; what is an AnnData stays as it is."""
    paths = [Path(part) for part in parts.values() if isinstance(part, str | Path)]
    options = SourceOptions.of(config.data.preprocessing)
    for name in ("table", "pixel_size"):
        if not paths and getattr(options, name) is not None:
            logger.warning("%s: counts with the path of a file or folder: not used", name)
    objects = [name for name, part in parts.items() if not isinstance(part, str | Path)]
    if paths and objects and options.pixel_size is not None:
        raise InputError(
            f"pixel_size: converts files, and not {objects[0]}, which is an AnnData: give all by "
            "their paths, or convert obsm['spatial'] yourself"
        )
    check_flags(paths, options)
    read = {
        name: read_cells_of(Path(part), config) if isinstance(part, str | Path) else part
        for name, part in parts.items()
    }
    key = config.data.preprocessing.position_key
    located = [
        Path(part)
        for name, part in parts.items()
        if name not in objects and may_be_positions(list(read[name].obsm), key)
    ]
    require_one_unit(located, options)
    return read


def read_cells_of(path: Path, config: Config) -> AnnData:
    """Read a file or folder of cells, in any format, into memory."""
    reading = config.data.preprocessing
    options = SourceOptions.of(reading)
    with in_subprocess(path, options) as source:
        say_notes(path, source)
        source.verify()
        cells: AnnData = source.to_anndata()
        keys = {reading.position_key, *USUAL_POSITION_KEYS} & set(source.position_keys)
        for key in sorted(keys):
            # The AnnData has them as stored: in pixels, or as columns of obs.
            if options.pixel_size is not None or key not in cells.obsm:
                cells.obsm[key] = source.positions(key).rows(0, source.num_cells, partial=True)
        for column in source.slice_keys:  # regions of a store
            if SLICE_KEY not in cells.obs and cells.obs[column].nunique() > 1:
                cells.obs[SLICE_KEY] = cells.obs[column].astype(str).to_numpy()
    return cells


def require_anndata(adata: Any, name: str) -> AnnData:
    """Refuse what is no AnnData."""
    if not isinstance(adata, AnnData):
        raise InputError(
            f"{name}: expected an AnnData, got {type(adata).__name__}; read a file with "
            "anndata.read_h5ad"
        )
    if adata.is_view and adata.isbacked:
        raise InputError(
            f"{name}: is a view of a file on disk, into which nothing can be written; give "
            f"{name}.to_memory()"
        )
    return adata


def check(adata: AnnData, setup: Setup, name: str, *, partial: bool = False) -> None:
    """Refuse choices that an AnnData does not have."""
    required = {
        "position_key": ("obsm", setup.position_key, list(adata.obsm)),
        "cell_type_key": ("obs", setup.cell_type_key, list(adata.obs)),
        "slice_key": ("obs", setup.slice_key, list(adata.obs)),
        "layer": ("layers", setup.layer, [key for key in adata.layers if key is not None]),
    }
    for choice, (slot, key, present) in required.items():
        if key is not None and key not in present:
            there = ", ".join(map(str, present)) or "none"
            raise InputError(
                f"{name}: {slot}[{key!r}] is missing (there: {there}); name it with {choice}=… in "
                "setup_anndata"
            )
    if setup.slice_key is not None and adata.obs[setup.slice_key].isna().any():
        raise InputError(
            f"{name}: obs[{setup.slice_key!r}] is missing for some cells; name the slice of every "
            "cell, or drop the column"
        )
    if setup.layer is None and adata.X is None:
        raise InputError(f"{name}: X is missing; name the counts with layer=… in setup_anndata")
    require_unique(list(adata.var_names), f"{name}: var_names", "adata.var_names_make_unique()")
    if setup.position_key is not None:
        positions(adata, setup.position_key, name, partial=partial)


def common_dims(
    data: Mapping[str, AnnData], setups: Mapping[str, Setup], options: PreprocessingConfig
) -> int:
    """Check every AnnData, and that all slices are 2D, or all 3D."""
    dims_of, extents = {}, []
    for name, adata in data.items():
        setup = setups[name]
        check(adata, setup, name)
        if setup.position_key is not None:
            position = positions(adata, setup.position_key, name)
            dims_of[name] = position.shape[1]
            extents += [position[:, 2]] if position.shape[1] == 3 else []
    if not dims_of:
        name, adata = next(iter(data.items()))
        there = ", ".join(map(str, adata.obsm)) or "none"
        raise InputError(
            f"{name}: without coordinates; training needs them, here or in another AnnData beside "
            f"it (keys of obsm: {there}): name them with position_key=… in setup_anndata; impute "
            "and predict_labels learn from dissociated cells, too: reference=…"
        )
    if len(set(dims_of.values())) > 1:
        raise InputError(f"adata: slices in 2D and in 3D do not mix (columns: {dims_of})")
    asked = "position_is_3d" in options.model_fields_set
    if extents and not asked and np.ptp(np.concatenate(extents)) == 0:
        raise InputError(
            f"adata: z is {extents[0][0]:g} for every cell, which is no third dimension: keep two "
            "columns of obsm, or set position_is_3d=True if all slices share a frame"
        )
    return next(iter(dims_of.values()))


def units_known(given: Mapping[str, Any], config: Config) -> set[str]:
    """Name the inputs whose coordinates come in µm by their format, or are converted."""
    options = SourceOptions.of(config.data.preprocessing)
    paths = {name: Path(part) for name, part in given.items() if isinstance(part, str | Path)}
    return {
        name
        for name, path in paths.items()
        if options.pixel_size is not None or format_of(path, options) not in AS_STORED
    }


def say_units(setups: Mapping[str, Setup], known: set[str]) -> None:
    """Log that coordinates are taken as stored, where nothing says in which unit they are."""
    stored = [n for n, setup in setups.items() if setup.position_key is not None and n not in known]
    if stored:
        logger.info(
            "coordinates of %s are taken as stored, as µm; multiply pixels by their size in µm "
            "before you train",
            ", ".join(stored[:3]) + (", …" if len(stored) > 3 else ""),
        )


def positions(adata: AnnData, key: str, name: str, *, partial: bool = False) -> np.ndarray:
    """Return the coordinates of an AnnData, checked."""
    return checked_coordinates(adata.obsm[key], f"{name}: obsm[{key!r}]", partial=partial)


def checked_coordinates(values: Any, where: str, *, partial: bool = False) -> np.ndarray:
    """Return coordinates as an array (N, 2 or 3) of finite numbers.

    With `partial`, those of a cell may all be NaN: nobody knows where it is.
    """
    try:
        position = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: expected coordinates, which are numbers") from error
    if position.ndim != 2 or position.shape[1] not in (2, 3):
        raise InputError(f"{where}: has shape {position.shape}, not (cells, 2) or (cells, 3)")
    missing = np.isnan(position).all(axis=1) & partial
    bad = np.flatnonzero(~np.isfinite(position).all(axis=1) & ~missing)
    if len(bad):
        raise InputError(f"{where}: has NaN or infinite coordinates (first in row {bad[0]})")
    return position


def register(adata: AnnData, setup: Setup) -> None:
    """Write the choices into an AnnData, where they survive saving and reading."""
    choices = {name: key for name, key in asdict(setup).items() if key is not None}
    put_quietly(adata, "uns", {SETUP_KEY: choices})


def registered(adata: AnnData) -> Setup | None:
    """Read the choices that `register` wrote; None where there are none."""
    stored = adata.uns.get(SETUP_KEY)
    return None if stored is None else from_plain(stored, f"uns[{SETUP_KEY!r}]")


def from_plain(values: Any, where: str) -> Setup:
    """Read choices from plain data."""
    names = [field.name for field in fields(Setup)]
    if not isinstance(values, Mapping) or not set(values) <= set(names):
        raise InputError(f"{where}: not what setup_anndata writes; call setup_anndata again")
    return Setup(**{name: None if (v := values.get(name)) is None else str(v) for name in names})


def setup_for(adata: AnnData, config: Config, name: str) -> Setup:
    """Return the registered choices, or those of the settings."""
    options = config.data.preprocessing
    setup = registered(adata)
    if setup is None:
        keys = list(map(str, adata.obsm))
        key = usual_position_key(keys, options)
        types: str | None = options.cell_type_key
        is_slice = may_be_positions(keys, key)
        if not is_slice and {"x", "y"} <= set(adata.obs):  # as the commands do
            raise InputError(
                f"{name}: obs['x'] and obs['y'] may be coordinates, and obsm has none (keys: "
                f"{', '.join(keys) or 'none'}): put them into obsm['spatial'], or drop the columns "
                "if these are dissociated cells"
            )
        if not is_slice and types not in adata.obs:  # as the commands do
            types = None
        setup = Setup(key if is_slice else None, types, None, usual_layer(adata, options))
    return with_slices(adata, setup)


def usual_layer(adata: AnnData, options: PreprocessingConfig) -> str | None:
    """Name the layer of counts, where counts are wanted and there is one, as the commands do."""
    return COUNTS_LAYER if options.log_normalize and COUNTS_LAYER in adata.layers else None


def to_remember(adata: AnnData, setup: Setup) -> Setup:
    """Return the choices that other cells must follow: not what was found without asking."""
    return setup if registered(adata) is not None else replace(setup, layer=None)


def setup_for_use(adata: AnnData, trained: Setup, options: PreprocessingConfig) -> Setup:
    """Return the registered choices, or those of the training as far as this AnnData has them.

    Cells whose positions are predicted need no coordinates, slices or types; their counts must
    come from the same slot.
    """
    setup = registered(adata)
    if setup is None:
        setup = replace(
            trained,
            position_key=trained.position_key if trained.position_key in adata.obsm else None,
            cell_type_key=trained.cell_type_key if trained.cell_type_key in adata.obs else None,
            slice_key=trained.slice_key if trained.slice_key in adata.obs else None,
            layer=trained.layer or usual_layer(adata, options),
        )
    return with_slices(adata, setup)


def with_slices(adata: AnnData, setup: Setup) -> Setup:
    """Take the usual columns, as the commands do, where no other column is named."""
    if setup.slice_key is not None:
        return setup
    if SLICE_KEY in adata.obs:
        return replace(setup, slice_key=SLICE_KEY)
    usual = USUAL_SLICE_KEYS if setup.position_key is not None else ()
    several = (key for key in usual if key in adata.obs and adata.obs[key].nunique() > 1)
    return replace(setup, slice_key=next(several, None))


def write_cells(path: Path, adata: AnnData, setup: Setup) -> None:
    """Write what the commands need of an AnnData, under the names that they expect."""
    if adata.isbacked:
        adata = adata.to_memory()
    columns = {SLICE_KEY: setup.slice_key, CELL_TYPE: setup.cell_type_key}
    columns |= {key: key for key in SAMPLE_KEYS if key in adata.obs}
    obs = pd.DataFrame(
        {name: adata.obs[key].to_numpy() for name, key in columns.items() if key is not None},
        index=pd.Index(adata.obs_names.astype(str), dtype=object),
    )
    for name in obs:
        obs[name] = pd.Categorical([word if pd.isna(word) else str(word) for word in obs[name]])
    var = pd.DataFrame(index=pd.Index(adata.var_names.astype(str), dtype=object))
    values = adata.X if setup.layer is None else adata.layers[setup.layer]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Observation names are not unique")
        # A copy: a view of a matrix is of a class that cannot be written.
        cells = AnnData(rows_of_cells(values), obs=obs, var=var)
        if setup.position_key is not None:
            cells.obsm[POSITION] = np.asarray(adata.obsm[setup.position_key])
        write_anndata(path, cells, compression=None)


def rows_of_cells(values: Any) -> Any:
    """Return a copy of a matrix in a form that AnnData holds: COO and the like become CSR."""
    if issparse(values) and values.format not in ("csr", "csc"):
        return values.tocsr()
    return values.copy()


def options_for(options: PreprocessingConfig, setups: list[Setup], dims: int) -> Any:
    """Return the settings of preprocessing with the names of the temporary files."""
    with_types = any(setup.cell_type_key is not None for setup in setups)
    given = options.model_fields_set
    # A notebook's training holds out what it needs by itself: no cell need be set aside.
    whole = {} if {"train_ratio", "val_ratio"} & given else {"train_ratio": 1.0, "val_ratio": 0.0}
    return options.model_copy(
        update={
            **whole,
            "position_key": POSITION,
            "cell_type_key": CELL_TYPE if with_types else None,
            "position_is_3d": dims == 3,
            # The temporary files are .h5ad, whatever the cells came from.
            **{"format": None, "table": None, "pixel_size": None},
        }
    )


def put_quietly(
    adata: AnnData, slot: str, values: Mapping[str, Any], dropped: Sequence[str] = ()
) -> None:
    """Write into an AnnData; a view becomes an AnnData of its own, which is what is wanted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImplicitModificationWarning)
        for key in dropped:
            del getattr(adata, slot)[key]
        for key, value in values.items():
            if key is not None:  # anndata 0.13 counts X among the layers, by this name
                getattr(adata, slot)[key] = value


@contextmanager
def calling(path: Path, name: str) -> Iterator[None]:
    """Call a temporary file or folder by the user's own word for it, in a refusal."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace(str(path), name)) from None


def require_whole(name: str, value: Any, least: int) -> None:
    """Refuse what is no whole number, or too small a one."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        expected = f"a whole number of at least {least}"
        raise InputError(f"{name}: expected {expected}, got {value!r}")


def require_z(z: Any) -> list[float]:
    """Return one z, or several, as numbers."""
    try:
        z_values = np.atleast_1d(np.asarray(z, dtype=np.float64))
    except (TypeError, ValueError):
        z_values = np.zeros((0, 0))
    if z_values.ndim != 1 or not len(z_values) or isinstance(z, bool | str):
        raise InputError(f"z: expected a number, or several, got {z!r}")
    return z_values.tolist()
