"""Forms of the Newton-Schulz iteration: standard, with symmetric products from the diagonal down, and on the Gram matrix."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from omn_dist.algorithms import kernels, products
from omn_dist.algorithms.coefficients import Schedule
from omn_dist.algorithms.scratch import Scratch

Form = Literal["standard", "symmetric", "gram"]
FormChoice = Literal["standard", "symmetric", "gram", "auto"]

GRAM_FIRST_STRETCH, GRAM_STRETCH = 2, 3
"""Steps before the first restart and between later ones. Rounding of the Gram matrix grows by the square of every slope: with
ten steps and one restart in fp32 singular values reached 8.5 instead of 1.0."""

_NUM_STRIPS, _STRIP_MULTIPLE = 4, 16
"""Strips of a symmetric product, and what their width is a multiple of: rows of an AMX tile, fp32 numbers of an AVX-512 register.
Measured on one CPU core: six strips of 171 take up to 1.2 times as long as four of 256; eight save 0.03 at most, with twice the
calls."""
_SYMMETRIC_FROM = {4: (256, 2**18), 2: (512, 3 * 2**19)}
"""By bytes of an element: short side and elements of a matrix from which the symmetric form was faster on one CPU core. Below,
small products and transposed copies cost more than what is left out: in fp32 256 x 512 took 1.01 of the time, 256 x 1024 0.96; in
bf16, whose products are six times as fast, 1024 x 1024 took 1.04, 1280 x 1280 0.91 to 0.96, 384 x 4096 1.03, 512 x 4096 0.87."""


def standard_flops(short: int, long: int, num_steps: int, *, cubic: bool = False) -> int:
    """``k (4 s^2 l + 2 s^3)``: Gram matrix, its square and one rectangular product a step; a cubic step needs no square."""
    return num_steps * (4 * short * short * long + (0 if cubic else 2 * short**3))


def symmetric_flops(short: int, long: int, num_steps: int, *, cubic: bool = False) -> int:
    """FLOPs of the symmetric form: the strips of the Gram matrix and of its square, and the whole rectangular product.

    ``k (3.25 s^2 l + 1.25 s^3)`` where the short side is a multiple of 64.
    """
    computed = strip_elements(short)
    return 2 * num_steps * (computed * long + (0 if cubic else computed * short) + short * short * long)


def strips(short: int) -> list[tuple[int, int]]:
    """First and last column (exclusive) of the strips of a symmetric product; a strip is computed from the diagonal down."""
    width = -(-short // (_NUM_STRIPS * _STRIP_MULTIPLE)) * _STRIP_MULTIPLE
    return [(start, min(start + width, short)) for start in range(0, short, width)]


def strip_elements(short: int) -> int:
    """Elements of a symmetric product that are computed; the others are copies of them."""
    return sum((short - start) * (stop - start) for start, stop in strips(short))


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


def chosen_form(choice: FormChoice, schedule: Schedule, dtype: torch.dtype, short: int, long: int) -> Form:
    """The form that runs for a shape: ``symmetric`` only where it is faster, ``auto`` the standard or the Gram form.

    ``auto`` takes the one with fewer FLOPs, the standard form when they are equal. Time follows the FLOPs of these two; that of
    the symmetric form does not, so it is taken by name alone.
    """
    if choice == "symmetric":
        smallest_short, smallest_elements = _SYMMETRIC_FROM[min(dtype.itemsize, 4)]
        return choice if short >= smallest_short and short * long >= smallest_elements else "standard"
    if choice != "auto":
        return choice
    standard = standard_flops(short, long, schedule.num_steps, cubic=schedule.is_cubic)
    return "gram" if gram_flops(short, long, schedule.num_steps) < standard else "standard"


ITERATES = ("iterate", "other iterate")
"""Working memory of the two iterates; an input may be in the first one."""


def standard_form(
    iterate: Tensor,
    schedule: Schedule,
    scratch: Scratch | None = None,
    out: Tensor | None = None,
    *,
    symmetric: bool = False,
) -> Tensor:
    """All steps on ``[short, long]`` or ``[batch, short, long]``: ``X <- a X + (b A + c A A) X`` with ``A = X X^T``.

    In bf16 on CPU by a kernel of our own where that has torch's bits, see products.py. Nothing is allocated but what ``scratch``
    does not have yet.

    Args:
        iterate: contiguous or the transpose of that; not changed, unless it is in working memory.
        schedule: the coefficients of each step.
        scratch: working memory.
        out: where the result goes, contiguous; else it is in working memory.
        symmetric: the symmetric form: of A and of b A + c A A only what lies on strips from the diagonal down is computed.
    """
    scratch = Scratch() if scratch is None else scratch
    shape, dtype, device = iterate.shape, iterate.dtype, iterate.device
    if not symmetric and (chunks := products.chunks(iterate)) is not None:
        work = scratch.take(ITERATES[0], shape, dtype, device)
        start = iterate if iterate.is_contiguous() else copy_transposed(work, iterate.mT)
        end = work if out is None else out
        for one, at_work, result in zip(*(part.view(-1, *shape[-2:]) for part in (start, work, end)), strict=True):
            products.newton_schulz(one, at_work, result, schedule.coefficients, chunks, scratch)
        return end
    multiply, combine = (torch.mm, torch.addmm) if iterate.ndim == 2 else (torch.bmm, torch.baddbmm)
    multiply_square, combine_square = multiply, combine
    if symmetric:
        multiply_square, combine_square = (partial(_symmetric_product, product) for product in (torch.mm, torch.addmm))
    gram, polynomial = (scratch.take(name, (*shape[:-1], shape[-2]), dtype, device) for name in ("gram", "polynomial"))
    iterates = [scratch.take(name, shape, dtype, device) for name in ITERATES]
    for step, (a, b, c) in enumerate(schedule.coefficients):
        target = out if step == schedule.num_steps - 1 and out is not None else iterates[(step + 1) % 2]
        multiply_square(iterate, iterate.mT, out=gram)
        factor, beta = gram, b
        if c != 0:
            factor, beta = combine_square(gram, gram, gram, beta=b, alpha=c, out=polynomial), 1
        addend = iterate
        if not iterate.is_contiguous():
            addend = copy_transposed(target, iterate.mT)
        combine(addend, factor, iterate, beta=a, alpha=beta, out=target)
        iterate = target
    return iterate


def _symmetric_product(product: Callable[..., Tensor], *operands: Tensor, out: Tensor, **scales: float) -> Tensor:
    """``torch.mm`` or ``torch.addmm`` into ``out``, for an addend and a result that are symmetric, or for a batch of them.

    Strips of columns, not of rows: each brings its own part of the right factor to the product, and no part of another's. Copies go
    by rows of what is computed, whose elements stay in a core's cache. Batches go matrix by matrix: batched products into parts of
    matrices took 1.2 to 1.5 times as long as standard ones in bf16 on CPU.
    """
    if out.ndim == 3:
        for one, *parts in zip(out, *operands, strict=True):
            _symmetric_product(product, *parts, out=one, **scales)
        return out
    *addend, left, right = operands
    cuts = strips(len(out))
    for start, stop in cuts:
        strip = [part[start:, start:stop] for part in addend]
        product(*strip, left[start:], right[:, start:stop], out=out[start:, start:stop], **scales)
    for start, stop in cuts[1:]:
        copy_transposed(out[:start, start:stop], out[start:stop, :start])
    return out


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
