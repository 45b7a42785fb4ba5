"""One step's view of the parameters: what is read from groups and gradients, and what is written to shards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from omn_dist._domains import Member
from omn_dist.algorithms import muon
from omn_dist.algorithms.adamw import adamw_update
from omn_dist.algorithms.muon import MuonSettings
from omn_dist.exchange.pipeline import Place
from omn_dist.plan.layout import Segment
from omn_dist.plan.ownership import Plan
from omn_dist.plan.placement import as_matrix, local_tensor

Gradients = Mapping[Tensor, Tensor | None]


def checked_gradient(name: str, parameter: Tensor) -> Tensor | None:
    """The local part of the parameter's gradient, or ``None``; ``ValueError`` when it does not fit the parameter."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        raise ValueError(f"parameter {name}: found a gradient of layout {gradient.layout}, expected a dense one")
    if isinstance(parameter, DTensor) != isinstance(gradient, DTensor):
        raise ValueError(
            f"parameter {name}: found a {type(gradient).__name__} as gradient of a {type(parameter).__name__}, expected both alike"
        )
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        found = (gradient.device_mesh, gradient.placements)
        if found != (parameter.device_mesh, parameter.placements):
            raise ValueError(
                f"parameter {name}: found a gradient with placements {gradient.placements} on {gradient.device_mesh}, expected "
                f"{parameter.placements} on {parameter.device_mesh}; reduce it before the step"
            )
    local = local_tensor(gradient)
    if local.shape != local_tensor(parameter).shape:
        raise ValueError(
            f"parameter {name}: found a gradient of local shape {tuple(local.shape)}, expected "
            f"{tuple(local_tensor(parameter).shape)}"
        )
    return local


@dataclass
class _Shard:
    """The local part of one parameter, as matrices."""

    parameter: Tensor
    """What the step acts on: the fp32 master where there is one."""
    rounded: Tensor | None
    """The half-precision parameter that follows its master."""
    momentum: Tensor
    gradient: Tensor | None
    settings: MuonSettings


class MatrixStep:
    """What the pipeline asks of Muon, for the matrices of one plan at one step."""

    def __init__(
        self,
        plan: Plan,
        members: Mapping[str, Member],
        state: Mapping[Tensor, Mapping[str, Any]],
        gradients: Gradients,
        *,
        deterministic: bool,
    ) -> None:
        self._plan = plan
        self._deterministic = deterministic
        settings_by_group: dict[int, MuonSettings] = {}
        by_name: dict[str, _Shard] = {}
        for name, (parameter, group) in members.items():
            settings = settings_by_group.setdefault(id(group), _muon_settings(group))
            gradient = gradients[parameter]
            master = state[parameter].get("master")
            local = as_matrix(local_tensor(parameter.detach()))
            by_name[name] = _Shard(
                local if master is None else as_matrix(local_tensor(master)),
                None if master is None else local,
                as_matrix(local_tensor(state[parameter]["momentum_buffer"])),
                None if gradient is None else as_matrix(gradient),
                settings,
            )
        self._shards = [by_name[matrix.parameter_name] for matrix in plan.matrices]
        self._presences: list[Tensor] = []

    def saw_gradient(self) -> bool:
        """Whether another rank reported a gradient for a shard that has none here. Reads from the device."""
        return any(bool(present) for present in self._presences)

    def has_gradient(self, matrix: int) -> bool:
        return self._shards[matrix].gradient is not None

    def prepare(self, places: Sequence[Place], directions: Sequence[Tensor]) -> None:
        for (matrix, segment), target in zip(places, directions, strict=True):
            shard = self._shards[matrix]
            target.copy_(muon.prepare(_gradient(shard, segment), _local(shard.momentum, segment), shard.settings))

    def transform(self, matrices: Sequence[int], stack: Tensor) -> None:
        # Matrices of one shape may belong to groups with different settings.
        settings = [self._shards[matrix].settings for matrix in matrices]
        start = 0
        for stop in range(1, len(matrices) + 1):
            if stop == len(matrices) or settings[stop] != settings[start]:
                self._transform(self._plan.matrices[matrices[start]].transposed, settings[start], stack[start:stop])
                start = stop

    def _transform(self, transposed: bool, settings: MuonSettings, stack: Tensor) -> None:
        directions = stack.mT.contiguous() if transposed else stack
        for target, update in zip(stack, muon.transform(directions, settings, deterministic=self._deterministic), strict=True):
            target.copy_(update.T if transposed else update)

    def apply(self, places: Sequence[Place], updates: Sequence[Tensor], present: Sequence[Tensor | None]) -> None:
        for (matrix, segment), update, flag in zip(places, updates, present, strict=True):
            shard, whole = self._shards[matrix], self._plan.matrices[matrix]
            parameter, momentum = _local(shard.parameter, segment), _local(shard.momentum, segment)
            before = None if flag is None else (parameter.clone(), momentum.clone())
            muon.apply(
                parameter,
                _gradient(shard, segment),
                momentum,
                update,
                shard.settings,
                num_rows=whole.num_rows,
                num_columns=whole.num_columns,
            )
            if flag is not None and before is not None:
                self._presences.append(flag.clone())
                for tensor, old in zip((parameter, momentum), before, strict=True):
                    tensor.copy_(torch.where(flag > 0, tensor, old))
            if shard.rounded is not None:
                _local(shard.rounded, segment).copy_(parameter)


class AdamWStep:
    """AdamW of all its groups at one step, on local shards that have a gradient."""

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        state: Mapping[Tensor, Mapping[str, Any]],
        gradients: Gradients,
    ) -> None:
        self._groups = groups
        self._state = state
        self._gradients = gradients

    def run(self) -> None:
        """Update parameters and state in place. Not collective."""
        with record_function("omn_dist::adamw"):
            for group in self._groups:
                present = [parameter for parameter in group["params"] if self._gradients[parameter] is not None]
                states = [self._state[parameter] for parameter in present]
                masters = [state.get("master") for state in states]
                stepped = [
                    local_tensor(parameter.detach() if master is None else master)
                    for parameter, master in zip(present, masters, strict=True)
                ]
                gradients = [gradient for parameter in present if (gradient := self._gradients[parameter]) is not None]
                adamw_update(
                    stepped,
                    [gradient.to(target.dtype) for gradient, target in zip(gradients, stepped, strict=True)],
                    [local_tensor(state["exp_avg"]) for state in states],
                    [local_tensor(state["exp_avg_sq"]) for state in states],
                    [state["step"] for state in states],
                    lr=float(group["lr"]),
                    betas=tuple(group["betas"]),
                    epsilon=group["eps"],
                    weight_decay=group["weight_decay"],
                )
                for parameter, master, local in zip(present, masters, stepped, strict=True):
                    if master is not None:
                        local_tensor(parameter.detach()).copy_(local)


def _muon_settings(group: Mapping[str, Any]) -> MuonSettings:
    return MuonSettings(
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        momentum_rule=group["momentum_rule"],
        nesterov=group["nesterov"],
        newton_schulz=group["newton_schulz"],
        scale=group["scale"],
    )


def _local(local: Tensor, segment: Segment) -> Tensor:
    return local[
        segment.local_row : segment.local_row + segment.num_rows,
        segment.local_column : segment.local_column + segment.num_columns,
    ]


def _gradient(shard: _Shard, segment: Segment) -> Tensor:
    """The gradient of a rectangle; a missing one counts as zeros, for the ranks that have theirs."""
    if shard.gradient is None:
        return torch.zeros_like(_local(shard.momentum, segment))
    return _local(shard.gradient, segment)
