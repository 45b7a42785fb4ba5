"""Muon: momentum, Newton-Schulz of the whole matrix, and a step with a shape factor.

With D the momentum direction of a matrix of m x n elements (see ``momentum.py``)::

    U  = Newton-Schulz(D)
    W <- (1 - lr wd) W - lr scale(m, n) U

Source: K. Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from omn_dist.algorithms.guards import capped, guarded, guards_of
from omn_dist.algorithms.newton_schulz import Recipe, group_recipe, orthogonalize_into
from omn_dist.algorithms.scale import ScaleMode, adjusted_lr
from omn_dist.algorithms.team_newton_schulz import Team, orthogonalize_slice
from omn_dist.exchange.numbers import StackNumbers
from omn_dist.optim.rules.momentum import Momentum, MomentumSettings, momentum_fields
from omn_dist.optim.rules.rule import LocalRegion, Tools
from omn_dist.plan.geometry.matrix import NO_NUMBERS, Matrix, Work

_CPU_BATCH_BYTES, _BATCH_BYTES = 2**20, 2**26
"""Working memory of one batched Newton-Schulz. On a CPU what a core's cache holds: larger batches
brought nothing there."""


@dataclass(frozen=True, kw_only=True)
class MuonSettings(MomentumSettings):
    """What a group on Muon says at one step."""

    scale: ScaleMode
    recipe: Recipe
    spectral_cap: float | None
    stable_rank_floor: float | None


class Muon(Momentum):
    """Muon; other rules may derive from it and change what they do with the update."""

    name = "muon"
    label = "Muon"
    fields: ClassVar[tuple[str, ...]] = (
        *Momentum.fields,
        "scale",
        "newton_schulz",
        "schedule",
        "ns_steps",
        "ns_dtype",
        "form",
        "spectral_cap",
        "stable_rank_floor",
    )

    @override
    def settings(self, group: Mapping[str, Any]) -> MuonSettings:
        return MuonSettings(**muon_fields(group))

    @override
    def work(self, group: Mapping[str, Any], matrix: Matrix) -> Work:
        # A team multiplies slices: it can do this Newton-Schulz and nothing else of a whole matrix.
        is_plain = type(self).transform is Muon.transform and self.numbers == NO_NUMBERS
        whole_only = next(iter(guards_of(group)), "") if is_plain else f"algorithm {self.name}"
        shape = matrix.operator_shape
        return Work.of_recipe(group_recipe(group), *shape, row_numbers=self.numbers, whole_only=whole_only)

    @override
    def communication_dtype(self, group: Mapping[str, Any]) -> torch.dtype | None:
        # What the recipe casts to before it does anything else.
        return group_recipe(group).input_dtype

    @override
    def warm_up(self, matrix: Matrix, group: Mapping[str, Any], tools: Tools) -> None:
        tools.kernels.warm_up([matrix.operator_shape], group_recipe(group).dtype)

    @override
    def transform(
        self,
        matrices: Sequence[Matrix],
        directions: Tensor,
        settings: MuonSettings,
        numbers: Sequence[StackNumbers],
        tools: Tools,
    ) -> None:
        transposed = matrices[0].transposed
        # Operators that are stored transposed get the bits of those that are not.
        operators = directions.mT.contiguous() if transposed else directions
        num_rows, num_columns = operators.shape[1:]
        num_bytes = 2 * min(num_rows, num_columns) * (num_rows + num_columns) * settings.recipe.dtype.itemsize
        budget = _CPU_BATCH_BYTES if directions.device.type == "cpu" else _BATCH_BYTES
        most = 1 if tools.batch_invariant else max(1, budget // num_bytes)
        for batch in operators.unbind() if most == 1 else torch.split(operators, most):
            _orthogonalize(batch, settings, tools)
        if transposed:
            directions.copy_(operators.mT)

    @override
    def transform_slice(self, matrix: Matrix, direction: Tensor, settings: MuonSettings, team: Team, tools: Tools) -> None:
        assert matrix.slice is not None, "teams work on slices"
        # The short side of the whole matrix as rows.
        short_first = direction.T if matrix.slice.cuts_rows else direction
        short_first.copy_(orthogonalize_slice(short_first, settings.recipe, team, tools.scratch))

    @override
    def move(self, region: LocalRegion) -> tuple[float, float, bool]:
        """``1 - lr wd``, ``lr scale(m, n)``, and whether decay is cautious.

        The shape m x n is that of the whole matrix.
        """
        settings: MuonSettings = region.settings
        kept, lr, cautious = super().move(region)
        return kept, adjusted_lr(lr, settings.scale, *region.matrix.operator_shape), cautious


def muon_fields(group: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of :class:`MuonSettings`."""
    names = ("scale", "spectral_cap", "stable_rank_floor")
    return {**momentum_fields(group), "recipe": group_recipe(group), **{name: group[name] for name in names}}


def _orthogonalize(directions: Tensor, settings: MuonSettings, tools: Tools) -> None:
    original = directions if settings.stable_rank_floor is None else directions.clone()
    orthogonalize_into(directions, directions, settings.recipe, tools.scratch, tools.kernels)
    if settings.stable_rank_floor is not None:
        directions.copy_(guarded(directions, original, settings.stable_rank_floor))
    if settings.spectral_cap is not None:
        directions.copy_(capped(directions, settings.spectral_cap))
