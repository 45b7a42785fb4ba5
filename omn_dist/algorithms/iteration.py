"""The two forms of the Newton-Schulz iteration: the standard one, and the one on the Gram matrix of the short side."""

from typing import Literal

import torch
from torch import Tensor

from omn_dist.algorithms import kernels
from omn_dist.algorithms.coefficients import Schedule
from omn_dist.algorithms.scratch import Scratch

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


ITERATES = ("even iterate", "odd iterate")
"""Working memory of the two iterates; an input may be in the odd one."""


def standard_form(iterate: Tensor, schedule: Schedule, scratch: Scratch | None = None, out: Tensor | None = None) -> Tensor:
    """All steps on ``[short, long]`` or ``[batch, short, long]``: ``X <- a X + (b A + c A A) X`` with ``A = X X^T``.

    Nothing is allocated but what ``scratch`` does not have yet.

    Args:
        iterate: contiguous or the transpose of that; not changed, unless it is in working memory.
        schedule: the coefficients of each step.
        scratch: working memory.
        out: where the result goes, contiguous; else it is in working memory.
    """
    scratch = Scratch() if scratch is None else scratch
    multiply, combine = (torch.mm, torch.addmm) if iterate.ndim == 2 else (torch.bmm, torch.baddbmm)
    shape, dtype, device = iterate.shape, iterate.dtype, iterate.device
    gram, polynomial = (scratch.take(name, (*shape[:-1], shape[-2]), dtype, device) for name in ("gram", "polynomial"))
    iterates = [scratch.take(name, shape, dtype, device) for name in ITERATES]
    for step, (a, b, c) in enumerate(schedule.coefficients):
        target = out if step == schedule.num_steps - 1 and out is not None else iterates[step % 2]
        multiply(iterate, iterate.mT, out=gram)
        factor, beta = gram, b
        if c != 0:
            factor, beta = combine(gram, gram, gram, beta=b, alpha=c, out=polynomial), 1
        addend = iterate
        if not iterate.is_contiguous():
            addend = copy_transposed(target, iterate.mT)
        combine(addend, factor, iterate, beta=a, alpha=beta, out=target)
        iterate = target
    return iterate


_SMALLEST_BLOCKED = 3600
"""Elements from which torch transposes one matrix on CPU block by block."""


def copy_transposed(target: Tensor, source: Tensor) -> Tensor:
    """``target <- source^T`` of each matrix; returns the target.

    On CPU matrix by matrix, and two bytes as an integer: two thirds of the time, measured with bf16 matrices of 1368 x 512; by a
    kernel of our own in a third of that.
    """
    if kernels.takes_transposed(target, source):
        kernels.transpose(target, source)
        return target
    to, of = target, source.mT
    if to.dtype == of.dtype and to.dtype.itemsize == 2:
        to, of = to.view(torch.int16), of.view(torch.int16)
    if to.ndim == 3 and to.device.type == "cpu" and to[0].numel() >= _SMALLEST_BLOCKED:
        for one, other in zip(to, of, strict=True):
            one.copy_(other)
    else:
        to.copy_(of)
    return target


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
