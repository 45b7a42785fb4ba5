"""Newton-Schulz in bf16 that computes half of each symmetric product, with torch's bits.

``A = X X^T`` and ``b A + c A A`` are symmetric, and exactly so as torch computes them: both halves
sum the same products in the same order. So newton_schulz.c computes what lies below the diagonal,
and copies the rest.

It is for CPUs with AVX512_BF16 and without AMX. There the order of torch's sums is known but for
one number: how much of the depth is summed at a time. :meth:`Products.warm_up` finds it for each
shape, before the first step, with room for six iterates. Torch multiplies shapes that were not
tried, and those where no candidate has torch's bits on samples.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from omn_dist.algorithms.coefficients import Coefficients, Schedule
from omn_dist.algorithms.iteration import ITERATES
from omn_dist.algorithms.scratch import Scratch
from omn_dist.kernels.cpu.library import Function
from omn_dist.kernels.cpu.memory import addresses, may_run
from omn_dist.kernels.cpu.trial import in_own_thread

SMALLEST = 128
"""Short side from which a shape is tried: smaller products cost little."""
CHUNKS = (2**62, 1024, 512)
"""How much of the depth oneDNN may sum at a time: everything, or so much. The shape decides."""
_STRIP_COLUMNS = 48


class Chunks(ctypes.Structure):
    """How much of the depth is summed at a time, product by product."""

    _fields_ = [(name, ctypes.c_long) for name in ("first_gram", "gram", "square", "update")]


class Products:
    """The iteration of one library, on shapes that were tried."""

    def __init__(self, newton_schulz: Function, product: Function) -> None:
        self._newton_schulz, self._product = newton_schulz, product
        self._chunks: dict[tuple[int, int, bool], Chunks | None] = {}

    def warm_up(self, shapes: Iterable[tuple[int, int]]) -> None:
        """Try matrices of these rows and columns that were not tried yet.

        In a process with several threads, try none.
        """
        keys = {(min(shape), max(shape), shape[0] > shape[1]) for shape in shapes} - self._chunks.keys()
        if keys and may_run():
            self._chunks |= in_own_thread(lambda: {key: self.tried(*key) for key in sorted(keys)})
            _give_back()

    def chunks(self, iterate: Tensor) -> Chunks | None:
        """How C takes an iterate ``[..., short, long]``, contiguous or the transpose of that.

        ``None`` where torch has to multiply.
        """
        short, long = iterate.shape[-2:]
        tall = not iterate.is_contiguous()
        if iterate.dtype != torch.bfloat16 or not may_run() or addresses(iterate.mT if tall else iterate) is None:
            return None
        return self._chunks.get((short, long, tall))

    def newton_schulz(
        self,
        iterate: Tensor,
        schedule: Schedule,
        scratch: Scratch,
        out: Tensor | None,
        transpose: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor | None:
        """:func:`~omn_dist.algorithms.iteration.standard_form` by C.

        ``None`` where torch has to do it.
        """
        chunks = self.chunks(iterate)
        if chunks is None:
            return None
        shape, dtype, device = iterate.shape, iterate.dtype, iterate.device
        work = scratch.take(ITERATES[0], shape, dtype, device)
        end = work if out is None else out
        if addresses(work) is None or addresses(end) is None or end.shape != shape or end.dtype != dtype:
            return None
        start = iterate if iterate.is_contiguous() else transpose(work, iterate.mT)
        stacks = [part.view(-1, *shape[-2:]) for part in (start, work, end)]
        for one, at_work, result in zip(*stacks, strict=True):
            self.run(one, at_work, result, schedule.coefficients, chunks, scratch)
        return end

    def run(
        self, start: Tensor, work: Tensor, end: Tensor, coefficients: Sequence[Coefficients], chunks: Chunks, scratch: Scratch
    ) -> None:
        """All steps from ``start`` over ``work`` to ``end``.

        All are contiguous bf16 ``[short, long]``, and may be one tensor.
        """
        short, long = start.shape
        gram, polynomial = (scratch.take(name, (short, short), start.dtype, start.device) for name in ("gram", "polynomial"))
        strip = scratch.take("strip", (_STRIP_COLUMNS, long), start.dtype, start.device)
        self._newton_schulz(
            short,
            long,
            len(coefficients),
            _numbers(coefficients),
            ctypes.byref(chunks),
            *(tensor.data_ptr() for tensor in (start, work, end, gram, polynomial, strip)),
        )
        increment_version((work, end, gram, polynomial))

    def tried(self, short: int, long: int, transposed: bool) -> Chunks | None:
        """The chunks with which C has torch's bits on samples, found product by product."""
        if short < SMALLEST or short % 2 or long % 2:
            return None
        generator = torch.Generator(device="cpu").manual_seed(0)

        def layouts(matrix: Tensor) -> list[Tensor]:
            """The matrix as the first step finds it, and as the others do."""
            return [matrix.mT.contiguous().mT, matrix] if transposed else [matrix]

        def of_grams() -> list[int | None]:
            matrix, other = _cancelling(short, short, long, generator)
            matrix[::2] = other[::2]
            return [_chunk(partial(self._multiply, matrix, None), [torch.mm(given, given.mT)], long) for given in layouts(matrix)]

        def of_factor(columns: int, alpha: float, beta: float) -> int | None:
            left, right = _cancelling(short, columns, short, generator)
            right, zeros = right.mT.contiguous(), torch.zeros(short, columns, dtype=left.dtype, device=left.device)
            expected = [torch.addmm(zeros, left, given, beta=beta, alpha=alpha) for given in layouts(right)]
            return _chunk(partial(self._multiply, left, right, addend=zeros, alpha=alpha, beta=beta), expected, short)

        (a, b, c), grams = _QUINTIC, of_grams()
        found = (grams[0], grams[-1], of_factor(short, c, b), of_factor(long, 1.0, a))
        if None in found:
            return None
        chunks = Chunks(*found)
        # The rest, with numbers as a first step has them: singular values up to one.
        matrix = layouts(_random(short, long, generator).div_(short**0.5 + long**0.5))[0]
        return chunks if all(self._step_agrees(matrix, coefficients, chunks) for coefficients in (_CUBIC, _QUINTIC)) else None

    def _multiply(
        self,
        left: Tensor,
        right: Tensor | None,
        chunk: int,
        *,
        addend: Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> Tensor:
        """``alpha left right + beta addend``.

        Without ``right`` it is the symmetric product of ``left`` and its transpose.
        """
        (num_rows, depth), num_columns = left.shape, len(left) if right is None else right.size(1)
        out, strip = left.new_empty(num_rows, num_columns), left.new_empty(_STRIP_COLUMNS, depth)
        self._product(
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

    def _step_agrees(self, matrix: Tensor, coefficients: Coefficients, chunks: Chunks) -> bool:
        """Whether one step has torch's bits, on a matrix or the transpose of a contiguous one."""
        a, b, c = coefficients
        gram = torch.mm(matrix, matrix.mT)
        factor, alpha = (torch.addmm(gram, gram, gram, beta=b, alpha=c), 1.0) if c else (gram, b)
        start = matrix.contiguous()
        end = torch.empty_like(start)
        self.run(start, end, end, (coefficients,), chunks, Scratch())
        return torch.equal(end, torch.addmm(start, factor, matrix, beta=a, alpha=alpha))


_CUBIC, _QUINTIC = (1.5, -0.5, 0.0), (3.4445, -4.775, 2.0315)


@cache
def _numbers(coefficients: Sequence[Coefficients]) -> "ctypes.Array[ctypes.c_float]":
    numbers = [number for triple in coefficients for number in triple]
    return (ctypes.c_float * len(numbers))(*numbers)


def _give_back() -> None:
    """Return to the system what a trial took, which malloc would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _random(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.bfloat16, device="cpu").normal_(generator=generator)


def _cancelling(rows: int, columns: int, depth: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Factors ``[rows, depth]``, ``[columns, depth]`` whose products show the order of sums.

    The products are zero but for rounding. Every pair of terms has its opposite elsewhere in the
    depth, and one term of a pair is 2**20 times the other, so that no sum of two is exact. (With
    random numbers one result in 10,000 would show the order, and hardly one how the last pair of
    514 is summed.)
    """
    rest, half = depth % 4, depth // 4 * 2
    pairs = rest + 2 * torch.randperm(half, generator=generator, dtype=torch.int64, device="cpu")
    order = torch.cat((torch.arange(rest, device="cpu"), torch.stack((pairs, pairs + 1), 1).flatten()))
    factors = []
    for num_rows, sign in ((rows, 1), (columns, -1)):
        part = _random(num_rows, half, generator)
        part[:, 1::2] *= 2**10
        zeros = torch.zeros(num_rows, rest, dtype=part.dtype, device=part.device)
        factors.append(torch.cat((zeros, part, sign * part), 1)[:, order])
    return factors[0], factors[1]


def _chunk(product: Callable[[int], Tensor], expected: list[Tensor], depth: int) -> int | None:
    """The first chunk that gives the expected bits, which are the same for all layouts."""
    chunks = (chunk for chunk in CHUNKS if chunk < depth or chunk == CHUNKS[0])
    return next((chunk for chunk in chunks if all(torch.equal(product(chunk), found) for found in expected)), None)
