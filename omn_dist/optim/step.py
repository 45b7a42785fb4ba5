"""The matrices of one plan in a step: the pipeline's calls, passed to the rules as lists."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from omn_dist.algorithms import lists
from omn_dist.algorithms.lists import batches, in_a_row, restore_absent
from omn_dist.algorithms.team_newton_schulz import Team
from omn_dist.exchange.numbers import Returned, StackNumbers
from omn_dist.exchange.route import is_gathered_from
from omn_dist.exchange.work import IndexedRegion, MatrixWork
from omn_dist.optim.rules.registry import matrix_rule
from omn_dist.optim.rules.rule import MatrixRule, Tools
from omn_dist.optim.shards import Gradients, MatrixRegion, MatrixShard, Zeros
from omn_dist.plan.geometry.matrix import Matrix
from omn_dist.plan.plan import Plan

Member = tuple[Tensor, dict[str, Any]]
"""A parameter and its group."""
States = Mapping[Tensor, Mapping[str, Any]]
"""The state of each parameter, as ``optimizer.state``."""


class MatrixStep(MatrixWork):
    """Made with the plan and used in every step: :meth:`begin` takes up gradients and settings.

    Rules are called on lists. On a CPU a list holds one region, which then stays in the cache; on
    other devices it holds all regions of a wave, so that kernel launches grow with the number of
    different settings, not of matrices. Bits are the same.
    """

    def __init__(self, plan: Plan, members: Mapping[str, Member], rank: int, states: States, tools: Tools) -> None:
        self._plan, self._members, self._rank = plan, members, rank
        self.states, self._tools = states, tools
        self._shards = {name: MatrixShard(name, parameter, group) for name, (parameter, group) in members.items()}
        self._by_matrix = [self._shards[matrix.parameter_name] for matrix in plan.matrices]
        self._regions: dict[IndexedRegion, MatrixRegion] = {}
        self._zeros = Zeros()
        self._presences: list[Tensor] = []
        self._together = False

    def begin(self, gradients: Gradients) -> None:
        """Take up the gradients of a step and what groups say now. Not collective.

        Raises:
            ValueError: a group was changed to what the team of one of its matrices cannot do.
        """
        settings: dict[int, Any] = {}
        for name, (parameter, group) in self._members.items():
            if id(group) not in settings:
                settings[id(group)] = self._shards[name].rule.settings(group)
            self._begin(name, gradients.get(parameter), settings[id(group)])
        for matrix in self._plan.matrices:
            if matrix.slice is not None:
                _check_team(matrix, self._members[matrix.parameter_name][1])
        self._presences = []
        self._together = any(lists.uses_multi_tensor(shard.stepped.device) for shard in self._shards.values())

    def end(self) -> None:
        """Let go of the gradients, which would stay in memory until the next step."""
        for shard in self._shards.values():
            shard.gradient = None

    def set_gradient(self, name: str, gradient: Tensor) -> None:
        """Take up a gradient that arrived after :meth:`begin`."""
        self._begin(name, gradient, self._shards[name].settings)

    def _begin(self, name: str, gradient: Tensor | None, settings: Any) -> None:
        shard = self._shards[name]
        shard.begin(self.states[shard.parameter], gradient, settings)

    def saw_gradient(self) -> bool:
        """Whether another rank reported a gradient for a shard that has none here.

        Reads from the device.
        """
        return any(bool(present) for present in self._presences)

    @override
    def has_gradient(self, matrix: int) -> bool:
        return self._by_matrix[matrix].gradient is not None

    @override
    def prepare(
        self, regions: Sequence[IndexedRegion], directions: Sequence[Tensor], numbers: Sequence[Tensor], *, commit: bool
    ) -> None:
        def kind(indexed: IndexedRegion, region: MatrixRegion) -> tuple[MatrixRule, bool]:
            return region.rule, commit and self._commits_early(indexed)

        for (rule, commits), found, (of_directions, of_numbers) in self._lists(kind, regions, directions, numbers):
            rule.prepare(found, of_directions, of_numbers, self._tools, commit=commits)

    @override
    def commit(self, regions: Sequence[IndexedRegion]) -> None:
        early = [indexed for indexed in regions if self._commits_early(indexed)]
        for rule, found, _ in self._lists(lambda _, region: region.rule, early):
            rule.commit(found, self._tools)

    def _commits_early(self, indexed: IndexedRegion) -> bool:
        """Whether the state of a region is that of this step before its update is back."""
        return self.has_gradient(indexed.matrix) and is_gathered_from(self._plan, indexed.matrix, self._rank)

    @override
    def transform(self, matrices: Sequence[int], stack: Tensor, numbers: Sequence[StackNumbers]) -> None:
        if stack.numel() == 0:
            return
        # Matrices of one shape may belong to groups with different settings.
        kinds = [(self._by_matrix[index].rule, self._by_matrix[index].settings) for index in matrices]
        start = 0
        for stop in range(1, len(matrices) + 1):
            if stop == len(matrices) or kinds[stop] != kinds[start]:
                rule, settings = kinds[start]
                found = [self._plan.matrices[index] for index in matrices[start:stop]]
                rule.transform(found, stack[start:stop], settings, numbers[start:stop], self._tools)
                start = stop

    @override
    def transform_slice(self, matrix: int, direction: Tensor, team: Team) -> None:
        shard = self._by_matrix[matrix]
        shard.rule.transform_slice(self._plan.matrices[matrix], direction, shard.settings, team, self._tools)

    @override
    def apply(
        self,
        regions: Sequence[IndexedRegion],
        updates: Sequence[Tensor],
        present: Sequence[Tensor | None],
        returned: Sequence[Returned],
    ) -> None:
        late = [not self._commits_early(indexed) for indexed in regions]
        for rule, found, rest in self._lists(lambda _, region: region.rule, regions, updates, present, returned, late):
            self._apply(rule, found, *rest)

    def _apply(
        self,
        rule: MatrixRule,
        regions: Sequence[MatrixRegion],
        updates: Sequence[Tensor],
        present: Sequence[Tensor | None],
        returned: Sequence[Returned],
        late: Sequence[bool],
    ) -> None:
        uncertain = [(region, flag) for region, flag in zip(regions, present, strict=True) if flag is not None]
        before = []
        if uncertain:
            changed = [((), (tensor, flag)) for region, flag in uncertain for tensor in (region.parameter, *region.state.values())]
            before = [(tensors, flags, in_a_row(tensors)) for _, (tensors, flags) in batches(changed)]
        uncommitted = [region for region, is_late in zip(regions, late, strict=True) if is_late]
        if uncommitted:
            rule.commit(uncommitted, self._tools)
        rule.apply(regions, updates, returned, self._tools)
        for tensors, flags, old in before:
            restore_absent(tensors, flags, old)
        if uncertain:
            self._presences.append(torch.stack([flag for _, flag in uncertain]).amax())
        if followers := [((), (region.rounded, region.parameter)) for region in regions if region.rounded is not None]:
            for _, (rounded, masters) in batches(followers):
                torch._foreach_copy_(rounded, masters)

    def _lists(
        self, kind: Callable[[IndexedRegion, MatrixRegion], Hashable], regions: Sequence[IndexedRegion], *parallel: Sequence[Any]
    ) -> Iterator[tuple[Any, list[MatrixRegion], list[list[Any]]]]:
        """Regions of one kind, with the entries of parallel lists: one by one, or all together."""
        found: dict[Hashable, tuple[list[MatrixRegion], list[list[Any]]]] = {}
        for indexed, *items in zip(regions, *parallel, strict=True):
            region = self._regions.get(indexed)
            if region is None:
                region = self._regions[indexed] = self._made(indexed)
            key = kind(indexed, region)
            if not self._together:
                yield key, [region], [[item] for item in items]
                continue
            alike, columns = found.setdefault(key, ([], [[] for _ in items]))
            alike.append(region)
            for column, item in zip(columns, items, strict=True):
                column.append(item)
        for key, (alike, columns) in found.items():
            yield key, alike, columns

    def _made(self, indexed: IndexedRegion) -> MatrixRegion:
        matrix, region = indexed
        return MatrixRegion(self._plan.matrices[matrix], self._by_matrix[matrix], region, self._zeros)


def _check_team(matrix: Matrix, group: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` when a group was changed to what the team of a matrix cannot do.

    The plan formed the team before the change.
    """
    if found := matrix_rule(group["algorithm"]).work(group, matrix).whole_only:
        name = matrix.slice.whole if matrix.slice is not None else matrix.name
        raise ValueError(
            f"matrix {name}: found {found} in its group, set after a team was formed for it; expected it at construction, "
            "or the matrix out of teams"
        )
