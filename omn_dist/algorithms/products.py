"""Newton-Schulz in bf16 on CPU ranks at half the price of its symmetric products, to the bit.

A = X X^T and b A + c A A are symmetric, and exactly so as torch computes them: both halves sum the same products in the same order.
So a kernel (products.c) computes what lies below the diagonal and copies the rest. It serves CPUs with AVX512_BF16 and without AMX,
where torch's products sum in an order that is known but for one number: how much of the depth is summed at a time. That is tried
for each shape once in a process, with room for six iterates, and where no candidate gives torch's bits, torch multiplies.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from omn_dist.algorithms import kernels
from omn_dist.algorithms.coefficients import Coefficients
from omn_dist.algorithms.scratch import Scratch

_SMALLEST = 128
"""Short side from which a shape is tried: smaller products cost little."""
_CHUNKS = (2**62, 1024, 512)
"""How much of the depth oneDNN sums at a time: everything, or so much; which one depends on the shape."""
_STRIP_COLUMNS = 48


class Chunks(ctypes.Structure):
    """How much of the depth is summed at a time, product by product."""

    _fields_ = [(name, ctypes.c_long) for name in ("first_gram", "gram", "square", "update")]


def chunks(iterate: Tensor) -> Chunks | None:
    """How the kernel takes ``[short, long]``, contiguous or the transpose of that; ``None`` where torch has to multiply."""
    if iterate.dtype != torch.bfloat16 or not kernels.in_memory(iterate) or torch.get_num_threads() != 1:
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
    if short < _SMALLEST or short % 2 or long % 2 or not usable():
        return None
    found = _tried(short, long, transposed)
    _give_back()
    return found


def _give_back() -> None:
    """To the system what a trial took, which malloc would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@kernels.torch_as_it_starts()
def _tried(short: int, long: int, transposed: bool) -> Chunks | None:
    """Those with which the kernel has torch's bits, found one product after the other."""
    generator = torch.Generator().manual_seed(0)

    def layouts(matrix: Tensor) -> list[Tensor]:
        """The matrix as the first step and as the others find it."""
        return [matrix.mT.contiguous().mT, matrix] if transposed else [matrix]

    def of_grams() -> list[int | None]:
        matrix, other = _cancelling(short, short, long, generator)
        matrix[::2] = other[::2]
        return [_chunk(partial(_product, matrix, None), [torch.mm(given, given.mT)], long) for given in layouts(matrix)]

    def of_factor(columns: int, alpha: float, beta: float) -> int | None:
        left, right = _cancelling(short, columns, short, generator)
        right, zeros = right.mT.contiguous(), torch.zeros(short, columns, dtype=torch.bfloat16)
        expected = [torch.addmm(zeros, left, given, beta=beta, alpha=alpha) for given in layouts(right)]
        return _chunk(partial(_product, left, right, addend=zeros, alpha=alpha, beta=beta), expected, short)

    (a, b, c), grams = _QUINTIC, of_grams()
    found = (grams[0], grams[-1], of_factor(short, c, b), of_factor(long, 1.0, a))
    if None in found:
        return None
    chunks = Chunks(*found)
    # The rest, with numbers as they are in a first step: singular values up to one.
    matrix = layouts(_random(short, long, generator).div_(short**0.5 + long**0.5))[0]
    return chunks if all(_step_agrees(matrix, coefficients, chunks) for coefficients in (_CUBIC, _QUINTIC)) else None


_CUBIC, _QUINTIC = (1.5, -0.5, 0.0), (3.4445, -4.775, 2.0315)


def _random(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(generator=generator)


def _cancelling(rows: int, columns: int, depth: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``[rows, depth]`` and ``[columns, depth]`` whose scalar products are zero but for rounding, which shows the order of sums.

    Every pair of terms has its opposite somewhere else in the depth, and one term of a pair is 2**20 times the other, so that no
    sum of two is exact. (Of random numbers one result in 10,000 would show the order, and hardly one how the last pair of 514 is
    summed.)
    """
    rest, half = depth % 4, depth // 4 * 2
    pairs = rest + 2 * torch.randperm(half, generator=generator)
    order = torch.cat((torch.arange(rest), torch.stack((pairs, pairs + 1), 1).flatten()))
    factors = []
    for num_rows, sign in ((rows, 1), (columns, -1)):
        part = _random(num_rows, half, generator)
        part[:, 1::2] *= 2**10
        factors.append(torch.cat((torch.zeros(num_rows, rest, dtype=part.dtype), part, sign * part), 1)[:, order])
    return factors[0], factors[1]


def _chunk(product: Callable[[int], Tensor], expected: list[Tensor], depth: int) -> int | None:
    """The first that gives the expected bits, which are the same for all layouts."""
    chunks = (chunk for chunk in _CHUNKS if chunk < depth or chunk == _CHUNKS[0])
    return next((chunk for chunk in chunks if all(torch.equal(product(chunk), found) for found in expected)), None)


def _product(
    left: Tensor,
    right: Tensor | None,
    chunk: int,
    *,
    addend: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Tensor:
    """``alpha left right + beta addend``; without ``right`` the symmetric product of ``left`` and its transpose."""
    (num_rows, depth), num_columns = left.shape, len(left) if right is None else right.size(1)
    out, strip = left.new_empty(num_rows, num_columns), left.new_empty(_STRIP_COLUMNS, depth)
    kernels.library().omn_product(
        num_rows,
        num_columns,
        depth,
        left.data_ptr(),
        (left if right is None else right).data_ptr(),
        right is None,
        chunk,
        out.data_ptr(),
        None if addend is None else addend.data_ptr(),
        alpha,
        beta,
        strip.data_ptr(),
    )
    return out


def _step_agrees(matrix: Tensor, coefficients: Coefficients, chunks: Chunks) -> bool:
    """Whether one step on a matrix, which may be the transpose of a contiguous one, has torch's bits."""
    a, b, c = coefficients
    gram = torch.mm(matrix, matrix.mT)
    factor, alpha = (torch.addmm(gram, gram, gram, beta=b, alpha=c), 1.0) if c else (gram, b)
    start = matrix.contiguous()
    end = torch.empty_like(start)
    newton_schulz(start, end, end, (coefficients,), chunks, Scratch())
    return torch.equal(end, torch.addmm(start, factor, matrix, beta=a, alpha=alpha))
