"""How many elements a wave moves between ranks, and so how many bytes a step sends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from omn_dist.plan.matrix import Matrix

Transport = Literal["all_to_all", "all_gather"]
"""How a wave moves. ``all_to_all``: one uneven all-to-all to the owners, one back. ``all_gather``: everybody gets the directions of
everybody, and each owner scatters its updates; more bytes, for fabrics without a good all-to-all."""

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class WaveTraffic:
    """Wire elements of one wave, one entry a rank. Gather goes from the shard side to the owner side, scatter back.

    A message holds, for each matrix of which the shard side has a part, one flag (is there a gradient?) and that part.
    Replicated matrices are not gathered: each owner side is then what it contributes to the gather of *updates*, padded to one
    length, and the shard side holds the contributions of all.
    """

    shard_side: Counts
    owner_side: Counts
    stack: Counts
    """Elements of the whole matrices that each rank owns in the wave."""


def wave_traffic(matrices: Sequence[Matrix], owners: Sequence[int], wave: Sequence[int], world_size: int) -> WaveTraffic:
    """The traffic of the matrices with the indices ``wave``."""
    shard_side = np.zeros(world_size, dtype=np.int64)
    owner_side = np.zeros(world_size, dtype=np.int64)
    stack = np.zeros(world_size, dtype=np.int64)
    for index in wave:
        matrix, owner = matrices[index], owners[index]
        stack[owner] += matrix.num_elements
        if is_replicated(matrices):
            continue
        message = matrix.message_elements()
        shard_side += message
        shard_side[owner] -= message[owner]
        owner_side[owner] += message.sum() - message[owner]
    if is_replicated(matrices) and world_size > 1:
        owner_side[:] = stack.max()
        shard_side[:] = stack.max() * world_size
    return WaveTraffic(shard_side, owner_side, stack)


def message_counts(matrices: Sequence[Matrix], owners: Sequence[int], wave: Sequence[int], world_size: int) -> Counts:
    """``[source, owner]``: wire elements of every message of one gather of sharded matrices."""
    counts = np.zeros((world_size, world_size), dtype=np.int64)
    for index in wave:
        counts[:, owners[index]] += matrices[index].message_elements()
    np.fill_diagonal(counts, 0)
    return counts


def elements_sent(
    matrices: Sequence[Matrix],
    owners: Sequence[int],
    wave: Sequence[int],
    world_size: int,
    transport: Transport,
) -> Counts:
    """``[world_size]``: wire elements that each rank sends to other ranks for one wave, both ways together."""
    traffic = wave_traffic(matrices, owners, wave, world_size)
    if is_replicated(matrices):
        return traffic.owner_side * (world_size - 1)
    if transport == "all_to_all":
        return traffic.shard_side + traffic.owner_side
    back: Counts = message_counts(matrices, owners, wave, world_size).max(axis=0)
    padded: Counts = traffic.shard_side.max() + back
    return padded * (world_size - 1)


def is_replicated(matrices: Sequence[Matrix]) -> bool:
    """Whether the matrices of a plan lie whole on every rank. A plan has one kind of layout."""
    return bool(matrices) and matrices[0].layout.kind == "replicate"
