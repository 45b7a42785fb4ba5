"""AdamW on lists of local shards, by torch's own function.

Source: I. Loshchilov and F. Hutter, Decoupled weight decay regularization, arXiv 1711.05101 (2019).
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWCoefficients:
    """The numbers of one group at one step."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class AdamWShards(NamedTuple):
    """Local shards, plain and on one device; the tensors at one index have one shape and dtype."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    first_moments: list[Tensor]
    second_moments: list[Tensor]
    steps: list[Tensor]
    """fp32 scalars: how many steps each shard has taken."""


def adamw(shards: AdamWShards, coefficients: AdamWCoefficients, *, batch_invariant: bool) -> None:
    """One step, in place; gradients are not changed.

    Args:
        shards: parameters, moments and step numbers are updated.
        coefficients: of all shards.
        batch_invariant: an element gets the same bits wherever its shard was cut. On a CPU torch's
            fused kernel does not do that: its vector body and its scalar tail round differently
            (torch 2.13, up to one in two odd cuts). So it runs there only without
            ``batch_invariant``, else torch's loop over tensors. On CUDA torch's fused kernel runs
            either way.

    Not collective.
    """
    if not shards.parameters:
        return
    torch_adamw(
        shards.parameters,
        shards.gradients,
        shards.first_moments,
        shards.second_moments,
        [],
        shards.steps,
        foreach=False,
        fused=shards.parameters[0].is_cuda or not batch_invariant,
        amsgrad=False,
        beta1=coefficients.betas[0],
        beta2=coefficients.betas[1],
        lr=coefficients.lr,
        weight_decay=coefficients.weight_decay,
        eps=coefficients.eps,
        maximize=False,
    )
