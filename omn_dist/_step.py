"""One step's view of the parameters: what is read from groups and gradients, and what is written to shards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from omn_dist._domains import Domain, Member
from omn_dist._row_moment import RowMoment
from omn_dist.algorithms import muon, normuon, vector
from omn_dist.algorithms.adamw import adamw_update
from omn_dist.algorithms.guards import guards_of
from omn_dist.algorithms.muon import MuonSettings, UpdateSettings
from omn_dist.algorithms.newton_schulz import group_recipe
from omn_dist.algorithms.normuon import NorMuonSettings
from omn_dist.algorithms.team_newton_schulz import Team, orthogonalize_slice
from omn_dist.algorithms.vector import VectorSettings, vector_segments
from omn_dist.exchange.numbers import Returned, StackNumbers
from omn_dist.exchange.pipeline import Place
from omn_dist.exchange.route import speaks
from omn_dist.plan.cost import cost_form
from omn_dist.plan.layout import Segment
from omn_dist.plan.matrix import Matrix, whole_only
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
    settings: UpdateSettings
    row_moment: RowMoment | None


class MatrixStep:
    """What the pipeline asks of Muon, for the matrices of one plan at one step."""

    def __init__(
        self,
        domain: Domain,
        state: Mapping[Tensor, Mapping[str, Any]],
        gradients: Gradients,
        *,
        deterministic: bool,
    ) -> None:
        self._plan, self._members = domain.plan, domain.members
        self._rank, self._scratch = domain.rank, domain.scratch
        self._state, self._gradients = state, gradients
        self._deterministic = deterministic
        self._settings: dict[int, UpdateSettings] = {}
        self._by_parameter: dict[str, _Shard] = {}
        self._by_matrix: dict[int, _Shard] = {}
        for matrix in domain.plan.matrices:
            if matrix.slice is not None:
                _check_team(matrix, domain.members[matrix.parameter_name][1])
        self._presences: list[Tensor] = []

    def _shard(self, matrix: int) -> _Shard:
        """Made when it is first asked for: of a step that begins in backward not all gradients are there at once."""
        if matrix not in self._by_matrix:
            whole = self._plan.matrices[matrix]
            name = whole.parameter_name
            if name not in self._by_parameter:
                self._by_parameter[name] = self._of_parameter(*self._members[name])
            self._by_matrix[matrix] = _of_matrix(self._by_parameter[name], self._members, whole)
        return self._by_matrix[matrix]

    def _of_parameter(self, parameter: Tensor, group: dict[str, Any]) -> _Shard:
        if id(group) not in self._settings:
            self._settings[id(group)] = _settings(group)
        state, gradient = self._state[parameter], self._gradients[parameter]
        master = state.get("master")
        local = as_matrix(local_tensor(parameter).detach())
        return _Shard(
            local if master is None else as_matrix(local_tensor(master)),
            None if master is None else local,
            as_matrix(local_tensor(state["momentum_buffer"])),
            None if gradient is None else as_matrix(gradient, read_only=True),
            self._settings[id(group)],
            RowMoment.of_state(parameter, state, group),
        )

    def saw_gradient(self) -> bool:
        """Whether another rank reported a gradient for a shard that has none here. Reads from the device."""
        return any(bool(present) for present in self._presences)

    def has_gradient(self, matrix: int) -> bool:
        return self._shard(matrix).gradient is not None

    def prepare(self, places: Sequence[Place], directions: Sequence[Tensor], numbers: Sequence[Tensor], *, commit: bool) -> None:
        for place, target, rows in zip(places, directions, numbers, strict=True):
            shard, segment = self._shard(place.matrix), place.segment
            commits = commit and self._commits_early(place)
            gradient, momentum = _gradient(shard, segment), rectangle(shard.momentum, segment)
            muon.prepare(gradient, momentum, shard.settings, target, commit=commits, scratch=self._scratch)
            if shard.row_moment is not None:
                rows[0].copy_(shard.row_moment.rows(segment))

    def commit(self, places: Sequence[Place]) -> None:
        for place in places:
            if self._commits_early(place):
                self._commit(place)

    def _commits_early(self, place: Place) -> bool:
        """Whether the momentum of a rectangle is that of this step before its update is back."""
        return self.has_gradient(place.matrix) and speaks(self._plan, place.matrix, self._rank)

    def _commit(self, place: Place) -> None:
        shard = self._shard(place.matrix)
        muon.commit(_gradient(shard, place.segment), rectangle(shard.momentum, place.segment), shard.settings)

    def transform(self, matrices: Sequence[int], stack: Tensor, numbers: Sequence[StackNumbers]) -> None:
        if stack.numel() == 0:
            return
        # Matrices of one shape may belong to groups with different settings.
        settings = [self._shard(matrix).settings for matrix in matrices]
        start = 0
        for stop in range(1, len(matrices) + 1):
            if stop == len(matrices) or settings[stop] != settings[start]:
                transposed = self._plan.matrices[matrices[start]].transposed
                self._transform(transposed, settings[start], stack[start:stop], numbers[start:stop])
                start = stop

    def transform_slice(self, matrix: int, direction: Tensor, team: Team) -> None:
        whole, settings = self._plan.matrices[matrix].slice, self._shard(matrix).settings
        assert whole is not None, "teams work on slices"
        assert isinstance(settings, MuonSettings), "of matrices on Muon"
        # The short side of the whole matrix as rows.
        short_first = direction.T if whole.cuts_rows else direction
        short_first.copy_(orthogonalize_slice(short_first, settings.recipe, team, self._scratch))

    def _transform(self, transposed: bool, settings: UpdateSettings, stack: Tensor, numbers: Sequence[StackNumbers]) -> None:
        if isinstance(settings, VectorSettings):
            stack.copy_(vector.transform(stack, settings))
            return
        assert isinstance(settings, MuonSettings), "every other algorithm is a kind of Muon"
        # Operators that are stored transposed get the bits of those that are not.
        directions = stack.mT.contiguous() if transposed else stack
        muon.transform(directions, settings, deterministic=self._deterministic, scratch=self._scratch)
        if transposed:
            stack.copy_(directions.mT)
        if isinstance(settings, NorMuonSettings):
            # Of the updates as they travel: what the wire rounds is what the shards normalise.
            for update, (received, returned) in zip(stack, numbers, strict=True):
                moment, factor = normuon.row_statistics(update.T if transposed else update, received[0], settings)
                returned.rows[0].copy_(moment)
                returned.scalars[0].copy_(factor)

    def apply(
        self,
        places: Sequence[Place],
        updates: Sequence[Tensor],
        present: Sequence[Tensor | None],
        returned: Sequence[Returned],
    ) -> None:
        for place, update, flag, numbers in zip(places, updates, present, returned, strict=True):
            shard, segment = self._shard(place.matrix), place.segment
            changed = changed_by_apply(shard, place)
            before = None if flag is None else [tensor.clone() for tensor in changed]
            self._apply(place, update, numbers, changed)
            if flag is not None and before is not None:
                self._presences.append(flag.clone())
                for tensor, old in zip(changed, before, strict=True):
                    tensor.copy_(torch.where(flag > 0, tensor, old))
            if shard.rounded is not None:
                rectangle(shard.rounded, segment).copy_(changed[0])

    def _apply(self, place: Place, update: Tensor, numbers: Returned, changed: Sequence[Tensor]) -> None:
        shard, whole = self._shard(place.matrix), self._plan.matrices[place.matrix]
        if not self._commits_early(place):
            self._commit(place)
        num_rows, num_columns = whole.operator_shape
        if isinstance(shard.settings, NorMuonSettings):
            parameter, _, row_moment = changed
            normuon.apply(
                parameter,
                row_moment,
                update,
                numbers.rows[0],
                numbers.scalars[0],
                shard.settings,
                transposed=whole.transposed,
                num_rows=num_rows,
                num_columns=num_columns,
            )
        else:
            muon.apply(changed[0], update, shard.settings, num_rows=num_rows, num_columns=num_columns)


class AdamWStep:
    """AdamW of all its groups at one step, on local shards that have a gradient."""

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        state: Mapping[Tensor, Mapping[str, Any]],
        gradients: Gradients,
        *,
        deterministic: bool,
    ) -> None:
        self._deterministic = deterministic
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
                    local_tensor(parameter).detach() if master is None else local_tensor(master)
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
                    deterministic=self._deterministic,
                )
                for parameter, master, local in zip(present, masters, stepped, strict=True):
                    if master is not None:
                        local_tensor(parameter).copy_(local)


def _settings(group: Mapping[str, Any]) -> UpdateSettings:
    """What a group says at this step, in the settings class of its algorithm."""

    def fields(*names: str) -> dict[str, Any]:
        return {name: group[name] for name in names}

    common = {"lr": float(group["lr"]), **fields("weight_decay", "momentum", "momentum_rule", "nesterov", "cautious_decay")}
    if group["algorithm"] == "vector":
        return VectorSettings(**common, scale="1", length=1.0)
    common |= {"recipe": group_recipe(group), **fields("scale", "spectral_cap", "stable_rank_floor")}
    if group["algorithm"] == "normuon":
        return NorMuonSettings(**common, **fields("row_beta", "row_epsilon", "rescale"))
    return MuonSettings(**common)


def _check_team(matrix: Matrix, group: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` when a group was changed, after its plan was made, to what the team of a slice cannot do."""
    form = cost_form(group_recipe(group), *matrix.operator_shape)
    if found := whole_only(group["algorithm"], form, guards_of(group)):
        name = matrix.slice.whole if matrix.slice is not None else matrix.name
        raise ValueError(
            f"matrix {name}: found {found} in its group, set after a team was formed for it; expected it at construction, "
            "or the matrix out of teams"
        )


def _of_matrix(shard: _Shard, members: Mapping[str, Member], matrix: Matrix) -> _Shard:
    """The shard as one matrix sees it: a segment of a vector has settings of its own."""
    settings = shard.settings
    if not isinstance(settings, VectorSettings):
        return shard
    name, start = matrix.parameter_name, matrix.region[0].column
    segments = vector_segments(name, matrix.layout.num_columns, members[name][1]["segments"])
    segment = next(segment for segment in segments if segment.start == start)
    decay = settings.weight_decay if segment.has_decay else 0.0
    return replace(shard, settings=replace(settings, length=segment.scale, weight_decay=decay))


def changed_by_apply(shard: _Shard, place: Place) -> list[Tensor]:
    """What apply may change of a rectangle: parameter, momentum and, where there is one, the row moment."""
    changed = [rectangle(shard.parameter, place.segment), rectangle(shard.momentum, place.segment)]
    if shard.row_moment is not None:
        changed.append(shard.row_moment.rows(place.segment))
    return changed


def rectangle(local: Tensor, segment: Segment) -> Tensor:
    """A rectangle of a shard ``[rows, columns]``, as a view."""
    if local.shape == (segment.num_rows, segment.num_columns):
        return local
    return local[
        segment.local_row : segment.local_row + segment.num_rows,
        segment.local_column : segment.local_column + segment.num_columns,
    ]


def _gradient(shard: _Shard, segment: Segment) -> Tensor:
    """The gradient of a rectangle; a missing one counts as zeros, for the ranks that have theirs."""
    if shard.gradient is None:
        return torch.zeros_like(rectangle(shard.momentum, segment))
    return rectangle(shard.gradient, segment)
