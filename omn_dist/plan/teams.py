"""Teams: several ranks on one matrix, where there are more ranks than large matrices and it is predicted to pay.

What a member does, and what the collectives are: :mod:`omn_dist.algorithms.team_newton_schulz`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from omn_dist.plan.devices import Device, Topology
from omn_dist.plan.matrix import Matrix
from omn_dist.plan.ownership import Plan
from omn_dist.plan.simulation import matrix_seconds, simulate
from omn_dist.plan.slices import slices_of, with_teams

_SIZES = (2, 3, 4, 6, 8)
# Targets that are tried for the busiest rank: a bisection to about a thousandth of the range.
_NUM_TARGETS = 10
_LEAST_GAIN = 0.02

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class TeamChoice:
    """A plan of whole matrices, the best one with teams that was found, and which of them a step is predicted to be faster with."""

    whole: Plan
    teamed: Plan
    """``whole`` itself where no team lowers the busiest rank."""
    device: Device
    topology: Topology
    num_adamw_elements: int

    @cached_property
    def whole_seconds(self) -> float:
        """Predicted step with one owner a matrix."""
        return self._step(self.whole)

    @cached_property
    def seconds(self) -> float:
        """Predicted step with teams."""
        return self._step(self.teamed)

    def _step(self, plan: Plan) -> float:
        return simulate(plan, self.device, self.topology, num_adamw_elements=self.num_adamw_elements).seconds

    @property
    def pays(self) -> bool:
        """Whether the step with teams is predicted to be faster by at least 2 %: bits are not given up for less."""
        return self.teamed is not self.whole and self.seconds < (1 - _LEAST_GAIN) * self.whole_seconds

    @property
    def plan(self) -> Plan:
        """The plan with teams where they pay, else that of whole matrices."""
        return self.teamed if self.pays else self.whole

    def __str__(self) -> str:
        """One line: what was compared, and what was chosen."""
        one_owner = sorted({matrix.whole_only for matrix in self.whole.matrices})
        if one_owner and all(one_owner):
            return f"no team of ranks can work on a matrix here: {', '.join(one_owner)} needs one owner"
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
    """The best plan with teams for the matrices of ``plan``, beside that plan. Pure and deterministic.

    For a target of seconds, matrices go heaviest first to the least loaded rank, whole; one that does not fit any more goes to
    the smallest team on which it fits. The lowest target that holds everything counts. Teams are blocks of consecutive ranks of
    one node, so that there are few different ones. A matrix that lies whole on some ranks stays with them.

    Args:
        plan: of whole matrices.
        device: what each rank computes with.
        topology: the network; the device's own when ``None``.
        nodes: the node of each rank; consecutive ranks, as the topology says, when ``None``.
        num_adamw_elements: elements of parameters that take AdamW in the same step, over all ranks.
    """
    topology = device.topology if topology is None else topology
    if nodes is None:
        nodes = [rank // topology.ranks_per_node for rank in range(plan.world_size)]
    filling = _Filling(plan, device, topology, nodes)
    low, high = filling.least, filling.busiest(plan.owners)
    best: _Assignment | None = None
    for _ in range(_NUM_TARGETS):
        target = (low + high) / 2
        found = filling.assign(target)
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


class _Filling:
    """Assignments of matrices to ranks and to teams, by seconds."""

    def __init__(self, plan: Plan, device: Device, topology: Topology, nodes: Sequence[int]) -> None:
        self._plan = plan
        self._blocks = {size: blocks for size in _SIZES if len(blocks := _blocks(nodes, size))}
        by_kind: dict[tuple[object, ...], list[float]] = {}
        self._seconds = []
        """Of each matrix: alone, and on a team of each possible size."""
        for matrix in plan.matrices:
            kind = (matrix.stored_rows, matrix.stored_columns, matrix.num_steps, matrix.form, matrix.itemsize, matrix.whole_only)
            if kind not in by_kind:
                by_kind[kind] = [_seconds(matrix, size, device, topology) for size in (1, *self._blocks)]
            self._seconds.append(by_kind[kind])
        alone = np.array([seconds[0] for seconds in self._seconds])
        self._order = sorted(range(len(alone)), key=lambda index: (-alone[index], plan.matrices[index].name))
        self._pinned = [
            candidates if len(candidates := matrix.candidates()) < plan.world_size else None for matrix in plan.matrices
        ]
        self.least = float(alone.sum()) / plan.world_size
        """The busiest rank has no less, unless teams are faster than their parts."""

    def busiest(self, owners: Sequence[int]) -> float:
        """Seconds of the busiest rank when each matrix has one owner."""
        loads = np.zeros(self._plan.world_size)
        np.add.at(loads, np.asarray(owners, dtype=np.int64), [seconds[0] for seconds in self._seconds])
        return float(loads.max(initial=0.0))

    def assign(self, target: float) -> _Assignment | None:
        """Ranks for all matrices, none busier than ``target``; ``None`` where that was not found."""
        loads = np.zeros(self._plan.world_size)
        found: _Assignment = [()] * len(self._order)
        for index in self._order:
            alone, *parts = self._seconds[index]
            pinned = self._pinned[index]
            rank = int(loads.argmin()) if pinned is None else min(pinned, key=lambda rank: (loads[rank], rank))
            if loads[rank] + alone <= target:
                loads[rank] += alone
                found[index] = (rank,)
                continue
            if pinned is not None:
                return None
            for part, blocks in zip(parts, self._blocks.values(), strict=True):
                # A team works together: its busiest member counts.
                busiest = loads[blocks].max(axis=1)
                block = blocks[int(busiest.argmin())]
                if busiest.min() + part <= target:
                    loads[block] = busiest.min() + part
                    found[index] = tuple(block.tolist())
                    break
            else:
                return None
        return found


def _seconds(matrix: Matrix, size: int, device: Device, topology: Topology) -> float:
    """Of the widest slice, for a team; infinite where there can be none."""
    if size == 1:
        return matrix_seconds(matrix, device, topology)
    if matrix.whole_only or size > max(matrix.stored_rows, matrix.stored_columns):
        return float("inf")
    return max(matrix_seconds(part, device, topology) for part in slices_of(matrix, size))


def _blocks(nodes: Sequence[int], size: int) -> NDArray[np.int64]:
    """``[blocks, size]``: the ranks of each node in blocks of this size, in order; what is left over has none."""
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    blocks = [ranks[start : start + size] for ranks in by_node.values() for start in range(0, len(ranks) - size + 1, size)]
    return np.array(blocks, dtype=np.int64).reshape(-1, size)
