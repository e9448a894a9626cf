"""Expert groups, and how their kernels' memory is laid out: by hand, and against itertools."""

from itertools import combinations
from math import comb

import pytest
import torch

from alphastomics.attn_model.kernels.expert_groups import (
    EXPERT_BITS,
    MAX_GROUPS,
    ExpertGroups,
    expert_groups,
    group_experts,
    group_table,
)
from alphastomics.attn_model.kernels.launch import Space, key_of, lay_out


def unpack(packed, size):
    return tuple((packed >> (EXPERT_BITS * i)) & 31 for i in range(size))


@pytest.mark.parametrize(
    ("experts", "top_k", "groups"),
    [
        (4, 2, ExpertGroups(6, 2, rows_per_cell=1)),
        (8, 2, ExpertGroups(28, 2, rows_per_cell=1)),
        (4, 4, ExpertGroups(1, 4, rows_per_cell=1)),
        (32, 1, ExpertGroups(32, 1, rows_per_cell=1)),
        # C(16, 2) = 120 groups, and C(8, 4) = 70, would have too few cells each.
        (16, 2, ExpertGroups(16, 1, rows_per_cell=2)),
        (8, 4, ExpertGroups(8, 1, rows_per_cell=4)),
        # C(14, 13) = 14, but 13 experts of 5 bits do not fit into 64.
        (14, 13, ExpertGroups(14, 1, rows_per_cell=13)),
    ],
)
def test_cells_are_sorted_by_groups_of_k_experts_where_there_are_few(experts, top_k, groups):
    assert expert_groups(experts, top_k) == groups


@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (8, 2), (5, 5), (7, 3), (32, 1), (18, 3)])
def test_a_table_names_each_group_once_and_its_binomials_give_its_number(experts, top_k):
    groups = expert_groups(experts, top_k)
    table = group_table(experts, groups)
    packed, binomials = table[: groups.number], table[groups.number :]
    unpacked = [unpack(number, groups.size) for number in packed]
    assert groups.number <= max(MAX_GROUPS, experts)
    assert sorted(unpacked) == sorted(combinations(range(experts), groups.size))
    assert unpacked == group_experts(experts, groups)
    for number, group in enumerate(unpacked):
        terms = [binomials[expert * groups.size + i] for i, expert in enumerate(group)]
        assert sum(terms) == number
        assert terms == [comb(expert, i + 1) for i, expert in enumerate(group)]


def test_parts_of_an_allocation_do_not_touch_and_begin_where_kernels_want_them():
    parts = (("a", (3, 5), torch.bfloat16), ("b", (1,), torch.int32), ("c", (0,), torch.float32),
             ("d", (7, 100), torch.float32))  # fmt: skip
    layout = lay_out(parts)
    space = Space(layout, torch.zeros(layout.size, dtype=torch.uint8), by_address=False)
    for number, (name, shape, dtype) in enumerate(parts, 1):
        tensor = space[name]
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert layout.offsets[name] % 512 == 0
        tensor.fill_(number)
    for number, (name, _, _) in enumerate(parts, 1):
        assert (space.tensor(name) == number).all()
    addresses = Space(layout, space.memory, by_address=True)
    assert addresses["d"] == space.tensor("d").data_ptr()


def test_a_key_tells_precisions_sizes_and_what_is_missing_apart_and_shuns_odd_addresses():
    x, y = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)
    keys = [key_of((x, y), 4), key_of((x, None), 4), key_of((x, x), 4), key_of((x, y), 5)]
    assert len(set(keys)) == len(keys)
    assert key_of((x, y), 4) == key_of((torch.ones(8), y), 4)
    assert key_of((x[1:], y), 4) is None
