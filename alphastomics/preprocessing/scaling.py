"""Mean and std of every slice's genes: statistics enter, files that tasks map leave."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from alphastomics.io.files import replacing
from alphastomics.preprocessing.datasets import Merged, scaling_of
from alphastomics.preprocessing.normalize import absent
from alphastomics.preprocessing.row_arrays import write_header


def write_scaling(datasets: Merged, shuffle: Path) -> None:
    """Write each slice's mean, std and what an absent value stands for, for tasks to map."""
    if not datasets.scale:
        return
    shape = (len(datasets.slices), len(datasets.genes))
    with ExitStack() as files:
        kinds = {"scaling.mean.npy": "<f8", "scaling.std.npy": "<f8", "absent.npy": "<f4"}
        targets = []
        for name, kind in kinds.items():
            path = files.enter_context(replacing(shuffle / name))
            targets.append(files.enter_context(path.open("wb")))
            write_header(targets[-1], shape, kind)
        blocks = (scaling_of(datasets, name) for name in ("mean", "std"))
        for mean, std in zip(*blocks, strict=True):
            for file, values in zip(targets, (mean, std, absent(mean, std)), strict=True):
                file.write(np.ascontiguousarray(values).tobytes())


def scaling_rows(shuffle: Path, name: str) -> Iterator[Float64[np.ndarray, "K G"]]:
    """Yield the rows that tasks have mapped, one at a time."""
    values = np.load(shuffle / f"scaling.{name}.npy", mmap_mode="r")
    for row in range(len(values)):
        yield values[row : row + 1]
