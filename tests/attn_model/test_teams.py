"""Teams of experts, and how their kernels' memory is laid out: by hand, and against itertools."""

from itertools import combinations
from math import comb

import pytest
import torch

from alphastomics.attn_model.launch import Space, key_of, lay_out
from alphastomics.attn_model.teams import (
    MEMBER_BITS,
    MOST_TEAMS,
    Teams,
    make_teams,
    team_members,
    team_table,
)


def unpack(packed, size):
    return tuple((packed >> (MEMBER_BITS * place)) & 31 for place in range(size))


@pytest.mark.parametrize(
    ("experts", "top_k", "teams"),
    [
        (4, 2, Teams(6, 2, rows=1)),
        (8, 2, Teams(28, 2, rows=1)),
        (4, 4, Teams(1, 4, rows=1)),
        (32, 1, Teams(32, 1, rows=1)),
        # C(16, 2) = 120 teams, and C(8, 4) = 70, would have too few cells each.
        (16, 2, Teams(16, 1, rows=2)),
        (8, 4, Teams(8, 1, rows=4)),
        # C(14, 13) = 14, but 13 members of 5 bits do not fit into 64.
        (14, 13, Teams(14, 1, rows=13)),
    ],
)
def test_cells_are_sorted_by_teams_where_there_are_few(experts, top_k, teams):
    assert make_teams(experts, top_k) == teams


@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (8, 2), (5, 5), (7, 3), (32, 1), (18, 3)])
def test_a_table_names_each_team_once_and_its_binomials_find_it(experts, top_k):
    teams = make_teams(experts, top_k)
    table = team_table(experts, teams)
    packed, binomials = table[: teams.number], table[teams.number :]
    members = [unpack(number, teams.members) for number in packed]
    assert teams.number <= max(MOST_TEAMS, experts)
    assert sorted(members) == sorted(combinations(range(experts), teams.members))
    assert members == team_members(experts, teams)
    for number, team in enumerate(members):
        found = [binomials[expert * teams.members + i] for i, expert in enumerate(team)]
        assert sum(found) == number
        assert found == [comb(expert, i + 1) for i, expert in enumerate(team)]


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
