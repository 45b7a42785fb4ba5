"""AdamW on local shards, with the bits of torch's own kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw as _torch_adamw

from omn_dist.algorithms import kernels


def adamw_update(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first_moments: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
    deterministic: bool,
) -> None:
    """One AdamW step on plain local tensors, in place.

    Args:
        parameters, gradients, first_moments, second_moments: local shards of equal shapes and one device.
        steps: fp32 scalars, one a parameter; each is raised by one.
        deterministic: the bits of a shard are those of the whole. CUDA shards take torch's fused kernel either way. On CPU its
            vector body and its scalar tail round differently (measured with torch 2.13: up to 1 in 2 of odd cuts differed), so
            that only ``False`` takes it there; else the bits are those of torch's loop over tensors.

    Not collective. Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019).
    """
    taken, left = [], []
    for index, tensors in enumerate(zip(parameters, gradients, first_moments, second_moments, strict=True)):
        if deterministic and kernels.takes_adamw(*tensors):
            taken.append((tensors, steps[index]))
        else:
            left.append(index)
    if taken:
        torch._foreach_add_([step for _, step in taken], 1)
        by_count: dict[float, list[tuple[Tensor, Tensor, Tensor, Tensor]]] = {}
        for (tensors, _), count in zip(taken, torch.stack([step for _, step in taken]).tolist(), strict=True):
            by_count.setdefault(count, []).append(tensors)
        for count, shards in by_count.items():
            kernels.adamw(shards, lr=lr, betas=betas, eps=epsilon, weight_decay=weight_decay, step=count)
    if not left:
        return

    def those_left(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[index] for index in left]

    _torch_adamw(
        those_left(parameters),
        those_left(gradients),
        those_left(first_moments),
        those_left(second_moments),
        [],
        those_left(steps),
        foreach=False,
        fused=parameters[0].is_cuda or not deterministic,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=epsilon,
        maximize=False,
    )
