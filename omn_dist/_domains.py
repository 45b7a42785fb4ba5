"""Domains: matrices that share one set of ranks, each with its plan, its process group and its pipeline."""

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor import DTensor

from omn_dist.algorithms.guards import guards_of
from omn_dist.algorithms.newton_schulz import group_recipe
from omn_dist.algorithms.row_numbers import MATRIX_ALGORITHMS
from omn_dist.algorithms.scratch import Scratch
from omn_dist.algorithms.vector import vector_segments
from omn_dist.exchange.pipeline import Pipeline
from omn_dist.exchange.transport import all_gather_single
from omn_dist.plan.devices import DEVICES, Device
from omn_dist.plan.layout import Layout, Piece
from omn_dist.plan.matrix import Matrix, whole_only
from omn_dist.plan.ownership import Plan, plan_matrices
from omn_dist.plan.placement import Copies, placed
from omn_dist.plan.simulation import simulate
from omn_dist.plan.slices import with_teams
from omn_dist.plan.teams import choose_teams
from omn_dist.plan.traffic import Transport
from omn_dist.plan.views import View, matrices_of

logger = logging.getLogger(__name__)

Teams = Literal["never", "auto"] | Mapping[str, Sequence[int]]
"""Which matrices teams of ranks work on: none; those for which it is predicted to pay; or these, on these ranks of their plan."""

Member = tuple[Tensor, dict[str, Any]]
"""A parameter and its group."""


@dataclass(frozen=True)
class Domain:
    """One plan in execution."""

    plan: Plan
    members: Mapping[str, Member]
    """By parameter name."""
    rank: int
    """Of this process, among the ranks of the plan."""
    pipeline: Pipeline
    scratch: Scratch = field(default_factory=Scratch)
    """Working memory of the owner's products."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has handed to collectives for other ranks."""
        return self.pipeline.traffic.num_bytes_sent


class SharedGroups:
    """Process groups of an optimizer and of its deep copies: made once for each set of ranks, never copied.

    The pipeline has a group of its own, and so has each team, since two streams of collectives on one communicator can deadlock.
    """

    def __init__(self, replicas: dist.ProcessGroup | None = None) -> None:
        self.replicas = replicas
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._teams: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._known_teams: set[tuple[int, ...]] = set()

    def of(self, ranks: tuple[int, ...], parts: Sequence[dist.ProcessGroup], device: torch.device) -> dist.ProcessGroup | None:
        """The pipeline's group of these global ranks; ``None`` for fewer than two. Collective on first use.

        ``parts`` are the groups that this rank is in along the axes of the grid that ``ranks`` make up.
        """
        if len(ranks) < 2:
            return None
        if ranks not in self._by_ranks:
            _even_out(parts, device)
            group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="omn_dist_pipeline")
            self._by_ranks[ranks] = group
        return self._by_ranks[ranks]

    def of_teams(self, plan: Plan, ranks: tuple[int, ...], device: torch.device) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """The groups of the teams of ``plan`` that this rank is in, by ranks of the plan, which are these global ``ranks``.

        Collective over all ``ranks`` on first use, after :meth:`of`. In each round every rank makes one group, of a team or of
        itself alone, so that all have as many.
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
    """Let all ranks of a grid have the same number of process groups: those that have fewer make groups of themselves alone.

    torch names a group that its members make by themselves after their ranks and that number; where it differs, because some
    ranks have groups that others are not in, they would wait for each other under different names. Collective.

    Args:
        parts: the groups that this rank is in, one for each axis of the grid.
        device: on which these groups communicate.
    """
    most = torch.tensor(len(_world.pg_names), device=device)
    for part in parts:
        dist.all_reduce(most, dist.ReduceOp.MAX, part)
    for _ in range(int(most) - len(_world.pg_names)):
        dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc="omn_dist_even")


def build_domains(
    groups: Sequence[dict[str, Any]],
    *,
    wire: str,
    wave_bytes: int | None,
    transport: Transport,
    shared: SharedGroups,
    owners: Mapping[str, int],
    copies: Copies | Literal["auto"],
    teams: Teams,
) -> list[Domain]:
    """The domains of the matrix groups. Collective over each domain's ranks, which compare their plans.

    Raises:
        ValueError: ranks whose plans differ, an owner or a team for a matrix that is not there, or ranks that are no team.
        NotImplementedError: a placement that is not supported.
    """
    dtype = _wire_dtype(wire, groups)
    device = next((parameter.device for group in groups for parameter in group["params"]), torch.device("cpu"))

    def plans(choice: Copies) -> list[_Planned]:
        found = _together(groups, shared.replicas, choice)
        names = {matrix.name for planned in found for matrix in planned.matrices}
        for name in (*owners, *(names if owners else ())):
            if name not in names or name not in owners:
                raise ValueError(
                    f"owners: {name!r} is in one of owners and matrices only, expected an owner for every matrix and no more "
                    "(names of Muon parameters, with the part in brackets where a view splits one)"
                )
        for name in () if isinstance(teams, str) else teams:
            if name not in names:
                raise ValueError(
                    f"teams: found {name!r}, expected names of matrices, such as {min(names, default='none')!r} (names of Muon "
                    "parameters, with the part in brackets where a view splits one)"
                )
        for planned in found:
            planned.plan = plan_matrices(
                planned.matrices,
                max(len(planned.ranks), 1),
                wave_bytes=wave_bytes,
                wire_itemsize=dtype.itemsize,
                transport=transport,
                owners=[owners[matrix.name] for matrix in planned.matrices] if owners else None,
            )
            if teams != "never":
                planned.plan = _with_teams(planned, teams, device_like(device))
        return found

    if copies == "auto":
        chosen = min(
            (plans("share"), plans("repeat")),
            key=lambda found: sum(simulate(planned.plan, device_like(device)).seconds for planned in found),
        )
    else:
        chosen = plans(copies)
    return [_build(planned, device, dtype, shared) for planned in chosen]


@dataclass
class _Planned:
    """Matrices that share one set of ranks, on their way to a domain."""

    ranks: tuple[int, ...]
    parts: Sequence[dist.ProcessGroup]
    """Groups of this rank along the axes of the grid that the ranks make up."""
    matrices: list[Matrix]
    members: dict[str, Member]
    plan: Plan = field(init=False)


def _together(groups: Sequence[dict[str, Any]], replicas: dist.ProcessGroup | None, copies: Copies) -> list[_Planned]:
    """Matrices by their ranks; in one order on all ranks, large sets first, so that AdamW runs beside their first gather."""
    replica_ranks = () if replicas is None else tuple(dist.get_process_group_ranks(replicas))
    by_ranks: dict[tuple[int, ...], _Planned] = {}
    for group in groups:
        view = View.from_group(group)
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            place = placed(name, parameter, replica_ranks, copies)
            planned = by_ranks.setdefault(place.ranks, _Planned(place.ranks, _parts(parameter, replicas, copies), [], {}))
            if name in planned.members:
                raise ValueError(f"parameter {name}: two parameters of this name, expected unique param_names")
            planned.matrices.extend(_worked(name, view, place.layout, group))
            planned.members[name] = (parameter, group)
    return [by_ranks[ranks] for ranks in sorted(by_ranks, key=lambda ranks: (-len(ranks), ranks))]


def _parts(parameter: Tensor, replicas: dist.ProcessGroup | None, copies: Copies) -> list[dist.ProcessGroup]:
    """This rank's groups along the axes of the grid of ranks that work on a parameter together."""
    if not isinstance(parameter, DTensor):
        return [] if replicas is None else [replicas]
    mesh, placements = parameter.device_mesh, parameter.placements
    shared = [axis for axis in range(mesh.ndim) if copies == "share" or not placements[axis].is_replicate()]
    return [mesh.get_group(axis) for axis in shared if mesh.size(axis) > 1]


def _with_teams(planned: _Planned, teams: Literal["auto"] | Mapping[str, Sequence[int]], device: Device) -> Plan:
    """The plan of ``planned`` with the teams that were asked for, or with those that pay on such a device."""
    if not isinstance(teams, str):
        own = {matrix.name for matrix in planned.matrices}
        return with_teams(planned.plan, {name: team for name, team in teams.items() if name in own})
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", device.topology.ranks_per_node))
    choice = choose_teams(planned.plan, device, nodes=[rank // ranks_per_node for rank in planned.ranks or (0,)])
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info("%s", choice)
    return choice.plan


def device_like(device: torch.device) -> Device:
    """The profile by which choices are made for a torch device: that of a GPU whose name says so, else of an H100, or of a CPU."""
    if device.type != "cuda":
        return DEVICES["cpu"]
    name = torch.cuda.get_device_name(device).lower()
    return next((profile for key, profile in DEVICES.items() if key in name), DEVICES["h100"])


def _build(planned: _Planned, device: torch.device, dtype: torch.dtype, shared: SharedGroups) -> Domain:
    ranks, plan = planned.ranks, planned.plan
    if not ranks and dist.is_initialized() and dist.get_world_size() > 1:
        warnings.warn(
            f"{len(plan.matrices)} matrices are plain tensors and no process_group was given: each of {dist.get_world_size()} "
            "ranks orthogonalises all of them; pass process_group to share the work of equal copies",
            stacklevel=5,
        )
    group = shared.of(ranks, planned.parts, device)
    if group is not None:
        compare_plans(plan, group, device)
    rank = ranks.index(dist.get_rank()) if ranks else 0
    team_groups = shared.of_teams(plan, ranks, device) if plan.teams else {}
    return Domain(plan, planned.members, rank, Pipeline(plan, rank, group, device, dtype, team_groups))


def compare_plans(plan: Plan, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise ``ValueError`` on all ranks of ``group`` when their plans differ, with the first difference. Collective."""
    size = dist.get_world_size(group)
    mine = torch.tensor(list(bytes.fromhex(plan.hash)), dtype=torch.uint8, device=device)
    everybody = torch.empty(size * mine.numel(), dtype=torch.uint8, device=device)
    all_gather_single(everybody, mine, group=group)
    hashes = everybody.view(size, -1).tolist()
    if all(other == hashes[0] for other in hashes):
        return
    descriptions: list[tuple[str, ...] | None] = [None] * size
    dist.all_gather_object(descriptions, plan.description, group=group)
    first = descriptions[0] or ()
    for rank, other in enumerate(descriptions):
        if other is None or other == first:
            continue
        here = next((line for line in first if line not in other), "nothing more")
        there = next((line for line in other if line not in first), "nothing more")
        raise ValueError(
            f"plan: ranks 0 and {rank} of {size} differ, expected the same parameters and options on all; "
            f"rank 0 has {here!r}, rank {rank} has {there!r}"
        )


def _worked(name: str, view: View | None, layout: Layout, group: Mapping[str, Any]) -> list[Matrix]:
    """What is moved and worked on of one parameter: its matrices, or the segments of a vector."""
    if group["algorithm"] != "vector":
        recipe = group_recipe(group)
        matrices = matrices_of(name, view, layout, recipe.schedule.num_steps)
        return [matrix.worked_by(group["algorithm"], recipe, guards_of(group)) for matrix in matrices]
    segments = vector_segments(name, layout.num_columns, group["segments"])
    return [
        Matrix(
            f"{name}[{segment.start}:{segment.stop}]",
            name,
            1,
            segment.stop - segment.start,
            (Piece(0, segment.start, 1, segment.stop - segment.start, 0, 0),),
            layout,
            0,
            whole_only=whole_only("vector", "standard", ()),
        )
        for segment in segments
    ]


def _wire_dtype(wire: str, groups: Sequence[Mapping[str, Any]]) -> torch.dtype:
    """bf16 loses nothing exactly when every Newton-Schulz casts to it before it normalises. Vectors take the wire that is there."""
    if wire != "auto":
        return torch.float32 if wire == "float32" else torch.bfloat16
    dtypes = {group_recipe(group).input_dtype for group in groups if group["algorithm"] in MATRIX_ALGORITHMS}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32
