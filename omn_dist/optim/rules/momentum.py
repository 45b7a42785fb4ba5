"""What rules with a momentum buffer share: momentum and direction, and a step with decoupled decay.

With G the gradient, B the momentum and U the update of a matrix of m x n elements::

    B <- mu B + G                      (momentum_rule "sum")
      or B <- mu B + (1 - mu) G        (momentum_rule "ema")
    D  = B, or looks one step ahead    (nesterov)
    W <- (1 - lr wd) W - lr scale(m, n) U

What makes an update of the direction D is the rule's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from omn_dist.algorithms.lists import batches
from omn_dist.algorithms.momentum import MomentumRule, update_momenta
from omn_dist.exchange.numbers import Returned
from omn_dist.optim.rules.rule import LocalRegion, MatrixRule, StateTensor, Tools

MOMENTUM = "momentum_buffer"
"""State key, as in ``torch.optim.Muon``."""


@dataclass(frozen=True, kw_only=True)
class MomentumSettings:
    """What a group says about momentum and decay at one step."""

    lr: float
    weight_decay: float
    momentum: float
    momentum_rule: MomentumRule
    nesterov: bool
    cautious_decay: bool


class Momentum(MatrixRule):
    """A rule whose direction is a momentum. Its settings derive from :class:`MomentumSettings`."""

    fields: ClassVar[tuple[str, ...]] = (
        "lr",
        "weight_decay",
        "momentum",
        "momentum_rule",
        "nesterov",
        "cautious_decay",
    )

    @override
    def defaults(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        return {field: recipe[field] for field in self.fields} | super().defaults(recipe)

    @override
    def check_saved(self, saved: Mapping[str, Any], group: Mapping[str, Any]) -> None:
        # torch.optim.Muon, by a field that only it has: its momentum is a mean.
        if "ns_coefficients" in saved and "momentum_rule" not in saved and group["momentum_rule"] != "ema":
            raise ValueError(
                f"momentum_rule: found a momentum of torch.optim.Muon, which is a mean, and {group['momentum_rule']!r} here, "
                "expected 'ema'; build the optimizer with preset 'torch' or momentum_rule='ema'"
            )

    @override
    def state(self, group: Mapping[str, Any]) -> tuple[StateTensor, ...]:
        return (StateTensor(MOMENTUM, "elements"),)

    @override
    def prepare(
        self,
        regions: Sequence[LocalRegion],
        directions: Sequence[Tensor],
        numbers: Sequence[Tensor],
        tools: Tools,
        *,
        commit: bool,
    ) -> None:
        items = [
            (_momentum(region.settings), (region.gradient, region.state[MOMENTUM], direction))
            for region, direction in zip(regions, directions, strict=True)
        ]
        for (coefficient, rule, nesterov), (gradients, momenta, out) in batches(items):
            tools.kernels.write_directions(gradients, momenta, out, coefficient, rule, nesterov, commit=commit)

    @override
    def commit(self, regions: Sequence[LocalRegion], tools: Tools) -> None:
        items = [(_momentum(region.settings), (region.gradient, region.state[MOMENTUM])) for region in regions]
        for (coefficient, rule, _), (gradients, momenta) in batches(items):
            update_momenta(gradients, momenta, coefficient, rule)

    @override
    def apply(self, regions: Sequence[LocalRegion], updates: Sequence[Tensor], returned: Sequence[Returned], tools: Tools) -> None:
        items = [(self.move(region), (region.parameter, update)) for region, update in zip(regions, updates, strict=True)]
        for (kept, step_size, cautious), (parameters, of_updates) in batches(items):
            tools.kernels.apply_updates(parameters, of_updates, kept, step_size, cautious=cautious)

    def move(self, region: LocalRegion) -> tuple[float, float, bool]:
        """The factor of decay on a parameter, the step size, and whether decay is cautious."""
        settings: MomentumSettings = region.settings
        return 1 - settings.lr * settings.weight_decay, settings.lr, settings.cautious_decay


def momentum_fields(group: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of :class:`MomentumSettings`."""
    names = ("weight_decay", "momentum", "momentum_rule", "nesterov", "cautious_decay")
    return {"lr": float(group["lr"]), **{name: group[name] for name in names}}


def _momentum(settings: MomentumSettings) -> tuple[float, MomentumRule, bool]:
    return settings.momentum, settings.momentum_rule, settings.nesterov
