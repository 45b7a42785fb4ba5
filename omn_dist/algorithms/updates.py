"""How a parameter moves by its update: decoupled weight decay, plain or cautious, then the step.

Shard-local and elementwise, on lists, see :mod:`~omn_dist.algorithms.lists`.
"""

from functools import partial

import torch
from torch import Tensor

from omn_dist.algorithms.lists import blocks, in_dtype, in_one_call


def apply_updates(parameters: list[Tensor], updates: list[Tensor], kept: float, step_size: float, *, cautious: bool) -> None:
    """``W <- kept W - step_size U`` for each parameter W and its update U, in place.

    Cautious decay leaves out the elements that the update already moves towards zero: it decays
    where ``U W >= 0``. Source: L. Chen et al., Cautious weight decay, arXiv 2510.12402.

    Args:
        parameters, updates: ``[rows, columns]``, a parameter and its update at one index; each list
            has one floating dtype. Arithmetic is done in fp32 at least, and rounded once.
        kept: what decay keeps of a weight, ``1 - lr weight_decay``.
        step_size: the learning rate times the scale of the matrix's shape.
        cautious: whether decay is cautious.

    Not collective.
    """
    for of_parameters, of_updates in blocks(parameters, updates):
        precise = torch.promote_types(of_parameters[0].dtype, torch.float32)
        weights, wide = in_dtype(of_parameters, precise), in_dtype(of_updates, precise)
        if kept != 1:
            if cautious:
                products = list(torch._foreach_mul(weights, wide))
                torch._foreach_mul_(weights, in_one_call(partial(cautious_factors, kept=kept), products))
            else:
                torch._foreach_mul_(weights, kept)
        torch._foreach_add_(weights, wide, alpha=-step_size)
        if weights is not of_parameters:
            torch._foreach_copy_(of_parameters, weights)


def cautious_factors(products: Tensor, kept: float) -> Tensor:
    """What cautious decay keeps of each weight, given weights times updates; of any shape."""
    return torch.where(products >= 0, kept, 1.0)
