"""Domains: matrices that share one set of ranks, each with its plan, its pipeline and its step."""

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from omn_dist.exchange.pipeline import Pipeline
from omn_dist.exchange.process_groups import SharedGroups, compare_plans
from omn_dist.optim.options import Options
from omn_dist.optim.rules.registry import matrix_rule
from omn_dist.optim.rules.rule import Tools
from omn_dist.optim.step import MatrixStep, Member, States
from omn_dist.plan.geometry.matrix import Matrix
from omn_dist.plan.geometry.placement import Copies, parameter_layout
from omn_dist.plan.geometry.views import View
from omn_dist.plan.plan import Plan, plan_matrices, with_teams
from omn_dist.plan.predict.devices import DEVICES, Device
from omn_dist.plan.predict.simulation import simulate
from omn_dist.plan.predict.teams import choose_teams

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Domain:
    """One plan in execution."""

    plan: Plan
    members: Mapping[str, Member]
    """By parameter name."""
    pipeline: Pipeline
    step: MatrixStep

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has handed to collectives for other ranks."""
        return self.pipeline.traffic.num_bytes_sent


@dataclass
class _Planned:
    """Matrices that share one set of ranks, on their way to a domain."""

    ranks: tuple[int, ...]
    parts: Sequence[dist.ProcessGroup]
    """Groups of this rank along the axes of the grid that the ranks make up."""
    matrices: list[Matrix]
    members: dict[str, Member]
    plan: Plan = field(init=False)


def build_domains(
    groups: Sequence[dict[str, Any]],
    communication_dtype: str,
    options: Options,
    shared: SharedGroups,
    states: States,
    tools: Tools,
) -> list[Domain]:
    """The domains of groups whose rules need owners.

    Collective over each domain's ranks, which compare their plans.

    Args:
        groups: complete groups.
        communication_dtype: of the preset.
        options: of the optimizer.
        shared: process groups that exist already.
        states: ``optimizer.state``.
        tools: for the rules.

    Raises:
        ValueError: ranks whose plans differ, an owner or a team for a matrix that is not there, or
            ranks that are no team.
        NotImplementedError: a placement that is not supported.
    """
    dtype = _dtype_in_flight(communication_dtype, groups)
    device = next((parameter.device for group in groups for parameter in group["params"]), torch.device("cpu"))
    if options.copies == "auto":
        both = [_plans(groups, copies, shared.replicas, dtype, device, options) for copies in ("share", "repeat")]
        profile = device_like(device)
        chosen = min(both, key=lambda found: sum(simulate(planned.plan, profile).seconds for planned in found))
    else:
        chosen = _plans(groups, options.copies, shared.replicas, dtype, device, options)
    return [_build(planned, device, dtype, shared, states, tools) for planned in chosen]


def _plans(
    groups: Sequence[dict[str, Any]],
    copies: Copies,
    replicas: dist.ProcessGroup | None,
    dtype: torch.dtype,
    device: torch.device,
    options: Options,
) -> list[_Planned]:
    found = _by_ranks(groups, replicas, copies)
    owners, teams = options.owners or {}, options.teams
    _check_names({matrix.name for planned in found for matrix in planned.matrices}, options)
    for planned in found:
        planned.plan = plan_matrices(
            planned.matrices,
            max(len(planned.ranks), 1),
            wave_bytes=options.wave_bytes,
            communication_itemsize=dtype.itemsize,
            transport=options.transport,
            owners=[owners[matrix.name] for matrix in planned.matrices] if owners else None,
        )
        if teams != "never":
            planned.plan = _with_teams(planned, teams, device_like(device))
    return found


def _check_names(names: set[str], options: Options) -> None:
    owners, teams = options.owners or {}, options.teams
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


def _by_ranks(groups: Sequence[dict[str, Any]], replicas: dist.ProcessGroup | None, copies: Copies) -> list[_Planned]:
    """Matrices by their ranks, in one order on all ranks.

    Large sets of ranks come first, so that AdamW runs beside their first gather.
    """
    replica_ranks = () if replicas is None else tuple(dist.get_process_group_ranks(replicas))
    by_ranks: dict[tuple[int, ...], _Planned] = {}
    for group in groups:
        rule, view = matrix_rule(group["algorithm"]), View.from_group(group)
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            place = parameter_layout(name, parameter, replica_ranks, copies)
            planned = by_ranks.setdefault(place.ranks, _Planned(place.ranks, _parts(parameter, replicas, copies), [], {}))
            if name in planned.members:
                raise ValueError(f"parameter {name}: two parameters of this name, expected unique param_names")
            planned.matrices.extend(rule.matrices(name, view, place.layout, group))
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
    """The plan with the teams that were asked for, or with those that are predicted to pay."""
    if not isinstance(teams, str):
        own = {matrix.name for matrix in planned.matrices}
        return with_teams(planned.plan, {name: team for name, team in teams.items() if name in own})
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", device.topology.ranks_per_node))
    choice = choose_teams(planned.plan, device, nodes=[rank // ranks_per_node for rank in planned.ranks or (0,)])
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info("%s", choice)
    return choice.plan


def device_like(device: torch.device) -> Device:
    """The profile by which choices are made for a torch device.

    That of a GPU whose name says so, else of an H100, or of a CPU.
    """
    if device.type != "cuda":
        return DEVICES["cpu"]
    name = torch.cuda.get_device_name(device).lower()
    return next((profile for key, profile in DEVICES.items() if key in name), DEVICES["h100"])


def _build(
    planned: _Planned, device: torch.device, dtype: torch.dtype, shared: SharedGroups, states: States, tools: Tools
) -> Domain:
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
    for matrix, owner in zip(plan.matrices, plan.owners, strict=True):
        if owner == rank and matrix.slice is None:
            matrix_group = planned.members[matrix.parameter_name][1]
            matrix_rule(matrix_group["algorithm"]).warm_up(matrix, matrix_group, tools)
    pipeline = Pipeline(plan, rank, group, device, dtype, team_groups)
    return Domain(plan, planned.members, pipeline, MatrixStep(plan, planned.members, rank, states, tools))


def _dtype_in_flight(choice: str, groups: Sequence[Mapping[str, Any]]) -> torch.dtype:
    """The dtype of directions and updates between ranks.

    ``auto`` takes the one in which no rule's direction loses anything: bf16 exactly when every rule
    casts to it before it does anything else, else fp32.
    """
    if choice != "auto":
        return torch.float32 if choice == "float32" else torch.bfloat16
    found = {matrix_rule(group["algorithm"]).communication_dtype(group) for group in groups} - {None}
    dtype = found.pop() if len(found) == 1 else None
    return torch.float32 if dtype is None else dtype
