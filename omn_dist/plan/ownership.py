"""The plan: owners and waves of all matrices, frozen, hashable, the same on every rank."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from omn_dist.algorithms.coefficients import QUINTIC
from omn_dist.algorithms.guards import guards_of
from omn_dist.algorithms.newton_schulz import Recipe, build_recipe
from omn_dist.plan.bounds import Bound, makespan_bound
from omn_dist.plan.layout import SHARD_ROWS, Layout
from omn_dist.plan.matrix import Matrix
from omn_dist.plan.strategies import Strategy, owners_by
from omn_dist.plan.tally import StepTraffic, Tally
from omn_dist.plan.traffic import Counts, Transport, bytes_sent, message_bytes
from omn_dist.plan.views import View, matrices_of
from omn_dist.plan.waves import assign_waves, default_wave_bytes, least_waves, lockstep_makespan


@dataclass(frozen=True)
class Plan:
    """Who orthogonalises which matrix, and in which wave. Made from shapes and layouts alone, never from gradients."""

    world_size: int
    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    """The owner rank of each matrix."""
    waves: tuple[tuple[int, ...], ...]
    """Indices into ``matrices``: an exact partition."""
    wire_itemsize: int
    """Bytes of one element in flight."""
    wave_bytes: int
    """The budget of a slot and of the stack."""
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
            if len(indices) != self.matrices[indices[0]].slice.size or sorted(set(team)) != team:  # type: ignore[union-attr]
                raise ValueError(f"plan: the slices of {name} have the owners {team}, expected one each, in ascending order")
            if len({wave_by_matrix[index] for index in indices}) > 1:
                raise ValueError(f"plan: the slices of {name} are in several waves, expected one")

    @property
    def num_matrices(self) -> int:
        """Whole matrices; slices of one count once."""
        return len(self.matrices) - sum(len(team) - 1 for team in self.teams.values())

    @cached_property
    def _slices(self) -> dict[str, list[int]]:
        """Of each matrix that a team works on, the indices of its slices, in their order."""
        found: dict[str, dict[int, int]] = {}
        for index, matrix in enumerate(self.matrices):
            if matrix.slice is not None:
                found.setdefault(matrix.slice.whole, {})[matrix.slice.index] = index
        return {name: [indices[number] for number in sorted(indices)] for name, indices in found.items()}

    @cached_property
    def teams(self) -> Mapping[str, tuple[int, ...]]:
        """The ranks of each matrix that a team works on, by its name, in the order of its slices."""
        return {name: tuple(self.owners[index] for index in indices) for name, indices in self._slices.items()}

    @property
    def description(self) -> tuple[str, ...]:
        """One line a fact, in a fixed order: what the hash is made of and what is compared when two ranks differ."""
        wave_by_matrix = {index: number for number, wave in enumerate(self.waves) for index in wave}
        head = (
            f"world size {self.world_size}",
            f"wire {self.wire_itemsize} bytes an element",
            f"transport {self.transport}",
            f"order {[list(wave) for wave in self.waves]}",
        )
        return head + tuple(
            f"matrix {matrix.name}: {matrix.num_rows} x {matrix.num_columns} of parameter {matrix.parameter_name} "
            f"{list(matrix.layout.shape)}, transposed {matrix.transposed}, region {[list(piece) for piece in matrix.region]}, "
            f"mesh {list(matrix.layout.mesh_shape)}, placements {[list(part) for part in matrix.layout.placements]}, "
            f"{matrix.work}, owner {owner}, wave {wave_by_matrix[index]}"
            for index, (matrix, owner) in enumerate(zip(self.matrices, self.owners, strict=True))
        )

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the description, in hex: equal exactly when two ranks would do the same."""
        digest = hashlib.sha256()
        # Line by line: as one string the description of a deep model would leave large holes in the heap.
        for part in json.JSONEncoder().iterencode(self.description):
            digest.update(part.encode())
        return digest.hexdigest()

    @cached_property
    def flops_by_rank(self) -> Counts:
        """``[world_size]``: estimated Newton-Schulz FLOPs of each rank in one step."""
        return self._by_owner([matrix.flops for matrix in self.matrices])

    @property
    def imbalance(self) -> float:
        """Largest over mean load, 1.0 at best (and when there is nothing to do)."""
        mean = float(self.flops_by_rank.mean())
        return float(self.flops_by_rank.max()) / mean if mean else 1.0

    @cached_property
    def bound(self) -> Bound:
        """No assignment of these matrices and slices gives the busiest rank fewer FLOPs; proven, see ``plan.bounds``."""
        return makespan_bound([matrix.flops for matrix in self.matrices], self.world_size)

    @property
    def gap(self) -> float:
        """What the busiest rank has above the bound, as a fraction of it: 0 where the owners are proven best."""
        return float(self.flops_by_rank.max()) / self.bound.value - 1 if self.bound.value else 0.0

    @cached_property
    def wave_imbalance(self) -> float:
        """Sum over waves of the slowest rank's FLOPs, over the mean load: what ranks in lockstep would take."""
        flops = [matrix.flops for matrix in self.matrices]
        mean = float(self.flops_by_rank.mean())
        return lockstep_makespan(self.waves, self.owners, flops, self.world_size) / mean if mean else 1.0

    @cached_property
    def _traffic(self) -> StepTraffic:
        return Tally(self.matrices, self.owners, self.world_size, self.wire_itemsize).traffic(self.waves)

    @cached_property
    def bytes_sent_by_rank(self) -> Counts:
        """``[world_size]``: bytes that each rank sends to other ranks in one step, those of its teams included."""
        total = self._by_owner([matrix.team_bytes for matrix in self.matrices])
        if self.transport == "all_to_all":
            total += (self._traffic.gather_sent + self._traffic.scatter_sent).sum(axis=0)
            return total
        for wave in self.waves:
            total += bytes_sent(self.matrices, self.owners, wave, self.world_size, self.wire_itemsize, self.transport)
        return total

    @cached_property
    def moves(self) -> tuple[tuple[bool, bool], ...]:
        """For each wave whether anything travels to owners, and whether anything returns.

        Nothing does where matrices lie whole at their owners; the collective is then left out on all ranks alike.
        """
        return tuple(
            (bool(gathered.any()), bool(scattered.any()))
            for gathered, scattered in zip(self._traffic.gather_sent, self._traffic.scatter_sent, strict=True)
        )

    @cached_property
    def num_collectives(self) -> int:
        """Collectives of one step, without those of teams.

        One for each passage in which something moves, or one for each owner that scatters.
        """
        if self.transport == "all_to_all":
            return sum(gather + scatter for gather, scatter in self.moves)
        count = 0
        for wave, (gathers, _) in zip(self.waves, self.moves, strict=True):
            _, scatter = message_bytes(self.matrices, self.owners, wave, self.world_size, self.wire_itemsize)
            count += gathers + int(scatter.any(axis=0).sum())
        return count

    @cached_property
    def team_collectives_by_rank(self) -> Counts:
        """``[world_size]``: collectives that each rank makes with its teams in one step."""
        return self._by_owner([matrix.team_collectives for matrix in self.matrices])

    def _by_owner(self, numbers: Sequence[int]) -> Counts:
        """``[world_size]``: sums of one number a matrix."""
        total = np.zeros(self.world_size, dtype=np.int64)
        np.add.at(total, np.asarray(self.owners, dtype=np.int64), np.asarray(numbers, dtype=np.int64))
        return total

    @cached_property
    def temporary_bytes(self) -> int:
        """Bytes of the two slots and the stack on the rank that needs most; without the second transport's own buffers."""
        if not self.waves:
            return 0
        moved = self._traffic
        buffers = (moved.gather_sent, moved.gather_received, moved.scatter_sent, moved.scatter_received, moved.stack)
        return int(sum(buffer.max(axis=0) for buffer in buffers).max())

    def summary(self) -> dict[str, Any]:
        """The plan in numbers, for a run record; only JSON types."""
        return {
            "hash": self.hash,
            "world_size": self.world_size,
            "transport": self.transport,
            "num_matrices": self.num_matrices,
            "num_elements": sum(matrix.num_elements for matrix in self.matrices),
            "num_waves": len(self.waves),
            "wave_bytes": self.wave_bytes,
            "wire_itemsize": self.wire_itemsize,
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
    wire_itemsize: int = 4,
    transport: Transport = "all_to_all",
    owners: Sequence[int] | None = None,
    strategy: Strategy = "flops",
) -> Plan:
    """The plan of these matrices; ``owners`` (one a matrix, in the given order) replaces the choice by ``strategy``.

    Pure, and the same for every order of ``matrices``. Raises ``ValueError`` for impossible numbers or names that are not unique.
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
        wave_bytes = default_wave_bytes(chosen, world_size, wire_itemsize)
        least = least_waves(chosen, world_size, wire_itemsize)
    flops = [matrix.flops for matrix in chosen]
    given = None if owners is None else [tuple(owners[index] for index in order)]
    proposals = given or owners_by(strategy, chosen, world_size, flops)
    found = [
        (assigned, assign_waves(chosen, assigned, world_size, wave_bytes, wire_itemsize, flops, least)) for assigned in proposals
    ]
    # Of assignments that are about as even, the one that makes ranks wait least for each other from wave to wave.
    assigned, waves = min(found, key=lambda plan: lockstep_makespan(plan[1], plan[0], flops, world_size))
    return Plan(world_size, chosen, assigned, waves, wire_itemsize, wave_bytes, transport)


def plan_ownership(
    shapes: Mapping[str, Sequence[int]] | Iterable[Mapping[str, Any]],
    world_size: int,
    *,
    num_steps: int = QUINTIC.num_steps,
    wave_bytes: int | None = None,
    wire_itemsize: int = 4,
    transport: Transport = "all_to_all",
    strategy: Strategy = "flops",
    algorithm: str = "muon",
    recipe: Recipe | None = None,
) -> Plan:
    """The plan for matrices sharded with FSDP2 over ``world_size`` ranks, without a process group.

    Args:
        shapes: names to ``(rows, columns)``, or the groups of ``build_parameter_groups`` (their matrix groups are taken; a model
            on the meta device will do).
        world_size: number of ranks of the shard axis.
        num_steps: Newton-Schulz iterations, for the cost.
        wave_bytes: byte budget of one slot and of the stack, per rank; ``None`` for :func:`default_wave_bytes`
            and :func:`least_waves`.
        wire_itemsize: bytes of one element in flight: 4 for fp32, 2 for bf16.
        transport: how waves move.
        strategy: how owners are chosen.
        algorithm: ``"muon"`` or ``"normuon"``, whose row numbers add to the bytes.
        recipe: Newton-Schulz recipe, for the cost of its schedule and form; instead of ``num_steps``.

    Raises:
        ValueError: a shape that is no matrix, or impossible numbers.

    Not collective.
    """
    members: list[tuple[str, Sequence[int], View | None, list[str]]] = []
    if isinstance(shapes, Mapping):
        members.extend((name, shape, None, []) for name, shape in shapes.items())
    else:
        for group in shapes:
            if group["algorithm"] != "adamw":
                own = View.from_group(group), guards_of(group)
                members.extend((name, p.shape, *own) for name, p in zip(group["param_names"], group["params"], strict=True))
    layouts = {tuple(shape): Layout(tuple(shape), (world_size,), (SHARD_ROWS,)) for _, shape, _, _ in members}
    recipe = build_recipe("omn", "quintic", num_steps) if recipe is None else recipe
    matrices = [
        matrix.worked_by(algorithm, recipe, guards)
        for name, shape, view, guards in members
        for matrix in matrices_of(name, view, layouts[tuple(shape)], num_steps)
    ]
    return plan_matrices(
        matrices, world_size, wave_bytes=wave_bytes, wire_itemsize=wire_itemsize, transport=transport, strategy=strategy
    )
