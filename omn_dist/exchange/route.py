"""Where every rectangle of a wave lies in the buffers of one rank: offsets worked out once, from the plan alone."""

from dataclasses import dataclass
from typing import NamedTuple

from omn_dist.plan.layout import Segment
from omn_dist.plan.ownership import Plan
from omn_dist.plan.traffic import is_replicated, wave_traffic

STACK_ALIGNMENT = 64
"""Bytes. Every matrix starts on a cache line, so that matrix kernels see the alignment of a tensor of its own."""


class Part(NamedTuple):
    """One rectangle of a matrix in a flat buffer, row-major."""

    matrix: int
    segment: Segment
    offset: int


class Flag(NamedTuple):
    """The place of one number that says whether the sender of a message has a gradient for a matrix."""

    matrix: int
    offset: int


@dataclass(frozen=True)
class Side:
    """The arrangement of one flat buffer: what is said to (or by) each other rank, in rank order."""

    parts: tuple[Part, ...]
    flags: tuple[Flag, ...]
    counts: tuple[int, ...]
    """Elements to or from each rank."""

    @property
    def num_elements(self) -> int:
        """Elements of the whole buffer."""
        return sum(self.counts)


@dataclass(frozen=True)
class WaveRoute:
    """One wave as one rank sees it; offsets and counts in wire elements.

    Gather goes from the shard side of every rank to the owner side of every rank, scatter back through buffers of the same
    arrangement. Replicated matrices are not gathered: each owner side is copied to all ranks, one after the other in their
    shard sides.
    """

    owned: tuple[tuple[int, int], ...]
    """Matrices of this rank with their offsets in the stack."""
    own: tuple[tuple[int, Segment], ...]
    """What this rank holds of its own matrices: it does not travel."""
    shard_side: Side
    owner_side: Side
    num_stack_elements: int
    is_gathered: bool
    """Whether directions travel: not so for replicated matrices."""


def wave_route(plan: Plan, rank: int, wave: tuple[int, ...]) -> WaveRoute:
    """The route of ``wave`` (indices of matrices) for ``rank``."""
    alignment = STACK_ALIGNMENT // plan.wire_itemsize
    owned, end = [], 0
    for index in wave:
        if plan.owners[index] == rank:
            owned.append((index, end))
            end += -(-plan.matrices[index].num_elements // alignment) * alignment
    own = tuple((index, segment) for index, _ in owned for segment in plan.matrices[index].segments(rank))
    replicated = is_replicated(plan.matrices)
    sides = _replicated_sides if replicated else _sharded_sides
    return WaveRoute(tuple(owned), own, *sides(plan, rank, wave), end, not replicated)


def _sharded_sides(plan: Plan, rank: int, wave: tuple[int, ...]) -> tuple[Side, Side]:
    by_owner: list[list[int]] = [[] for _ in range(plan.world_size)]
    for index in wave:
        by_owner[plan.owners[index]].append(index)

    def side(messages: list[tuple[int, list[int]]]) -> Side:
        """``messages``: for each rank in turn, whose shards it is about, and of which matrices."""
        parts, flags, counts, offset = [], [], [], 0
        for holder, indices in messages:
            start = offset
            spoken_of = [index for index in indices if plan.matrices[index].held_elements()[holder]]
            for index in spoken_of:
                flags.append(Flag(index, offset))
                offset += 1
            for index in spoken_of:
                for segment in plan.matrices[index].segments(holder):
                    parts.append(Part(index, segment, offset))
                    offset += segment.num_elements
            counts.append(offset - start)
        return Side(tuple(parts), tuple(flags), tuple(counts))

    shard_side = side([(rank, by_owner[owner] if owner != rank else []) for owner in range(plan.world_size)])
    owner_side = side([(holder, by_owner[rank] if holder != rank else []) for holder in range(plan.world_size)])
    return shard_side, owner_side


def _replicated_sides(plan: Plan, rank: int, wave: tuple[int, ...]) -> tuple[Side, Side]:
    if plan.world_size == 1:
        return Side((), (), (0,)), Side((), (), (0,))
    length = int(wave_traffic(plan.matrices, plan.owners, wave, plan.world_size).owner_side[rank])
    parts: list[list[Part]] = [[] for _ in range(plan.world_size)]
    ends = [0] * plan.world_size
    for index in wave:
        owner = plan.owners[index]
        # All ranks hold the same rectangles, so that the owner's own segments are also those of everybody else.
        for segment in plan.matrices[index].segments(rank):
            parts[owner].append(Part(index, segment, ends[owner]))
            ends[owner] += segment.num_elements
    others = tuple(
        part._replace(offset=owner * length + part.offset)
        for owner in range(plan.world_size)
        if owner != rank
        for part in parts[owner]
    )
    return Side(others, (), (length,) * plan.world_size), Side(tuple(parts[rank]), (), (length,))
