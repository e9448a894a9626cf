"""The processed folder on disk: its names, the columns of a shard, and what metadata.json holds.

Plain text enters, a checked `Metadata` leaves. Writers and readers both go through these classes,
so that the format is written down once.
"""

import hashlib
import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from alphastomics.errors import InputError
from alphastomics.preprocessing.resume import checksum_holds

FORMAT_VERSION = 1
SPLITS = ("train", "validation", "test")
# The cells without positions, which are in no other split.
REFERENCE = "reference"
ALL_SPLITS = (*SPLITS, REFERENCE)
DATA_FOLDER = "data"
METADATA_FILE = "metadata.json"
SCALING_FILE = "scaling.npz"
DATASET_FILE = "dataset.json"
STATISTICS_FILE = "statistics.npz"
INTERMEDIATE_FOLDER = "_intermediate_slices"
SHUFFLE_FOLDER = "shuffle"
STAGED_FOLDER = ".staged"
TARGET_SUM = 1e4  # the contract's total of a normalised cell

ABSENT_VALUE = (
    "a gene that gene_index does not list has the value (0 - mean) / std of its slice, from "
    f"{SCALING_FILE}, when scale is true, and 0 otherwise"
)
SHARD_FILE = re.compile(rf"{DATA_FOLDER}/[A-Za-z0-9_][\w.-]*\.parquet", re.ASCII)

NonNegative = Annotated[int, Field(ge=0)]
Scale = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def require_all(checks: dict[str, bool]) -> None:
    """Refuse, with the first check that does not hold."""
    for said, holds in checks.items():
        if not holds:
            raise ValueError(said)


def first_fault(error: ValidationError) -> str:
    """Say where a record is wrong first, and what is wrong there."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "the file"
    return f"{where}: {first['msg'].removeprefix('Value error, ')}"


class Record(BaseModel):
    """A part of metadata.json: unknown keys and loose types are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ShardRecord(Record):
    """One Parquet file."""

    file: str
    cells: NonNegative
    bytes: NonNegative
    sha256: str
    row_groups: list[NonNegative]
    """Cells of each row group, so that readers can plan without opening the file."""
    slices: list[tuple[int, int]] | None
    """Layout `slice`: (slice, cells) runs in the order of the rows; null in layout `shuffled`."""

    @model_validator(mode="after")
    def is_a_shard(self) -> "ShardRecord":
        """Refuse files elsewhere, and cells that are in no row group."""
        if not SHARD_FILE.fullmatch(self.file):
            raise ValueError(f"lists {self.file!r}, which is no shard of this folder")
        if self.cells != sum(self.row_groups):
            raise ValueError(f"{self.file}: its row groups do not hold its {self.cells} cells")
        return self


class SplitRecord(Record):
    """One of train, validation and test."""

    cells: NonNegative
    shards: list[ShardRecord]

    @model_validator(mode="after")
    def shards_hold_the_cells(self) -> "SplitRecord":
        """Refuse cells that are in no shard."""
        if self.cells != sum(shard.cells for shard in self.shards):
            raise ValueError(f"its shards do not hold its {self.cells} cells")
        return self


class SliceRecord(Record):
    """One tissue slice; its index in the list is the `slice_id` of its cells."""

    name: str
    dataset: int
    file: str
    cells: int
    cells_per_split: dict[str, int]
    panel: NonNegative
    """Which of `panels` says what genes were measured."""
    z: float | None
    """The made-up z of a 2D slice; null where the file had three coordinates."""
    log_normalize: bool | None = None
    scale: bool | None = None
    """What was done to the slice's values; null: what `normalization` says of all slices."""
    sample: str | None = None
    """The animal or sample that the slice is of, where obs names one."""


class ReferenceRecord(Record):
    """Dissociated cells of one input; those of `slices` come before them in `slice_id`."""

    name: str
    dataset: int
    file: str
    cells: int
    panel: NonNegative
    log_normalize: bool | None = None
    scale: bool | None = None


class Panel(Record):
    """A set of measured genes, kept as its complement, which is short in most data."""

    missing: list[NonNegative]


class Normalization(Record):
    """What the expression values on disk are, and what a query must become.

    A merged dataset may have come with a step already done: `slices` say what was done to each.
    """

    log_normalize: bool
    target_sum: float | None
    scale: bool
    absent_value: str
    fractions: bool = False
    """Whether values that were no counts were normalised all the same: so are those to come."""


class PositionStatistics(Record):
    """Where the training cells lie, in the user's own units.

    `scale` is the root mean square of the coordinates about `center`, over the axes that vary: one
    number, so that dividing by it keeps the aspect ratio. `within_slice_scale` is the same about
    each slice's own centre.
    """

    center: list[float]
    scale: Scale
    within_slice_scale: Scale
    minimum: list[float]
    maximum: list[float]


class Dataset(Record):
    """One stage 1 folder that went in: its name, settings and the digests of its files."""

    name: str
    request: dict[str, Any]


class Provenance(Record):
    """Where the data came from."""

    datasets: list[Dataset]
    request: dict[str, Any]


class Metadata(Record):
    """All of metadata.json."""

    format_version: Literal[1]
    version: str
    num_genes: int
    genes: list[str]
    cell_types: list[str] | None
    layout: Literal["shuffled", "slice"]
    storage: Literal["dense", "sparse"]
    split_by: Literal["cell", "slice"]
    common_frame: bool = False
    """2D slices that lie in one frame, by the user's word; see `shares_frame`."""
    normalization: Normalization
    position_statistics: PositionStatistics | None
    splits: dict[str, SplitRecord]
    slices: list[SliceRecord]
    references: list[ReferenceRecord] = Field(default_factory=list)
    """Dissociated cells: all of the split `reference`, which is there where these are."""
    panels: list[Panel]
    scaling_sha256: str | None
    provenance: Provenance
    record_sha256: str | None = None
    """Checksum of all the rest; null in folders that were written before there was one."""

    @property
    def shares_frame(self) -> bool:
        """Say whether positions of different slices can be compared.

        3D positions can, 2D ones by the user's word, and those of a single slice.
        """
        return len(self.slices) == 1 or self.has_common_frame

    @property
    def has_common_frame(self) -> bool:
        """Say whether positions of slices that are yet to come can be compared with these."""
        planar = {record.z is not None for record in self.slices}
        return planar == {False} or (self.common_frame and planar == {True})

    @property
    def records(self) -> list[SliceRecord | ReferenceRecord]:
        """Return what `slice_id` counts: slices, then dissociated cells."""
        return [*self.slices, *self.references]

    @property
    def reference_cells(self) -> int:
        """Count the dissociated cells."""
        return sum(record.cells for record in self.references)

    @property
    def checksums(self) -> dict[str, str]:
        """Return the sha256 of every file that the folder has beside metadata.json."""
        shards = [shard for split in self.splits.values() for shard in split.shards]
        known = {shard.file: shard.sha256 for shard in shards}
        scaling = self.scaling_sha256
        return known if scaling is None else {**known, SCALING_FILE: scaling}

    @property
    def training_digest(self) -> str:
        """Return the digest of the training cells, by which a model knows them again."""
        digests = "".join(shard.sha256 for shard in self.splits["train"].shards)
        return hashlib.sha256(digests.encode()).hexdigest()

    @model_validator(mode="after")
    def parts_agree(self) -> "Metadata":
        """Refuse parts that contradict one another: every number must lead somewhere."""
        shards = [shard for split in self.splits.values() for shard in split.shards]
        known = range(len(self.records))
        runs = [number for shard in shards for number, _ in shard.slices or ()]
        names = set(ALL_SPLITS if self.references else SPLITS)
        panels = [record.panel for record in self.records]
        checks = {
            "num_genes is not the number of genes": self.num_genes == len(self.genes) > 0,
            "a gene stands there twice": len(set(self.genes)) == len(self.genes),
            f"splits are not {', '.join(SPLITS)}, and {REFERENCE} for dissociated cells": set(
                self.splits
            )
            == names,
            "there are no slices": bool(self.slices),
            "a slice has no panel": max(panels, default=0) < len(self.panels),
            "a panel lacks genes that are not there": all(
                gene < self.num_genes for panel in self.panels for gene in panel.missing
            ),
            "a shard does not say which slices it holds": self.layout != "slice"
            or all(shard.slices is not None for shard in shards),
            "a shard holds slices that are not there": all(number in known for number in runs),
            "a shard's slices do not hold its cells": all(
                shard.slices is None or sum(size for _, size in shard.slices) == shard.cells
                for shard in shards
            ),
        }
        require_all(checks)
        # After the others: it counts on them.
        said = "cells_per_split does not add up to the cells of slices and splits"
        require_all({said: self._adds_up()})
        return self

    def _adds_up(self) -> bool:
        """Tell whether the counts of slices, splits and runs of rows are those of one plan."""
        counts = [record.cells_per_split for record in self.slices]
        if any(
            set(per_split) != set(SPLITS) or min(per_split.values()) < 0 for per_split in counts
        ):
            return False
        of_slices = [record.cells for record in self.slices]
        of_splits = {name: self.splits[name].cells for name in SPLITS}
        of_references = [record.cells for record in self.references]
        if of_references and sum(of_references) != self.splits[REFERENCE].cells:
            return False
        if [sum(per_split.values()) for per_split in counts] != of_slices:
            return False
        if {name: sum(per_split[name] for per_split in counts) for name in SPLITS} != of_splits:
            return False
        if self.layout != "slice":
            return True
        none = [0] * len(of_references)
        expected = {name: [each[name] for each in counts] + none for name in SPLITS}
        if of_references:
            expected[REFERENCE] = [0] * len(counts) + of_references
        for name, cells in expected.items():
            per_split = [0] * len(cells)
            for number, size in (run for s in self.splits[name].shards for run in s.slices or ()):
                per_split[number] += size
            if per_split != cells:
                return False
        return True


def parse_metadata(text: str, where: str) -> Metadata:
    """Read metadata.json; `where` names it in an error."""
    try:
        metadata = Metadata.model_validate_json(text)
    except ValidationError as error:
        raise InputError(
            f"{where}: {first_fault(error)}; it was not written by this version of "
            "`alphastomics preprocess`, or was altered: preprocess again"
        ) from error
    if metadata.record_sha256 is not None and not checksum_holds(json.loads(text)):
        raise InputError(
            f"{where}: was altered: its content differs from its checksum; copy it again, or "
            "preprocess again"
        )
    return metadata


def shard_name(split: str, index: int, total: int) -> str:
    """Name a shard: `train.parquet` when it is the only one, else `train-00000.parquet`, …."""
    return f"{split}.parquet" if total == 1 else f"{split}-{index:05d}.parquet"
