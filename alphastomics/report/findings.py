"""What a report shows, as arrays: the network is above this line, the page below it."""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float, Float32, Int64

from alphastomics.generation.cells import InputCells
from alphastomics.generation.radii import Radii

Scores = dict[str, dict[str, dict[str, float]]]


@dataclass(frozen=True)
class PredictedPositions:
    """Positions predicted from expression, rotated onto the truth slice by slice.

    Attributes
    ----------
    position
        Where they came to lie, in the truth's frame and units.
    error
        Distance from the true position.
    std
        Root of the summed variances of the samples; None when there was one sample only.
    radii
        Radii that hold the true position of a share of the cells, where they are calibrated.
    coverage
        The share that a level promises, and the share that its radii hold.
    free
        Cells that are no anchors, whose errors count; None: all.
    assigned
        Whether each cell has a position of its own.
    """

    position: Float[np.ndarray, "N 3"]
    error: Float[np.ndarray, " N"]
    std: Float32[np.ndarray, " N"] | None
    radii: Radii | None = None
    coverage: tuple[tuple[float, float], ...] = ()
    free: Bool[np.ndarray, " N"] | None = None
    assigned: bool = False


@dataclass(frozen=True)
class NewTissue:
    """Tissue made from nothing, and for each of its cells the true one with the nearest expression.

    Its position and orientation are arbitrary: here it was brought onto the nearest cells.
    """

    position: Float[np.ndarray, "N 3"]
    expression: Float32[np.ndarray, "N G"]
    nearest: Int64[np.ndarray, " N"]


@dataclass(frozen=True)
class Path:
    """The way from noise to tissue, of some cells of one slice: F steps, M cells.

    Attributes
    ----------
    rows
        The cells that are shown.
    time
        t / T at each step, from 1 down.
    noisy, clean
        What the network saw, and the clean cells that it predicted from it.
    """

    rows: Int64[np.ndarray, " M"]
    time: Float[np.ndarray, " F"]
    noisy: Float[np.ndarray, "F M 3"]
    clean: Float[np.ndarray, "F M 3"]


@dataclass(frozen=True)
class Inside:
    """What the layers do with some cells of one slice at several diffusion times.

    Attributes
    ----------
    rows
        The cells that were looked at.
    time
        t / T of the looks.
    expert_use
        Share of the choices that fell on each expert, by time and layer; None without experts.
    gate
        Histogram of the open share of the gates over [0, 1], by time and layer; None without gates.
    attention
        Attention that each cell receives by layer, times the number of cells: 1 is an even share.
        Averaged over the times.
    """

    rows: Int64[np.ndarray, " M"]
    time: Float[np.ndarray, " T"]
    expert_use: Float[np.ndarray, "T L E"] | None
    gate: Float[np.ndarray, "T L bins"] | None
    attention: Float32[np.ndarray, "L M"]


@dataclass(frozen=True)
class Curve:
    """One logged value over the steps of a run."""

    step: Float[np.ndarray, " K"]
    value: Float[np.ndarray, " K"]


@dataclass(frozen=True)
class ObsColumn:
    """A column of `obs` as a colour: numbers, NaN where unknown, or numbers into `names`."""

    name: str
    names: list[str] | None
    values: Float[np.ndarray, " N"]


@dataclass(frozen=True)
class Findings:
    """Everything that a report shows; what is None is said to be missing, and why.

    Attributes
    ----------
    title
        Name of the run.
    facts
        What was looked at, as names and values for the head of the page.
    cells, genes
        The truth, and the names of its genes.
    predicted_position, predicted, new, path, inside
        Results of the modes and of the look inside.
    scores
        What `test` found: {mode: {method: {metric: value}}}.
    curves
        What the run logged.
    missing
        Part of the page -> why it is not there.
    columns
        Columns of `obs` that cells can be coloured by.
    unit
        Unit of the coordinates.
    held
        Share of true values that intervals of expression promise to hold, and do; by what.
    is_generated
        Whether the cells themselves were made: they are all that is shown.
    """

    title: str
    facts: list[tuple[str, str]]
    cells: InputCells
    genes: list[str]
    predicted_position: PredictedPositions | None = None
    predicted: Float32[np.ndarray, "N G"] | None = None
    new: NewTissue | None = None
    path: Path | None = None
    inside: Inside | None = None
    scores: Scores | None = None
    curves: dict[str, Curve] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    columns: list[ObsColumn] = field(default_factory=list)
    unit: str = "µm"
    held: tuple[float, float, str] | None = None
    is_generated: bool = False
