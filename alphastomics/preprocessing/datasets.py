"""The outputs of stage 1, read back and merged: folders enter, one common view leaves.

Slices, parts and cell types of several datasets are numbered through; everything that must agree
between them is checked.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from alphastomics.errors import InputError
from alphastomics.io.files import sha256_of
from alphastomics.preprocessing.dataset_record import DatasetRecord
from alphastomics.preprocessing.genes import require_same_gene_lists, union_of
from alphastomics.preprocessing.resume import load, unaltered
from alphastomics.preprocessing.schema import DATASET_FILE, INTERMEDIATE_FOLDER, first_fault

logger = logging.getLogger(__name__)

SKIPPED = {"log_normalize": "--skip-log-normalize", "scale": "--skip-scale"}


@dataclass(frozen=True)
class Part:
    """One part of one dataset, in the numbers of the merged view."""

    path: Path
    sha256: str
    cells: int
    entries: int
    runs: tuple[tuple[int, int, int], ...]
    """(slice, first cell in the slice, cells) of its rows."""
    cell_type_numbers: tuple[int, ...]
    """The merged number of each of its dataset's cell types."""


@dataclass(frozen=True)
class Merged:
    """All datasets together."""

    folders: tuple[Path, ...]
    names: tuple[str, ...]
    requests: tuple[dict[str, Any], ...]
    digests: tuple[str, ...]
    statistics_sha256: tuple[str, ...]
    genes: tuple[str, ...]
    cell_types: tuple[str, ...] | None
    slices: tuple[dict[str, Any], ...]
    references: tuple[dict[str, Any], ...]
    """Dissociated cells, numbered after all slices."""
    panels: tuple[tuple[int, ...], ...]
    parts: tuple[Part, ...]
    log_normalize: bool
    scale: bool
    common_frame: bool
    fractions: bool

    @property
    def slice_sizes(self) -> tuple[int, ...]:
        """Count the cells of each slice."""
        return tuple(record["cells"] for record in self.slices)

    @property
    def reference_sizes(self) -> tuple[int, ...]:
        """Count the dissociated cells of each input."""
        return tuple(record["cells"] for record in self.references)

    def parts_of(self, *, slices: bool) -> list[Part]:
        """List the parts with cells of slices, or those of dissociated cells."""
        return [part for part in self.parts if (part.runs[0][0] < len(self.slices)) == slices]


def find_dataset(folder: Path) -> Path:
    """Return the folder with stage 1's output: the one given, or the one inside it."""
    for candidate in (folder, folder / INTERMEDIATE_FOLDER):
        if (candidate / DATASET_FILE).is_file():
            return candidate
    raise InputError(
        f"{folder}: there is no {DATASET_FILE}: it is not the output of a finished stage1; run "
        "`alphastomics stage1 --output_dir` with this folder first"
    )


def merge(folders: list[Path]) -> Merged:
    """Read the outputs of stage 1 and number everything through."""
    if not folders:
        raise InputError("--input_dirs: name at least one folder that stage1 wrote")
    sources = [find_dataset(folder) for folder in folders]
    if len({source.resolve() for source in sources}) < len(sources):
        raise InputError("--input_dirs: a folder is named twice, so its cells would be repeated")
    datasets = [load(source / DATASET_FILE) for source in sources]
    if any(dataset is None for dataset in datasets):
        broken = sources[datasets.index(None)]
        raise InputError(f"{broken / DATASET_FILE}: is damaged: run stage1 again with --overwrite")
    for source, dataset in zip(sources, datasets, strict=True):
        require_sound(dataset, source / DATASET_FILE)
        require_same_gene_lists(
            datasets[0]["genes"], dataset["genes"], str(folders[0]), str(source)
        )
    spatial = [has_slices(dataset) for dataset in datasets]
    if not any(spatial):
        raise InputError(
            f"--input_dirs: no cell of {' '.join(map(str, folders))} has a position, and training "
            "needs slices that have them: name a folder of slices, too"
        )
    _check_flags(sources, datasets)
    flags = [dataset["request"]["flags"] for dataset in datasets]
    _warn_of_repeated_files(datasets)
    named = [dataset["cell_types"] for dataset in datasets if dataset["cell_types"] is not None]
    types = tuple(union_of(named)) if named else None
    return Merged(
        folders=tuple(sources),
        names=tuple(dataset["name"] for dataset in datasets),
        requests=tuple(dataset["request"] for dataset in datasets),
        digests=tuple(sha256_of(source / DATASET_FILE) for source in sources),
        statistics_sha256=tuple(dataset["statistics_sha256"] for dataset in datasets),
        genes=tuple(datasets[0]["genes"]),
        cell_types=types,
        slices=tuple(_slices(datasets)),
        references=tuple(_references(datasets)),
        panels=tuple(tuple(panel) for dataset in datasets for panel in dataset["panels"]),
        parts=tuple(_parts(sources, datasets, types or ())),
        # The values of all datasets are of the kind that the most prepared one has.
        log_normalize=any(flag["log_normalize"] for flag in flags),
        scale=any(flag["scale"] for flag in flags),
        common_frame=all(
            flag.get("common_frame") for flag, has in zip(flags, spatial, strict=True) if has
        ),
        fractions=any(dataset.get("fractions") for dataset in datasets),
    )


def require_sound(dataset: Any, path: Path) -> None:
    """Refuse a dataset.json that was altered, or whose parts contradict one another."""
    try:
        DatasetRecord.model_validate(dataset)
        fault = None if unaltered(dataset) else "its content differs from its checksum"
    except ValidationError as error:
        fault = first_fault(error)
    if fault is not None:
        raise InputError(f"{path}: is damaged ({fault}): run stage1 again with --overwrite")


def _check_flags(sources: list[Path], datasets: list[Any]) -> None:
    """Say where datasets differ in their normalisation, or 2D is mixed with 3D."""
    first = next(filter(has_slices, datasets))["request"]["flags"]
    for source, dataset in zip(sources, datasets, strict=True):
        flags = dataset["request"]["flags"]
        for key, flag in SKIPPED.items():
            if not flags[key] and any(other["request"]["flags"][key] for other in datasets):
                logger.warning(
                    "%s: prepared with %s: its values are merged as they are, and must already be "
                    "what the other datasets' become; metadata.json has each slice's normalisation",
                    *(source, flag),
                )
        if has_slices(dataset) and flags["position_is_3d"] != first["position_is_3d"]:
            logger.warning(
                "%s: 2D slices, whose z is made up, are merged with 3D ones: the two do not share "
                "a frame",
                source,
            )


def _warn_of_repeated_files(datasets: list[Any]) -> None:
    seen: dict[str, str] = {}
    for dataset in datasets:
        for name, digest in dataset["request"]["inputs"].items():
            here = f"{dataset['name']}/{name}"
            if digest in seen:
                logger.warning("%s and %s are the same file: cells repeat", seen[digest], here)
            seen[digest] = here


def has_position(record: Any) -> bool:
    """Tell a slice from dissociated cells; records of older versions are slices."""
    return bool(record.get("has_positions", True))


def has_slices(dataset: Any) -> bool:
    """Tell whether a dataset has cells with positions."""
    return any(map(has_position, dataset["slices"]))


def _merged_records(datasets: list[Any], *, slices: bool) -> list[dict[str, Any]]:
    """Give slices, or dissociated cells, their dataset, panel and a name of their own."""
    uses = Counter(record["name"] for dataset in datasets for record in dataset["slices"])
    merged: list[dict[str, Any]] = []
    first_panel = 0
    for number, dataset in enumerate(datasets):
        done = {key: dataset["request"]["flags"][key] for key in SKIPPED}
        for record in dataset["slices"]:
            if has_position(record) != slices:
                continue
            name = record["name"]
            if uses[name] > 1:
                name = f"{number}:{dataset['name']}:{name}"
            identity = {"name": name, "dataset": number, "panel": first_panel + record["panel"]}
            kept = {key: value for key, value in record.items() if key != "has_positions"}
            merged.append({**kept, **identity, **done})
        first_panel += len(dataset["panels"])
    return merged


def _slices(datasets: list[Any]) -> list[dict[str, Any]]:
    """Give the slices their merged numbers, z and names, which are made unique."""
    z_values: list[float | None] = []
    highest = None
    for dataset in datasets:
        own = _z_values(dataset, highest)
        highest = own[-1] if own and own[-1] is not None else highest
        z_values += own
    records = _merged_records(datasets, slices=True)
    return [{**record, "z": z} for record, z in zip(records, z_values, strict=True)]


def _references(datasets: list[Any]) -> list[dict[str, Any]]:
    """Describe the dissociated cells, which have neither z nor sample."""
    return [
        {key: value for key, value in record.items() if key not in ("z", "sample")}
        for record in _merged_records(datasets, slices=False)
    ]


def _z_values(dataset: Any, highest: float | None) -> list[float | None]:
    """Return the z of a dataset's slices: made-up ones go on, a spacing above the last so far."""
    flags = dataset["request"]["flags"]
    slices = sum(map(has_position, dataset["slices"]))
    if flags["position_is_3d"]:
        return [None] * slices
    spacing = flags["z_spacing"]
    steps = 0 if highest is None else highest / spacing + 1
    return [(steps + i) * spacing for i in range(slices)]


def _parts(sources: list[Path], datasets: list[Any], types: tuple[str, ...]) -> list[Part]:
    parts = []
    # Merged numbers: all slices first, then the dissociated cells of all datasets.
    records = chain.from_iterable(dataset["slices"] for dataset in datasets)
    slices, references = count(), count(sum(map(has_position, records)))
    number_of = {name: number for number, name in enumerate(types)}
    for source, dataset in zip(sources, datasets, strict=True):
        numbers = tuple(number_of[name] for name in dataset["cell_types"] or ())
        merged = [next(slices if has_position(r) else references) for r in dataset["slices"]]
        for part in dataset["parts"]:
            runs = tuple((merged[run[0]], run[1], run[2]) for run in part["runs"])
            path = source / part["file"]
            parts.append(Part(path, part["sha256"], part["cells"], part["entries"], runs, numbers))
    return parts
