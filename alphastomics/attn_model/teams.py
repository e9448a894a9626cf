"""Which sets of experts cells are sorted by: the number of experts and k enter, a table leaves.

Cells that visit the same k experts, a team, lie together: for them the mixture is a dense
feed-forward of k experts' width, and costs what one costs. Where there would be too many teams,
each expert is a team of its own and a cell has k rows, one in each.
"""

from itertools import combinations
from math import comb
from typing import NamedTuple

# More teams than this have too few cells each.
MOST_TEAMS = 32
# Members are packed into a number, of so many bits each.
MEMBER_BITS = 5
MOST_MEMBERS = 12


class Teams(NamedTuple):
    """How many teams there are, of how many experts each, and how many rows a cell has."""

    number: int
    members: int
    rows: int


def make_teams(num_experts: int, top_k: int) -> Teams:
    """Choose between teams of k experts and teams of one."""
    number = comb(num_experts, top_k)
    if number <= MOST_TEAMS and top_k <= MOST_MEMBERS:
        return Teams(number, top_k, rows=1)
    return Teams(num_experts, 1, rows=top_k)


def team_members(num_experts: int, teams: Teams) -> list[tuple[int, ...]]:
    """List the experts of each team, ascending; teams in the order of their last expert first."""
    return sorted(combinations(range(num_experts), teams.members), key=lambda team: team[::-1])


def team_table(num_experts: int, teams: Teams) -> list[int]:
    """Return each team's members as one number, then the binomials that say which team it is.

    Experts c_0 < c_1 < ... are team number C(c_0, 1) + C(c_1, 2) + ...: the order of
    `team_members`. The binomials C(c, i + 1) lie by c, then by i.
    """
    packed = [
        sum(expert << (MEMBER_BITS * place) for place, expert in enumerate(team))
        for team in team_members(num_experts, teams)
    ]
    places = range(1, teams.members + 1)
    return packed + [comb(expert, place) for expert in range(num_experts) for place in places]
