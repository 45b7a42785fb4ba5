"""Row numbers on the messages: fp32 numbers of a matrix's rows, at its owner and in the buffers of a wave."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from omn_dist.algorithms.row_numbers import NUMBER_BYTES
from omn_dist.exchange.route import Part, Way
from omn_dist.plan.layout import Segment
from omn_dist.plan.matrix import Matrix

NOTHING = torch.empty(0, 0, dtype=torch.float32)
"""The row numbers of all matrices that have none."""


def kept(view: Tensor) -> Tensor:
    """The same elements in a tensor to keep for all steps, of which there are many.

    It lacks autograd's record of how a view was made, which is two thirds of its memory; and empty ones are all the same.
    """
    return view.detach() if view.numel() else NOTHING


class SharedViews:
    """Views to keep for all steps, equal ones as one tensor: waves use the same buffers, and most are cut alike."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]], Tensor] = {}

    def keep(self, view: Tensor) -> Tensor:
        """The tensor that stands for ``view``, a part of a buffer that outlives this."""
        return self._known.setdefault((view.data_ptr(), view.dtype, tuple(view.shape), view.stride()), view.detach())


class Returned(NamedTuple):
    """What the owner says of the rows of a rectangle, next to its update; fp32."""

    rows: Tensor
    """``[numbers a row, rows of the operator]``."""
    scalars: Tensor
    """``[numbers a matrix]``."""


class StackNumbers(NamedTuple):
    """The row numbers of one whole matrix at its owner; fp32. ``NOTHING`` for most algorithms."""

    received: Tensor
    """``[numbers a row, rows of the operator]``: from the shards."""
    returned: Returned
    """For the shards, written by the algorithm's transform."""


def num_stack_numbers(matrices: Iterable[Matrix]) -> int:
    """Numbers of these matrices at their owner."""
    return sum(matrix.stack_number_bytes for matrix in matrices) // NUMBER_BYTES


def stack_numbers(matrices: Sequence[Matrix], buffer: Tensor) -> list[StackNumbers]:
    """The numbers of each matrix as views of ``buffer``, one matrix after the other."""
    found, end = [], 0
    for matrix in matrices:
        counts, num_rows = matrix.row_numbers, matrix.num_rows
        sizes = [counts.to_owner * num_rows, counts.to_shards * num_rows, counts.scalars]
        received, rows, scalars = torch.split(buffer[end : end + sum(sizes)], sizes)
        returned = Returned(kept(rows.view(counts.to_shards, num_rows)), kept(scalars))
        found.append(StackNumbers(kept(received.view(counts.to_owner, num_rows)), returned))
        end += sum(sizes)
    return found


def rows_of(numbers: Tensor, matrix: Matrix, segment: Segment) -> Tensor:
    """Of ``[numbers a row, rows of the operator]`` the rows that a rectangle has a part of."""
    start = segment.matrix_column if matrix.transposed else segment.matrix_row
    return kept(numbers[:, start : start + matrix.segment_rows(segment)])


def numbers_at(buffer: Tensor, offset: int, count: int) -> Tensor:
    """``count`` numbers at ``offset`` bytes of a message buffer."""
    return buffer[offset : offset + NUMBER_BYTES * count].view(torch.float32)


def part_numbers(buffer: Tensor, matrix: Matrix, part: Part, way: Way) -> Tensor:
    """The numbers of a rectangle's rows in a message buffer: ``[numbers a row, rows of the operator]``."""
    per_row = matrix.row_numbers.to_owner if way == "gather" else matrix.row_numbers.to_shards
    num_rows = matrix.segment_rows(part.segment)
    return kept(numbers_at(buffer, part.numbers_offset, per_row * num_rows).view(per_row, num_rows))


class Copies(NamedTuple):
    """Views that are copied in one call; both empty where no algorithm has row numbers."""

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


Rectangle = tuple[int, Segment, Tensor]
"""Matrix, rectangle and the numbers of its rows in a message."""


def copies_in(matrices: Sequence[Matrix], whole: Mapping[int, StackNumbers], received: Iterable[Rectangle]) -> Copies:
    """From received messages into the numbers of whole matrices."""
    copies = Copies([], [])
    for index, segment, numbers in received:
        copies.add(rows_of(whole[index].received, matrices[index], segment), numbers)
    return copies


def copies_out(
    matrices: Sequence[Matrix],
    whole: Mapping[int, StackNumbers],
    sent: Iterable[Rectangle],
    scalars: Mapping[int, Sequence[Tensor]],
) -> Copies:
    """From the numbers of whole matrices into the messages for shards; ``scalars`` are the places of each matrix's own."""
    copies = Copies([], [])
    for index, segment, numbers in sent:
        copies.add(numbers, rows_of(whole[index].returned.rows, matrices[index], segment))
    for index, places in scalars.items():
        for place in places:
            copies.add(place, whole[index].returned.scalars)
    return copies
