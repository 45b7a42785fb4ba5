"""The plan: owners and waves of all matrices, frozen, hashable, the same on every rank."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from omn_dist.plan.assign.bounds import Bound, makespan_bound
from omn_dist.plan.assign.slices import assign_team_waves, owners_beside, slices_of
from omn_dist.plan.assign.strategies import Strategy, owners_by
from omn_dist.plan.assign.waves import assign_waves, default_wave_bytes, least_waves, lockstep_makespan, wave_budget
from omn_dist.plan.geometry.matrix import Matrix
from omn_dist.plan.geometry.traffic import Counts, StepTraffic, TrafficCounter, Transport


@dataclass(frozen=True)
class Plan:
    """Which rank owns each matrix, and in which wave it moves.

    A plan depends on shapes, layouts and options only, never on gradients.
    """

    world_size: int
    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    """The owner rank of each matrix."""
    waves: tuple[tuple[int, ...], ...]
    """Indices into ``matrices``; each is in one wave."""
    communication_itemsize: int
    """Bytes of one element in flight."""
    wave_bytes: int
    """Byte budget of a slot and of the stack, on each rank."""
    transport: Transport = "all_to_all"

    def __post_init__(self) -> None:
        moved = sorted(index for wave in self.waves for index in wave)
        if moved != list(range(len(self.matrices))) or len(self.owners) != len(self.matrices):
            raise ValueError("plan: every matrix needs exactly one owner and one wave")
        if any(not 0 <= owner < self.world_size for owner in self.owners):
            raise ValueError(f"plan: an owner is not one of the {self.world_size} ranks")
        wave_by_matrix = {index: number for number, wave in enumerate(self.waves) for index in wave}
        for name, indices in self._slices.items():
            team = [self.owners[index] for index in indices]
            first = self.matrices[indices[0]].slice
            if first is None or len(indices) != first.size or sorted(set(team)) != team:
                raise ValueError(f"plan: the slices of {name} have the owners {team}, expected one each, in ascending order")
            if len({wave_by_matrix[index] for index in indices}) > 1:
                raise ValueError(f"plan: the slices of {name} are in several waves, expected one")

    @property
    def num_matrices(self) -> int:
        """Number of whole matrices: the slices of one count once."""
        return len(self.matrices) - sum(len(team) - 1 for team in self.teams.values())

    @cached_property
    def _slices(self) -> dict[str, list[int]]:
        """The indices of the slices of each matrix that a team works on, in their order."""
        found: dict[str, dict[int, int]] = {}
        for index, matrix in enumerate(self.matrices):
            if matrix.slice is not None:
                found.setdefault(matrix.slice.whole, {})[matrix.slice.index] = index
        return {name: [indices[number] for number in sorted(indices)] for name, indices in found.items()}

    @cached_property
    def teams(self) -> Mapping[str, tuple[int, ...]]:
        """The ranks of each matrix that a team works on, by name, in the order of its slices."""
        return {name: tuple(self.owners[index] for index in indices) for name, indices in self._slices.items()}

    @property
    def description(self) -> tuple[str, ...]:
        """One line a fact, in a fixed order: what the hash covers, and what an error compares."""
        wave_by_matrix = {index: number for number, wave in enumerate(self.waves) for index in wave}
        head = (
            f"world size {self.world_size}",
            f"communication {self.communication_itemsize} bytes an element",
            f"transport {self.transport}",
            f"order {[list(wave) for wave in self.waves]}",
        )
        return head + tuple(
            f"matrix {matrix.name}: {matrix.num_rows} x {matrix.num_columns} of parameter {matrix.parameter_name} "
            f"{list(matrix.layout.shape)}, transposed {matrix.transposed}, region {[list(region) for region in matrix.region]}, "
            f"mesh {list(matrix.layout.mesh_shape)}, placements {[list(placement) for placement in matrix.layout.placements]}, "
            f"{matrix.work}, {'' if matrix.slice is None else f'{matrix.slice}, '}owner {owner}, wave {wave_by_matrix[index]}"
            for index, (matrix, owner) in enumerate(zip(self.matrices, self.owners, strict=True))
        )

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the description, in hex: equal on two ranks exactly where they do the same."""
        digest = hashlib.sha256()
        # Line by line: the description of a deep model as one string would fragment the heap.
        for text in json.JSONEncoder().iterencode(self.description):
            digest.update(text.encode())
        return digest.hexdigest()

    @cached_property
    def flops_by_rank(self) -> Counts:
        """``[world_size]``: estimated Newton-Schulz FLOPs of each rank in one step."""
        return self._sum_by_owner([matrix.flops for matrix in self.matrices])

    @property
    def imbalance(self) -> float:
        """Largest over mean FLOPs of a rank: 1.0 at best, and where there is nothing to do."""
        mean = float(self.flops_by_rank.mean())
        return float(self.flops_by_rank.max()) / mean if mean else 1.0

    @cached_property
    def bound(self) -> Bound:
        """The fewest FLOPs that the busiest rank can have with these matrices and slices.

        Proven, see :mod:`omn_dist.plan.assign.bounds`.
        """
        return makespan_bound([matrix.flops for matrix in self.matrices], self.world_size)

    @property
    def gap(self) -> float:
        """The busiest rank's FLOPs above the bound, as a fraction of it: 0 is proven best."""
        return float(self.flops_by_rank.max()) / self.bound.value - 1 if self.bound.value else 0.0

    @cached_property
    def wave_imbalance(self) -> float:
        """Sum over waves of the slowest rank's FLOPs, over the mean FLOPs of a rank.

        This is the imbalance where ranks wait for each other after every wave.
        """
        flops = [matrix.flops for matrix in self.matrices]
        mean = float(self.flops_by_rank.mean())
        return lockstep_makespan(self.waves, self.owners, flops, self.world_size) / mean if mean else 1.0

    def traffic_counter(self) -> TrafficCounter:
        """Counts what sets of these matrices move."""
        return TrafficCounter(self.matrices, self.owners, self.world_size, self.communication_itemsize)

    @cached_property
    def _traffic(self) -> StepTraffic:
        return self.traffic_counter().step_traffic(self.waves)

    def messages(self) -> Iterator[tuple[Counts, Counts]]:
        """For each wave, bytes of its gather and scatter messages: ``[shard rank, owner]`` each."""
        counter = self.traffic_counter()
        return (counter.messages(wave) for wave in self.waves)

    @cached_property
    def bytes_sent_by_rank(self) -> Counts:
        """``[world_size]``: bytes that each rank sends in one step, with those to its teams."""
        total = self._sum_by_owner([matrix.team_bytes for matrix in self.matrices])
        if self.transport == "all_to_all":
            total += (self._traffic.gather_sent + self._traffic.scatter_sent).sum(axis=0)
            return total
        for gather, scatter in self.messages():
            # Messages of one collective are padded to the longest.
            total += (self.world_size - 1) * (gather.sum(axis=1).max() + scatter.max(axis=0))
        return total

    @cached_property
    def moves(self) -> tuple[tuple[bool, bool], ...]:
        """For each wave, whether its gather moves anything, and whether its scatter does.

        Nothing moves where owners hold their matrices whole. All ranks then leave the collective
        out.
        """
        return tuple(
            (bool(gathered.any()), bool(scattered.any()))
            for gathered, scattered in zip(self._traffic.gather_sent, self._traffic.scatter_sent, strict=True)
        )

    @cached_property
    def num_collectives(self) -> int:
        """Collectives of one step, without those of teams.

        One for each gather that moves something, and one for each such scatter; with the transport
        ``all_gather`` one for each owner that scatters.
        """
        if self.transport == "all_to_all":
            return sum(gather + scatter for gather, scatter in self.moves)
        return sum(gather for gather, _ in self.moves) + int(np.count_nonzero(self._traffic.scatter_sent))

    @cached_property
    def team_collectives_by_rank(self) -> Counts:
        """``[world_size]``: collectives of each rank with its teams in one step."""
        return self._sum_by_owner([matrix.team_collectives for matrix in self.matrices])

    def _sum_by_owner(self, numbers: Sequence[int]) -> Counts:
        """``[world_size]``: sums of one number a matrix."""
        total = np.zeros(self.world_size, dtype=np.int64)
        np.add.at(total, np.asarray(self.owners, dtype=np.int64), np.asarray(numbers, dtype=np.int64))
        return total

    @cached_property
    def temporary_bytes(self) -> int:
        """Bytes of both slots and the stack on the rank that needs most.

        The transport ``all_gather`` has buffers of its own, which do not count.
        """
        if not self.waves:
            return 0
        traffic = self._traffic
        buffers = (traffic.gather_sent, traffic.gather_received, traffic.scatter_sent, traffic.scatter_received, traffic.stack)
        return int(sum(buffer.max(axis=0) for buffer in buffers).max())

    def summary(self) -> dict[str, Any]:
        """The plan in numbers, for a run record; JSON types."""
        return {
            "hash": self.hash,
            "world_size": self.world_size,
            "transport": self.transport,
            "num_matrices": self.num_matrices,
            "num_elements": sum(matrix.num_elements for matrix in self.matrices),
            "num_waves": len(self.waves),
            "wave_bytes": self.wave_bytes,
            "communication_itemsize": self.communication_itemsize,
            "flops_by_rank": self.flops_by_rank.tolist(),
            "imbalance": self.imbalance,
            "bound": self.bound.value,
            "gap": self.gap,
            "wave_imbalance": self.wave_imbalance,
            "num_collectives": self.num_collectives,
            "teams": {name: list(team) for name, team in self.teams.items()},
            "team_collectives_by_rank": self.team_collectives_by_rank.tolist(),
            "bytes_sent_by_rank": self.bytes_sent_by_rank.tolist(),
            "temporary_bytes": self.temporary_bytes,
        }

    def __str__(self) -> str:
        return (
            f"plan {self.hash[:12]}: {self.num_matrices} matrices on {self.world_size} ranks in {len(self.waves)} waves"
            f"{f' ({len(self.teams)} of them in slices on teams)' if self.teams else ''}; "
            f"{self.flops_by_rank.sum() / 1e9:.3f} GFLOP a step, imbalance {self.imbalance:.4f} "
            f"({self.gap:.2%} above the bound, wave by wave {self.wave_imbalance:.4f}); at most "
            f"{self.bytes_sent_by_rank.max(initial=0) / 2**20:.2f} MiB "
            f"sent and {self.temporary_bytes / 2**20:.2f} MiB of temporaries a rank"
        )


def plan_matrices(
    matrices: Sequence[Matrix],
    world_size: int,
    *,
    wave_bytes: int | None = None,
    communication_itemsize: int = 4,
    transport: Transport = "all_to_all",
    owners: Sequence[int] | None = None,
    strategy: Strategy = "flops",
) -> Plan:
    """The plan of these matrices. Pure, and the same for every order of ``matrices``.

    Args:
        matrices: with unique names, on ``world_size`` ranks.
        world_size: number of ranks.
        wave_bytes: byte budget of one slot and of the stack, per rank; ``None`` for the default.
        communication_itemsize: bytes of one element in flight.
        transport: how waves are moved.
        owners: the owner of each of ``matrices``; ``None`` for a choice by ``strategy``.
        strategy: how owners are chosen.

    Raises:
        ValueError: numbers out of range, names that are not unique, matrices on other ranks.
    """
    if world_size < 1:
        raise ValueError(f"world_size: found {world_size}, expected at least 1")
    if wave_bytes is not None and wave_bytes < 1:
        raise ValueError(f"wave_bytes: found {wave_bytes}, expected a positive number of bytes")
    if owners is not None and len(owners) != len(matrices):
        raise ValueError(f"owners: found {len(owners)} for {len(matrices)} matrices, expected one each")
    order = sorted(range(len(matrices)), key=lambda index: matrices[index].name)
    names = [matrices[index].name for index in order]
    for first, second in itertools.pairwise(names):
        if first == second:
            raise ValueError(f"matrix {first}: planned twice, expected unique names")
    chosen = tuple(matrices[index] for index in order)
    for matrix in chosen:
        if matrix.layout.world_size != world_size:
            raise ValueError(f"matrix {matrix.name}: on {matrix.layout.world_size} ranks, expected {world_size} like its plan")
    least = 1
    if wave_bytes is None:
        wave_bytes = default_wave_bytes(chosen, world_size, communication_itemsize)
        least = least_waves(chosen, world_size, communication_itemsize)
    flops = [matrix.flops for matrix in chosen]
    given = None if owners is None else [tuple(owners[index] for index in order)]
    proposals = given or owners_by(strategy, chosen, world_size, flops)
    found = [
        (assigned, assign_waves(chosen, assigned, world_size, wave_bytes, communication_itemsize, flops, least))
        for assigned in proposals
    ]
    # Of about equally even assignments, that in which ranks wait least for each other.
    assigned, waves = min(found, key=lambda plan: lockstep_makespan(plan[1], plan[0], flops, world_size))
    return Plan(world_size, chosen, assigned, waves, communication_itemsize, wave_bytes, transport)


def with_teams(plan: Plan, teams: Mapping[str, Sequence[int]], owners: Sequence[int] | None = None) -> Plan:
    """``plan`` with teams of ranks on some matrices: with new slices, owners and waves.

    Args:
        plan: of whole matrices. A wave may need what its budget allows its largest matrix. teams:
        ranks of the plan for each matrix that is cut, by its name; the first has slice 0. owners:
        of the matrices in the order of ``plan``, for those that stay whole. When ``None``, each,
            heaviest first, gets the rank that has least to do, with its teams.

    Raises:
        ValueError: a name that is no matrix of the plan, ranks that are no team, or a matrix that
        no
            team can work on.

    Pure and deterministic.
    """
    matrix_by_name = {matrix.name: matrix for matrix in plan.matrices}
    found: dict[Matrix, int] = {}
    for name, team in teams.items():
        if name not in matrix_by_name:
            raise ValueError(f"teams: found {name!r}, expected names of matrices of the plan, such as {min(matrix_by_name)!r}")
        if sorted(set(team) & set(range(plan.world_size))) != list(team):
            raise ValueError(
                f"matrix {name}: found the team {list(team)}, expected ranks in ascending order below {plan.world_size}, each once"
            )
        found.update(zip(slices_of(matrix_by_name[name], len(team)), team, strict=True))
    if owners is None:
        found.update(owners_beside(found, [matrix for matrix in plan.matrices if matrix.name not in teams], plan.world_size))
    else:
        pairs = zip(plan.matrices, owners, strict=True)
        found.update((matrix, owner) for matrix, owner in pairs if matrix.name not in teams)
    matrices = sorted(found, key=lambda matrix: matrix.whole_name)
    chosen = tuple(found[matrix] for matrix in matrices)
    budget = wave_budget(plan.wave_bytes, plan.traffic_counter())
    waves = assign_team_waves(matrices, chosen, plan.world_size, budget, plan.communication_itemsize)
    return replace(plan, matrices=tuple(matrices), owners=chosen, waves=waves)
