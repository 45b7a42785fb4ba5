"""How many bytes a wave moves between ranks, and so how many a step sends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from omn_dist.plan.matrix import Matrix

Transport = Literal["all_to_all", "all_gather"]
"""How a wave moves. ``all_to_all``: one uneven all-to-all to the owners, one back. ``all_gather``: everybody gets the
directions of everybody, and each owner scatters its updates; more bytes, for fabrics without a good all-to-all."""

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class WaveTraffic:
    """Bytes of one wave, ``[world_size]`` each.

    A message holds, for each matrix of which the shard side has a part, one flag (is there a gradient?), that part and what row
    numbers the algorithm adds.
    """

    gather_sent: Counts
    """To owners, from their own copy of the parameter."""
    gather_received: Counts
    scatter_sent: Counts
    """By owners, to all copies."""
    scatter_received: Counts
    stack: Counts
    """Whole matrices that each rank owns in the wave, and their row numbers."""

    @property
    def temporary(self) -> int:
        """The largest of gather slot, scatter slot and stack on any rank: what the byte budget of a wave bounds."""
        gather = int((self.gather_sent + self.gather_received).max(initial=0))
        scatter = int((self.scatter_sent + self.scatter_received).max(initial=0))
        return max(gather, scatter, int(self.stack.max(initial=0)))


def wave_traffic(
    matrices: Sequence[Matrix], owners: Sequence[int], wave: Sequence[int], world_size: int, wire_itemsize: int
) -> WaveTraffic:
    """The traffic of the matrices with the indices ``wave``."""
    gather_sent, gather_received, scatter_sent, scatter_received, stack = np.zeros((5, world_size), dtype=np.int64)
    for index in wave:
        matrix, owner = matrices[index], owners[index]
        gathered, scattered = matrix.gather_bytes(owner, wire_itemsize), matrix.scatter_bytes(owner, wire_itemsize)
        gather_sent += gathered
        gather_received[owner] += gathered.sum()
        scatter_sent[owner] += scattered.sum()
        scatter_received += scattered
        stack[owner] += matrix.num_elements * wire_itemsize + matrix.stack_number_bytes
    return WaveTraffic(gather_sent, gather_received, scatter_sent, scatter_received, stack)


def message_bytes(
    matrices: Sequence[Matrix], owners: Sequence[int], wave: Sequence[int], world_size: int, wire_itemsize: int
) -> tuple[Counts, Counts]:
    """``[shard rank, owner]``: bytes of every message of one wave's gather, and of its scatter (from owner to rank)."""
    gather, scatter = np.zeros((2, world_size, world_size), dtype=np.int64)
    for index in wave:
        owner = owners[index]
        gather[:, owner] += matrices[index].gather_bytes(owner, wire_itemsize)
        scatter[:, owner] += matrices[index].scatter_bytes(owner, wire_itemsize)
    return gather, scatter


def bytes_sent(
    matrices: Sequence[Matrix],
    owners: Sequence[int],
    wave: Sequence[int],
    world_size: int,
    wire_itemsize: int,
    transport: Transport,
) -> Counts:
    """``[world_size]``: bytes that each rank sends to other ranks for one wave, both ways together."""
    if transport == "all_to_all":
        traffic = wave_traffic(matrices, owners, wave, world_size, wire_itemsize)
        return traffic.gather_sent + traffic.scatter_sent
    gather, scatter = message_bytes(matrices, owners, wave, world_size, wire_itemsize)
    padded: Counts = gather.sum(axis=1).max() + scatter.max(axis=0)
    return padded * (world_size - 1)
