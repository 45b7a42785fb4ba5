"""The two momentum rules, and the directions that they give.

Shard-local and elementwise: a shard gets the same bits as the whole tensor. Both functions take
lists, see :mod:`~omn_dist.algorithms.lists`.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from omn_dist.algorithms.lists import blocks, copies, in_dtype, widened
from omn_dist.settings import unknown_name

MomentumRule = Literal["sum", "ema"]
MOMENTUM_RULES: tuple[str, ...] = get_args(MomentumRule)


def update_momenta(gradients: list[Tensor], momenta: list[Tensor], coefficient: float, rule: MomentumRule) -> None:
    """The momenta after these gradients, in place.

    With momentum B, gradient G and coefficient mu:

    - ``sum``: ``B <- mu B + G`` (Muon as first published, OMN);
    - ``ema``: ``B <- B + (1 - mu)(G - B)`` (``torch.optim.Muon``).

    Args:
        gradients, momenta: ``[rows, columns]``, a gradient and its momentum at one index; each list
            has one floating dtype. Gradients are not changed.
        coefficient: mu.
        rule: a name of ``MOMENTUM_RULES``.

    Raises:
        ValueError: an unknown rule.

    Not collective.
    """
    for of_gradients, of_momenta in blocks(gradients, momenta):
        _update(of_gradients, of_momenta, coefficient, rule)


def write_directions(
    gradients: list[Tensor],
    momenta: list[Tensor],
    out: list[Tensor],
    coefficient: float,
    rule: MomentumRule,
    nesterov: bool,
    *,
    commit: bool,
) -> None:
    """The matrices handed to Newton-Schulz, from gradients and momenta.

    A direction is the momentum B after this gradient G or, with Nesterov, ``G + mu B`` under
    ``sum`` and ``G + mu (B - G)`` under ``ema``.

    Args:
        gradients, momenta: as in :func:`update_momenta`.
        out: where the directions go, in the communication dtype.
        coefficient, rule: as in :func:`update_momenta`.
        nesterov: whether the direction looks one step ahead.
        commit: whether the momenta become those after this step; else they are not changed.

    Raises:
        ValueError: an unknown rule.

    Not collective.
    """
    for of_gradients, of_momenta, of_out in blocks(gradients, momenta, out):
        dtype = of_momenta[0].dtype
        wide = widened(of_gradients, dtype)
        updated = of_momenta if commit else copies(of_momenta, dtype)
        _update(wide, updated, coefficient, rule)
        torch._foreach_copy_(of_out, _look_ahead(wide, updated, coefficient, rule) if nesterov else updated)


def _update(gradients: list[Tensor], momenta: list[Tensor], coefficient: float, rule: MomentumRule) -> None:
    dtype = momenta[0].dtype
    if rule == "sum":
        if dtype.itemsize < 4:
            # In place torch may round the coefficient to the dtype of the tensors.
            torch._foreach_copy_(momenta, torch._foreach_mul(momenta, coefficient))
        else:
            torch._foreach_mul_(momenta, coefficient)
        # A gradient wider than the momentum is not rounded before the sum, as in torch's addition.
        torch._foreach_add_(momenta, widened(gradients, dtype))
    elif rule == "ema":
        torch._foreach_lerp_(momenta, in_dtype(gradients, dtype), 1 - coefficient)
    else:
        raise ValueError(unknown_name("momentum rule", rule, MOMENTUM_RULES))


def _look_ahead(gradients: list[Tensor], updated: list[Tensor], coefficient: float, rule: MomentumRule) -> list[Tensor]:
    """Nesterov's directions, in the dtype of the updated momenta."""
    dtype = updated[0].dtype
    gradients = in_dtype(gradients, dtype)
    if rule == "ema":
        return list(torch._foreach_lerp(gradients, updated, coefficient))
    # In half precision the vector body and the scalar tail of this operation round differently.
    # Done in fp32, a shard has the bits of the whole.
    single = in_dtype(gradients, torch.float32), in_dtype(updated, torch.float32)
    return in_dtype(list(torch._foreach_add(*single, alpha=coefficient)), dtype)
