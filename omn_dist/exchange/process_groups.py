"""Process groups of an optimizer, and the comparison of plans over them."""

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist

# Private: torch names a group that its members make by themselves after the number of groups that a
# rank is in, and offers no public way to read that number. Seen in torch 2.9 and 2.13.
from torch.distributed.distributed_c10d import _world

from omn_dist.exchange.grid import Grid, find_difference
from omn_dist.plan.plan import Plan


class SharedGroups:
    """The process groups of an optimizer, one for each set of ranks.

    Deep copies of the optimizer use the same groups: groups are never copied.

    The pipeline has a group of its own, and so has each team: two streams of collectives on one
    communicator can deadlock.

    Args:
        replicas: ranks that hold equal copies of plain tensors; ``None``: no other rank does.
    """

    def __init__(self, replicas: dist.ProcessGroup | None = None) -> None:
        self.replicas = replicas
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._teams: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._known_teams: set[tuple[int, ...]] = set()

    def of(self, ranks: tuple[int, ...], parts: Sequence[dist.ProcessGroup], device: torch.device) -> dist.ProcessGroup | None:
        """The pipeline's group of these global ranks. Collective on first use.

        ``None`` for fewer than two ranks. The ranks form a grid; ``parts`` are the groups that this
        rank is in, one for each axis of the grid.
        """
        if len(ranks) < 2:
            return None
        if ranks not in self._by_ranks:
            _even_out(parts, device)
            group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="omn_dist_pipeline")
            self._by_ranks[ranks] = group
        return self._by_ranks[ranks]

    def of_teams(self, plan: Plan, ranks: tuple[int, ...], device: torch.device) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """The groups of the teams that this rank is in, by the team's ranks in ``plan``.

        Collective over all ``ranks`` on first use, after :meth:`of`. In each round every rank makes
        one group, of a team or of itself alone, so that all ranks have the same number of groups.

        Args:
            plan: with teams.
            ranks: the global rank of each rank of the plan.
            device: on which the groups communicate.
        """
        members = {team: tuple(ranks[rank] for rank in team) for team in plan.teams.values()}
        rounds: list[list[tuple[int, ...]]] = []
        for team in sorted(set(members.values()) - self._known_teams):
            apart = (found for found in rounds if all(set(team).isdisjoint(other) for other in found))
            fitting = next(apart, None)
            if fitting is None:
                rounds.append([team])
            else:
                fitting.append(team)
        me = dist.get_rank()
        if rounds:
            _even_out([self._by_ranks[ranks]], device)
        for found in rounds:
            own = next((team for team in found if me in team), (me,))
            group = dist.new_group(list(own), use_local_synchronization=True, group_desc="omn_dist_team")
            self._teams[own] = group
        self._known_teams.update(members.values())
        return {team: self._teams[own] for team, own in members.items() if me in own}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())


def _even_out(parts: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Give all ranks of a grid the same number of process groups. Collective.

    Ranks that have fewer make groups of themselves alone. torch names a group that its members make
    by themselves after its ranks and after the number of groups that the process is in. That number
    differs where some ranks are in groups that others are not in. Then the members of a new group
    would wait for each other under different names.

    Args:
        parts: the groups that this rank is in, one for each axis of the grid.
        device: on which these groups communicate.
    """
    most = torch.tensor(len(_world.pg_names), device=device)
    for part in parts:
        dist.all_reduce(most, dist.ReduceOp.MAX, part)
    for _ in range(int(most) - len(_world.pg_names)):
        dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc="omn_dist_even")


def compare_plans(plan: Plan, group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that all ranks of ``group`` have the same plan. Collective.

    Raises:
        ValueError: on all ranks, when plans differ; the message has the first difference.
    """
    grid = Grid.of_group(group)
    found = find_difference(plan.description, grid, device)
    if found is not None:
        raise ValueError(
            f"plan: ranks {found.first_rank} and {found.other_rank} of {len(grid.ranks)} differ, expected the same options on all; "
            f"rank {found.first_rank} has {found.first_line!r}, rank {found.other_rank} has {found.other_line!r}"
        )
