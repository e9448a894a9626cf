"""What is held out: the most telling that the data allow, and every cell on exactly one side."""

import numpy as np
import pytest

from alphastomics.preprocessing.batch_loader import create_dataloaders
from alphastomics.preprocessing.folder import DataFolder
from alphastomics.preprocessing.holdout import Holdout, choose_holdout
from alphastomics.preprocessing.schema import Metadata, SliceRecord
from tests.preprocessing.tissue import make_slice, run, write


def holdout_of(sizes: list[int], samples: list[str | None] | None = None) -> Holdout | None:
    return choose_holdout(metadata_for(sizes, samples), seed=3)


def metadata_for(sizes: list[int], samples: list[str | None] | None = None) -> Metadata:
    """Metadata of slices of these sizes, all their cells in training."""
    named = samples or [None] * len(sizes)
    slices = [
        {
            "name": f"s{number}",
            "dataset": 0,
            "file": f"s{number}.h5ad",
            "cells": size,
            "cells_per_split": {"train": size, "validation": 0, "test": 0},
            "panel": 0,
            "z": 10.0 * number,
            "sample": sample,
        }
        for number, (size, sample) in enumerate(zip(sizes, named, strict=True))
    ]
    return Metadata.model_construct(
        slices=[SliceRecord.model_validate(record) for record in slices]
    )


def test_a_sample_is_held_out_before_a_slice_a_slice_before_a_block_a_block_before_cells():
    assert holdout_of([900] * 4, ["a", "a", "b", "b"]).kind == "sample"
    assert holdout_of([900] * 4, ["a", "a", "b", None]).kind == "slice"
    assert holdout_of([900] * 4, ["a"] * 4).kind == "slice"
    assert holdout_of([900] * 3).kind == "slice"
    assert holdout_of([900] * 2).kind == "block"
    assert holdout_of([500]).kind == "block"
    assert holdout_of([499]).kind == "cells"
    assert holdout_of([50]).kind == "cells"
    assert holdout_of([49]) is None


def test_all_slices_of_the_sample_of_middle_size_are_held_out():
    result = holdout_of([100, 300, 100, 200, 250], ["a", "b", "a", "c", "c"])
    # a has 200 cells, b 300, c 450: b is in the middle.
    assert (result.slices, result.names) == ((1,), ("b",))
    assert result.describe() == "sample b"


def test_a_sample_or_slice_with_most_of_the_cells_is_never_held_out():
    assert holdout_of([10, 900], ["a", "b"]).names == ("a",)
    assert holdout_of([5000, 700, 800]).names == ("s2",)
    # Slices that have no training cells do not count.
    assert holdout_of([5000, 700, 0]).kind == "block"


def test_of_many_slices_about_a_fifth_of_the_cells_is_held_out_evenly():
    result = holdout_of([50] * 200)
    held = 50 * len(result.slices)
    assert 0.1 * 10_000 <= held <= 0.2 * 10_000
    assert len(set(result.slices)) == len(result.slices)
    assert np.diff(result.slices).max() <= 200 / 4
    assert result.describe() == "slices s0, s5, s10 and more"


@pytest.fixture
def cells() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    number = rng.integers(0, 3, 3000)
    position = rng.normal(0, [300, 100, 0], (3000, 3))
    position[:, 2] = 10 * number
    return number, position


@pytest.mark.parametrize("kind", ["slice", "block", "cells"])
def test_masks_are_deterministic_and_do_not_depend_on_the_order_of_rows(kind, cells):
    number, position = cells
    holdout = Holdout(kind, (1,), ("s1",), seed=5)
    mask = holdout.mask(number, position)
    assert np.array_equal(mask, holdout.mask(number, position))
    order = np.random.default_rng(1).permutation(len(number))
    assert np.array_equal(mask[order], holdout.mask(number[order], position[order]))
    assert 0 < mask.sum() < len(mask)


@pytest.mark.parametrize("kind", ["block", "cells"])
def test_a_fifth_of_every_slice_is_held_out_and_another_seed_holds_out_other_cells(kind, cells):
    number, position = cells
    mask, other = (Holdout(kind, (), (), seed).mask(number, position) for seed in (5, 6))
    assert (mask != other).any()
    for one in range(3):
        assert 0.1 < mask[number == one].mean() < 0.3
        rows = np.flatnonzero(number == one)
        alone = Holdout(kind, (), (), 5).mask(number[rows], position[rows])
        assert np.array_equal(alone, mask[rows])


def test_blocks_are_contiguous_where_cells_are_not(cells):
    number, position = cells

    def neighbours_held(kind: str) -> float:
        """Share of held-out cells whose nearest cell of the slice is held out, too."""
        rows = np.flatnonzero(number == 0)
        held = Holdout(kind, (), (), 5).mask(number[rows], position[rows])
        distance = np.linalg.norm(position[rows, None] - position[None, rows], axis=2)
        np.fill_diagonal(distance, np.inf)
        return float(held[distance.argmin(1)][held].mean())

    assert neighbours_held("block") > 0.7
    assert neighbours_held("cells") < 0.4


@pytest.mark.parametrize("kind", ["slice", "block", "cells"])
@pytest.mark.parametrize("draw", ["slice", "random"])
def test_every_cell_is_in_exactly_one_of_the_two_loaders(tmp_path, kind, draw):
    source = write(tmp_path / "in", **{f"s{n}": make_slice(90 + n, seed=n) for n in range(3)})
    run(source, tmp_path / "out", train_ratio=1.0, val_ratio=0.0, common_frame=True)
    metadata = DataFolder(tmp_path / "out").metadata()
    holdout = Holdout(kind, (1,), ("s1",), seed=5)
    loaders = create_dataloaders(
        tmp_path / "out", 32, set_size=16, set_draw=draw, num_workers=0, holdout=holdout
    )
    seen = []
    for loader in loaders[:2]:
        batches = list(loader)
        assert len(batches) == len(loader)
        seen.append([int(i) for batch in batches for i in batch.cell_id[batch.node_mask]])
        assert loader.num_cells == len(seen[-1]) > 0
    assert sorted(seen[0] + seen[1]) == list(range(metadata.splits["train"].cells))
    if kind == "slice":
        assert len(seen[1]) == 91


def test_a_loader_does_not_resume_with_other_cells_held_out(tmp_path):
    run(write(tmp_path / "in", one=make_slice(90)), tmp_path / "out")
    block, random = (Holdout(kind, (), (), 5) for kind in ("block", "cells"))
    state, other = (
        create_dataloaders(tmp_path / "out", 16, num_workers=0, holdout=holdout)[0]
        for holdout in (block, random)
    )
    with pytest.raises(ValueError, match="held_out"):
        other.load_state_dict(state.state_dict())
