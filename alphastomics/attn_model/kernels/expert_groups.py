"""Expert groups that cells are sorted by: the number of experts and k enter, a table leaves.

Cells assigned to the same k experts, an expert group, are contiguous: for them the mixture is a
dense feed-forward of k experts' width, and costs what one costs. Where there would be too many
groups, each expert is a group of its own and a cell has k rows, one in each.
"""

from itertools import combinations
from math import comb
from typing import NamedTuple

# More groups than this have too few cells each.
MAX_GROUPS = 32
# A group's experts are packed into one number, of so many bits each.
EXPERT_BITS = 5
MAX_GROUP_SIZE = 12


class ExpertGroups(NamedTuple):
    """How many groups there are, of how many experts each, and how many rows a cell has."""

    number: int
    size: int
    rows_per_cell: int


def expert_groups(num_experts: int, top_k: int) -> ExpertGroups:
    """Choose between groups of k experts and groups of one."""
    number = comb(num_experts, top_k)
    if number <= MAX_GROUPS and top_k <= MAX_GROUP_SIZE:
        return ExpertGroups(number, top_k, rows_per_cell=1)
    return ExpertGroups(num_experts, 1, rows_per_cell=top_k)


def group_experts(num_experts: int, groups: ExpertGroups) -> list[tuple[int, ...]]:
    """List the experts of each group, ascending; groups in the order of their last expert first."""
    return sorted(combinations(range(num_experts), groups.size), key=lambda experts: experts[::-1])


def group_table(num_experts: int, groups: ExpertGroups) -> list[int]:
    """Return each group's experts as one number, then the binomials that give a group's number.

    Experts c_0 < c_1 < ... are group number C(c_0, 1) + C(c_1, 2) + ...: the order of
    `group_experts`. The binomials C(c, i + 1) lie by c, then by i.
    """
    packed = [
        sum(expert << (EXPERT_BITS * i) for i, expert in enumerate(experts))
        for experts in group_experts(num_experts, groups)
    ]
    sizes = range(1, groups.size + 1)
    return packed + [comb(expert, size) for expert in range(num_experts) for size in sizes]
