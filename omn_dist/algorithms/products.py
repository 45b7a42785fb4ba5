"""Newton-Schulz in bf16 on CPU ranks at half the price of its symmetric products, to the bit.

A = X X^T and b A + c A A are symmetric, and exactly so as torch computes them: both halves sum the same products in the same order.
So a kernel (products.c) computes what lies below the diagonal and copies the rest. It serves CPUs with AVX512_BF16 and without AMX,
where torch's products sum in an order that is known but for one number: how much of the depth is summed at a time. That is tried
for each shape once in a process, with room for four iterates, and where no candidate gives torch's bits, torch multiplies.
"""

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from omn_dist.algorithms import kernels
from omn_dist.algorithms.coefficients import Coefficients
from omn_dist.algorithms.scratch import Scratch

_SMALLEST = 128
"""Short side from which a shape is tried: smaller products cost little, and too few numbers would tell two orders apart."""
_CHUNKS = (2**62, 1024, 512)
"""How much of the depth oneDNN sums at a time: everything, or so much; which one depends on the shape."""
_NUM_TRIED = 2**19
"""Elements that must agree. Of those of a wrong order 1 in 10,000 differs."""
_STRIP_COLUMNS = 48


class Chunks(ctypes.Structure):
    """How much of the depth is summed at a time, product by product."""

    _fields_ = [(name, ctypes.c_long) for name in ("first_gram", "gram", "square", "update")]


def chunks(iterate: Tensor) -> Chunks | None:
    """How the kernel takes ``[short, long]``, contiguous or the transpose of that; ``None`` where torch has to multiply."""
    if iterate.dtype != torch.bfloat16 or iterate.device.type != "cpu" or torch.get_num_threads() != 1:
        return None
    return _chunks(*iterate.shape[-2:], not iterate.is_contiguous())


def newton_schulz(
    start: Tensor, iterate: Tensor, end: Tensor, coefficients: Sequence[Coefficients], chunks: Chunks, scratch: Scratch
) -> None:
    """All steps from ``start`` over ``iterate`` to ``end``, contiguous bf16 ``[short, long]`` each, which may be one."""
    short, long = start.shape
    gram, polynomial = (scratch.take(name, (short, short), start.dtype, start.device) for name in ("gram", "polynomial"))
    strip = scratch.take("strip", (_STRIP_COLUMNS, long), start.dtype, start.device)
    kernels.library().omn_newton_schulz(
        short,
        long,
        len(coefficients),
        _numbers(coefficients),
        ctypes.byref(chunks),
        *(tensor.data_ptr() for tensor in (start, iterate, end, gram, polynomial, strip)),
    )
    increment_version((iterate, end, gram, polynomial))


@cache
def _numbers(coefficients: Sequence[Coefficients]) -> "ctypes.Array[ctypes.c_float]":
    numbers = [number for triple in coefficients for number in triple]
    return (ctypes.c_float * len(numbers))(*numbers)


@cache
def usable() -> bool:
    """Whether the kernel was built, and for a CPU such as this one."""
    library = kernels.library() if kernels.usable() else None
    return library is not None and hasattr(library, "omn_has_newton_schulz") and bool(library.omn_has_newton_schulz())


@cache
def _chunks(short: int, long: int, transposed: bool) -> Chunks | None:
    """Those with which the kernel has torch's bits on random matrices, found one product after the other."""
    if short < _SMALLEST or short % 2 or long % 2 or not usable():
        return None
    found = Chunks(*(_CHUNKS[0] for _ in _PRODUCTS))
    for name, agrees in _PRODUCTS.items():
        for chunk in _CHUNKS:
            setattr(found, name, chunk)
            if (chunk < long or chunk == _CHUNKS[0]) and all(
                agrees(matrix, found, transposed) for matrix in _matrices(short, long)
            ):
                break
        else:
            return None
    _give_back()
    return found


def _matrices(short: int, long: int) -> Iterator[Tensor]:
    """One after the other, with singular values up to one."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(-(-_NUM_TRIED // short**2)):
        matrix = torch.empty(short, long, dtype=torch.bfloat16).normal_(generator=generator)
        yield matrix.div_(short**0.5 + long**0.5)


def _give_back() -> None:
    """To the system what a trial took, which malloc would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _first_gram_agrees(matrix: Tensor, chunks: Chunks, transposed: bool) -> bool:
    given = matrix.mT.contiguous().mT if transposed else matrix
    return torch.equal(_step(matrix, _CUBIC, chunks)[0], torch.mm(given, given.mT))


def _gram_agrees(matrix: Tensor, chunks: Chunks, transposed: bool) -> bool:
    return _first_gram_agrees(matrix, Chunks(*(chunks.gram for _ in _PRODUCTS)), transposed=False)


def _square_agrees(matrix: Tensor, chunks: Chunks, transposed: bool) -> bool:
    (_, b, c), (gram, square, _) = _QUINTIC, _step(matrix, _QUINTIC, chunks)
    return torch.equal(square, torch.addmm(gram, gram, gram, beta=b, alpha=c))


def _update_agrees(matrix: Tensor, chunks: Chunks, transposed: bool) -> bool:
    given = matrix.mT.contiguous().mT if transposed else matrix
    for a, b, c in (_CUBIC, _QUINTIC):
        gram, square, update = _step(matrix, (a, b, c), chunks)
        factor, alpha = (square, 1.0) if c else (gram, b)
        if not all(torch.equal(update, torch.addmm(matrix, factor, x, beta=a, alpha=alpha)) for x in (matrix, given)):
            return False
    return True


_PRODUCTS = {"first_gram": _first_gram_agrees, "gram": _gram_agrees, "square": _square_agrees, "update": _update_agrees}
_CUBIC, _QUINTIC = (0.1, -0.7, 0.0), (0.1, -0.3, 1.7)
"""Steps whose sums have a small addend, so that it does not hide their last bits."""


def _step(matrix: Tensor, coefficients: Coefficients, chunks: Chunks) -> tuple[Tensor, Tensor, Tensor]:
    """A A^T, b A + c A A, and the iterate after one step."""
    scratch, end = Scratch(), torch.empty_like(matrix)
    newton_schulz(matrix, end, end, (coefficients,), chunks, scratch)
    gram, polynomial = (scratch.take(name, (len(matrix),) * 2, matrix.dtype, matrix.device) for name in ("gram", "polynomial"))
    return gram, polynomial, end
