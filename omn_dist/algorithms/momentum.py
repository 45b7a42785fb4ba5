"""The two momentum conventions: shard-local, elementwise, the same bits on a shard as on the whole tensor."""

from typing import Literal, get_args

import torch
from torch import Tensor

from omn_dist.settings import unknown_name

MomentumRule = Literal["sum", "ema"]
MOMENTUM_RULES: tuple[str, ...] = get_args(MomentumRule)


def next_momentum(gradient: Tensor, momentum: Tensor, coefficient: float, rule: MomentumRule, out: Tensor | None = None) -> Tensor:
    """The momentum buffer after this gradient, in the dtype of ``momentum``; a new tensor, or ``out`` (which may be it).

    ``sum``: ``mu B + G`` (Muon as first published, OMN). ``ema``: ``B + (1 - mu)(G - B)`` (``torch.optim.Muon``).
    """
    if rule == "sum":
        return torch.mul(momentum, coefficient, out=out).add_(gradient)
    if rule == "ema":
        return torch.lerp(momentum, gradient.to(momentum.dtype), 1 - coefficient, out=out)
    raise ValueError(unknown_name("momentum rule", rule, MOMENTUM_RULES))


def direction(
    gradient: Tensor, updated: Tensor, coefficient: float, rule: MomentumRule, nesterov: bool, out: Tensor | None = None
) -> Tensor:
    """The matrix handed to Newton-Schulz, from the gradient and the *updated* momentum.

    Nesterov: ``G + mu B`` under ``sum``, ``G + mu (B - G)`` under ``ema``; without it the momentum itself. ``out`` may be
    ``updated``.
    """
    if not nesterov:
        return updated
    gradient = gradient.to(updated.dtype)
    if rule == "sum":
        if updated.dtype != torch.float32:
            # In half precision the vector body and the scalar tail of this kernel round differently, so that a shard would
            # not have the bits of the whole.
            return gradient.float().add(updated.float(), alpha=coefficient).to(updated.dtype)
        return torch.add(gradient, updated, alpha=coefficient, out=out)
    return torch.lerp(gradient, updated, coefficient, out=out)
