"""Offsets of every region of a wave in the buffers of one rank, computed once from the plan."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from omn_dist.plan.geometry.layout import ShardRegion
from omn_dist.plan.geometry.matrix import FLAG_BYTES, MESSAGE_ALIGNMENT, NUMBER_BYTES, RowNumbers, TeamSlice
from omn_dist.plan.plan import Plan

STACK_ALIGNMENT = 64
"""Bytes. Every matrix starts on a cache line, as a tensor of its own would, for matrix kernels."""

Phase = Literal["gather", "scatter"]
"""Of a wave. ``gather``: directions from shards to owners. ``scatter``: updates back to shards."""


class Segment(NamedTuple):
    """The range of a buffer that holds one region of a matrix, row-major. Offsets are in bytes."""

    matrix: int
    region: ShardRegion
    offset: int
    numbers_offset: int
    """Offset of the region's row numbers, ``[numbers a row, rows]`` in fp32; most have none."""


class Flags(NamedTuple):
    """Consecutive fp32 numbers of a message: whether its sender has a gradient for these matrices.

    In a scatter, the scalars of a matrix (see ``RowNumbers``) follow its flag. ``offset`` and
    ``pitch``, the distance between flags, are in bytes.
    """

    matrices: tuple[int, ...]
    offset: int
    pitch: int


@dataclass(frozen=True)
class BufferLayout:
    """The content of one flat buffer: the messages to, or from, each other rank in rank order."""

    segments: tuple[Segment, ...]
    flags: tuple[Flags, ...]
    num_bytes_by_rank: tuple[int, ...]
    """Bytes of the message to or from each rank."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole buffer."""
        return sum(self.num_bytes_by_rank)


@dataclass(frozen=True)
class Messages:
    """What one rank sends and receives in one phase of a wave."""

    sent: BufferLayout
    received: BufferLayout


class StackGroup(NamedTuple):
    """Matrices of one stored shape that a rank owns in a wave: a batch in its stack.

    ``offset`` and ``pitch``, the distance between matrices, are in elements.
    """

    matrices: tuple[int, ...]
    offset: int
    pitch: int


@dataclass(frozen=True)
class WaveRoute:
    """What one rank owns, keeps, sends and receives in one wave."""

    owned: tuple[StackGroup, ...]
    own: tuple[tuple[int, ShardRegion], ...]
    """What this rank holds of the matrices that it owns: matrix and region. It is not sent."""
    gather: Messages
    """From shards to owners, within the owner's copy of the parameter."""
    scatter: Messages
    """From owners to the shards of all copies of the parameter."""
    num_stack_elements: int


def wave_route(plan: Plan, rank: int, wave: tuple[int, ...]) -> WaveRoute:
    """The route of ``wave`` (indices of matrices) for ``rank``."""
    groups, num_stack_elements = _stack(plan, [index for index in wave if plan.owners[index] == rank])
    own = tuple(
        (index, region) for group in groups for index in group.matrices for region in plan.matrices[index].shard_regions(rank)
    )
    by_owner: list[list[int]] = [[] for _ in range(plan.world_size)]
    for index in wave:
        by_owner[plan.owners[index]].append(index)
    ranks = range(plan.world_size)
    mine = by_owner[rank]

    def of_copy(indices: list[int], holder: int) -> list[int]:
        return [index for index in indices if is_gathered_from(plan, index, holder)]

    # Sent: this rank's shards, to each owner. Received: each rank's shards of the matrices owned
    # here.
    gather = Messages(
        _buffer_layout(plan, "gather", ((rank, of_copy(by_owner[owner], rank) if owner != rank else []) for owner in ranks)),
        _buffer_layout(plan, "gather", ((holder, of_copy(mine, holder) if holder != rank else []) for holder in ranks)),
    )
    # Sent: updates for each rank's shards. Received: from each owner, updates for this rank's
    # shards.
    scatter = Messages(
        _buffer_layout(plan, "scatter", ((holder, mine if holder != rank else []) for holder in ranks)),
        _buffer_layout(plan, "scatter", ((rank, by_owner[owner] if owner != rank else []) for owner in ranks)),
    )
    return WaveRoute(groups, own, gather, scatter, num_stack_elements)


def is_gathered_from(plan: Plan, index: int, rank: int) -> bool:
    """Whether the copy of ``rank`` is the one that is gathered. All copies get the update."""
    replica = plan.matrices[index].holdings.replica
    return bool(replica[rank] == replica[plan.owners[index]])


def _stack(plan: Plan, owned: list[int]) -> tuple[tuple[StackGroup, ...], int]:
    alignment = STACK_ALIGNMENT // plan.communication_itemsize
    by_shape: dict[tuple[int, int, bool, RowNumbers, TeamSlice | None], list[int]] = {}
    # Slices first, each in a group of its own: their teams start a wave together.
    for index in sorted(owned, key=lambda index: plan.matrices[index].slice is None):
        matrix = plan.matrices[index]
        key = (matrix.stored_rows, matrix.stored_columns, matrix.transposed, matrix.work.row_numbers, matrix.slice)
        by_shape.setdefault(key, []).append(index)
    groups, end = [], 0
    for (num_rows, num_columns, *_), indices in by_shape.items():
        pitch = -(-num_rows * num_columns // alignment) * alignment
        groups.append(StackGroup(tuple(indices), end, pitch))
        end += pitch * len(indices)
    return tuple(groups), end


def _buffer_layout(plan: Plan, phase: Phase, messages: Iterable[tuple[int, list[int]]]) -> BufferLayout:
    """The layout of messages, each given by the rank of its shards and its matrices' indices."""
    segments, flags, sizes, offset = [], [], [], 0
    for holder, indices in messages:
        start = offset
        present = [index for index in indices if plan.matrices[index].holdings.elements[holder]]
        scalars = {index: plan.matrices[index].work.row_numbers.scalars if phase == "scatter" else 0 for index in present}
        for num_scalars, alike in groupby(present, key=scalars.__getitem__):
            flags.append(Flags(tuple(alike), offset, FLAG_BYTES + NUMBER_BYTES * num_scalars))
            offset += flags[-1].pitch * len(flags[-1].matrices)
        for index in present:
            matrix = plan.matrices[index]
            per_row = matrix.work.row_numbers.to_owner if phase == "gather" else matrix.work.row_numbers.to_shards
            regions = matrix.shard_regions(holder)
            numbers = offset + sum(region.num_elements for region in regions) * plan.communication_itemsize
            numbers += -numbers % MESSAGE_ALIGNMENT
            for region in regions:
                segments.append(Segment(index, region, offset, numbers))
                offset += region.num_elements * plan.communication_itemsize
                numbers += NUMBER_BYTES * per_row * matrix.region_rows(region)
            offset = numbers
        sizes.append(offset - start)
    return BufferLayout(tuple(segments), tuple(flags), tuple(sizes))
