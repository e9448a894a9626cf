"""The plan of stage 2: a permutation of all cells, whatever the sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphastomics.preprocessing.plan import (
    PlanRequest,
    destinations,
    draw_splits,
    make_shuffle_plan,
    order_in_bucket,
    split_sizes,
)

REQUESTS = st.fixed_dictionaries(
    {
        "slice_sizes": st.lists(st.integers(1, 40), min_size=1, max_size=6).map(tuple),
        "cuts": st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
        "split_by": st.sampled_from(["cell", "slice"]),
        "layout": st.sampled_from(["shuffled", "slice"]),
        "max_shard_size": st.integers(1, 60),
        "bucket_rows": st.integers(1, 30),
        "seed": st.integers(0, 2**32 - 1),
    }
)


def request_of(drawn: dict) -> PlanRequest:
    """Build a request outside the strategy: checking its types draws random numbers."""
    others = {key: value for key, value in drawn.items() if key != "cuts"}
    first, second = drawn["cuts"]
    return PlanRequest(ratios=(first, second - first, 1 - second), **others)


@given(REQUESTS)
def test_every_cell_of_every_slice_goes_to_exactly_one_shard(drawn: dict):
    request_ = request_of(drawn)
    plan = make_shuffle_plan(request_)
    assert plan.counts.sum(axis=0).tolist() == list(request_.slice_sizes)
    for number, size in enumerate(request_.slice_sizes):
        bucket = destinations(plan, number)
        assert len(bucket) == size
        counted = np.bincount(bucket, minlength=len(plan.counts))
        assert counted.tolist() == plan.counts[:, number].tolist()
    for bucket_number, counts in enumerate(plan.counts):
        order = order_in_bucket(plan, bucket_number)
        assert sorted(order.tolist()) == list(range(counts.sum()))


@given(REQUESTS)
def test_shards_and_buckets_are_no_larger_than_asked_and_none_is_empty(drawn: dict):
    request_ = request_of(drawn)
    plan = make_shuffle_plan(request_)
    assert (plan.counts.sum(axis=1) <= request_.bucket_rows).all()
    for split in range(3):
        for shard in range(plan.num_shards(split)):
            cells = plan.counts[plan.buckets_of(split, shard)].sum()
            assert 0 < cells <= request_.max_shard_size


@given(REQUESTS)
def test_the_split_of_a_cell_depends_on_neither_layout_nor_shard_nor_chunk_size(drawn: dict):
    request_ = request_of(drawn)
    other = PlanRequest(
        request_.slice_sizes,
        request_.ratios,
        request_.split_by,
        "slice" if request_.layout == "shuffled" else "shuffled",
        request_.max_shard_size + 7,
        request_.bucket_rows + 3,
        request_.seed,
    )
    plan, changed = make_shuffle_plan(request_), make_shuffle_plan(other)
    for number in range(len(request_.slice_sizes)):
        mine = plan.split[destinations(plan, number)]
        assert mine.tolist() == changed.split[destinations(changed, number)].tolist()


@given(REQUESTS)
def test_layout_slice_keeps_the_cells_of_a_slice_together(drawn: dict):
    request_ = request_of(drawn)
    plan = make_shuffle_plan(request_)
    if request_.layout == "slice":
        assert ((plan.counts > 0).sum(axis=1) == 1).all()
        for split in range(3):
            order = plan.counts[plan.split == split].argmax(axis=1)
            assert (np.diff(order) >= 0).all()


@given(REQUESTS)
def test_split_by_slice_never_divides_a_slice(drawn: dict):
    request_ = request_of(drawn)
    if request_.split_by == "slice":
        assert ((draw_splits(request_) > 0).sum(axis=0) == 1).all()


@given(st.integers(0, 10**9), st.floats(0, 1), st.floats(0, 1))
def test_split_sizes_add_up_and_stay_within_two_of_the_ratios(total, first, second):
    low, high = sorted([first, second])
    ratios = (low, high - low, 1 - high)
    sizes = split_sizes(total, ratios)
    assert sizes.sum() == total
    assert (sizes >= 0).all()
    assert np.abs(sizes - np.array(ratios) * total).max() <= 2


@pytest.mark.parametrize(
    ("total", "expected"),
    [(1000, [800, 100, 100]), (10, [8, 1, 1]), (4, [2, 1, 1]), (2, [1, 1, 0]), (1, [1, 0, 0])],
)
def test_each_split_gets_something_where_there_is_enough(total, expected):
    assert split_sizes(total, (0.8, 0.1, 0.1)).tolist() == expected


def test_all_orders_are_equally_likely():
    """Two slices of two cells: the 24 orders of four cells, over many seeds."""
    counts: dict[tuple, int] = {}
    for seed in range(4800):
        request_ = PlanRequest((2, 2), (1.0, 0.0, 0.0), "cell", "shuffled", 9, 2, seed)
        plan = make_shuffle_plan(request_)
        where = np.concatenate([destinations(plan, 0), destinations(plan, 1)])
        order = []
        for bucket in range(len(plan.counts)):
            cells = np.flatnonzero(where == bucket)
            order.extend(cells[order_in_bucket(plan, bucket)].tolist())
        counts[tuple(order)] = counts.get(tuple(order), 0) + 1
    assert len(counts) == 24
    chi_square = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert chi_square < 50  # 23 degrees of freedom: one in a thousand lies above 49.7


def test_another_seed_is_another_split():
    def split(seed):
        plan = make_shuffle_plan(
            PlanRequest((1000,), (0.5, 0.25, 0.25), "cell", "shuffled", 100, 50, seed)
        )
        return plan.split[destinations(plan, 0)]

    assert 0.3 < (split(1) == split(2)).mean() < 0.45  # by chance 0.375
