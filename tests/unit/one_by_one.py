"""The formulas of a step on one tensor at a time: a reference for those on lists."""

import torch
from torch import Tensor

from omn_dist.algorithms.momentum import MomentumRule


def next_momentum(gradient: Tensor, momentum: Tensor, coefficient: float, rule: MomentumRule) -> Tensor:
    if rule == "sum":
        return torch.mul(momentum, coefficient).add_(gradient)
    return torch.lerp(momentum, gradient.to(momentum.dtype), 1 - coefficient)


def direction(gradient: Tensor, updated: Tensor, coefficient: float, rule: MomentumRule, nesterov: bool) -> Tensor:
    if not nesterov:
        return updated
    gradient = gradient.to(updated.dtype)
    if rule == "sum":
        if updated.dtype != torch.float32:
            return gradient.float().add(updated.float(), alpha=coefficient).to(updated.dtype)
        return torch.add(gradient, updated, alpha=coefficient)
    return torch.lerp(gradient, updated, coefficient)


def write_direction(
    gradient: Tensor, momentum: Tensor, out: Tensor, coefficient: float, rule: MomentumRule, nesterov: bool, *, commit: bool
) -> None:
    updated = next_momentum(gradient, momentum, coefficient, rule)
    out.copy_(direction(gradient, updated, coefficient, rule, nesterov))
    if commit:
        momentum.copy_(updated)


def apply_update(parameter: Tensor, update: Tensor, kept: float, step_size: float, *, cautious: bool) -> None:
    weights = parameter.to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
    if kept != 1:
        weights.mul_(torch.where(weights * update >= 0, kept, 1.0) if cautious else kept)
    parameter.copy_(weights.add_(update, alpha=-step_size))
