"""Teams: several ranks on one matrix, for more ranks than there are large matrices. A study; the exchange does not run it.

Each member of a team of t holds a slice of the long side (s x l/t). Each step: Gram matrix of its slice (2 s^2 l / t), summed over
the team and left in row blocks (reduce-scatter); its row block of the square (2 s^3 / t) after an all-gather of the Gram matrix;
its slice of the product (2 s^2 l / t) after an all-gather of the polynomial. So a member has 1/t of the FLOPs, and three
collectives of s^2 elements a step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omn_dist.plan.cost import newton_schulz_seconds
from omn_dist.plan.devices import Device, Topology
from omn_dist.plan.ownership import Plan

_TEAM_SIZES = (1, 2, 3, 4, 6, 8)
_COLLECTIVES_A_STEP = 3


@dataclass(frozen=True)
class TeamPlan:
    """Which ranks work on each matrix of a plan, and what that would save."""

    teams: tuple[tuple[int, ...], ...]
    """The ranks of each matrix, in the order of the plan; one rank is an owner as before."""
    flops_by_rank: NDArray[np.float64]
    """``[world_size]``."""
    seconds: float
    """Predicted Newton-Schulz seconds of the busiest rank, with the collectives of its teams."""
    whole_seconds: float
    """The same for the plan's whole-matrix owners."""

    @property
    def imbalance(self) -> float:
        """Largest over mean FLOPs."""
        mean = float(self.flops_by_rank.mean())
        return float(self.flops_by_rank.max()) / mean if mean else 1.0

    @property
    def num_teams(self) -> int:
        """Matrices with more than one rank."""
        return sum(len(team) > 1 for team in self.teams)

    @property
    def pays(self) -> bool:
        """Whether teams are predicted to be faster than whole-matrix owners."""
        return self.seconds < self.whole_seconds


def team_seconds(
    num_rows: int, num_columns: int, num_steps: int, size: int, device: Device, topology: Topology, itemsize: int
) -> float:
    """Seconds of one matrix on a team of ``size`` ranks of one node, its collectives included."""
    short = min(num_rows, num_columns)
    alone = newton_schulz_seconds(num_rows, num_columns, num_steps, device, itemsize)
    if size == 1:
        return alone
    # Kernels to launch stay, everything else is divided.
    launches = newton_schulz_seconds(1, 1, num_steps, device, itemsize)
    travelling = short * short * itemsize * (size - 1) / size / topology.inside_bytes_per_second
    collective = travelling + topology.latency_seconds * math.ceil(math.log2(size))
    return launches + (alone - launches) / size + num_steps * _COLLECTIVES_A_STEP * collective


def plan_teams(plan: Plan, device: Device, topology: Topology | None = None) -> TeamPlan:
    """The best of several ways to split heavy matrices over teams, by predicted seconds; no teams where none helps.

    A way is a most for what one rank may do of one matrix: heavier matrices are split into as few equal parts as that takes.
    Heaviest parts go first, each matrix to the least loaded ranks of one node. Pure and deterministic.

    Args:
        plan: its owners are the way without teams.
        device: what each rank computes with.
        topology: the network; the device's own when ``None``. Teams never cross a node.
    """
    topology = device.topology if topology is None else topology
    shapes = [(matrix.stored_rows, matrix.stored_columns, matrix.num_steps) for matrix in plan.matrices]
    flops = np.array([matrix.flops for matrix in plan.matrices], dtype=np.float64)
    seconds = {
        (shape, size): team_seconds(*shape, size, device, topology, plan.wire_itemsize)
        for shape in set(shapes)
        for size in _TEAM_SIZES
    }
    alone = np.array([seconds[shape, 1] for shape in shapes])
    loads = np.zeros(plan.world_size)
    np.add.at(loads, np.asarray(plan.owners, dtype=np.int64), alone)
    whole = float(loads.max(initial=0.0))
    best = TeamPlan(tuple((owner,) for owner in plan.owners), plan.flops_by_rank.astype(np.float64), whole, whole)
    largest = max(size for size in _TEAM_SIZES if size <= min(plan.world_size, topology.ranks_per_node))
    mosts = sorted({cost / size for cost in set(alone.tolist()) for size in _TEAM_SIZES if size <= largest}, reverse=True)
    tried: set[tuple[int, ...]] = set()
    for most in mosts:
        by_cost = {cost: _size(cost / most, largest) for cost in set(alone.tolist())}
        sizes = tuple(by_cost[cost] for cost in alone.tolist())
        if max(sizes, default=1) == 1 or sizes in tried:
            continue
        tried.add(sizes)
        parts = [seconds[shape, size] for shape, size in zip(shapes, sizes, strict=True)]
        # No placement is better than its parts shared evenly, or than its largest part.
        shared = sum(part * size for part, size in zip(parts, sizes, strict=True)) / plan.world_size
        if max(shared, max(parts)) >= best.seconds:
            continue
        teams, busiest = _place(parts, sizes, [matrix.name for matrix in plan.matrices], plan.world_size, topology.ranks_per_node)
        if busiest < best.seconds:
            by_rank = np.zeros(plan.world_size)
            for cost, team in zip(flops, teams, strict=True):
                by_rank[list(team)] += cost / len(team)
            best = TeamPlan(teams, by_rank, busiest, whole)
    return best


def _size(parts: float, largest: int) -> int:
    """The smallest team with at least ``parts`` members."""
    return next((size for size in _TEAM_SIZES if size >= parts * (1 - 1e-9) and size <= largest), largest)


def _place(
    parts: Sequence[float], sizes: Sequence[int], names: Sequence[str], world_size: int, ranks_per_node: int
) -> tuple[tuple[tuple[int, ...], ...], float]:
    """Teams for parts of these seconds, and the busiest rank's sum."""
    nodes = [list(range(first, min(first + ranks_per_node, world_size))) for first in range(0, world_size, ranks_per_node)]
    loads = np.zeros(world_size)
    teams: list[tuple[int, ...]] = [()] * len(parts)
    for index in sorted(range(len(parts)), key=lambda index: (-parts[index], -sizes[index], names[index])):
        size = sizes[index]
        if size == 1:
            team = [int(loads.argmin())]
        else:
            # In each node the least loaded ranks; a team works together, so its busiest member counts.
            options = [sorted(node, key=lambda rank: (loads[rank], rank))[:size] for node in nodes if len(node) >= size]
            team = min(options, key=lambda option: (loads[option[-1]], option))
        # All members start together.
        loads[team] = loads[team].max() + parts[index]
        teams[index] = tuple(sorted(team))
    return tuple(teams), float(loads.max(initial=0.0))
