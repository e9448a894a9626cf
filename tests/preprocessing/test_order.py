"""The order of cells: windows, sets and patches are partitions, and pure."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from alphastomics.preprocessing import order
from alphastomics.preprocessing.patches import patches
from alphastomics.preprocessing.shard_reader import Piece

GROUPS = st.lists(st.integers(1, 20), min_size=1, max_size=12)


def rows_of(pieces: list[Piece]) -> list[tuple[int, int, int]]:
    return [(p.shard, p.group, row) for p in pieces for row in range(p.start, p.stop)]


@given(GROUPS, st.integers(1, 5), st.integers(1, 50), st.integers(0, 9), st.integers(0, 9))
def test_windows_of_all_ranks_hold_every_row_once(groups, world_size, window, seed, epoch):
    pieces = [Piece(0, number, 0, rows) for number, rows in enumerate(groups)]
    mixed = order.shuffled_pieces(pieces, seed, epoch)
    seen = []
    for rank in range(world_size):
        start, stop = order.share_of(sum(groups), rank, world_size)
        windows = order.random_windows(order.cut(mixed, start, stop), window)
        sizes = [sum(map(len, one)) for one in windows]
        assert all(size == window for size in sizes[:-1])
        assert sum(sizes) == stop - start
        seen.extend(rows_of([piece for one in windows for piece in one]))
    assert sorted(seen) == sorted(rows_of(pieces))


@given(st.integers(0, 200), st.integers(1, 7))
def test_shares_of_ranks_follow_one_another_and_differ_by_one_at_most(total, world_size):
    shares = [order.share_of(total, rank, world_size) for rank in range(world_size)]
    assert shares[0][0] == 0
    assert shares[-1][1] == total
    assert all(one[1] == two[0] for one, two in pairwise(shares))
    sizes = [stop - start for start, stop in shares]
    assert max(sizes) - min(sizes) <= 1
    for per_batch in (1, 3):
        batches = order.batches_per_rank(total, per_batch, world_size)
        assert batches == max(-(-size // per_batch) for size in sizes)


@given(
    st.dictionaries(st.integers(0, 50), st.integers(1, 40), min_size=1, max_size=8),
    st.integers(1, 15),
    st.integers(1, 60),
    st.integers(0, 5),
)
def test_slice_windows_hold_every_set_once_and_fit_the_buffer(cells, set_size, window, epoch):
    windows = order.slice_windows(cells, set_size, window, 3, epoch)
    seen = [(one.slice_number, one.number) for sets in windows for one in sets]
    expected = [
        (number, position)
        for number, size in cells.items()
        for position in range(order.sets_of_slice(size, set_size))
    ]
    assert sorted(seen) == sorted(expected)
    for sets in windows:
        numbers = {one.slice_number for one in sets}
        assert len(numbers) == 1 or sum(cells[number] for number in numbers) <= window


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 1000))
def test_patches_are_a_partition_into_sets_that_fit(cells, set_size, seed):
    rng = np.random.default_rng(seed)
    position = rng.normal(size=(cells, 3)).astype(np.float32)
    result = patches(position, set_size, rng)
    assert sorted(np.concatenate(result).tolist()) == list(range(cells))
    sizes = [len(one) for one in result]
    assert max(sizes) <= set_size
    assert len(result) == -(-cells // set_size)
    assert max(sizes) - min(sizes) <= int(np.log2(len(result))) + 1


@given(st.integers(1, 100), st.integers(1, 30))
def test_sets_of_a_slice_are_a_partition(cells, set_size):
    result = order.random_sets(cells, set_size, np.random.default_rng(0))
    assert sorted(np.concatenate(result).tolist()) == list(range(cells))
    assert max(map(len, result)) <= set_size


def test_a_patch_is_contiguous():
    """On a grid, cells nearest to a patch's centre belong to it, and no patch is a sliver."""
    side = 48
    grid = np.stack(np.meshgrid(np.arange(side), np.arange(side)), axis=-1).reshape(-1, 2)
    position = np.concatenate([grid, np.full((len(grid), 1), 7)], axis=1).astype(np.float32)
    for seed in range(5):
        for patch in patches(position, 100, np.random.default_rng(seed)):
            center = position[patch].mean(axis=0)
            distance = np.linalg.norm(position - center, axis=1)
            inner = np.flatnonzero(distance < 2)
            assert set(inner.tolist()) <= set(patch.tolist())
            assert distance[patch].max() < 2.5 * np.sqrt(len(patch))


def test_patches_of_equal_positions_do_no_harm():
    result = patches(np.zeros((20, 3), dtype=np.float32), 6, np.random.default_rng(0))
    assert sorted(np.concatenate(result).tolist()) == list(range(20))
