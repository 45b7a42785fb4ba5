"""Forms of the Newton-Schulz iteration: the standard one, and one on the Gram matrix."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from omn_dist.algorithms.coefficients import Schedule
from omn_dist.algorithms.scratch import Scratch

Form = Literal["standard", "gram"]
FormChoice = Literal["standard", "gram", "auto"]

GRAM_FIRST_STRETCH, GRAM_STRETCH = 2, 3
"""Steps before the first restart and between later ones. Rounding of the Gram matrix grows by the
square of every slope: with ten steps and one restart in fp32, singular values reached 8.5 instead
of 1.0."""


def standard_flops(short: int, long: int, ns_steps: int, *, cubic: bool = False) -> int:
    """FLOPs of the standard form: ``k (4 s^2 l + 2 s^3)`` for k steps and sides s <= l.

    A step makes the Gram matrix, its square and one rectangular product. A cubic step needs no
    square.
    """
    return ns_steps * (4 * short * short * long + (0 if cubic else 2 * short**3))


def gram_flops(short: int, long: int, ns_steps: int) -> int:
    """FLOPs of the Gram form: ``8 s^2 l + 28 s^3`` for five steps, which have one restart.

    Each stretch between restarts takes two rectangular products (2 s^2 l each). Each step takes one
    square, and each step but the first of its stretch three more products on the short side: two
    for the next Gram matrix, one for the collected polynomial (2 s^3 each).
    """
    num_stretches = len(gram_stretches(ns_steps))
    return 4 * num_stretches * short * short * long + 2 * short**3 * (ns_steps + 3 * (ns_steps - num_stretches))


def gram_stretches(ns_steps: int) -> list[range]:
    """The steps between restarts of the Gram form.

    The first stretch is short, since the first slopes are the steepest.
    """
    starts = [0, *range(GRAM_FIRST_STRETCH, ns_steps, GRAM_STRETCH)]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], ns_steps], strict=True)]


def chosen_form(choice: FormChoice, schedule: Schedule, short: int, long: int) -> Form:
    """The form that runs for a shape.

    ``auto`` takes the form with fewer FLOPs, and the standard form when both are equal.
    """
    if choice != "auto":
        return choice
    standard = standard_flops(short, long, schedule.ns_steps, cubic=schedule.is_cubic)
    return "gram" if gram_flops(short, long, schedule.ns_steps) < standard else "standard"


ITERATES = ("iterate", "other iterate")
"""Names of the two iterates in working memory; an input may be in the first one."""

_SMALLEST_BLOCKED = 3600
"""Elements from which torch transposes one matrix on a CPU block by block."""


def copy_transposed(target: Tensor, source: Tensor) -> Tensor:
    """``target <- source^T`` of each matrix; returns the target.

    On a CPU it goes matrix by matrix, and copies two-byte elements as integers: that took two
    thirds of the time with bf16 matrices of 1368 x 512.
    """
    to, of = target, source.mT
    if to.dtype == of.dtype and to.dtype.itemsize == 2:
        to, of = to.view(torch.int16), of.view(torch.int16)
    if to.ndim == 3 and to.device.type == "cpu" and to[0].numel() >= _SMALLEST_BLOCKED:
        for one, other in zip(to, of, strict=True):
            one.copy_(other)
    else:
        to.copy_(of)
    return target


def standard_form(
    iterate: Tensor,
    schedule: Schedule,
    scratch: Scratch | None = None,
    out: Tensor | None = None,
    *,
    transpose: Callable[[Tensor, Tensor], Tensor] = copy_transposed,
) -> Tensor:
    """All steps ``X <- a X + (b A + c A A) X`` with ``A = X X^T``.

    Args:
        iterate: ``[short, long]`` or ``[batch, short, long]``, contiguous or the transpose of that;
            not changed, unless it is in working memory.
        schedule: the coefficients of each step.
        scratch: working memory. Nothing is allocated but what it lacks.
        out: where the result goes, contiguous; without it the result is in working memory.
        transpose: :func:`copy_transposed`, or a faster function that does the same.

    Returns:
        The last iterate, of the shape and dtype of the first.

    Source: K. Jordan et al., Muon (2024).
    """
    scratch = Scratch() if scratch is None else scratch
    shape, dtype, device = iterate.shape, iterate.dtype, iterate.device
    multiply, combine = (torch.mm, torch.addmm) if iterate.ndim == 2 else (torch.bmm, torch.baddbmm)
    gram, polynomial = (scratch.take(name, (*shape[:-1], shape[-2]), dtype, device) for name in ("gram", "polynomial"))
    iterates = [scratch.take(name, shape, dtype, device) for name in ITERATES]
    for step, (a, b, c) in enumerate(schedule.coefficients):
        target = out if step == schedule.ns_steps - 1 and out is not None else iterates[(step + 1) % 2]
        multiply(iterate, iterate.mT, out=gram)
        factor, beta = gram, b
        if c != 0:
            factor, beta = combine(gram, gram, gram, beta=b, alpha=c, out=polynomial), 1
        addend = iterate
        if not iterate.is_contiguous():
            addend = transpose(target, iterate.mT)
        combine(addend, factor, iterate, beta=a, alpha=beta, out=target)
        iterate = target
    return iterate


def gram_form(iterate: Tensor, schedule: Schedule) -> Tensor:
    """The same polynomial, with two rectangular products a stretch instead of two a step.

    With ``R = X X^T``, a step multiplies X by ``P = a I + b R + c R R``. P commutes with R, so the
    next Gram matrix is ``P R P``. A stretch collects ``Q = P_k ... P_1`` on the short side and
    multiplies X by it once. Then R is computed from X again (a restart), since the rounding of R
    grows by the square of every slope.

    Args:
        iterate: ``[short, long]`` or ``[batch, short, long]``, in fp32; not changed.
        schedule: the coefficients of each step.

    Source: the expansion in the appendix of the Polar Express (arXiv 2505.16932).
    """
    product = torch.addmm if iterate.ndim == 2 else torch.baddbmm
    for stretch in gram_stretches(schedule.ns_steps):
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


class IterationKernels:
    """The operations of an orthogonalisation that may have faster implementations, here with torch.

    Subclasses with the same results are in :mod:`omn_dist.kernels`.
    """

    def newton_schulz(self, iterate: Tensor, schedule: Schedule, scratch: Scratch, out: Tensor | None = None) -> Tensor:
        """:func:`standard_form`."""
        return standard_form(iterate, schedule, scratch, out, transpose=self.copy_transposed)

    def copy_transposed(self, target: Tensor, source: Tensor) -> Tensor:
        """:func:`copy_transposed`."""
        return copy_transposed(target, source)


TORCH_ITERATION = IterationKernels()
