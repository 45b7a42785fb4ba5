"""Rules that work on shards in a step: whole parameters, and rows that are no matrix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from omn_dist.optim.groups import row_group
from omn_dist.optim.rules.registry import FOR_ROWS, rule_by_name
from omn_dist.optim.rules.rule import LocalShard, ShardRule, Tools
from omn_dist.optim.shards import Gradients, part_of_shard
from omn_dist.optim.state import MASTER, check_local, follow_parameter
from omn_dist.optim.step import States
from omn_dist.plan.geometry.layout import ShardRegion, intersect
from omn_dist.plan.geometry.placement import as_matrix, local_tensor, parameter_layout
from omn_dist.plan.geometry.views import View


def step_shards(groups: Sequence[Mapping[str, Any]], states: States, gradients: Gradients, tools: Tools) -> None:
    """Update the parameters of groups on shard rules that have a gradient here. Not collective."""
    for group in groups:
        rule = rule_by_name(group["algorithm"])
        assert isinstance(rule, ShardRule), "the other groups go through the pipeline"
        with record_function(f"omn_dist::{rule.name}"):
            shards, followers = [], []
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                gradient, state = gradients[parameter], states[parameter]
                if gradient is None:
                    continue
                local, kept = local_tensor(parameter).detach(), {key: local_tensor(state[key]) for key, _ in rule.state(group)}
                held = _held(local, state.get(MASTER))
                # A copy where state was loaded in a wider dtype.
                stepped = held.to(_widest(held, kept))
                check_local(name, local, {key: tensor for key, tensor in kept.items() if tensor.ndim})
                shards.append(LocalShard(stepped, gradient.to(stepped.dtype), kept))
                followers += [
                    (tensor, stepped) for tensor in ((local,) if held is local else (held, local)) if tensor is not stepped
                ]
            if shards:
                rule.update(shards, rule.settings(group), tools)
            for rounded, stepped in followers:
                rounded.copy_(stepped)


def _held(local: Tensor, master: Tensor | None) -> Tensor:
    """What the step moves: the parameter, or its master, which follows it first."""
    if master is None:
        return local
    follow_parameter(local_tensor(master), local)
    return local_tensor(master)


def _widest(held: Tensor, kept: Mapping[str, Tensor]) -> torch.dtype:
    widest = held.dtype
    for tensor in kept.values():
        if tensor.ndim:
            widest = torch.promote_types(widest, tensor.dtype)
    return widest


@dataclass(frozen=True)
class Rows:
    """What this rank holds of the rows of one matrix parameter that AdamW updates."""

    parameter: Tensor
    group: Mapping[str, Any]
    regions: tuple[ShardRegion, ...]
    """Of the local tensor; none where this rank holds no such row."""


def find_rows(groups: Sequence[Mapping[str, Any]]) -> list[Rows]:
    """The rows that AdamW updates in all groups whose view has some. Not collective.

    An example are the gate rows of a fused projection.

    Raises:
        NotImplementedError: a placement that is not supported.
    """
    found = []
    for group in groups:
        view = View.from_group(group)
        if view is None or not view.has_adamw_rows:
            continue
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            place = parameter_layout(name, parameter)
            rank = place.ranks.index(dist.get_rank()) if place.ranks else 0
            found.append(Rows(parameter, group, intersect(place.layout.regions(rank), view.adamw_region(place.layout))))
    return found


def step_rows(rows: Sequence[Rows], states: States, gradients: Gradients, tools: Tools) -> None:
    """Update the rows of parameters that have a gradient here. Not collective.

    The bits are those of AdamW on these rows alone.
    """
    # Regions of a parameter are cut anywhere, so these bits must never depend on cuts.
    tools = replace(tools, batch_invariant=True)
    with record_function("omn_dist::adamw_rows"):
        for own in rows:
            gradient = gradients[own.parameter]
            if gradient is not None:
                _step_rows(own, states[own.parameter], gradient, tools)


def _step_rows(rows: Rows, state: Mapping[str, Any], gradient: Tensor, tools: Tools) -> None:
    counters = {key: state[key] for key, extent in FOR_ROWS.state(rows.group) if extent == "once"}
    # Counters count gradients of the parameter, on ranks without such rows too.
    before = {key: counter.clone() for key, counter in counters.items()}
    for counter in counters.values():
        counter.add_(1)
    if not rows.regions:
        return
    stored, master = rows.parameter.detach(), state.get(MASTER)
    stepped = as_matrix(local_tensor(stored if master is None else master))
    kept = {key: as_matrix(local_tensor(state[key])) for key, extent in FOR_ROWS.state(rows.group) if extent == "elements"}
    # Regions are strided and may be many, and torch's kernels want dense tensors. So all regions
    # are copied into one dense tensor.
    dense = {key: _dense(tensor, rows.regions) for key, tensor in kept.items()}
    parameter = _dense(stepped, rows.regions)
    parameter = parameter.to(_widest(parameter, kept))
    shard = LocalShard(parameter, _dense(as_matrix(gradient, read_only=True), rows.regions).to(parameter.dtype), dense | before)
    FOR_ROWS.update([shard], FOR_ROWS.settings(row_group(rows.group)), tools)
    for key, tensor in kept.items():
        _write_back(dense[key], tensor, rows.regions)
    _write_back(parameter, stepped, rows.regions)
    if master is not None:
        _write_back(parameter, as_matrix(local_tensor(stored)), rows.regions)


def _dense(local: Tensor, regions: Sequence[ShardRegion]) -> Tensor:
    return torch.cat([part_of_shard(local, region).reshape(-1) for region in regions])


def _write_back(dense: Tensor, local: Tensor, regions: Sequence[ShardRegion]) -> None:
    parts = torch.split(dense, [region.num_elements for region in regions])
    for part, region in zip(parts, regions, strict=True):
        part_of_shard(local, region).copy_(part.view(region.num_rows, region.num_columns))
