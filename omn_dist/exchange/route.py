"""Where every rectangle of a wave lies in the buffers of one rank: offsets worked out once, from the plan alone."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from omn_dist.algorithms.row_numbers import NUMBER_BYTES, RowNumbers
from omn_dist.plan.layout import Segment
from omn_dist.plan.matrix import FLAG_BYTES, MESSAGE_ALIGNMENT, Slice
from omn_dist.plan.ownership import Plan

STACK_ALIGNMENT = 64
"""Bytes. Every matrix starts on a cache line, so that matrix kernels see the alignment of a tensor of its own."""


Way = Literal["gather", "scatter"]


class Part(NamedTuple):
    """One rectangle of a matrix in a flat buffer, row-major, and the numbers of its rows; offsets are in bytes."""

    matrix: int
    segment: Segment
    offset: int
    numbers_offset: int
    """``[numbers a row, rows]`` in fp32, empty for most algorithms."""


class Flags(NamedTuple):
    """Neighbouring fp32 numbers of one message that say whether its sender has a gradient for each of these matrices.

    On the way back, the scalars of a matrix's algorithm follow its flag. ``offset`` and ``pitch`` in bytes.
    """

    matrices: tuple[int, ...]
    offset: int
    pitch: int


@dataclass(frozen=True)
class Side:
    """The arrangement of one flat buffer: what is said to (or by) each other rank, in rank order."""

    parts: tuple[Part, ...]
    flags: tuple[Flags, ...]
    num_bytes_by_rank: tuple[int, ...]
    """Bytes to or from each rank."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole buffer."""
        return sum(self.num_bytes_by_rank)


@dataclass(frozen=True)
class Passage:
    """One way of a wave for one rank: what it sends and what it receives."""

    sent: Side
    received: Side


class StackGroup(NamedTuple):
    """Matrices of one stored shape that a rank owns in a wave: a batch in its stack. ``offset`` and ``pitch`` in elements."""

    matrices: tuple[int, ...]
    offset: int
    pitch: int


@dataclass(frozen=True)
class WaveRoute:
    """One wave as one rank sees it."""

    owned: tuple[StackGroup, ...]
    own: tuple[tuple[int, Segment], ...]
    """What this rank holds of its own matrices: it does not travel."""
    gather: Passage
    """From shards to owners, within the owner's copy of the parameter."""
    scatter: Passage
    """From owners to the shards of all copies."""
    num_stack_elements: int


def wave_route(plan: Plan, rank: int, wave: tuple[int, ...]) -> WaveRoute:
    """The route of ``wave`` (indices of matrices) for ``rank``."""
    groups, num_stack_elements = _stack(plan, [index for index in wave if plan.owners[index] == rank])
    own = tuple((index, segment) for group in groups for index in group.matrices for segment in plan.matrices[index].segments(rank))
    by_owner: list[list[int]] = [[] for _ in range(plan.world_size)]
    for index in wave:
        by_owner[plan.owners[index]].append(index)
    others = range(plan.world_size)
    mine = by_owner[rank]

    def of_copy(indices: list[int], holder: int) -> list[int]:
        return [index for index in indices if speaks(plan, index, holder)]

    # What I say of my shards to each owner, and what each rank says of its shards to me.
    gather = Passage(
        _side(plan, "gather", ((rank, of_copy(by_owner[owner], rank) if owner != rank else []) for owner in others)),
        _side(plan, "gather", ((holder, of_copy(mine, holder) if holder != rank else []) for holder in others)),
    )
    # What I say to each rank of the matrices that I own, and what each owner says of my shards.
    scatter = Passage(
        _side(plan, "scatter", ((holder, mine if holder != rank else []) for holder in others)),
        _side(plan, "scatter", ((rank, by_owner[owner] if owner != rank else []) for owner in others)),
    )
    return WaveRoute(groups, own, gather, scatter, num_stack_elements)


def speaks(plan: Plan, index: int, rank: int) -> bool:
    """Whether the shards of ``rank`` are those that the owner of a matrix hears; equal copies elsewhere only get the update."""
    replica = plan.matrices[index].held.replica
    return bool(replica[rank] == replica[plan.owners[index]])


def _stack(plan: Plan, owned: list[int]) -> tuple[tuple[StackGroup, ...], int]:
    alignment = STACK_ALIGNMENT // plan.wire_itemsize
    by_shape: dict[tuple[int, int, bool, RowNumbers, Slice | None], list[int]] = {}
    # Slices come first, each on its own: their teams start a wave together.
    for index in sorted(owned, key=lambda index: plan.matrices[index].slice is None):
        matrix = plan.matrices[index]
        key = (matrix.stored_rows, matrix.stored_columns, matrix.transposed, matrix.row_numbers, matrix.slice)
        by_shape.setdefault(key, []).append(index)
    groups, end = [], 0
    for (num_rows, num_columns, *_), indices in by_shape.items():
        pitch = -(-num_rows * num_columns // alignment) * alignment
        groups.append(StackGroup(tuple(indices), end, pitch))
        end += pitch * len(indices)
    return tuple(groups), end


def _side(plan: Plan, way: Way, messages: Iterable[tuple[int, list[int]]]) -> Side:
    """``messages``: for each rank in turn, whose shards the message is about, and of which matrices."""
    parts, flags, sizes, offset = [], [], [], 0
    for holder, indices in messages:
        start = offset
        spoken_of = [index for index in indices if plan.matrices[index].held.elements[holder]]
        scalars = {index: plan.matrices[index].row_numbers.scalars if way == "scatter" else 0 for index in spoken_of}
        for num_scalars, alike in groupby(spoken_of, key=scalars.__getitem__):
            flags.append(Flags(tuple(alike), offset, FLAG_BYTES + NUMBER_BYTES * num_scalars))
            offset += flags[-1].pitch * len(flags[-1].matrices)
        for index in spoken_of:
            matrix = plan.matrices[index]
            per_row = matrix.row_numbers.to_owner if way == "gather" else matrix.row_numbers.to_shards
            segments = matrix.segments(holder)
            numbers = offset + sum(segment.num_elements for segment in segments) * plan.wire_itemsize
            numbers += -numbers % MESSAGE_ALIGNMENT
            for segment in segments:
                parts.append(Part(index, segment, offset, numbers))
                offset += segment.num_elements * plan.wire_itemsize
                numbers += NUMBER_BYTES * per_row * matrix.segment_rows(segment)
            offset = numbers
        sizes.append(offset - start)
    return Side(tuple(parts), tuple(flags), tuple(sizes))
