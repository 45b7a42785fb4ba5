"""A rule of your own in one file: steepest descent under the spectral norm.

It does not orthogonalise. With D the momentum direction of a matrix and ``|D|`` its largest
singular value::

    U  = gain D / |D|
    W <- (1 - lr wd) W - lr U

Only a whole matrix has a spectral norm, so this is work for an owner. Momentum, decay and the step
come from :class:`~omn_dist.optim.rules.momentum.Momentum`. Use it after
``register_rule(SpectralDescent())``: in groups (``"algorithm": "spectral"``), in a preset
(``DualOptimizer(groups, algorithm="spectral")``) or in the YAML file of a run::

    optimizer:
      rule_modules: [spectral_descent]
      overrides: {algorithm: spectral, gain: 0.5}
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from omn_dist import register_rule
from omn_dist.algorithms.guards import spectral_norm
from omn_dist.exchange.numbers import StackNumbers
from omn_dist.optim.rules.momentum import Momentum, MomentumSettings, momentum_fields
from omn_dist.optim.rules.rule import Tools
from omn_dist.optim.rules.values import check_at_least_zero
from omn_dist.plan.geometry.matrix import Matrix, Work


@dataclass(frozen=True, kw_only=True)
class SpectralSettings(MomentumSettings):
    """What a group says at one step."""

    gain: float


class SpectralDescent(Momentum):
    """Directions divided by their largest singular value."""

    name = "spectral"
    label = "Spectral"
    own_fields: ClassVar[Mapping[str, Any]] = {"gain": 1.0}

    @override
    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        check_at_least_zero(group, "gain")

    @override
    def settings(self, group: Mapping[str, Any]) -> SpectralSettings:
        return SpectralSettings(**momentum_fields(group), gain=group["gain"])

    @override
    def work(self, group: Mapping[str, Any], matrix: Matrix) -> Work:
        # Its products with vectors cost about as much as one small step of Newton-Schulz.
        return Work(ns_steps=1, whole_only=f"algorithm {self.name}")

    @override
    def transform(
        self,
        matrices: Sequence[Matrix],
        directions: Tensor,
        settings: SpectralSettings,
        numbers: Sequence[StackNumbers],
        tools: Tools,
    ) -> None:
        # One after the other, so that bits do not depend on what else the owner has.
        for direction in directions:
            norm = spectral_norm(direction).clamp(min=1e-30)
            direction.copy_(direction.float() * (settings.gain / norm))


register_rule(SpectralDescent())
