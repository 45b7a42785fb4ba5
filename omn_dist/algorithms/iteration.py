"""The two forms of the Newton-Schulz iteration: the standard one, and the one on the Gram matrix of the short side."""

from typing import Literal

import torch
from torch import Tensor

from omn_dist.algorithms.coefficients import Schedule

Form = Literal["standard", "gram"]
FormChoice = Literal["standard", "gram", "auto"]

GRAM_FIRST_STRETCH, GRAM_STRETCH = 2, 3
"""Steps before the first restart and between later ones. Rounding of the Gram matrix grows by the square of every slope: with
ten steps and one restart in fp32 singular values reached 8.5 instead of 1.0."""


def standard_flops(short: int, long: int, num_steps: int, *, cubic: bool = False) -> int:
    """``k (4 s^2 l + 2 s^3)``: Gram matrix, its square and one rectangular product a step; a cubic step needs no square."""
    return num_steps * (4 * short * short * long + (0 if cubic else 2 * short**3))


def gram_flops(short: int, long: int, num_steps: int) -> int:
    """FLOPs of the Gram form: ``8 s^2 l + 28 s^3`` for five steps with one restart.

    Each stretch between restarts takes two rectangular products (2 s^2 l each); each step one square, and each but the
    first of its stretch four more: two for the Gram matrix of the step before it, one for the collected polynomial. Counted
    here: 2 s^3 a product.
    """
    num_stretches = len(gram_stretches(num_steps))
    return 4 * num_stretches * short * short * long + 2 * short**3 * (num_steps + 3 * (num_steps - num_stretches))


def gram_stretches(num_steps: int) -> list[range]:
    """The steps between restarts of the Gram form: the first is short, since the first slopes are the steepest."""
    starts = [0, *range(GRAM_FIRST_STRETCH, num_steps, GRAM_STRETCH)]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], num_steps], strict=True)]


def chosen_form(choice: FormChoice, schedule: Schedule, short: int, long: int) -> Form:
    """The form that runs for a shape; ``auto`` takes the one with fewer FLOPs, the standard form when they are equal."""
    if choice != "auto":
        return choice
    standard = standard_flops(short, long, schedule.num_steps, cubic=schedule.is_cubic)
    return "gram" if gram_flops(short, long, schedule.num_steps) < standard else "standard"


def standard_form(iterate: Tensor, schedule: Schedule) -> Tensor:
    """All steps on ``[short, long]`` or ``[batch, short, long]``: ``X <- a X + (b A + c A A) X`` with ``A = X X^T``."""
    product = torch.addmm if iterate.ndim == 2 else torch.baddbmm
    for a, b, c in schedule.coefficients:
        gram = iterate @ iterate.mT
        if c == 0:
            iterate = product(iterate, gram, iterate, beta=a, alpha=b)
            continue
        polynomial = product(gram, gram, gram, beta=b, alpha=c)
        iterate = product(iterate, polynomial, iterate, beta=a)
    return iterate


def gram_form(iterate: Tensor, schedule: Schedule) -> Tensor:
    """The same polynomial with two rectangular products a stretch instead of two a step.

    With R = X X^T, a step multiplies X by P = a I + b R + c R R, which commutes with R: the next Gram matrix is P R P. So a
    stretch collects Q = P_k ... P_1 on the short side and multiplies X once. After a stretch R is computed anew from X (a
    restart), since the rounding of R grows by the square of every slope.

    Source: the expansion in the appendix of the Polar Express (arXiv 2505.16932).
    """
    product = torch.addmm if iterate.ndim == 2 else torch.baddbmm
    for stretch in gram_stretches(schedule.num_steps):
        gram = iterate @ iterate.mT
        collected: Tensor | None = None
        for step in stretch:
            a, b, c = schedule.coefficients[step]
            polynomial = product(gram, gram, gram, beta=b, alpha=c)
            polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
            collected = polynomial if collected is None else polynomial @ collected
            if step + 1 < stretch.stop:
                gram = polynomial @ gram @ polynomial
        assert collected is not None, "a stretch has at least one step"
        iterate = collected @ iterate
    return iterate
