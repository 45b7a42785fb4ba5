"""Teams: several ranks on one matrix, where the step is predicted to be faster with them.

What a member computes and sends: :mod:`omn_dist.algorithms.team_newton_schulz`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from omn_dist.plan.assign.slices import slices_of
from omn_dist.plan.geometry.matrix import Matrix, Work
from omn_dist.plan.plan import Plan, with_teams
from omn_dist.plan.predict.devices import Device, Topology
from omn_dist.plan.predict.seconds import matrix_seconds
from omn_dist.plan.predict.simulation import simulate

_SIZES = (2, 3, 4, 6, 8)
# Targets that are tried for the busiest rank: a bisection to about a thousandth of the range.
_NUM_TARGETS = 10
_LEAST_GAIN = 0.02


@dataclass(frozen=True)
class TeamChoice:
    """A plan of whole matrices, the best one found with teams, and the predicted step of both."""

    whole: Plan
    teamed: Plan
    """``whole`` itself where no team lowers the busiest rank."""
    device: Device
    topology: Topology
    num_adamw_elements: int

    @cached_property
    def whole_seconds(self) -> float:
        """Predicted step with one owner a matrix."""
        return self._step_seconds(self.whole)

    @cached_property
    def seconds(self) -> float:
        """Predicted step with teams."""
        return self._step_seconds(self.teamed)

    def _step_seconds(self, plan: Plan) -> float:
        return simulate(plan, self.device, self.topology, num_adamw_elements=self.num_adamw_elements).seconds

    @property
    def pays(self) -> bool:
        """Whether the predicted step with teams is 2 % shorter: less is not worth other bits."""
        return self.teamed is not self.whole and self.seconds < (1 - _LEAST_GAIN) * self.whole_seconds

    @property
    def plan(self) -> Plan:
        """The plan with teams where they pay, else that of whole matrices."""
        return self.teamed if self.pays else self.whole

    def __str__(self) -> str:
        """One line: what was compared, and what was chosen."""
        reasons = sorted({matrix.work.whole_only for matrix in self.whole.matrices})
        if reasons and all(reasons):
            return f"no team of ranks can work on a matrix here: {', '.join(reasons)} needs one owner"
        if self.teamed is self.whole:
            return f"teams of ranks do not pay on {self.device.name}: with their collectives none lowers the busiest rank's seconds"
        return (
            f"{len(self.teamed.teams)} of {self.whole.num_matrices} matrices on teams of ranks: imbalance "
            f"{self.teamed.imbalance:.3f} instead of {self.whole.imbalance:.3f}, predicted step {1e3 * self.seconds:.2f} instead "
            f"of {1e3 * self.whole_seconds:.2f} ms on {self.device.name}: teams {'pay' if self.pays else 'do not pay'}"
        )


def choose_teams(
    plan: Plan,
    device: Device,
    topology: Topology | None = None,
    *,
    nodes: Sequence[int] | None = None,
    num_adamw_elements: int = 0,
) -> TeamChoice:
    """The best plan with teams for the matrices of ``plan``, beside it. Pure and deterministic.

    For a target of seconds, each matrix, heaviest first, goes whole to the least loaded rank; where
    it exceeds the target there, it goes to the smallest team on which it does not. The lowest
    target that holds all matrices is taken. A team is a group of consecutive ranks of one node, so
    that there are few different teams. A matrix that some ranks hold whole is owned by one of them.

    Args:
        plan: of whole matrices.
        device: what each rank computes with.
        topology: the network; the device's own when ``None``.
        nodes: the node of each rank; by consecutive ranks, as in the topology, when ``None``.
        num_adamw_elements: elements, over all ranks, that AdamW updates in the same step.
    """
    topology = device.topology if topology is None else topology
    if nodes is None:
        nodes = [rank // topology.ranks_per_node for rank in range(plan.world_size)]
    search = _TeamSearch(plan, device, topology, nodes)
    low, high = search.least, search.busiest(plan.owners)
    best: _Assignment | None = None
    for _ in range(_NUM_TARGETS):
        target = (low + high) / 2
        found = search.assign(target)
        if found is None:
            low = target
        else:
            best, high = found, target
    if best is None or not any(len(team) > 1 for team in best):
        return TeamChoice(plan, plan, device, topology, num_adamw_elements)
    teams = {matrix.name: team for matrix, team in zip(plan.matrices, best, strict=True) if len(team) > 1}
    teamed = with_teams(plan, teams, [team[0] for team in best])
    return TeamChoice(plan, teamed, device, topology, num_adamw_elements)


_Assignment = list[tuple[int, ...]]
"""The ranks of each matrix: one owner or a team."""


class _TeamSearch:
    """Assignments of matrices to ranks and to teams, by seconds."""

    def __init__(self, plan: Plan, device: Device, topology: Topology, nodes: Sequence[int]) -> None:
        self._plan = plan
        self._teams_by_size = {size: teams for size in _SIZES if len(teams := _teams_of_size(nodes, size))}
        by_kind: dict[tuple[int, int, Work], list[float]] = {}
        self._seconds = []
        """Of each matrix: alone, and on a team of each possible size."""
        for matrix in plan.matrices:
            kind = (matrix.stored_rows, matrix.stored_columns, matrix.work)
            if kind not in by_kind:
                by_kind[kind] = [_seconds_on_team(matrix, size, device, topology) for size in (1, *self._teams_by_size)]
            self._seconds.append(by_kind[kind])
        alone = np.array([seconds[0] for seconds in self._seconds])
        self._order = sorted(range(len(alone)), key=lambda index: (-alone[index], plan.matrices[index].name))
        self._pinned = [
            candidates if len(candidates := matrix.candidates()) < plan.world_size else None for matrix in plan.matrices
        ]
        self.least = float(alone.sum()) / plan.world_size
        """No busiest rank has less, unless a team takes less time in sum than one rank."""

    def busiest(self, owners: Sequence[int]) -> float:
        """Seconds of the busiest rank when each matrix has one owner."""
        loads = np.zeros(self._plan.world_size)
        np.add.at(loads, np.asarray(owners, dtype=np.int64), [seconds[0] for seconds in self._seconds])
        return float(loads.max(initial=0.0))

    def assign(self, target: float) -> _Assignment | None:
        """Ranks for all matrices, none busier than ``target``; ``None`` where none were found."""
        loads = np.zeros(self._plan.world_size)
        found: _Assignment = [()] * len(self._order)
        for index in self._order:
            alone, *on_teams = self._seconds[index]
            pinned = self._pinned[index]
            rank = int(loads.argmin()) if pinned is None else min(pinned, key=lambda rank: (loads[rank], rank))
            if loads[rank] + alone <= target:
                loads[rank] += alone
                found[index] = (rank,)
                continue
            if pinned is not None:
                return None
            for seconds, teams in zip(on_teams, self._teams_by_size.values(), strict=True):
                # A team works together: it starts when its busiest member does.
                busiest = loads[teams].max(axis=1)
                team = teams[int(busiest.argmin())]
                if busiest.min() + seconds <= target:
                    loads[team] = busiest.min() + seconds
                    found[index] = tuple(team.tolist())
                    break
            else:
                return None
        return found


def _seconds_on_team(matrix: Matrix, size: int, device: Device, topology: Topology) -> float:
    """Seconds of a matrix on ``size`` ranks: those of its widest slice; infinite for no team."""
    if size == 1:
        return matrix_seconds(matrix, device, topology)
    if matrix.work.whole_only or size > max(matrix.stored_rows, matrix.stored_columns):
        return float("inf")
    return max(matrix_seconds(team_slice, device, topology) for team_slice in slices_of(matrix, size))


def _teams_of_size(nodes: Sequence[int], size: int) -> NDArray[np.int64]:
    """``[teams, size]``: consecutive ranks of each node; left over ranks are in no team."""
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    teams = [ranks[start : start + size] for ranks in by_node.values() for start in range(0, len(ranks) - size + 1, size)]
    return np.array(teams, dtype=np.int64).reshape(-1, size)
