"""Muon as three pure functions on the path of a step: prepare (shard), transform (owner), apply (shard)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from omn_dist.algorithms.momentum import MomentumRule, direction, next_momentum
from omn_dist.algorithms.newton_schulz import RecipeName, orthogonalize
from omn_dist.algorithms.scale import ScaleMode, adjusted_lr


@dataclass(frozen=True, kw_only=True)
class MuonSettings:
    """What one group says of its matrices at this step."""

    lr: float
    weight_decay: float
    momentum: float
    momentum_rule: MomentumRule
    nesterov: bool
    newton_schulz: RecipeName
    scale: ScaleMode


def prepare(gradient: Tensor, momentum: Tensor, settings: MuonSettings) -> Tensor:
    """Gradient and momentum of a shard (any shape, elementwise) to its direction. Nothing is changed."""
    updated = next_momentum(gradient, momentum, settings.momentum, settings.momentum_rule)
    return direction(gradient, updated, settings.momentum, settings.momentum_rule, settings.nesterov)


def transform(direction_MN: Tensor, settings: MuonSettings) -> Tensor:
    """A whole direction ``[rows, columns]`` to its update of the same shape. At the owner, not collective."""
    return orthogonalize(direction_MN, settings.newton_schulz)


def apply(
    parameter: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    update: Tensor,
    settings: MuonSettings,
    *,
    num_rows: int,
    num_columns: int,
) -> tuple[Tensor, Tensor]:
    """New values of a shard's parameter and momentum, from the rows of the update that belong to it.

    Decay is decoupled and takes the group's own rate: ``W <- (1 - lr wd) W - lr scale(m, n) U``.

    Args:
        parameter, gradient, momentum, update: of one shape. The parameter's arithmetic is done in fp32 at least.
        num_rows, num_columns: the shape of the whole matrix, for the scale.

    Returns:
        The parameter and the momentum after the step, new tensors.
    """
    step_size = adjusted_lr(settings.lr, settings.scale, num_rows, num_columns)
    precise = torch.promote_types(parameter.dtype, torch.float32)
    weights = parameter.to(precise).mul(1 - settings.lr * settings.weight_decay).add_(update, alpha=-step_size)
    return weights.to(parameter.dtype), next_momentum(gradient, momentum, settings.momentum, settings.momentum_rule)
