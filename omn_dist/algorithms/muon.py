"""Muon on the path of a step: prepare (shards), transform (owner), apply (shards)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omn_dist.algorithms.guards import capped, guarded
from omn_dist.algorithms.momentum import MomentumRule, direction, next_momentum
from omn_dist.algorithms.newton_schulz import Recipe, orthogonalize
from omn_dist.algorithms.scale import ScaleMode, adjusted_lr


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """What one group says of the shard-local parts of a step."""

    lr: float
    weight_decay: float
    momentum: float
    momentum_rule: MomentumRule
    nesterov: bool
    scale: ScaleMode
    cautious_decay: bool = False


@dataclass(frozen=True, kw_only=True)
class MuonSettings(UpdateSettings):
    """What one group says of its matrices at this step."""

    recipe: Recipe
    spectral_cap: float | None = None
    stable_rank_floor: float | None = None


def prepare(gradient: Tensor, momentum: Tensor, settings: UpdateSettings) -> Tensor:
    """Gradient and momentum of a shard (any shape, elementwise) to its direction. Nothing is changed."""
    updated = next_momentum(gradient, momentum, settings.momentum, settings.momentum_rule)
    return direction(gradient, updated, settings.momentum, settings.momentum_rule, settings.nesterov)


def transform(directions: Tensor, settings: MuonSettings, *, deterministic: bool) -> Tensor | Sequence[Tensor]:
    """Whole directions ``[matrices, rows, columns]`` to their updates of the same shapes. At the owner, not collective.

    ``deterministic`` takes one matrix after the other, so that its bits do not depend on what else its owner has; else one
    batched call does all of them.
    """
    if deterministic:
        return [_transformed(matrix, settings) for matrix in directions]
    return _transformed(directions, settings)


def _transformed(directions: Tensor, settings: MuonSettings) -> Tensor:
    updates = orthogonalize(directions, settings.recipe)
    if settings.stable_rank_floor is not None:
        updates = guarded(updates, directions, settings.stable_rank_floor)
    if settings.spectral_cap is not None:
        updates = capped(updates, settings.spectral_cap)
    return updates


def apply(
    parameter: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    update: Tensor,
    settings: UpdateSettings,
    *,
    num_rows: int,
    num_columns: int,
) -> None:
    """Commit a rectangle of a shard: its parameter and momentum, in place, from its part of the update.

    Decay is decoupled and takes the group's own rate: ``W <- (1 - lr wd) W - lr scale(m, n) U``. Cautious decay leaves out the
    elements that the update already takes away from zero: it decays where ``U W >= 0`` (L. Chen et al., Cautious weight decay,
    arXiv 2510.12402).

    Args:
        parameter, gradient, momentum, update: of one shape. Arithmetic is done in fp32 at least.
        num_rows, num_columns: the shape of the whole matrix, for the scale.
    """
    step_size = adjusted_lr(settings.lr, settings.scale, num_rows, num_columns)
    precise = torch.promote_types(parameter.dtype, torch.float32)
    weights = parameter.to(precise)
    if settings.weight_decay:
        kept = 1 - settings.lr * settings.weight_decay
        weights.mul_(torch.where(weights * update >= 0, kept, 1.0) if settings.cautious_decay else kept)
    weights.add_(update, alpha=-step_size)
    if weights is not parameter:
        parameter.copy_(weights)
    next_momentum(gradient, momentum, settings.momentum, settings.momentum_rule, out=momentum)
