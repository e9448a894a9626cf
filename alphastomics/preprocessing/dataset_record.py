"""What dataset.json holds: plain data enters, and is refused unless every part of it makes sense.

Stage 1 writes it for stage 2. Types are checked as strictly as in metadata.json; further keys are
left alone.
"""

from collections import defaultdict
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from alphastomics.preprocessing.owned import PART_FILE
from alphastomics.preprocessing.schema import NonNegative, require_all

Number = Annotated[float, Field(allow_inf_nan=False)]


class Loose(BaseModel):
    """A part of dataset.json."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class Flags(Loose):
    """Settings that stage 1 was run with."""

    scale: bool
    log_normalize: bool
    position_is_3d: bool
    z_spacing: Annotated[Number, Field(gt=0)] | Annotated[int, Field(gt=0)]


class DatasetRequest(Loose):
    """What was asked for."""

    name: str
    inputs: dict[str, str]
    flags: Flags


class Slice(Loose):
    """One slice."""

    name: str
    file: str
    cells: Annotated[int, Field(gt=0)]
    panel: NonNegative
    z: Number | int | None
    has_positions: bool = True


class PartRecord(Loose):
    """One file of cells."""

    file: Annotated[str, Field(pattern=f"^{PART_FILE.pattern}$")]
    sha256: str
    cells: Annotated[int, Field(gt=0)]
    entries: NonNegative
    runs: list[Annotated[list[NonNegative], Field(min_length=3, max_length=3)]]


class DatasetRecord(Loose):
    """All of dataset.json."""

    name: str
    request: DatasetRequest
    genes: Annotated[list[str], Field(min_length=1)]
    cell_types: list[str] | None
    slices: Annotated[list[Slice], Field(min_length=1)]
    panels: list[list[NonNegative]]
    parts: list[PartRecord]
    statistics_sha256: str

    @model_validator(mode="after")
    def parts_agree(self) -> "DatasetRecord":
        """Refuse parts that contradict one another: every cell of a slice is in one part."""
        types = self.cell_types or []
        missing = [gene for panel in self.panels for gene in panel]
        files = [part.file for part in self.parts]
        checks = {
            "a gene stands there twice": len(set(self.genes)) == len(self.genes),
            "a cell type stands there twice": len(set(types)) == len(types),
            "a part stands there twice": len(set(files)) == len(files),
            "a panel lacks genes that are not there": max(missing, default=0) < len(self.genes),
            "a slice has no panel": all(record.panel < len(self.panels) for record in self.slices),
            "cells without positions are not the last": sorted(
                self.slices, key=lambda record: not record.has_positions
            )
            == self.slices,
            "a part does not hold its cells": all(
                part.cells == sum(run[2] for run in part.runs) for part in self.parts
            ),
            "the parts do not hold the slices": self._runs_cover_the_slices(),
        }
        require_all(checks)
        return self

    def _runs_cover_the_slices(self) -> bool:
        """Tell whether the runs of each slice follow one another from first cell to last."""
        reached: defaultdict[int, int] = defaultdict(int)
        for number, first, cells in (run for part in self.parts for run in part.runs):
            if first != reached[number]:
                return False
            reached[number] += cells
        sizes: dict[int, int] = {n: record.cells for n, record in enumerate(self.slices)}
        return dict(reached) == sizes
