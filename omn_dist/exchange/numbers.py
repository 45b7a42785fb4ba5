"""Row numbers: fp32 numbers of a matrix's rows, at its owner and in the messages of a wave."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from omn_dist.exchange.route import Phase, Segment
from omn_dist.plan.geometry.layout import ShardRegion
from omn_dist.plan.geometry.matrix import NUMBER_BYTES, Matrix

NOTHING = torch.empty(0, 0, dtype=torch.float32)
"""An empty tensor: the row numbers of every matrix that has none."""


def plain_view(view: Tensor) -> Tensor:
    """The view without autograd's record of how it was made, for views that are kept for all steps.

    That record is two thirds of the memory of a view. All empty views are one tensor, ``NOTHING``.
    """
    return view.detach() if view.numel() else NOTHING


class SharedViews:
    """Views that are kept for all steps. Equal views are kept as one tensor.

    All waves use the same buffers, and most waves divide a buffer in the same way.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]], Tensor] = {}

    def keep(self, view: Tensor) -> Tensor:
        """The one tensor for all views that are equal to ``view``.

        Views are equal when they have the same address, dtype, shape and strides, so the buffer of
        ``view`` must live longer than this object.
        """
        return self._known.setdefault((view.data_ptr(), view.dtype, tuple(view.shape), view.stride()), view.detach())


class Returned(NamedTuple):
    """The numbers that the owner returns with the update of a region, in fp32."""

    rows: Tensor
    """``[numbers a row, rows of the operator]``."""
    scalars: Tensor
    """``[numbers a matrix]``."""


class StackNumbers(NamedTuple):
    """The row numbers of one whole matrix at its owner, in fp32; ``NOTHING`` for most rules."""

    received: Tensor
    """``[numbers a row, rows of the operator]``: from the shards."""
    returned: Returned
    """For the shards; the rule's ``transform`` writes it."""


def num_stack_numbers(matrices: Iterable[Matrix]) -> int:
    """How many row numbers and scalars these matrices have at their owner."""
    return sum(matrix.stack_number_bytes for matrix in matrices) // NUMBER_BYTES


def stack_numbers(matrices: Sequence[Matrix], buffer: Tensor) -> list[StackNumbers]:
    """The numbers of each matrix as views of ``buffer``, one matrix after the other."""
    found, end = [], 0
    for matrix in matrices:
        counts, num_rows = matrix.work.row_numbers, matrix.num_rows
        sizes = [counts.to_owner * num_rows, counts.to_shards * num_rows, counts.scalars]
        received, rows, scalars = torch.split(buffer[end : end + sum(sizes)], sizes)
        returned = Returned(plain_view(rows.view(counts.to_shards, num_rows)), plain_view(scalars))
        found.append(StackNumbers(plain_view(received.view(counts.to_owner, num_rows)), returned))
        end += sum(sizes)
    return found


def rows_of(numbers: Tensor, matrix: Matrix, region: ShardRegion) -> Tensor:
    """The numbers of the rows that a region holds elements of, as a view.

    ``numbers`` are those of the whole matrix: ``[numbers a row, rows of the operator]``.
    """
    start = region.matrix_column if matrix.transposed else region.matrix_row
    return plain_view(numbers[:, start : start + matrix.region_rows(region)])


def numbers_at(buffer: Tensor, offset: int, count: int) -> Tensor:
    """``count`` numbers at ``offset`` bytes of a message buffer."""
    return buffer[offset : offset + NUMBER_BYTES * count].view(torch.float32)


def segment_numbers(buffer: Tensor, matrix: Matrix, segment: Segment, phase: Phase) -> Tensor:
    """The numbers of a region's rows in a message: ``[numbers a row, rows of the operator]``."""
    per_row = matrix.work.row_numbers.to_owner if phase == "gather" else matrix.work.row_numbers.to_shards
    num_rows = matrix.region_rows(segment.region)
    return plain_view(numbers_at(buffer, segment.numbers_offset, per_row * num_rows).view(per_row, num_rows))


class CopyList(NamedTuple):
    """Views that are copied in one call; both empty where no rule has row numbers."""

    targets: list[Tensor]
    sources: list[Tensor]

    def run(self) -> None:
        """Copy every source to its target."""
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)

    def add(self, target: Tensor, source: Tensor) -> None:
        """One more pair; an empty one is left out."""
        if target.numel():
            self.targets.append(target)
            self.sources.append(source)


NumberedRegion = tuple[int, ShardRegion, Tensor]
"""Matrix, region and the numbers of its rows in a message."""


def copies_in(matrices: Sequence[Matrix], whole: Mapping[int, StackNumbers], received: Iterable[NumberedRegion]) -> CopyList:
    """The copies of row numbers from received messages to whole matrices."""
    copies = CopyList([], [])
    for index, region, numbers in received:
        copies.add(rows_of(whole[index].received, matrices[index], region), numbers)
    return copies


def copies_out(
    matrices: Sequence[Matrix],
    whole: Mapping[int, StackNumbers],
    sent: Iterable[NumberedRegion],
    scalars: Mapping[int, Sequence[Tensor]],
) -> CopyList:
    """The copies of row numbers and scalars from whole matrices to the messages for shards.

    ``scalars`` has the views that the scalars of a matrix are copied to, one in each message about
    the matrix.
    """
    copies = CopyList([], [])
    for index, region, numbers in sent:
        copies.add(numbers, rows_of(whole[index].returned.rows, matrices[index], region))
    for index, places in scalars.items():
        for place in places:
            copies.add(place, whole[index].returned.scalars)
    return copies
